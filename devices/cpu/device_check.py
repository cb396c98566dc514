"""Computes a little on the cores of this process; the exit code is 0 if that works."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.exit(0 if sum(range(1 << 20)) == 549755289600 else 1)
