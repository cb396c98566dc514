"""docs/architecture.md leads to files that are there, but for those that it tells to write."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
TO_WRITE = ("devices/amd/", "evener/NAME.py")
FOLDERS = ("balancer", "devices", "docs", "evener", "tests", "tui", "workloads")


def test_every_path_that_the_architecture_names_is_there() -> None:
    """A path from the top; a file alone is somewhere."""
    quoted = re.findall(r"`([\w/]+(?:\.\w+)?/?)`", (REPO / "docs" / "architecture.md").read_text())
    paths = {name for name in quoted if name.partition("/")[0] in FOLDERS and not name.startswith(TO_WRITE)}
    alone = {name for name in quoted if re.fullmatch(r"\w+\.py", name)}
    there = {path.name for folder in FOLDERS for path in (REPO / folder).rglob("*.py")}
    assert len(paths) > 40
    assert len(alone) > 20
    assert sorted(path for path in paths if not (REPO / path).exists()) == []
    assert sorted(alone - there) == []
