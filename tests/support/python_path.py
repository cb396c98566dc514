"""PYTHONPATH of a Python that a test starts with folders of its own."""

from __future__ import annotations

import os
from pathlib import Path

LIGHT_START = Path(__file__).parent / "light_start"


def python_path(*folders: Path) -> str:
    """These folders behind light_start, whose `sitecustomize` runs the one that it finds in
    them.
    """
    return os.pathsep.join(map(str, (LIGHT_START, *folders)))
