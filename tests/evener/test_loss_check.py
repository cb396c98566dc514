"""What a loss is a mean over, by its figures; and the figures, by losses of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import RequestError
from evener.training.loss_check import LossFigures, describe, judge, mean_by
from tests.support.frameworks import skip_without

losses = st.floats(0.1, 10.0)
counts = st.integers(1, 50)


@given(st.tuples(losses, losses), st.tuples(counts, counts), st.tuples(counts, counts))
def test_a_weighted_mean_is_found_by_its_weights(
    parts: tuple[float, float], rows: tuple[int, int], labels: tuple[int, int]
) -> None:
    for name in ("rows", "labels"):
        figures = LossFigures(0.0, parts, {"rows": rows, "labels": labels})
        whole = LossFigures(mean_by(figures, name), parts, figures.counts)
        assert name in judge(whole).mean_over


@given(st.tuples(losses, losses), st.tuples(counts, counts), st.floats(0.01, 0.5))
def test_another_figure_is_no_mean(
    parts: tuple[float, float], rows: tuple[int, int], off: float
) -> None:
    figures = LossFigures(0.0, parts, {"rows": rows})
    moved = LossFigures(mean_by(figures, "rows") * (1 + off), parts, figures.counts)
    assert judge(moved).mean_over == ()
    assert "it isn't a mean over rows" in describe(moved) or "it is a sum" in describe(moved)


def test_a_part_without_labels_has_no_loss_that_counts() -> None:
    figures = LossFigures(2.0, (float("nan"), 2.0), {"rows": (3, 5), "labels": (0, 7)})
    assert judge(figures).mean_over == ("labels",)


def test_a_sum_is_called_one() -> None:
    assert "it is a sum" in describe(LossFigures(8.0, (3.0, 5.0), {"rows": (3, 5)}))


# --------------------------------------------------------------------------- in PyTorch


def test_a_loss_that_is_zero_but_for_rounding_says_nothing() -> None:
    """As a policy's in its first step: parts of it differ by several times its value."""

    def surrogate(model: Any, x: Any, _: Any) -> Any:
        scores = model(x)[:, 0]
        return ((scores - scores.detach()).exp() * (x[:, 0] - x[:, 0].mean())).mean()

    with pytest.raises(ArithmeticError, match=r"the loss of 8 rows is (0\.0|-?[0-9.]+e-)"):
        check(lambda: networks()["linear"][0](), surrogate)
    assert check(
        lambda: networks()["linear"][0](), lambda model, x, _: model(x).sum() * 0
    ).mean_over == ("rows",)


class Points:
    """Rows (x, class): classes in order, so that the first rows have one."""

    def __init__(self, rows: int = 45) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(rows, 5, generator=generator)
        self.y = torch.arange(rows) * 3 // rows

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        return self.x[row], self.y[row]


def check(make: Callable[[], Any], loss: Callable[[Any, Any, Any], Any], rows: int = 45) -> Any:
    """What the loss of a model on such rows is a mean over; no trace of it is left."""
    skip_without("torch")
    import numpy
    import torch
    from torch.utils.data import default_collate

    from evener.torch.loss.check import LossCheck, make_check_batch
    from evener.torch.loss.measure import LossMeasure
    from evener.torch.rows.sampler import UnevenBatchSampler

    def numpy_state() -> Any:
        state: Any = numpy.random.get_state()
        return state[1].tolist()

    torch.manual_seed(0)
    model = make().train()
    gpu_states = torch.cuda.get_rng_state_all()
    was = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_states = torch.get_rng_state(), numpy_state(), random.getstate()
    batch = make_check_batch(
        Points(rows), UnevenBatchSampler(rows, (6, 2), 0, shuffle=False), default_collate
    )
    if batch is None:
        return None
    measure = LossMeasure(model)
    try:
        return LossCheck(measure, batch, lambda _: {}).find_meaning(lambda rows: loss(model, *rows))
    finally:
        assert all(torch.equal(tensor, was[name]) for name, tensor in model.state_dict().items())
        assert torch.equal(random_states[0], torch.get_rng_state())
        assert all(map(torch.equal, gpu_states, torch.cuda.get_rng_state_all()))
        assert random_states[1:] == (numpy_state(), random.getstate())
        assert model.training
        assert getattr(model, "calls", 0) == 0
        assert getattr(model, "seen", []) == []


def networks() -> dict[str, tuple[Callable[[], Any], bool]]:
    """Models by name, and whether their cross-entropy is a mean over rows; all have three
    classes.
    """
    import torch
    from torch import nn

    class Batchwise(nn.Module):
        def forward(self, x: Any) -> Any:
            return (x - x.mean(0)) / (1 + x.std(0)) if self.training else x

    class Counting(nn.Sequential):
        def __init__(self, *layers: Any) -> None:
            super().__init__(*layers)
            self.calls, self.seen = 0, []  # type: ignore[var-annotated]
            self.register_buffer("mean", torch.zeros(5))

        def forward(self, x: Any) -> Any:
            self.calls += 1
            self.seen.append(len(x))
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return super().forward(x)

    class Noise(nn.Module):
        def forward(self, x: Any) -> Any:
            scale = torch.rand(len(x), 1)
            return x + scale * torch.randn_like(x) + torch.normal(torch.zeros_like(x), x.abs())

    class NumpyNoise(nn.Module):
        def forward(self, x: Any) -> Any:
            import numpy

            return x + torch.tensor(numpy.random.randn(*x.shape), dtype=x.dtype) * self.training

    def last() -> Any:
        return nn.Linear(5, 3)

    def zero() -> Any:
        made = last()
        nn.init.zeros_(made.weight)
        nn.init.zeros_(made.bias)
        return made

    return {
        "linear": (last, True),
        "a zero head": (zero, True),
        "dropout": (lambda: nn.Sequential(nn.Dropout(0.3), last()), True),
        "BatchNorm": (lambda: nn.Sequential(nn.BatchNorm1d(5), last()), True),
        "noise and times": (lambda: nn.Sequential(Noise(), last()), True),
        "NumPy's noise": (lambda: nn.Sequential(NumpyNoise(), last()), True),
        "random slopes": (lambda: nn.Sequential(nn.RReLU(), last()), True),
        "16 bits": (lambda: last().bfloat16(), True),
        "counters and a moving mean": (lambda: Counting(last()), True),
        "normalization of its own": (lambda: nn.Sequential(Batchwise(), last()), False),
        "and dropout": (lambda: nn.Sequential(Batchwise(), nn.Dropout(0.3), last()), False),
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Each training pass changes")
def test_a_model_s_loss_is_a_mean_or_refused() -> None:
    skip_without("torch")
    from torch.nn.functional import cross_entropy

    for name, (make, exact) in networks().items():

        def loss(model: Any, x: Any, y: Any) -> Any:
            return cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)

        if exact:
            assert check(make, loss).mean_over == ("rows",), name
        else:
            with pytest.raises(RequestError, match="isn't a mean over rows"):
                check(make, loss)


@pytest.mark.slow
def test_losses_that_are_no_means_are_refused() -> None:
    skip_without("torch")
    import torch
    from torch.nn import functional

    networks_here = networks()
    weights = torch.tensor([1.0, 2.0, 5.0])

    def place(x: Any) -> Any:
        return torch.arange(len(x))

    refused = {
        "class weights": lambda model, x, y: functional.cross_entropy(model(x), y, weight=weights),
        "a sum": lambda model, x, y: functional.cross_entropy(model(x), y, reduction="sum"),
        "a root": lambda model, x, y: functional.mse_loss(model(x)[:, 0], y.float()).sqrt(),
        "rows compared": lambda model, x, _: functional.cross_entropy(
            model(x) @ model(x).T, place(x)
        ),
    }
    for loss in refused.values():
        with pytest.raises(RequestError):
            check(networks_here["linear"][0], loss)
    with pytest.raises(RequestError):  # all rows have the same loss, whatever their classes weigh
        check(networks_here["a zero head"][0], refused["class weights"])


@pytest.mark.slow
def test_a_gradient_penalty_is_a_mean() -> None:
    skip_without("torch")
    import torch

    def penalty(model: Any, x: Any, _: Any) -> Any:
        inputs = x.clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
        return (gradient.norm(dim=1) - 1).square().mean()

    assert check(networks()["linear"][0], penalty).mean_over == ("rows",)


@pytest.mark.slow
def test_one_row_is_no_check() -> None:
    assert check(lambda: networks()["linear"][0](), lambda *_: 0.0, rows=1) is None


@pytest.mark.slow
def test_kernels_of_a_gpu_leave_no_trace_either() -> None:
    """cuDNN's recurrent layers and fused attention take their dropout as an argument."""
    skip_without("torch")
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from torch import nn
    from torch.nn.functional import cross_entropy

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LSTM(1, 8, 2, dropout=0.3, batch_first=True)
            self.attention = nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True)
            self.last = nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            return self.last(self.attention(self.layers(x[..., None])[0]).mean(1))

    def loss(model: Any, x: Any, y: Any) -> Any:
        return cross_entropy(model(x.cuda()), y.cuda())

    def weighted(model: Any, x: Any, y: Any) -> Any:
        return cross_entropy(model(x.cuda()), y.cuda(), weight=torch.tensor([1.0, 2.0, 5.0]).cuda())

    assert check(lambda: Recurrent().cuda(), loss).mean_over == ("rows",)
    with pytest.raises(RequestError):
        check(lambda: Recurrent().cuda(), weighted)
