"""Waits for a condition, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_for(
    condition: Callable[[], Any], what: str = "", seconds: float = 120.0, pause: float = 0.01
) -> Any:
    """Return the first true value of `condition()`; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    found = condition()
    while not found:
        assert time.monotonic() < deadline, f"it never came: {what}"
        time.sleep(pause)
        found = condition()
    return found
