"""The judge of audits: what counts as rounding, when it is measured, and what follows."""

from __future__ import annotations

import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.training.audit import (
    EVERY,
    PROJECTIONS,
    REPEATS,
    Action,
    Audits,
    GradientDifference,
    Sketch,
    compare,
    compare_ranks,
    describe,
    find_cause,
    find_noises,
    find_unequal,
)

SHAPES = {"embed": 400, "layer.weight": 300, "layer.bias": 20, "zero": 30}


class Gradients:
    """Random gradients of several tensors and their sketches; "zero" has rounding errors only."""

    def __init__(self, seed: int) -> None:
        self.random = numpy.random.default_rng(seed)
        scales = 10.0 ** self.random.uniform(-3, 1, len(SHAPES))
        self.true = {
            name: self.random.normal(size=size) * scale * (name != "zero")
            for (name, size), scale in zip(SHAPES.items(), scales, strict=True)
        }
        self.largest = max(map(numpy.linalg.norm, self.true.values()))
        self.signs = {
            name: self.random.choice([-1.0, 1.0], (PROJECTIONS, size))
            for name, size in SHAPES.items()
        }

    def sketch(self, rounding: float, wrong: str = "", factor: float = 1.0) -> Sketch:
        """Return a sketch with new rounding errors; the tensor `wrong` is scaled by `factor`."""
        made = Sketch(loss=1.0)
        for name, true in self.true.items():
            size = max(numpy.linalg.norm(true), 1e-3 * self.largest)
            noise = self.random.normal(size=true.shape) * rounding * size / math.sqrt(true.size)
            seen = true * (factor if name == wrong else 1.0) + noise
            made.add(name, "float32", tuple(self.signs[name] @ seen))
        return made


@pytest.mark.parametrize(("error", "is_found"), [(2e-4, False), (1e-2, True)])
def test_terms_that_nearly_cancel_leave_their_rounding(error: float, is_found: bool) -> None:
    """The bias of a classifier, as two equally likely classes cancel; its repeats are all equal.

    An error of 2e-4 of this gradient is 2e-7 of the largest one, so it is float32's rounding.
    """
    kinds = {"weight": "float32", "bias": "float32"}

    def make(bias: float) -> Sketch:
        return Sketch({"weight": (1.0,) * PROJECTIONS, "bias": (bias,) * PROJECTIONS}, kinds, 0.7)

    reference = make(1e-3)
    found = compare(reference, make(1e-3 * (1 + error)), [reference] * REPEATS)
    assert (found is not None) is is_found


@given(seed=st.integers(0, 10**6), exponent=st.floats(-8, -3))
def test_what_repeats_show_to_be_rounding_is_no_difference(seed: int, exponent: float) -> None:
    gradients = Gradients(seed)
    rounding = 10.0**exponent
    repeats = [gradients.sketch(rounding) for _ in range(REPEATS)]
    assert compare(gradients.sketch(rounding), gradients.sketch(rounding), repeats) is None


@given(
    seed=st.integers(0, 10**6),
    wrong=st.sampled_from(["embed", "layer.weight", "layer.bias"]),
    error=st.floats(1e-3, 10.0),
)
def test_a_wrong_gradient_is_found_and_named(seed: int, wrong: str, error: float) -> None:
    gradients = Gradients(seed)
    gradients.true[wrong] *= gradients.largest / numpy.linalg.norm(gradients.true[wrong])
    repeats = [gradients.sketch(1e-6) for _ in range(REPEATS)]
    found = compare(
        gradients.sketch(1e-6), gradients.sketch(1e-6, wrong, 1.0 + 10 * error), repeats
    )
    assert found is not None
    assert found.name == wrong
    assert found.relative > found.allowed


@given(seed=st.integers(0, 10**6), exponents=st.tuples(st.floats(-8, -2), st.floats(-8, -2)))
def test_ranks_that_round_unlike_each_other_are_alike(
    seed: int, exponents: tuple[float, float]
) -> None:
    gradients = Gradients(seed)
    sketches, noises = [], []
    for exponent in exponents:
        own = [gradients.sketch(10.0**exponent) for _ in range(REPEATS + 1)]
        sketches.append(own[0])
        noises.append(find_noises(own[0], own[1:]))
    assert compare_ranks(sketches, noises) is None


@given(seed=st.integers(0, 10**6))
def test_ranks_that_compute_another_gradient_are_not_taken_for_rounding(seed: int) -> None:
    gradients = Gradients(seed)
    gradients.true["embed"] *= gradients.largest / numpy.linalg.norm(gradients.true["embed"])
    own = [gradients.sketch(1e-5) for _ in range(REPEATS + 1)]
    other = gradients.sketch(1e-5, "embed", 1.05)
    noises = find_noises(own[0], own[1:])
    for every in ([own[0], other], [other, own[0]]):
        assert compare_ranks(every) is not None  # therefore rounding is measured
        found = compare_ranks(every, [noises, noises])
        assert found is not None
        assert found.name == "embed"


def test_a_tensor_that_one_way_gives_no_gradient_is_a_difference() -> None:
    gradients = Gradients(1)
    trained = gradients.sketch(0.0)
    del trained.sums["layer.weight"]
    found = compare(gradients.sketch(0.0), trained)
    assert found is not None
    assert found.name == "layer.weight"
    assert found.trained == 0.0


def test_a_gradient_that_only_the_trained_way_makes_nan_is_a_difference() -> None:
    gradients = Gradients(2)
    trained = gradients.sketch(0.0)
    trained.sums["embed"] = (math.nan,) * PROJECTIONS
    found = compare(gradients.sketch(0.0), trained)
    assert found is not None
    assert found.name == "embed"
    assert compare(trained, gradients.sketch(0.0)) is None  # without repeats of the reference


def test_parts_of_a_gradient_add_up() -> None:
    gradients = Gradients(3)
    made = Sketch()
    for part in (0.25, 0.75):
        for name, true in gradients.true.items():
            made.add(name, "float64", tuple(gradients.signs[name] @ true * part))
    whole = gradients.sketch(0.0)
    whole.kinds = dict.fromkeys(whole.kinds, "float64")
    assert compare(whole, made) is None


def test_steps_1_4_16_64_256_1024_and_every_2000th_are_audited() -> None:
    audits = Audits()
    seen = [step for step in range(1, 3 * EVERY + 1) if audits.begin("same")]
    assert seen == [1, 4, 16, 64, 256, 1024, EVERY, 2 * EVERY, 3 * EVERY]


def test_a_change_of_the_program_is_audited_at_once() -> None:
    audits = Audits()
    for _ in range(4):
        audits.begin("one loss")
    assert not audits.begin("one loss")
    assert audits.begin("another loss")
    assert not audits.begin("another loss")
    assert not audits.begin("one loss")


def test_an_audit_is_thorough_at_first_after_a_change_and_to_confirm() -> None:
    audits = Audits()
    thorough = []
    for step in range(1, 258):
        if audits.begin("frozen" if step >= 20 else "all") and audits.thorough:
            thorough.append(step)
        if step == 256:
            audits.decide_by(True)
    assert thorough == [1, 20, 257]
    assert audits.add_signature("another loss")
    assert audits.thorough


def test_a_program_that_always_changes_isnt_always_audited() -> None:
    audits = Audits()
    assert sum(audits.begin(step) for step in range(1000)) < 50


def _difference() -> GradientDifference:
    gradients = Gradients(4)
    found = compare(gradients.sketch(0.0), gradients.sketch(0.0, "embed", 2.0))
    assert found is not None
    return found


def _at(step: int, **options: bool) -> Audits:
    audits = Audits(**options)
    for _ in range(step):
        audits.begin("same")
    return audits


@pytest.mark.parametrize(
    ("options", "early", "late"),
    [
        ({}, Action.REFUSE, Action.WARN),
        ({"strict": True}, Action.REFUSE, Action.REFUSE),
        ({"makes_even": True}, Action.GO_EVEN, Action.GO_EVEN),
    ],
)
def test_early_differences_act_at_once_and_late_ones_are_confirmed(
    options: dict[str, bool], early: Action, late: Action
) -> None:
    found = _difference()
    assert _at(64, **options).decide(found) is early
    audits = _at(256, **options)
    assert audits.decide(found) is Action.CONFIRM
    assert audits.begin("same")
    assert audits.decide(found) is late
    assert not audits.begin("same")


def test_a_late_difference_that_isnt_seen_again_is_forgotten() -> None:
    audits = _at(256)
    assert audits.decide(_difference()) is Action.CONFIRM
    audits.begin("same")
    assert audits.decide(None) is Action.GO_ON
    assert not audits.begin("same")


def test_the_first_thing_that_makes_it_right_is_the_cause() -> None:
    answers = {"passes": lambda: True, "collation": lambda: False, "sum": lambda: True}
    assert find_cause(answers) == "passes"
    assert find_cause({"sum": lambda: False}) == "rows"


def test_a_message_names_the_tensor_both_sizes_and_the_parts() -> None:
    found = _difference()
    words = describe(found, "sum", (3, 5), step=16)
    for part in ("embed", f"{found.reference:.4g}", f"{found.trained:.4g}", "3 and 5", "step 16"):
        assert part in words


def test_a_buffer_that_differs_between_ranks_is_named() -> None:
    one = {"bn.mean": (0.5, 1.0), "center": (0.25, 2.0), "mine": (1.0,)}
    other = {"bn.mean": (0.5, 1.0 + 1e-7), "center": (0.25, 2.5)}
    assert find_unequal([one, other]) == ("center", 2.0, 2.5)
    assert find_unequal([one, one]) is None
