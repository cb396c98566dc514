"""An audit's estimate of rounding is close to the real error, and far below a wrong loss's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from evener.torch.audit.compute import GradientSketcher, Piece  # noqa: E402
from evener.torch.audit.randomness import EvenRandomness  # noqa: E402
from evener.torch.audit.sketch import name_tensors  # noqa: E402
from evener.training.audit import REPEATS, Sketch, compare  # noqa: E402

Batch = tuple[Any, Any]


def dense(width: int) -> Any:
    return nn.Sequential(
        nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 4)
    )


def attention() -> Any:
    layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", batch_first=True)
    texts = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return nn.Sequential(nn.Unflatten(1, (4, 4)), nn.Linear(4, 64), texts, nn.Flatten(), head(256))


def images() -> Any:
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.Flatten(),
        head(512),
    )


def head(width: int) -> Any:
    return nn.Linear(width, 4)


MODELS: dict[str, Callable[[], Any]] = {
    "narrow": partial(dense, 32),
    "wide": partial(dense, 1024),
    "attention": attention,
    "images": images,
}


def make_batch(rows: int) -> Batch:
    return torch.randn(rows, 16), torch.randint(0, 4, (rows,))


def loss_of(model: Any, batch: Batch) -> Any:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def sketch(model: Any, pieces: Sequence[tuple[Batch, float]], disturbance: int = 0) -> Sketch:
    sketcher = GradientSketcher([model], name_tensors([model]))
    computation = [Piece(partial(loss_of, model, batch), weight) for batch, weight in pieces]
    with sketcher.open():
        return sketcher.sketch(computation, disturbance)


def disturbed(model: Any, batch: Batch) -> list[Sketch]:
    return [sketch(model, [(batch, 1.0)], number + 1) for number in range(REPEATS)]


@pytest.mark.parametrize("name", MODELS)
def test_rounding_is_not_taken_for_less_than_it_is(name: str) -> None:
    """The error of a float32 gradient, compared with float64, is at most the estimate."""
    torch.manual_seed(0)
    model, batch = MODELS[name](), make_batch(16)
    exact = copy.deepcopy(model).double()
    reference = sketch(model, [(batch, 1.0)])
    true = sketch(exact, [((batch[0].double(), batch[1]), 1.0)])
    true.kinds = dict(reference.kinds)
    repeats = disturbed(model, batch)
    shown = {each: _largest(reference, repeats, each) for each in reference.sums}
    for each in reference.sums:
        error = _distance(reference, true, each)
        assert error < 1.2 * max(shown[each], sorted(shown.values())[len(shown) // 2])


@pytest.mark.parametrize("terms", [64, 1024, 16_384])
def test_products_are_disturbed_as_sums_of_their_length_are(terms: int) -> None:
    """The disturbance is that of a sequential sum, which no kernel exceeds."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(16, terms, generator=generator)
    columns = torch.randn(terms, 16, generator=generator)
    exact = rows.double() @ columns.double()
    added = torch.zeros(16, 16)
    for place in range(terms):
        added += rows[:, place, None] * columns[place]
    with EvenRandomness(1):
        disturbed = rows @ columns
    error, shown = (float((each - exact).square().mean().sqrt()) for each in (added, disturbed))
    assert error / 3 < shown < error * 3


@pytest.mark.parametrize("name", MODELS)
def test_a_wrong_weight_is_far_more_than_rounding(name: str) -> None:
    """Parts of 12 and 4 rows have equal weights or, as a small error, weights 1 % too large."""
    torch.manual_seed(0)
    model, batch = MODELS[name](), make_batch(16)
    parts = [(batch[0][:12], batch[1][:12]), (batch[0][12:], batch[1][12:])]
    reference, repeats = sketch(model, [(batch, 1.0)]), disturbed(model, batch)
    right = sketch(model, [(parts[0], 0.75), (parts[1], 0.25)])
    assert compare(reference, right, repeats) is None
    for weights in (0.5, 0.5), (0.7575, 0.2525):
        wrong = sketch(model, list(zip(parts, weights, strict=True)))
        assert compare(reference, wrong, repeats) is not None


class Drops(nn.Module):
    """A model with each dropout kernel of a CPU; other devices use other ones."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.first = nn.Linear(16, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, rate, batch_first=True)
        self.reader = nn.LSTM(16, 4, 2, dropout=rate, batch_first=True)

    def forward(self, rows: Any) -> Any:
        made = nn.functional.dropout(self.first(rows), self.rate)
        made = torch.native_dropout(made, self.rate, True)[0]
        return self.reader(self.layer(made[:, None]))[0][:, 0]


def test_nothing_is_dropped_by_any_kernel() -> None:
    """Forward and backward passes are those without dropout, whichever kernel a device uses."""
    torch.manual_seed(0)
    drops, batch = Drops(0.4), make_batch(8)
    keeps = Drops(0.0)
    keeps.load_state_dict(drops.state_dict())
    assert compare(sketch(keeps, [(batch, 1.0)]), sketch(drops, [(batch, 1.0)])) is None


@pytest.mark.parametrize("way", ["older", "newer"])
def test_a_program_that_asks_for_coarse_products_is_computed_in_full_precision(way: str) -> None:
    """PyTorch has two settings for them, and raises an error if both are used."""
    products = torch.backends.mkldnn.matmul
    before = torch.get_float32_matmul_precision()
    if way == "newer" and getattr(torch.backends.cuda.matmul, "fp32_precision", None) is None:
        pytest.skip("this PyTorch has one way alone")
    try:
        if way == "older":
            torch.set_float32_matmul_precision("medium")
        else:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            products.fp32_precision = "bf16"
        model, batch = MODELS["wide"](), make_batch(8)
        asked = getattr(products, "fp32_precision", None), torch.backends.cudnn.allow_tf32
        with GradientSketcher([model], name_tensors([model])).open():
            assert getattr(products, "fp32_precision", "ieee") == "ieee"
            assert not torch.backends.cudnn.allow_tf32
            loss_of(model, batch)
        assert asked == (
            getattr(products, "fp32_precision", None),
            torch.backends.cudnn.allow_tf32,
        )
        if way == "older":
            assert torch.get_float32_matmul_precision() == "medium"
    finally:
        if way == "newer":
            torch.backends.cuda.matmul.fp32_precision = "none"
            products.fp32_precision = "none"
        torch.set_float32_matmul_precision(before)


def _largest(reference: Sketch, others: Sequence[Sketch], name: str) -> float:
    return max(_distance(reference, each, name) for each in others)


def _distance(one: Sketch, other: Sketch, name: str) -> float:
    """Return the difference relative to the tensor's gradient, or to 1/10,000 of the largest."""
    largest = max(one.size(each) for each in one.sums)
    gaps = [a - b for a, b in zip(one.sums[name], other.sums[name], strict=True)]
    norm: float = torch.tensor(gaps, dtype=torch.float64).square().mean().sqrt().item()
    return norm / max(one.size(name), 1e-4 * largest)
