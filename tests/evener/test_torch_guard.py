"""The guard, which checks whether a loop's losses are means over rows.

It computes them again with the loop's own functions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from evener.program.guard import Guard
from evener.torch.audit.rows import fetch_rows

ROWS = 8
Body = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


class Scaled(torch.autograd.Function):
    """A user-defined autograd function."""

    @staticmethod
    def forward(_: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * 1.0

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def noisy(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        functional.dropout(model(inputs + torch.randn_like(inputs)), 0.3), labels
    )


def summed_by_hand(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    for name in range(3):
        chosen = functional.one_hot(labels, 3)[:, name]
        total = total - (model(inputs).log_softmax(1)[:, name] * chosen).sum()
    return total / inputs.size(0)


def contrastive(model: Any, inputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    found = functional.normalize(model(inputs))
    return functional.cross_entropy(found @ found.T / 0.1, torch.arange(len(inputs)))


def mined(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = functional.cross_entropy(model(inputs), labels, reduction="none")
    hard = torch.from_numpy((losses.detach().numpy() > losses.mean().item()).astype("float64"))
    return (losses * hard).mean()


def read_back(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(model(inputs), labels)
    return loss * (1.0 / loss.item())


def drawn(model: Any, inputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Return a loss with diffusers' random numbers: an optional generator, drawn by shape."""
    options = {"device": inputs.device, "dtype": inputs.dtype}
    noise = torch.randn(inputs.shape, generator=None, layout=torch.strided, **options)
    noise = noise + torch.rand(inputs.shape, generator=None, **options)
    steps = torch.randint(0, 9, (inputs.shape[0],), generator=None)
    order = torch.randperm(5, generator=None)
    noise = noise + torch.normal(0.0, 1.0, size=inputs.shape, generator=None)
    return (model(inputs[:, order] + noise * steps[:, None]) - noise[:, :3]).square().mean()


def drawn_from_its_own_generator(model: Any, inputs: torch.Tensor, _: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    torch.randn(3, generator=generator)
    noise = torch.randn(inputs.shape, generator=generator)
    return (model(inputs + noise)).square().mean()


def read_when_complete(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return a loss whose number is logged before the backward pass, and multiplied by a float."""
    loss = functional.cross_entropy(model(inputs * 0.18215) * 0.5, labels)
    assert loss.item() > 0
    return loss


def read_beside(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return a second loss, computed after a read of the first."""
    first = functional.cross_entropy(model(inputs) * 0.5, labels)
    assert first.item() > 0
    return first + functional.cross_entropy(model(inputs), labels, label_smoothing=0.1)


def read_as_rows(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = functional.cross_entropy(model(inputs), labels, reduction="none")
    return (losses * torch.tensor(losses.tolist()).sigmoid()).mean()


EXACT: dict[str, Body] = {
    "drawn": drawn,
    "drawn from its own generator": drawn_from_its_own_generator,
    "read when complete": read_when_complete,
    "read beside": read_beside,
    "a mean": lambda model, x, y: functional.cross_entropy(model(x), y),
    "a module": lambda model, x, y: nn.CrossEntropyLoss(label_smoothing=0.1)(model(x), y),
    "divided by size": lambda model, x, y: (
        functional.cross_entropy(model(x), y, reduction="sum") / x.size(0)
    ),
    "divided by shape": lambda model, x, y: (
        functional.cross_entropy(model(x), y, reduction="sum") / x.shape[0]
    ),
    "a product of sizes": lambda model, x, _: (
        model(x).view(x.shape[0] * 3).square().sum() / (x.shape[0] * 3)
    ),
    "accumulated": lambda model, x, y: functional.cross_entropy(model(x), y) / 4,
    "squares": lambda model, x, y: (
        (model(x).float() - functional.one_hot(y, 3)).pow(2).mean().double()
    ),
    "two losses": lambda model, x, y: (
        (out := model(x)).square().mean() * 0.1 + functional.cross_entropy(out, y)
    ),
    "in place": lambda model, x, y: (
        functional.cross_entropy(model(x), y).mul_(0.5).add_(model(x).mean())
    ),
    "noise and dropout": noisy,
    "by hand": summed_by_hand,
    "class weights by rows": lambda model, x, y: (
        functional.cross_entropy(model(x), y, reduction="none") * torch.tensor([1.0, 2.0, 3.0])[y]
    ).mean(),
    "a function of one's own": lambda model, x, _: Scaled.apply(model(x).mean()),
    "a penalty": lambda model, x, y: (
        functional.cross_entropy(model(x), y)
        + sum(each.square().sum() for each in model.parameters()) * 0.01
    ),
}
OTHER: dict[str, tuple[Body, str]] = {
    "a sum": (
        lambda model, x, y: functional.cross_entropy(model(x), y, reduction="sum"),
        "it is a sum",
    ),
    "divided by a constant": (lambda model, x, _: model(x).square().sum() / ROWS, "it is a sum"),
    "class weights": (
        lambda model, x, y: functional.cross_entropy(
            model(x), y, weight=torch.tensor([1.0, 2.0, 30.0])
        ),
        "isn't a mean over rows",
    ),
    "ignored labels": (
        lambda model, x, y: functional.cross_entropy(model(x), y, ignore_index=2),
        "isn't a mean over rows",
    ),
    "contrastive": (contrastive, "isn't a mean over rows"),
    "mined": (mined, "can't be followed"),
    "read as rows": (read_as_rows, "rows that aren't tensors of its batch"),
    "read back": (read_back, "a number that the program has read"),
    "another batch": (
        lambda model, _, __: functional.cross_entropy(
            model(torch.randn(ROWS, 5)), torch.arange(ROWS) % 3
        ),
        "from the batch that its loader gave last",
    ),
    "a standard deviation": (lambda model, x, _: model(x).std(0).sum(), "isn't a mean over rows"),
    "no model": (
        lambda _, x, __: (x * torch.ones((), requires_grad=True)).mean(),
        "isn't computed from",
    ),
    "a loop over rows": (
        lambda model, x, y: (
            sum(functional.cross_entropy(model(x)[i : i + 1], y[i : i + 1]) for i in range(ROWS))
            / ROWS
        ),
        "isn't a number",
    ),
}


def judge(body: Body, rows: int = ROWS) -> str:
    """Return what the guard finds in one step of a loop."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)).double()
    inputs, labels = torch.randn(rows, 5, dtype=torch.float64), torch.arange(rows) % 3
    before = {name: value.clone() for name, value in model.state_dict().items()}
    guard = Guard([model], (inputs, labels))
    try:
        loss = body(model, inputs, labels)
        drawn = torch.get_rng_state()
        loss.backward()
        assert torch.equal(drawn, torch.get_rng_state())
    finally:
        guard.close()
    assert torch.overrides._get_current_function_mode() is None
    weights = dict(model.named_parameters())
    assert all(torch.equal(weights[name], before[name]) for name in weights)
    assert int(model[1].num_batches_tracked) >= 1 or "model" not in body.__code__.co_varnames
    return guard.fault


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", EXACT)
def test_a_mean_over_rows_is_known(name: str) -> None:
    assert judge(EXACT[name]) == ""


@pytest.mark.parametrize("name", OTHER)
def test_what_is_no_mean_or_cannot_be_followed_is_reported(name: str) -> None:
    body, said = OTHER[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert said in judge(body)


@pytest.mark.parametrize(
    "batch", [[torch.ones(6, 4), torch.ones(4)], [torch.ones(6, 4), torch.ones(6)]]
)
def test_a_batch_whose_tensors_have_no_row_for_each_sample_is_not_compared(batch: Any) -> None:
    """A time-major batch of four samples would be split between its time steps."""
    model = nn.Linear(4, 1, dtype=torch.float32)
    guard = Guard([model], batch, rows=4)
    model(batch[0]).std().backward()
    guard.close()
    assert "a row for each sample" in guard.fault
    assert not guard.measured


@pytest.mark.parametrize("drawn", [4, 6])
def test_rows_that_are_tensors_of_their_own_are_not_compared(drawn: int) -> None:
    """A list of pictures has as many tensors as rows, so fewer rows have fewer of them."""
    rows = [(torch.randn(3, 4), torch.ones(())) for _ in range(6)]

    def collate(items: Any) -> Any:
        return tuple(zip(*items, strict=True))

    batch, model = collate(rows[:4]), nn.Linear(4, 1)
    guard = Guard([model], batch, lambda: fetch_rows(rows, collate, range(drawn)), rows=4)
    model(torch.stack(batch[0])).mean().backward()
    guard.close()
    assert "a row for each sample" in guard.fault


@pytest.mark.parametrize("rows", [ROWS, 5])
def test_a_sum_is_found_where_it_may_be_and_is_then_right(rows: int) -> None:
    inputs, model = torch.randn(rows, 5), nn.Linear(5, 3)

    def look(are_sums: bool | None, factor: float = 1.0) -> Guard:
        guard = Guard([model], inputs, are_sums=are_sums)
        (model(inputs).square().sum() * factor).backward()
        guard.close()
        return guard

    found, expected = look(None), look(True)
    assert (found.fault, found.are_sums, expected.fault) == ("", True, "")
    assert "it is a sum" in look(False).fault
    assert "it is a sum" in look(None, 1 / rows).fault  # a mean, divided by len()
    mean = Guard([model], inputs, are_sums=True)
    model(inputs).square().mean().backward()
    mean.close()
    assert mean.fault
    assert mean.measured


def test_packed_rows_are_written_down_and_computed_again() -> None:
    model, inputs, lengths = (
        nn.LSTM(3, 2, batch_first=True),
        torch.randn(4, 5, 3),
        torch.tensor([5, 4, 4, 2]),
    )
    guard = Guard([model], (inputs, lengths))
    packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True)
    made, _ = model(packed)
    made.data.mean().backward()
    guard.close()
    assert "isn't a mean over rows" in guard.fault


def test_a_buffer_that_is_changed_by_its_data_is_put_back() -> None:
    class Counting(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.seen.data.add_(1)
            return super().forward(inputs)

    model, inputs = Counting(3, 1), torch.randn(ROWS, 3)
    model.register_buffer("seen", torch.zeros(()))
    guard = Guard([model], inputs)
    model(inputs).mean().backward()
    guard.close()
    assert (guard.fault, float(model.seen)) == ("", 1.0)


def test_a_weight_that_the_loop_moves_in_place_stays_where_it_is() -> None:
    """The weight belongs to a target model that follows the trained one and is part of the loss."""
    model, target, inputs = nn.Linear(3, 1), torch.zeros(1, 3), torch.randn(ROWS, 3)
    guard = Guard([model], inputs)
    target.lerp_(torch.ones(1, 3), 0.5)
    (model(inputs) - inputs @ target.T).square().mean().backward()
    guard.close()
    assert target.tolist() == [[0.5] * 3]


def test_a_single_row_cannot_be_compared() -> None:
    class Bare(nn.Linear):
        pass

    model = Bare(2, 1)
    guard = Guard([model], torch.ones(1, 2))
    model(torch.ones(1, 2)).mean().backward()
    guard.close()
    assert "a single row" in guard.fault
