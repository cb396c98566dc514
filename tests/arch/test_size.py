"""The house may shrink: lines, files, long functions and returns of a request's way have bounds, which are all here."""

from __future__ import annotations

import ast
import subprocess
import sys

from tests.support.sources import PACKAGES, REPO, files, parsed

MOST_LINES, MOST_FILES = 53_450, 284  # of product code: lower them with what goes; what comes takes something out
LONGEST_FILE, LONGEST_FUNCTION = 400, 60
NINTH_TENTH = 15  # lines that nine of ten functions have at most
MOST_RETURNS = 7  # of `evener balance` on simulated devices to its session (tests/support/walk.py)

PRODUCT = [path for package in PACKAGES for path in files(package)]


def test_the_product_has_no_more_lines_and_files_than_were_allowed() -> None:
    lines = {path: path.read_bytes().count(b"\n") for path in PRODUCT}
    assert [f"{path.relative_to(REPO)}: {count}" for path, count in lines.items() if count > LONGEST_FILE] == []
    assert sum(lines.values()) <= MOST_LINES
    assert len(lines) <= MOST_FILES


def test_functions_are_short() -> None:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    found = [(path, node) for path in PRODUCT for node in ast.walk(parsed(path)) if isinstance(node, kinds)]
    lengths = {f"{path.relative_to(REPO)}:{one.lineno}": (one.end_lineno or 0) - one.lineno + 1 for path, one in found}
    assert [place for place, length in lengths.items() if length > LONGEST_FUNCTION] == []
    assert sorted(lengths.values())[len(lengths) * 9 // 10] <= NINTH_TENTH


def test_a_request_comes_back_to_few_files() -> None:
    """The child prints each stop; `<-` is before those in a file that had been left."""
    command = [sys.executable, "-m", "tests.support.walk"]
    walked = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "balancer/session.py Session.__init__" in walked
    assert int(walked.splitlines()[-1]) <= MOST_RETURNS, walked
