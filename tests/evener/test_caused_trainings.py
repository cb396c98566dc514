"""Real ranks that train with one known cause of slowness each: it is named first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from evener.launch.summary import summarize_training
from evener.training.limits import LEAST_SHARE, LimitKind
from tests.support.frameworks import skip_without

skip_without("torch")
pytestmark = pytest.mark.slow

MOST_BY_CHANCE = 0.45  # fraction of a plain run's step that may be named while other tests run
MOST_STARVED = 0.12  # largest fraction of time without a core at which a cause can be seen


def test_the_cause_is_named_first_and_plain_trainings_have_none(
    trainer_ranks: Callable[..., list[Any]],
) -> None:
    """Each cause is named first, and plain training runs have none.

    If other programs take cores meanwhile, that is named too, makes ranks unequal, and hides
    sleeps.
    """
    from tests.support.caused_trainings import FIRST, PLAIN, read_record

    ranks = trainer_ranks("tests.support.caused_trainings.train_all", world=2)
    limits = {}
    for cause in ranks[0]:
        records = [read_record(rank[cause]) for rank in ranks]
        summary = summarize_training(records, "run", "finished", {})
        assert summary is not None
        limits[cause] = summary.limits
    starved = {
        cause: max(read_record(rank[cause]).starved_so_far for rank in ranks) for cause in ranks[0]
    }
    wrong = {}
    for cause, kind in FIRST.items():
        said = limits[cause]
        found = [each.kind for each in said if each.kind != LimitKind.HOST_STARVED]
        if starved[cause] > LEAST_SHARE and kind != LimitKind.UNEQUAL:
            found = [each for each in found if each != LimitKind.UNEQUAL]
        if starved[cause] > MOST_STARVED:
            assert LimitKind.HOST_STARVED in [each.kind for each in said]
            continue
        if found[:1] != [kind]:
            wrong[cause] = [(each.kind.value, round(each.share, 2)) for each in said]
    assert not wrong
    assert LimitKind.HOST_STARVED in [limit.kind for limit in limits["cores"]]
    for cause in PLAIN:
        named = [limit.kind for limit in limits[cause]]
        if starved[cause] > LEAST_SHARE:
            assert named[:1] == [LimitKind.HOST_STARVED], (
                "what it does to the others comes after it"
            )
        else:
            assert LimitKind.INPUT not in [limit.kind for limit in limits[cause]]
            # steps take milliseconds and other tests run, so nothing large may be named
            assert all(limit.share <= MOST_BY_CHANCE for limit in limits[cause]), limits[cause]
