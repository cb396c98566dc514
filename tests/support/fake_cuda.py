"""A stand-in for CUDA's library, made by a C compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NAME = "libcuda.so.1"


SOURCE = """
int cuInit(unsigned flags) {{ return 0; }}
int cuDeviceGetCount(int *count) {{ return {status}; }}
int cuDeviceGetAttribute(int *value, int attribute, int device) {{
    *value = attribute == 102 && {virtual_memory};
    return 0;
}}
"""


def make_cuda_library(folder: Path, status: int, virtual_memory: int = 1) -> Path:
    """Make a library whose `cuDeviceGetCount` returns `status`, and return its path.

    If `virtual_memory` is 0, its GPUs are like virtual ones, which can't map memory piecewise.
    Without a C compiler, the calling test is skipped.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a C compiler is needed")
    path = folder / NAME
    source = SOURCE.format(status=status, virtual_memory=virtual_memory)
    words = ["-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-x", "c", "-", "-o", str(path)]
    subprocess.run([compiler, *words], input=source, text=True, check=True)
    return path
