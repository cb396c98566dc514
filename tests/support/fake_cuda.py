"""A stand-in for CUDA's library, made by a C compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NAME = "libcuda.so.1"


def make_cuda_library(folder: Path, status: int) -> Path:
    """Make a library whose `cuDeviceGetCount` returns `status`, and return its path.

    Without a C compiler, the calling test is skipped.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a C compiler is needed")
    path = folder / NAME
    source = f"int cuDeviceGetCount(int *count) {{ return {status}; }}"
    words = ["-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-x", "c", "-", "-o", str(path)]
    subprocess.run([compiler, *words], input=source, text=True, check=True)
    return path
