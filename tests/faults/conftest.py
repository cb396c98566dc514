"""Most of these tests measure on the machine's cores; some fill a disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def share_cores(cores_of_one_user: int) -> None:
    """No other worker's test plays another user meanwhile."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=False
        ).returncode
    ):
        pytest.skip("a small file system needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)
