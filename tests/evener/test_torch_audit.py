"""Audits of PyTorch losses on a few rows of data.

Which models and losses count as right, and that audits leave no trace.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.autograd import Function  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils._python_dispatch import _get_current_dispatch_mode  # noqa: E402
from torch.utils.data import default_collate  # noqa: E402

from evener.torch.audit import compute  # noqa: E402
from evener.torch.audit.computations import AuditChange, Computations  # noqa: E402
from evener.torch.audit.compute import GradientSketcher, Piece  # noqa: E402
from evener.torch.audit.quick import KnownPasses  # noqa: E402
from evener.torch.audit.row_numbers import find_loss_by_rows  # noqa: E402
from evener.torch.audit.rows import FEWER, ROWS, choose_few_rows, fetch_rows  # noqa: E402
from evener.torch.audit.sketch import (  # noqa: E402
    SIGNS,
    GradientSums,
    add_lines,
    name_tensors,
    sum_lines,
)
from evener.torch.audit.step import DRAWN, Audited, audit, compare_losses  # noqa: E402
from evener.torch.rows.structure import tensors_in  # noqa: E402
from evener.torch.training_audits import (  # noqa: E402
    TrainingAudits,
    make_launcher_computations,
    make_share_computations,
    weigh_gradients,
)

Loss = Callable[[Any, Any, Any], Any]


class Points:
    """A data set of rows (x, class) in order of classes, so that the first rows have one class."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(rows, 5, generator=generator)
        self.y = torch.arange(rows) * 3 // rows

    def __getitem__(self, row: int) -> Any:
        return self.x[row], self.y[row]


class Texts(Points):
    """A data set of rows with 1 to 9 values."""

    def __getitem__(self, row: int) -> Any:
        return self.x[row, 0] + torch.arange(row * 7 % 9 + 1.0), self.y[row]


class Words(Points):
    """A data set of rows with 1 to 9 words, which are numbers above 0."""

    def __getitem__(self, row: int) -> Any:
        return torch.arange(row * 7 % 9 + 1) + 1, self.y[row]


def pad(rows: Any) -> Any:
    """Pad rows with zeros to the longest."""
    values = nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True)
    return values, torch.stack([y for _, y in rows])


def find_cause(
    make: Callable[[], Any], loss: Loss, data: Any = Points, collate: Any = default_collate
) -> str:
    """Return the cause of a difference found by the audit of a first step; "" without one.

    Checks that a later audit, which is quick if possible, also finds a difference or none, and that
    audits leave no trace.
    """
    torch.manual_seed(0)
    model = make().train()
    was = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = _list_random_states()
    known = KnownPasses()
    found = audit_rows(model, loss, data(45), collate, known)
    later = audit_rows(model, loss, data(45), collate, known, FEWER)
    assert (later.difference is None, later.fault) == (found.difference is None, found.fault)
    assert all(torch.equal(tensor, was[name]) for name, tensor in model.state_dict().items())
    assert _list_random_states() == states
    assert model.training
    assert all(each.grad is None for each in model.parameters())
    assert getattr(model, "calls", 0) == 0
    assert getattr(model, "seen", []) == []
    assert (found.difference is None) == (found.cause == "")
    return found.cause or found.fault


def audit_rows(
    model: Any,
    loss: Loss,
    data: Any,
    collate: Any,
    known: KnownPasses,
    most: int = ROWS,
    change: Callable[[Computations], Computations] = lambda computations: computations,
) -> Audited:
    """Audit a model's loss on some rows, with changed computations."""
    device = next(model.parameters()).device
    few = fetch_rows(data, collate, range(45), most)
    assert few is not None
    computations = make_share_computations(
        few, lambda part: loss(model, *[each.to(device) for each in part.batch])
    )
    return audit(
        GradientSketcher([model], name_tensors([model]), known_passes=known),
        change(computations),
        add_noise=True,
    )


def _list_random_states() -> list[Any]:
    drawn: Any = numpy.random.get_state()
    on_gpus = [each.tolist() for each in torch.cuda.get_rng_state_all()]
    return [torch.get_rng_state().tolist(), drawn[1].tolist(), random.getstate(), on_gpus]


class Batchwise(nn.Module):
    def forward(self, x: Any) -> Any:
        return (x - x.mean(0)) / (1 + x.std(0)) if self.training else x


class Counting(nn.Sequential):
    def __init__(self, *layers: Any) -> None:
        super().__init__(*layers)
        self.calls = 0
        self.seen: list[int] = []
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


class Recurrent(nn.Module):
    """A model whose layers take dropout as an argument: cuDNN's recurrent ones, fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(1, 8, 2, dropout=0.3, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.last(self.attention(self.layers(x[..., None])[0]).mean(1))


class Neighbors(nn.Module):
    """Adds the next word's embedding to that of each word, as MobileBERT does.

    The embedding of padding is zero at first. If the head has the same weight, it doesn't stay so.
    """

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, padding_idx=0)
        self.head = nn.Linear(4, 10, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Any) -> Any:
        words = self.embedding(x)
        words = (words + functional.pad(words[:, 1:], (0, 0, 0, 1))).tanh()
        mask = (x != 0)[..., None]
        return self.head((words * mask).sum(1) / mask.sum(1))


class Late(nn.Module):
    """Adds noise from its own generator once `draws` is set."""

    draws = False

    def __init__(self) -> None:
        super().__init__()
        self.head = head()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Any) -> Any:
        if self.draws:
            x = x + torch.randn(x.shape, generator=self.generator)
        return self.head(x)


class NumpyNoise(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + torch.tensor(numpy.random.randn(*x.shape), dtype=x.dtype)


class OneScale(nn.Module):
    """Draws one number for all rows."""

    def forward(self, x: Any) -> Any:
        return x * numpy.random.rand()


class RowScales(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.stack([row * random.random() for row in x])


class Reader(nn.Module):
    """A model with dropout and the mean over values with padding, or their sum with noise."""

    def __init__(self, reads_padding: bool) -> None:
        super().__init__()
        self.reads_padding = reads_padding
        self.dropout = nn.Dropout(0.1)
        self.last = nn.Linear(1, 3)

    def forward(self, x: Any) -> Any:
        x = self.dropout(x)
        made = x.mean(1) if self.reads_padding else (x * torch.randn_like(x)).sum(1)
        return self.last(made[:, None])


def head() -> Any:
    return nn.Linear(5, 3)


def zero_head() -> Any:
    made = head()
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def classify(model: Any, x: Any, y: Any, **options: Any) -> Any:
    scores = model(x.to(next(model.parameters()).dtype)).float()
    return functional.cross_entropy(scores, y, **options)


EXACT: dict[str, Callable[[], Any]] = {
    "linear": head,
    "a zero head": zero_head,
    "dropout": lambda: nn.Sequential(nn.Dropout(0.3), head()),
    "much dropout": lambda: nn.Sequential(nn.Dropout(0.8), head()),
    "BatchNorm": lambda: nn.Sequential(nn.BatchNorm1d(5), head()),
    "noise and times": lambda: nn.Sequential(Noise(), head()),
    "random slopes": lambda: nn.Sequential(nn.RReLU(), head()),
    "16 bits": lambda: head().bfloat16(),
    "counters and a moving mean": lambda: Counting(head()),
    "recurrent": Recurrent,
}


@pytest.mark.parametrize("name", EXACT)
def test_a_mean_over_rows_is_right_in_any_model(name: str) -> None:
    assert find_cause(EXACT[name], classify) == ""


def test_only_random_numbers_beside_dropout_s_keep_audits_from_being_quick() -> None:
    drawing = set()
    for name, make in EXACT.items():
        known = KnownPasses()
        for most in (ROWS, FEWER):
            audit_rows(make(), classify, Points(45), default_collate, known, most)
        if known.draws:
            drawing.add(name)
    assert drawing == {"noise and times", "random slopes"}


def test_an_audit_is_three_passes_and_only_the_very_first_pass_is_intercepted() -> None:
    """An intercepted pass takes the host several times as long."""
    intercepted = []

    def note_pass(model: Any, x: Any, y: Any) -> Any:
        intercepted.append(_get_current_dispatch_mode() is not None)
        return classify(model, x, y)

    model, known = nn.Sequential(head(), nn.Dropout(0.3)), KnownPasses()
    for most in (ROWS, ROWS, FEWER):
        audit_rows(model, note_pass, Points(45), default_collate, known, most)
    assert intercepted == [True] + 8 * [False]


def test_all_rows_of_an_audit_are_on_the_device() -> None:
    """Rows that are computed only to find the cause of a difference are on the device, too."""

    class Training(SimpleNamespace):  # must support weak references
        pass

    training = Training(world=1, rank=0, strict=False, device=torch.device("meta"))
    few = TrainingAudits(training).take_rows(Texts(45), pad, range(45))
    assert few is not None
    assert few.cut is not few.parts
    rows = tensors_in([few.whole, few.parts, few.cut, few.even, few.even_cut])
    assert len(rows) == 2 * (1 + 4 * 2)
    assert {each.device.type for each in rows} == {"meta"}


def test_an_audit_takes_the_memory_that_a_step_has_freed(monkeypatch: Any) -> None:
    allocated = {"peak": 500, "current": 300}
    stats = {"allocated_bytes": {"all": allocated}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: stats)
    assert compute._measure_room(torch.device("cuda:0")) == 200


def test_a_generator_that_starts_to_draw_ends_quick_audits() -> None:
    """The generator's numbers are the same for each row, whichever part it is in."""
    model, known = Late(), KnownPasses()
    for model.draws in (False, False, True, True):
        found = audit_rows(model, classify, Points(45), default_collate, known)
        assert (found.difference, found.fault) == (None, "")
        assert known.draws is model.draws


def test_sums_of_a_small_gradient_are_the_same_beside_others() -> None:
    torch.manual_seed(0)
    many = [torch.randn(size) for size in (1, 5, 255, 256, 257, 1000, 40_000)]
    together = torch.tensor(add_lines([sum_lines(many, SIGNS)]))
    alone = torch.tensor(add_lines([sum_lines([each], SIGNS) for each in reversed(many)])).flip(0)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-3)
    norms = torch.stack([each.double().norm() for each in many])
    found = torch.tensor(add_lines([sum_lines([each * 3], SIGNS) for each in many]))
    torch.testing.assert_close(found, together * 3, rtol=1e-4, atol=1e-3)
    sizes = together.square().mean(1).sqrt() / norms
    assert bool(((sizes > 0.2) & (sizes < 4)).all())


def test_only_weights_whose_values_are_all_equal_are_moved() -> None:
    large, differs = torch.zeros(300, 200), torch.full((300, 200), 0.1)
    differs[-1, -1] = 0.2
    tensors = [large, differs, torch.ones(7), torch.randn(7), torch.full((5,), 0.1).bfloat16()]
    before = [each.clone() for each in tensors]
    with compute._with_noisy_weights(tensors):
        moved = [not torch.equal(*pair) for pair in zip(tensors, before, strict=True)]
    assert moved == [True, False, True, False, True]
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize(("is_tied", "cause"), [(True, "collation"), (False, "")])
def test_padding_that_is_zero_only_before_the_first_step_is_found(
    is_tied: bool, cause: str
) -> None:
    """Before the first step, the gradient doesn't depend on the padding of rows."""

    def judge(model: Any, x: Any, y: Any) -> Any:
        return functional.cross_entropy(model(x), y)

    assert find_cause(partial(Neighbors, is_tied), judge, Words, pad) == cause


def test_gradients_that_are_freed_one_by_one_have_the_same_sums() -> None:
    """Gradients are freed one by one on a GPU without memory for all of them."""
    torch.manual_seed(0)
    rows = torch.randn(6, 300)
    tied = nn.Linear(300, 300)
    layers = [tied, nn.Tanh(), tied, nn.Linear(300, 30_000), nn.Linear(30_000, 2).bfloat16()]
    model = nn.Sequential(*layers[:4], nn.Flatten(), Cast(), layers[4])
    model[3].weight.register_hook(lambda gradient: gradient * 2)
    found = []
    for at_once in (True, False):
        sums = GradientSums(name_tensors([model]), SIGNS, at_once)
        sums.add(model(rows[:4]).float().square().mean(), 0.75)
        sums.add(model(rows[4:]).float().square().mean(), 0.25, scale=0.5)
        found.append(sums.sketch())
    assert found[0].kinds == found[1].kinds
    assert found[0].sums.keys() == dict(model.named_parameters()).keys()
    for name, each in found[0].sums.items():
        assert found[1].sums[name] == pytest.approx(each, rel=1e-4, abs=1e-6)


class Cast(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.bfloat16()


class Reversed(Function):
    """Computes a layer again in its backward pass, and calls backward there."""

    @staticmethod
    def forward(ctx: Any, x: Any, layer: Any) -> Any:
        """Return the layer's output without a graph."""
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the inputs' gradient; that of the layer is added to its weights'."""
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.layer(x).backward(*gradients)
        return x.grad, None


@pytest.mark.parametrize("at_once", [True, False])
def test_inner_backward_passes_leave_the_step_s_gradients_alone(at_once: bool) -> None:
    """Reversible layers, as Reformer's, call backward within their backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)

    def compute(is_reversed: bool) -> Any:
        hidden = model[0](x)
        return (
            (Reversed.apply(hidden, model[1]) if is_reversed else model[1](hidden)).square().mean()
        )

    compute(False).backward()
    before = [(each.grad, each.grad.clone()) for each in model.parameters()]
    found = []
    for is_reversed in (True, False):
        sums = GradientSums(name_tensors([model]), SIGNS, at_once)
        sums.add(compute(is_reversed))
        found.append(sums.sketch([]).sums)
    assert found[0].keys() == found[1].keys()
    for name, own in found[0].items():
        assert own == pytest.approx(found[1][name], rel=1e-12)
    for each, (gradient, values) in zip(model.parameters(), before, strict=True):
        assert each.grad is gradient
        assert torch.equal(gradient, values)


def test_kernels_of_a_gpu_leave_no_trace_either() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    weigh = partial(classify, weight=torch.tensor([1.0, 2.0, 5.0]).cuda())
    assert find_cause(lambda: Recurrent().cuda(), classify) == ""
    assert find_cause(lambda: Recurrent().cuda(), weigh) == "rows"


def test_dropout_explains_no_padding_that_is_read() -> None:
    """Positions of shorter and longer rows draw the same noise, and dropout is disabled."""
    assert find_cause(lambda: Reader(reads_padding=False), classify, Texts, pad) == ""
    assert find_cause(lambda: Reader(reads_padding=True), classify, Texts, pad) == "collation"


@pytest.mark.parametrize("draws", [NumpyNoise, RowScales])
def test_numbers_that_others_draw_for_each_row_are_no_difference(draws: Any) -> None:
    assert find_cause(lambda: nn.Sequential(draws(), head()), classify) == DRAWN


def test_a_number_that_others_draw_for_all_rows_hides_nothing() -> None:
    model = partial(nn.Sequential, OneScale())
    assert find_cause(lambda: model(head()), classify) == ""
    assert find_cause(lambda: model(Batchwise(), head()), classify) == "rows"


@pytest.mark.parametrize("layers", [(), (nn.Dropout(0.3),)])
def test_a_model_that_looks_at_the_other_rows_is_not(layers: Any) -> None:
    assert find_cause(lambda: nn.Sequential(Batchwise(), *layers, head()), classify) == "rows"


def compare_rows(model: Any, x: Any, _: Any) -> Any:
    return functional.cross_entropy(model(x) @ model(x).T, torch.arange(len(x)))


def penalize(model: Any, x: Any, _: Any) -> Any:
    inputs = x.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
    return (slopes.norm(dim=1) - 1).square().mean()


def improve(model: Any, x: Any, _: Any) -> Any:
    """Return a policy loss that is 0 in its first step: advantages relative to the batch's mean."""
    scores = model(x)[:, 0]
    return ((scores - scores.detach()).exp() * (x[:, 0] - x[:, 0].mean())).mean()


WEIGHTED = partial(classify, weight=torch.tensor([1.0, 2.0, 5.0]))


@pytest.mark.parametrize(
    ("loss", "cause"),
    [
        (penalize, ""),
        (WEIGHTED, "rows"),
        (partial(classify, reduction="sum"), "sum"),
        (lambda model, x, y: functional.mse_loss(model(x)[:, 0], y.float()).sqrt(), "rows"),
        (compare_rows, "rows"),
        (improve, "rows"),
        (lambda model, x, _: model(x).sum() * 0, ""),
    ],
)
def test_the_cause_of_a_difference_is_named(loss: Loss, cause: str) -> None:
    assert find_cause(head, loss) == cause


def test_a_zero_head_hides_no_weights_of_classes() -> None:
    assert find_cause(zero_head, WEIGHTED) == "rows"


class Clamped(nn.Module):
    """Clamps the gradient of an activation in a hook."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
        self.most = most

    def forward(self, x: Any) -> Any:
        made = self.first(x)
        if made.requires_grad:
            made.register_hook(lambda gradient: gradient.clamp(-self.most, self.most))
        return self.last(made.tanh())


@pytest.mark.parametrize(
    ("most", "scale", "cause"),
    [(0.01, 1.0, "size"), (0.01, 0.001, ""), (10.0, 1.0, ""), (0.01, None, "")],
)
def test_a_clamp_within_the_backward_pass_counts_where_it_acts(
    most: float, scale: float | None, cause: str
) -> None:
    """A clamp that changes the gradient is named as the cause.

    A plain loop's gradients are weighted after the backward pass, others before it. In large
    batches each row's gradient is too small to be clamped.
    """

    def weigh(computations: Computations) -> Computations:
        return computations if scale is None else weigh_gradients(computations, scale)

    torch.manual_seed(0)
    model = Clamped(most)
    found = audit_rows(model, classify, Points(45), default_collate, KnownPasses(), change=weigh)
    assert found.cause == cause


def test_one_row_is_no_audit() -> None:
    assert fetch_rows(Points(1), default_collate, range(1)) is None


def draw_for_rows(x: Any) -> Any:
    """Add noise by draws with an entry for each row, in several ways."""
    noise = torch.rand(len(x), 6) + torch.randn_like(x) + torch.empty(len(x), 1).uniform_()
    return x + noise * torch.randint(1, 5, (len(x), 1))


@pytest.mark.parametrize(
    ("loss", "is_mean"),
    [
        (lambda net, x: net(draw_for_rows(x)).square().mean(), True),
        (lambda net, x: (net(x) + torch.rand(4)).square().mean(), True),  # rows have no entries
        (lambda net, x: masked_mean(net(x), per_row=True), True),
        (lambda net, x: masked_mean(net(x), per_row=False), False),
        (lambda net, x: masked_mean(net(x), per_row=True, chance=0.3), True),
        (lambda net, x: masked_mean(net(x), per_row=False, chance=0.3), False),
        (lambda net, x: masked_mean(drop_as_on_gpus(net(x)), per_row=True), True),
        (lambda net, x: masked_mean(drop_as_on_gpus(net(x)), per_row=False), False),
        (lambda net, x: (net(x) - torch.rand(len(x), 1).mean()).square().mean(), False),
    ],
)
def test_a_loss_by_a_random_count_is_no_mean_over_rows(loss: Any, is_mean: bool) -> None:
    """Other rows have other random numbers, and a row has the same ones in any part."""
    torch.manual_seed(0)
    net, x = torch.nn.Linear(6, 4).double(), torch.randn(8, 6, dtype=torch.float64)
    few = choose_few_rows([x], 8)
    assert few is not None
    computations = make_launcher_computations(few, lambda part: loss(net, part.batch[0]))
    sketcher = GradientSketcher([net], dict(net.named_parameters()), losses_only=True)
    assert (find_loss_by_rows(sketcher, computations, few) is None) is is_mean


def drop_as_on_gpus(values: Any) -> Any:
    """Apply dropout by the operation of GPUs, which returns its mask too."""
    return torch.native_dropout(values, 0.2, True)[0]


def masked_mean(values: Any, per_row: bool, chance: float | None = None) -> Any:
    """Return the mean of the values that a random mask leaves, of each row or of the batch."""
    mask = (torch.rand(values.shape) < 0.5).double()
    if chance is not None:
        mask = torch.bernoulli(torch.full(values.shape, chance, dtype=torch.float64))
    if per_row:
        return ((values * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
    return (values * mask).sum() / mask.sum()


@pytest.mark.parametrize(("dtype", "agree"), [(torch.bfloat16, True), (torch.float32, False)])
def test_losses_of_bfloat16_may_differ_by_its_rounding(dtype: Any, agree: bool) -> None:
    """Each loss is computed once, so the dtype of the computation says how near they have to be."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).to(dtype)
    x = torch.randn(4, 5).to(dtype)

    def compute(factor: float) -> Any:
        return factor * model(x).float().square().mean()

    pieces = [Piece(partial(compute, 1.0 + 1e-4))]
    computations = Computations(
        [Piece(partial(compute, 1.0))], pieces, {"sum": AuditChange(pieces)}, sizes=(1, 3)
    )
    sketcher = GradientSketcher([model], name_tensors([model]))
    assert (compare_losses(sketcher, computations) is None) == agree
