"""The house may shrink: lines, files, long functions and returns of a request's way have bounds,
which are all here.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable

from tests.support.sources import PACKAGES, REPO, files, nodes, parsed

MOST_LINES, MOST_FILES = (
    48_997,
    257,
)  # of product code: lower them with what goes; what comes takes something out
LONGEST_FILE, LONGEST_FUNCTION = 400, 60
NINTH_TENTH = 15  # lines that nine of ten functions have at most
MOST_RETURNS = {  # on the ways of tests/support/walk.py, and what they lead to
    "balance": (7, "balancer/session.py Session.__init__"),
    "split": (25, "called back: evener/torch_split/buckets.py Bucket.receive"),
}

PRODUCT = [path for package in PACKAGES for path in files(package)]


def test_the_product_has_no_more_lines_and_files_than_were_allowed() -> None:
    lines = {path: path.read_bytes().count(b"\n") for path in PRODUCT}
    assert [
        f"{path.relative_to(REPO)}: {count}"
        for path, count in lines.items()
        if count > LONGEST_FILE
    ] == []
    assert sum(lines.values()) <= MOST_LINES
    assert len(lines) <= MOST_FILES


def test_functions_are_short() -> None:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    found = [
        (path, node) for path in PRODUCT for node in nodes(parsed(path)) if isinstance(node, kinds)
    ]
    lengths = {
        f"{path.relative_to(REPO)}:{one.lineno}": (one.end_lineno or 0) - one.lineno + 1
        for path, one in found
    }
    assert [place for place, length in lengths.items() if length > LONGEST_FUNCTION] == []
    assert sorted(lengths.values())[len(lengths) * 9 // 10] <= NINTH_TENTH


def check(way: str, walked: str) -> None:
    """`<-` is before a stop in a file that had been left; the number of these is the last line."""
    most, end = MOST_RETURNS[way]
    assert end in walked
    assert int(walked.splitlines()[-1]) <= most, walked


def test_a_request_s_way_to_its_session_comes_back_to_few_files() -> None:
    command = [sys.executable, "-m", "tests.support.walk", "balance"]
    check(
        "balance",
        subprocess.run(
            command, cwd=REPO, capture_output=True, text=True, check=True, timeout=60
        ).stdout,
    )


def test_the_way_to_a_weighted_gradient_comes_back_to_few_files(
    trainer_ranks: Callable[..., list[str]],
) -> None:
    check("split", trainer_ranks("tests.support.walk.save_split", world=2)[0])
