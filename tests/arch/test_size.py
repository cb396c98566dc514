"""The house may shrink: lines, files, long functions and returns of a request's way have bounds, which are all here."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.support.sources import PACKAGES, REPO, files, nodes, parsed

MOST_LINES, MOST_FILES = 49_615, 257  # of product code: lower them with what goes; what comes takes something out
LONGEST_FILE, LONGEST_FUNCTION = 400, 60
NINTH_TENTH = 15  # lines that nine of ten functions have at most
MOST_RETURNS = {  # on the ways of tests/support/walk.py, and what they lead to
    "balance": (7, "balancer/session.py Session.__init__"),
    "split": (24, "called back: evener/torch_split/buckets.py Bucket.receive"),
}

PRODUCT = [path for package in PACKAGES for path in files(package)]


def test_the_product_has_no_more_lines_and_files_than_were_allowed() -> None:
    lines = {path: path.read_bytes().count(b"\n") for path in PRODUCT}
    assert [f"{path.relative_to(REPO)}: {count}" for path, count in lines.items() if count > LONGEST_FILE] == []
    assert sum(lines.values()) <= MOST_LINES
    assert len(lines) <= MOST_FILES


def test_functions_are_short() -> None:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    found = [(path, node) for path in PRODUCT for node in nodes(parsed(path)) if isinstance(node, kinds)]
    lengths = {f"{path.relative_to(REPO)}:{one.lineno}": (one.end_lineno or 0) - one.lineno + 1 for path, one in found}
    assert [place for place, length in lengths.items() if length > LONGEST_FUNCTION] == []
    assert sorted(lengths.values())[len(lengths) * 9 // 10] <= NINTH_TENTH


@pytest.mark.parametrize("way", MOST_RETURNS)
def test_a_way_comes_back_to_few_files(way: str) -> None:
    """The child prints each stop; `<-` is before those in a file that had been left."""
    if way == "split":
        pytest.importorskip("torch")
    most, end = MOST_RETURNS[way]
    command = [sys.executable, "-m", "tests.support.walk", way]
    walked = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True, timeout=60).stdout
    assert end in walked
    assert int(walked.splitlines()[-1]) <= most, walked
