"""Which kinds of plans a training script can apply."""

from __future__ import annotations

import pytest

from evener.errors import PlanError
from evener.plan.check import check_fit
from evener.plan.file import Plan, Share, make_layout
from tests.support.launched_plan import make_plan


def plan(kind: str, batches: tuple[int, ...], **layout: object) -> Plan:
    """Return a plan of this kind on as many devices as there are batches."""
    shares = tuple(Share(f"gpu-{i}", i, "A", 0, 0.0) for i in range(len(batches)))
    return make_plan(make_layout(kind, shares, batches, **layout))  # type: ignore[arg-type]


def fit(of: Plan) -> tuple[str, ...]:
    """Return the result of the check when nothing else is known."""
    return check_fit(of, devices=None, world=None, workload_digest=None, strict=False)


def test_a_plan_that_places_parts_is_refused_with_its_placement() -> None:
    with pytest.raises(PlanError, match="towers"):
        fit(plan("place", (16, 16), placement="towers"))


def test_each_training_of_a_pack_can_apply_the_packs_plan() -> None:
    assert fit(plan("pack", (32, 0), processes=3)) == ()
