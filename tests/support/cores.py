"""Requirements of tests for the machine's cores."""

from __future__ import annotations

import os

import pytest

CORES = len(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(CORES < 2, reason="it cuts the CPU into two slices")
