"""A batch in passes: how it is split, how passes are weighted, and what is refused.

test_torch_exact has several ranks.
"""

from __future__ import annotations

import operator
import warnings
from collections import UserDict, namedtuple
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, mse_loss

from evener.errors import RequestError
from evener.plan.file import Plan
from evener.torch import Split
from evener.torch.rows.structure import cut_rows
from tests.support import torch_ranks

ROWS = torch.utils.data.TensorDataset(
    torch.randn(20, 3, dtype=torch.float64), torch.arange(20.0).double()
)
Pair = namedtuple("Pair", ["left", "right"])
pytestmark = pytest.mark.usefixtures("alone_on_the_cpu")


def in_passes(batches: tuple[int, ...], micros: tuple[int, ...]) -> Plan:
    return torch_ranks.example_plan(batches, "cpu-{}", micros)


@pytest.fixture
def split() -> Split:
    """A split over one device that computes 8 rows in passes of 3, 3 and 2."""
    return Split(in_passes((8,), (3,)))


@pytest.fixture
def one_rank_of_two(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A split that poses as the first of two ranks, whose share takes two passes."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(
        "evener.torch.ranks.ranks.gather_infos", lambda own, process: [own] * process.world
    )
    split = Split(in_passes((6, 2), (3, 2)))
    monkeypatch.undo()
    yield split
    torch.distributed.destroy_process_group()


def nested(rows: int) -> st.SearchStrategy[Any]:
    """Draw a batch with this number of rows, as collate functions make them."""
    leaves = st.one_of(
        st.lists(st.integers(0, 3), max_size=2).map(lambda shape: torch.randn(rows, *shape)),
        st.just([f"text {i}" for i in range(rows)]),
        st.sampled_from([None, 1.5, torch.tensor(2.0)]),
        st.just(torch.randn(rows).numpy()),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(inner, inner),
            st.builds(Pair, inner, inner),
            st.dictionaries(st.sampled_from("abc"), inner).map(UserDict),
            inner.map(lambda item: [item, torch.zeros(rows)]),
        ),
        max_leaves=6,
    )


def leaves(data: Any) -> list[Any]:
    """Return the batch's tensors, arrays and columns in order."""
    if hasattr(data, "shape") or (isinstance(data, list) and data and isinstance(data[0], str)):
        return [data]
    if isinstance(data, UserDict):
        return [leaf for key in sorted(data) for leaf in leaves(data[key])]
    return (
        [leaf for item in data for leaf in leaves(item)]
        if isinstance(data, (tuple, list))
        else [data]
    )


@settings(max_examples=20)
@given(
    st.integers(3, 9).flatmap(lambda rows: st.tuples(st.just(rows), nested(rows))),
    st.integers(1, 2),
)
def test_parts_have_the_batchs_structure_and_together_its_rows(
    case: tuple[int, Any], at: int
) -> None:
    rows, batch = case
    first, second = cut_rows(batch, 0, at, rows), cut_rows(batch, at, rows, rows)
    assert type(first) is type(second) is type(batch)
    for whole, left, right in zip(leaves(batch), leaves(first), leaves(second), strict=True):
        if isinstance(whole, list):
            assert left + right == whole
        elif getattr(whole, "shape", ()):
            assert torch.equal(
                torch.cat([torch.as_tensor(left), torch.as_tensor(right)]), torch.as_tensor(whole)
            )
            assert len(left) == at
        else:
            assert left is right is whole


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        (torch.zeros(3, 4), r"shape \(3, 4\)"),
        ({"a": torch.zeros(4), "b": [torch.zeros(1), torch.zeros(2)]}, r"shape \(1,\)"),
        (torch.nn.utils.rnn.pack_sequence([torch.zeros(2)] * 4), "PackedSequence"),
        ((torch.zeros(4), object()), "object"),
    ],
    ids=["shape", "nested", "packed", "object"],
)
def test_what_cannot_be_cut_is_named(batch: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named) as caught:
        cut_rows(batch, 0, 2, 4)
    assert caught.value.remedy


def test_one_device_learns_by_parts_what_it_learns_at_once(split: Split) -> None:
    """Weights and mean losses are the same, even with a short last batch."""
    one, many = torch.nn.Linear(3, 1).double(), torch.nn.Linear(3, 1).double()
    many.load_state_dict(one.state_dict())
    model = split.wrap(many)
    weights = [*one.parameters(), *many.parameters()]
    sizes = []
    for inputs, labels in split.loader(ROWS):
        loss = mse_loss(one(inputs)[:, 0], labels)
        loss.backward()
        found = 0.0
        for part in split.parts((inputs, labels)):
            sizes.append(part.rows)
            x, y = part.batch
            found += part.backward(mse_loss(model(x)[:, 0], y))
        assert split.mean(found) == pytest.approx(float(loss.detach()), abs=1e-12)
        for weight in weights:  # an optimizer would import PyTorch modules for 3 s
            weight.data -= 0.1 * weight.grad
            weight.grad = None
    assert sizes == [2, 3, 3, 2, 3, 3, 2, 2]
    torch.testing.assert_close(many.weight, one.weight, rtol=0, atol=1e-12)


def test_a_pass_that_counts_nothing_changes_nothing(split: Split) -> None:
    """The pass's mean is NaN; the other passes are weighted by what `count` returns."""
    model = split.wrap(torch.nn.Linear(3, 4).double())
    inputs, _ = next(iter(split.loader(ROWS)))
    labels = torch.tensor([0, 1, -100, -100, -100, 2, 3, 0])  # passes of 2, 3 and 3 rows
    whole = cross_entropy(inputs @ model.weight.T + model.bias, labels)
    (expected,) = torch.autograd.grad(whole, model.weight)
    found = 0.0
    for part in split.parts((inputs, labels), count=lambda part: (part.batch[1] != -100).sum()):
        x, y = part.batch
        found += part.backward(cross_entropy(model(x), y))
    assert split.mean(found) == pytest.approx(float(whole.detach()), abs=1e-12)
    torch.testing.assert_close(model.weight.grad, expected, rtol=0, atol=1e-12)


def test_a_loop_with_parts_needs_no_passes() -> None:
    split = Split(in_passes((8,), (8,)))
    for batch in split.loader(ROWS):
        for part in split.parts(batch):
            assert all(map(operator.is_, part.batch, batch))
            assert (part.rows, part.weight) == (len(batch[0]), 1.0)
            part.backward(torch.ones((), requires_grad=True) * 2)


def test_a_loop_without_parts_is_refused_before_it_learns(split: Split) -> None:
    model = split.wrap(torch.nn.Linear(3, 1).double())
    inputs, _ = next(iter(split.loader(ROWS)))
    with pytest.raises(RequestError, match=r"rank 0 compute its 8 rows in 3 passes.*split\.parts"):
        model(inputs)
    with torch.no_grad():
        model(inputs)
    model.eval()(inputs)


@pytest.mark.parametrize("name", ["mean", "total", "loss", "gather", "scale", "parts"])
def test_what_all_ranks_do_together_is_refused_inside_parts(split: Split, name: str) -> None:
    """Collectives within parts are refused before any rank waits, even without passes here.

    After the parts they work again.
    """
    batch = next(iter(split.loader(ROWS)))
    calls: dict[str, Any] = {
        "mean": lambda: split.mean(1.0),
        "total": lambda: split.total(1.0),
        "loss": lambda: split.loss(torch.ones(()), 1),
        "gather": lambda: split.gather(batch[0]),
        "scale": lambda: split.scale(torch.ones(())),
        "parts": lambda: next(split.parts(batch)),
    }
    for _ in split.parts(batch):
        with pytest.raises(
            RequestError, match=rf"split\.{name} can't be called inside split\.parts"
        ):
            calls[name]()
        break
    assert split.total(2.0) == 2.0


def test_a_pass_without_backward_is_refused_unless_nothing_is_learned(split: Split) -> None:
    batch = next(iter(split.loader(ROWS)))
    with pytest.raises(RequestError, match=r"without part\.backward"):
        list(split.parts(batch))
    with torch.no_grad():
        assert sum(part.rows for part in split.parts(batch)) == 8


def test_gradients_that_are_dropped_between_the_parts_of_a_batch_are_missed(split: Split) -> None:
    model = split.wrap(torch.nn.Linear(3, 1).double())
    batch = next(iter(split.loader(ROWS)))

    def train(drops: bool) -> None:
        model.zero_grad()
        for part in split.parts(batch):
            if drops:
                model.zero_grad()
            part.backward(model(part.batch[0]).mean())

    train(drops=False)
    with pytest.raises(RequestError, match="gradients of the batch's earlier passes are gone"):
        train(drops=True)


def test_parts_of_no_batch_are_refused(split: Split) -> None:
    with pytest.raises(RequestError, match=r"no current batch of split\.loader"):
        next(split.parts(ROWS.tensors))
    batch = next(iter(split.loader(ROWS)))
    with pytest.raises(RequestError, match="the batch has 8 rows"):
        next(split.parts([tensor[:6] for tensor in batch]))


def test_statistics_over_a_pass_are_warned_of(split: Split) -> None:
    """Statistics per pass are reported even on one device, where nothing else differs."""
    with pytest.warns(
        UserWarning, match=r"Batch normalization sees one pass of 3 rows, not the whole share\."
    ):
        split.wrap(torch.nn.BatchNorm1d(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Split(in_passes((8,), (8,))).wrap(torch.nn.BatchNorm1d(3))


@pytest.mark.parametrize("micro", [2, 3])
def test_a_pass_of_a_single_row_is_warned_of(micro: int) -> None:
    """3 rows in passes of at most 2 always are 2 and 1, even if short batches are dropped."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Split(in_passes((3,), (micro,))).wrap(torch.nn.BatchNorm1d(3))
    assert any("Each batch has a pass of a single row" in str(each.message) for each in said) is (
        micro == 2
    )


def play(split: Split, models: Any, way: str) -> None:
    """Run a step of the critic on the generator's output, then one of the generator.

    There are three ways to write it.
    """
    generator, critic = models
    batch = next(iter(split.loader(ROWS)))
    for part in split.parts(batch, models=[critic] if way == "named" else None):
        with torch.no_grad() if way == "without gradients" else nullcontext():
            made = generator(part.batch[0])
        part.backward(critic(made.detach()).square().mean())
    for part in split.parts(batch):
        part.backward(critic(generator(part.batch[0])).mean())


@pytest.mark.parametrize("way", ["plain", "named", "without gradients"])
def test_a_model_that_computes_without_a_backward_pass_is_left_alone(
    one_rank_of_two: Split, way: str
) -> None:
    split = one_rank_of_two
    models = [split.wrap(torch.nn.Linear(3, width).double()) for width in (3, 1)]
    play(split, models, way)
    assert all(each.grad is not None for model in models for each in model.parameters())


def test_a_validation_takes_batches_of_one_pass(split: Split, one_rank_of_two: Split) -> None:
    assert [len(rows) for rows, _ in split.loader(ROWS, training=False)] == [3] * 6 + [2]
    assert one_rank_of_two.loader(ROWS, training=False).batch_sampler.shares == (3, 1)
    assert one_rank_of_two.loader(ROWS).batch_sampler.shares == (6, 2)


def test_another_global_batch_keeps_the_rows_of_a_pass() -> None:
    plan = in_passes((8,), (3,))
    assert Split(plan, global_batch=32).micros == (3,)
    assert Split(plan, global_batch=2).micros == (2,)
    assert Split(in_passes((8,), (8,)), global_batch=32).micros == (32,)


def test_models_whose_passes_would_wait_for_each_other_are_refused(one_rank_of_two: Split) -> None:
    split = one_rank_of_two
    batch = next(iter(split.loader(ROWS)))
    with pytest.raises(RequestError, match="knows of no wrapped model"):
        next(split.parts(batch))
    with pytest.raises(RequestError, match="SyncBatchNorm exchanges statistics in each pass"):
        split.wrap(torch.nn.SyncBatchNorm(3))


@pytest.mark.parametrize(
    ("kind", "library"),
    [
        ("DeepSpeedEngine", "DeepSpeed"),
        ("MegatronEngine", "Megatron-LM"),
        ("FullyShardedDataParallel", "FSDP1"),
    ],
)
def test_a_model_whose_gradients_another_library_exchanges_is_refused(
    one_rank_of_two: Split, kind: str, library: str
) -> None:
    engine = type(kind, (torch.nn.Linear,), {})
    with pytest.raises(RequestError, match=f"{library} takes its own mean of gradients.*FSDP2"):
        one_rank_of_two.wrap(torch.nn.Sequential(engine(3, 1)))


def test_gradients_are_exchanged_in_the_last_pass_only(one_rank_of_two: Split) -> None:
    """All wrapped models, or the given ones, exchange in the last pass; an outer no_sync wins."""
    split = one_rank_of_two
    models = [split.wrap(torch.nn.Linear(3, 1).double()) for _ in range(2)]
    batch = next(iter(split.loader(ROWS)))

    def exchanged(**given: Any) -> list[tuple[bool, ...]]:
        with torch.no_grad():
            return [
                tuple(m.require_backward_grad_sync for m in models)
                for _ in split.parts(batch, **given)
            ]

    assert exchanged() == [(False, False), (True, True)]
    assert exchanged(models=models[:1]) == [(False, True), (True, True)]
    with split.no_sync(models[0]):
        assert exchanged() == [(False, False), (False, True)]


def test_a_plan_for_more_rows_than_there_are_is_warned_of() -> None:
    """A small validation set is fine."""
    split = Split(in_passes((32,), (32,)))
    with pytest.warns(UserWarning, match="has 20 rows, fewer than the plan's global batch of 32"):
        split.loader(ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split.loader(ROWS, training=False)
        Split(global_batch=32).loader(ROWS)


def test_a_trainer_whose_model_is_not_wrapped_is_refused(one_rank_of_two: Split) -> None:
    planned, model = one_rank_of_two, torch.nn.Linear(3, 1)
    planned.begin((6, 2))
    model(torch.randn(6, 3)).mean().backward()
    with pytest.raises(RequestError, match="gradients aren't weighted"):
        torch.optim.SGD(model.parameters(), 0.1).step()
