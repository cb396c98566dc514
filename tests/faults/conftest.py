"""Most of these tests measure on the machine's cores."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def share_cores(cores_of_one_user: int) -> None:
    """No other worker's test plays another user meanwhile."""
