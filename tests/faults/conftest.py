"""Fixtures for tests that fill a disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


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
