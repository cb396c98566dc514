"""A search that is asked in another way does no worse: pairs of runs on machines of every second
family.

`python -m benchmarks.search --families hard --laws` tries all families, and other seeds.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import machine_families_hard as hard
from tests.support.search_laws import LAWS, NOISE

FAMILIES = (
    "default",
    "contention80",
    "hosts",
    "memory_bend",
    "concave",
    "small_memory",
    "mixed_many",
    "knee",
)
SEED = 4
# known failures, with their cause; a change that fixes a cause removes its lines
TODAY = {
    ("more time", "knee"): (
        "97 % of the best in 120 s; in 240 s the second size is 64 rows, in three slow steps, the "
        "level stretch between 8 and 64 rows isn't looked into, and it is 87 %"
    ),
}


def _pairs() -> list[Any]:
    found = []
    for i, law in enumerate(LAWS):
        for family in FAMILIES[i % 2 :: 2]:
            reason = TODAY.get((law, family))
            marks = (pytest.mark.xfail(strict=True, reason=reason),) if reason else ()
            found.append(pytest.param(law, family, marks=marks))
    return found


@pytest.mark.parametrize(("law", "family"), _pairs())
def test_a_pair_of_searches_keeps_the_law(law: str, family: str) -> None:
    for case in hard.cases(family, SEED):
        loss = LAWS[law](case) or 0.0
        assert loss <= NOISE, f"{case.mode} {case.ask.words()}: {loss:.1%} worse"


@pytest.mark.parametrize(
    ("family", "seed"), [("stairs64", 17007), ("tol_jagged", 17001), ("small_memory", 23001)]
)
def test_a_useless_device_changes_nothing_for_the_others(family: str, seed: int) -> None:
    """They have the same equal share, probes and smaller batches after running out of memory as
    without it.
    """
    for case in hard.cases(family, seed):
        loss = LAWS["a useless device more"](case)
        assert loss is None or loss <= NOISE, f"{case.mode} {case.ask.words()}: {loss:.1%} worse"
