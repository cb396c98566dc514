"""Runs a user's script with float64 as PyTorch's default: `python -m tests.support.script_in_float64 script words`.

What it prints is then the same on every CPU: in float32 the order of sums shows in the third digit.
"""

from __future__ import annotations

import runpy
import sys

import torch

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
