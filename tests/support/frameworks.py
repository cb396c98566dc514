"""Skips tests of frameworks that aren't installed, without importing them: TensorFlow takes 5 s."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def skip_without(*names: str) -> None:
    """Skip the test, or the file that is being imported."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed", allow_module_level=True)
