"""Commands on the pages that need no hardware run as written, and print what the pages show."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from evener.tui.cli.main import run

REPO = Path(__file__).parents[2]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
CHEAP = re.compile(
    r"evener (balance|compare|probe|devices|monitor|replay|demo)\b.*(sim:|\.jsonl|--plain)"
)
ASKS = re.compile(r"train\.py|machine\.toml|--web")  # for what doesn't exist here


def _runs() -> Iterator[tuple[str, str, str]]:
    """Yield (page, command, the console block below or nothing) for each simulated or recorded
    command.
    """
    for page in PAGES:
        blocks = BLOCK.findall(page.read_text())
        for place, (kind, block) in enumerate(blocks):
            after = blocks[place + 1] if place + 1 < len(blocks) else ("", "")
            shown = after[1] if after[0] == "console" and "$ " not in after[1] else ""
            lines = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
            for line in lines if kind in ("sh", "bash") else ():
                if CHEAP.match(line) and not ASKS.search(line):
                    yield str(page.relative_to(REPO)), line, shown if len(lines) == 1 else ""


RUNS = sorted(set(_runs()))


def test_there_are_commands_to_run() -> None:
    """Each case study and how-to has at least one."""
    assert len(RUNS) >= 8
    assert sum(bool(shown) for _, _, shown in RUNS) >= 4


@pytest.mark.parametrize(
    ("page", "command", "shown"), RUNS, ids=[f"{page}: {command}" for page, command, _ in RUNS]
)
@pytest.mark.usefixtures("own_folder")
def test_a_command_of_a_page_runs(
    page: str, command: str, shown: str, own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs from a checkout. The page has the titles and sentences of the output.

    Numbers may change with the search.
    """
    for name in re.findall(r"(?:docs|tests)/\S+\.(?:toml|jsonl)", command):
        (own_folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, own_folder / name)
    assert run(shlex.split(command, comments=True)[1:]) == 0, page
    said = capsys.readouterr()
    printed = _words(said.out + said.err)
    assert [line for line in map(_words, shown.splitlines()) if line not in printed] == []


def _words(text: str) -> str:
    """Return the text without its numbers and spaces."""
    return re.sub(r"[\d\s.,±%×=()+-]+", " ", text).strip()
