"""Composes PYTHONPATH for a Python process that needs extra folders."""

from __future__ import annotations

import os
from pathlib import Path

LIGHT_START = Path(__file__).parent / "light_start"


def python_path(*folders: Path) -> str:
    """Return light_start and then these folders.

    The `sitecustomize` of light_start runs the one that it finds in them.
    """
    return os.pathsep.join(map(str, (LIGHT_START, *folders)))
