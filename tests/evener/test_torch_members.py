"""Reading a step's model, losses and random numbers without walking through the whole model."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy
import pytest

torch = pytest.importorskip("torch")

from evener.torch.audit.randomness import RandomState  # noqa: E402
from evener.torch.members import Members  # noqa: E402
from evener.torch.step.backward import listen  # noqa: E402
from evener.torch.weak_list import WeakList  # noqa: E402


def make_model() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: model,
    "freeze": lambda model: model[0].weight.requires_grad_(False),
    "a layer": lambda model: model.append(torch.nn.BatchNorm1d(2)),
    "a parameter": lambda model: model[0].register_parameter("new", torch.nn.Parameter()),
    "another parameter": lambda model: setattr(model[0], "bias", torch.nn.Parameter()),
    "a buffer": lambda model: model[0].register_buffer("new", torch.ones(2)),
    "another buffer": lambda model: setattr(model[1], "running_mean", torch.ones(2)),
    "no buffer": lambda model: setattr(model[1], "running_mean", None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_members_are_those_of_the_model_after_any_change(name: str) -> None:
    model = make_model()
    members = Members(model)
    before = members.trained()
    assert members.buffers()
    CHANGES[name](model)
    every = list(model.parameters())
    flags = tuple(each.requires_grad for each in every)
    assert members.trained() == (tuple(map(id, every)), flags)
    assert members.buffers() == [(name, each) for name, each in model.named_buffers()]
    assert (members.trained() == before) is ("buffer" in name or name == "nothing")


def test_other_models_are_no_reason_to_list_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers makes a ModuleList of a model's layers in each forward pass."""
    model = make_model()
    members = Members(model)
    before = members.trained(), members.buffers(), members.buffers_at()
    monkeypatch.setattr(model, "named_modules", None)
    monkeypatch.setattr(model, "parameters", None)
    torch.nn.ModuleList(model.children())
    assert (members.trained(), members.buffers(), members.buffers_at()) == before


def test_members_do_not_keep_a_model() -> None:
    members = Members(make_model())
    gc.collect()
    assert members.trained() == ((), ())


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[Any, FrameType]] = []

    def note_loss(self, _: Any, operations: tuple[Any, ...], caller: FrameType) -> None:
        self.heard.append((operations, caller))


def test_backward_is_pytorchs_own_before_and_after_it_is_listened_to() -> None:
    own, weight, target = torch.Tensor.backward, torch.ones(2, requires_grad=True), torch.ones(2)
    first, second = Listener(), Listener()
    end = listen(first)
    listen(second)
    torch.nn.functional.mse_loss(weight * 2, target, reduction="sum").backward()
    assert [caller.f_code.co_name for _, caller in first.heard] == [
        "test_backward_is_pytorchs_own_before_and_after_it_is_listened_to"
    ]
    assert first.heard[0][0] == second.heard[0][0]
    assert first.heard[0][0][:2] == (("MseLossBackward0", 2), ("MulBackward0", None))
    end()
    (weight * 2).sum().backward()
    assert (len(first.heard), len(second.heard)) == (1, 2)
    del second
    gc.collect()
    assert torch.Tensor.backward is own


def test_a_weak_list_has_each_object_once_and_in_order() -> None:
    made, known = [Listener() for _ in range(3)], WeakList[Any]()
    assert not known
    for each in (*made, made[0]):
        known.add(each)
    known.discard(made[1])
    assert list(known) == [made[0], made[2]]
    made.clear()
    del each
    gc.collect()
    assert not known


DRAWS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "python": random.random,
    "python, normal": lambda: random.gauss(0, 1),
    "python, a block": lambda: [random.random() for _ in range(312)],
    "numpy": numpy.random.rand,
    "numpy, normal": numpy.random.randn,
    "numpy, two normal": lambda: numpy.random.randn(2),
    "numpy, a block": lambda: numpy.random.rand(312),
    "torch": lambda: torch.rand(1),
}


@pytest.mark.parametrize(
    "drawn", [0, 1]
)  # the second normal number is already cached after the first
@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_seen_and_can_be_repeated(name: str, drawn: int) -> None:
    numpy.random.seed(1)
    random.seed(1)
    for _ in range(drawn):
        random.gauss(0, 1)
        numpy.random.randn()
    state = RandomState()
    DRAWS[name]()
    assert state.has_changed() is (name != "nothing")
    after = random.gauss(0, 1), numpy.random.randn(), float(torch.rand(1))
    state.restore()
    DRAWS[name]()
    assert (random.gauss(0, 1), numpy.random.randn(), float(torch.rand(1))) == after


def test_draws_of_another_generator_of_numpys_are_seen() -> None:
    before: Any = numpy.random.get_bit_generator()  # type: ignore[attr-defined] # in no stub
    numpy.random.set_bit_generator(numpy.random.SFC64(1))  # type: ignore[attr-defined]
    try:
        state = RandomState()
        assert not state.has_changed()
        first = numpy.random.rand()
        assert state.has_changed()
        state.restore()
        assert numpy.random.rand() == first
    finally:
        numpy.random.set_bit_generator(before)  # type: ignore[attr-defined]
