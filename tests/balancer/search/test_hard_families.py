"""One machine of each hard family: it can be measured, and a run of it ends with a plan.

How good the plans are is what `python -m benchmarks.search --families hard` measures.
"""

from __future__ import annotations

import pytest

from tests.support import machine_families_hard as hard
from tests.support import search_trials as trials

SEED = 7


@pytest.mark.parametrize("family", hard.FAMILIES)
def test_a_run_ends_with_a_plan(family: str) -> None:
    case = hard.cases(family, SEED)[0]
    assert case == hard.cases(family, SEED)[0], "another machine of the same seed"
    assert hard.is_measurable(case.machine, case.ask, hard.fewest_steps(family))
    found = trials.run(case.machine, case.ask, SEED)
    assert found.layout is not None, found.why
    assert found.verdict
    assert 0 < found.rate <= found.best / (1 - case.ask.tolerance) * 1.001


@pytest.mark.parametrize("seed", [661_012, 661_077])
def test_slow_steps_are_shared_by_what_each_device_did(seed: int) -> None:
    """With steps of 3 to 12 s, of which the budget has ten, two of the devices look alike at 8 and
    16 rows and aren't beyond; the verdict says what to do.
    """
    case = hard.cases("slow_knee", seed)[0]
    found = trials.run(case.machine, case.ask, case.seed)
    assert found.regret <= 0.15
    assert found.held
    action, headline, *_ = found.verdict.splitlines()
    assert "Use uneven shares by the plan" in action
    assert 3 < float(headline.partition("± ")[2].partition(" %")[0]) < 15
