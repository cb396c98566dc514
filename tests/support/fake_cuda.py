"""A stand-in for CUDA's library, made by a C compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NAME = "libcuda.so.1"


SOURCE = """
#include <unistd.h>
int cuInit(unsigned flags) {{ return 0; }}
int cuDeviceGetCount(int *count) {{
    static pid_t caller;
    int ends[2];
    if ({opens_pipe} && caller != getpid()) {{
        caller = getpid();
        if (pipe(ends)) return 999;
    }}
    return {status};
}}
int cuDeviceGetAttribute(int *value, int attribute, int device) {{
    *value = attribute == 102 && {virtual_memory};
    return 0;
}}
"""


def make_cuda_library(
    folder: Path, status: int, virtual_memory: int = 1, opens_pipe: bool = False
) -> Path:
    """Make a library whose `cuDeviceGetCount` returns `status`, and return its path.

    If `virtual_memory` is 0, its GPUs are like virtual ones, which can't map memory piecewise. If
    `opens_pipe` is true, that function opens a pipe when it is first called in a process, as the
    real one does in a forked process. Without a C compiler, the calling test is skipped.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a C compiler is needed")
    path = folder / NAME
    source = SOURCE.format(status=status, virtual_memory=virtual_memory, opens_pipe=int(opens_pipe))
    words = ["-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-x", "c", "-", "-o", str(path)]
    subprocess.run([compiler, *words], input=source, text=True, check=True)
    return path
