"""Tests, and what they share in tests/support.

Code that pytest rewrites is kept even under PYTHONDONTWRITEBYTECODE. All of Hypothesis is, which
would take each worker a second.
"""

import sys

sys.dont_write_bytecode = False
