"""Batches of rows of unequal length in one process; test_torch_exact has several ranks."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from evener.errors import RequestError
from evener.plan.file import Plan
from evener.shares.curves import Cost, RankCost
from evener.torch import Loader, Split
from evener.torch.rows.loader import StepLoader, StepSampler
from evener.torch.rows.sampler import LengthSampler, UnevenBatchSampler
from evener.torch.rows.structure import AssignedBatch
from evener.training.row_assignment import RowAssigner
from tests.support.torch_length_programs import Texts, collate
from tests.support.torch_ranks import example_plan

pytestmark = pytest.mark.usefixtures("one_torch_thread", "alone_on_the_cpu")

TEXTS = Texts(41)
BATCH = 8
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "text_train.py"


def plan(cost: Cost, tokens: int = 0) -> Plan:
    made = example_plan((BATCH,), "cpu-{}")
    share = msgspec.structs.replace(made.layout.share[0], cost=cost, tokens=tokens)
    return msgspec.structs.replace(
        made, layout=msgspec.structs.replace(made.layout, share=(share,))
    )


@pytest.fixture
def split() -> Split:
    """A split over one device, on which a pass costs as much as 10 tokens."""
    return Split(plan(Cost(10, 1, 0)))


def passes(split: Split, loader: Loader) -> list[list[list[int]]]:
    """Return the rows of each pass of each batch."""
    return [[part.batch["rows"].tolist() for part in parts(split, batch)] for batch in loader]


def parts(split: Split, batch: Any) -> list[Any]:
    with torch.no_grad():
        return [copy.copy(part) for part in split.parts(batch)]


def test_the_rows_of_each_batch_and_their_order_of_batches_stay(split: Split) -> None:
    assigned = split.loader(TEXTS, seed=3, lengths=TEXTS.lengths, collate_fn=collate)
    plain = split.loader(TEXTS, seed=3, collate_fn=collate)
    assert len(assigned) == len(plain) == 6
    for _ in range(2):
        rows = passes(split, assigned)
        assert max(map(len, rows)) > 1
        assert [sorted(row for each in batch for row in each) for batch in rows] == [
            sorted(batch["rows"].tolist()) for batch in plain
        ]


@pytest.mark.parametrize("options", [{"prefetch": 2}, {"num_workers": 1}])
def test_passes_are_the_same_however_they_are_fetched(
    split: Split, options: dict[str, Any]
) -> None:
    plain, other = (
        split.loader(TEXTS, lengths=torch.tensor(TEXTS.lengths), collate_fn=collate, **more)
        for more in ({}, options)
    )
    assert passes(split, other) == passes(split, plain)
    assert pickle.loads(pickle.dumps(plain)).state_dict() == plain.state_dict()


def test_a_pass_is_padded_to_its_own_longest(split: Split) -> None:
    for batch in split.loader(TEXTS, lengths=TEXTS.lengths, collate_fn=collate):
        for part in parts(split, batch):
            assert part.batch["words"].shape[1] + 1 == max(
                TEXTS.lengths[row] for row in part.batch["rows"]
            )
            assert part.rows == len(part.batch["rows"])


def test_a_pass_fits_in_memory() -> None:
    split = Split(plan(Cost(10_000, 1, 0), tokens=60))
    for batch in passes(split, split.loader(TEXTS, lengths=TEXTS.lengths, collate_fn=collate)):
        for rows in batch:
            assert len(rows) * max(TEXTS.lengths[row] for row in rows) <= 60


def test_a_loop_without_parts_trains_where_every_batch_is_one_pass() -> None:
    """A loop without parts works if ratios give one pass per batch.

    If batches may have passes, the first batch is refused, even if it has only one.
    """
    split = Split(ratios=[1.0], global_batch=BATCH)
    assert all(
        len(batch["rows"])
        for batch in split.loader(TEXTS, lengths=TEXTS.lengths, collate_fn=collate)
    )
    equal = split.loader(TEXTS, lengths=[7] * len(TEXTS), collate_fn=collate)
    assert all(len(batch["rows"]) for batch in equal)
    dear = Split(plan(Cost(1e9, 1, 0))).loader(TEXTS, lengths=TEXTS.lengths, collate_fn=collate)
    assert all(len(batch.passes) == 1 for batch in dear)
    with pytest.raises(RequestError, match="computes a batch at once"):
        next(iter(dear))["rows"]


@pytest.mark.parametrize(
    "use",
    [
        lambda batch: batch["words"],
        lambda batch: tuple(batch),
        lambda batch: batch.to("cpu"),
        lambda batch: {**batch},
        len,
    ],
)
def test_a_batch_in_passes_is_not_used_as_one(use: Callable[[Any], Any]) -> None:
    batch = AssignedBatch([1, 2], (1, 1))
    with pytest.raises(RequestError, match="computes a batch at once"):
        use(batch)
    assert copy.deepcopy(batch).rows == (1, 1)


def test_two_loops_over_one_loader_keep_their_epochs(split: Split) -> None:
    loader = split.loader(TEXTS, lengths=TEXTS.lengths, collate_fn=collate)
    expected = [batch for _ in range(2) for batch in passes(split, loader)]
    loader.set_epoch(0)
    first = iter(loader)
    taken = [next(first)]
    second = iter(loader)
    taken += [next(second), *first, *second]
    rows = [
        sorted(row for part in parts(split, batch) for row in part.batch["rows"].tolist())
        for batch in taken
    ]
    whole = [sorted(row for each in batch for row in each) for batch in expected]
    assert rows == [whole[0], whole[6], *whole[1:6], *whole[7:]]


def test_lightning_takes_no_lengths(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "_strategy", object())
    with pytest.raises(RequestError, match="Lightning takes as many passes"):
        split.loader(TEXTS, lengths=TEXTS.lengths)


def sampler(rank: int, rows: int = 3) -> LengthSampler:
    assigner = RowAssigner((RankCost(Cost(0, 1, 0)),) * 4, (1.0,) * 4)
    return LengthSampler(rows, (2, 2, 2, 2), rank, lengths=[5, 9, 7][:rows], assigner=assigner)


def test_cudnn_attention_is_off_only_while_a_loop_over_assigned_rows_runs() -> None:
    """Models of rows of one length, or a later validation, must not be slowed down."""
    split = Split(ratios=[1], global_batch=8)
    loader = split.loader(TEXTS, lengths=TEXTS.lengths, collate_fn=collate)
    enabled = torch.backends.cuda.cudnn_sdp_enabled
    assert enabled()
    seen = [enabled() for _ in loader]
    assert seen
    assert not any(seen)
    assert enabled()
    second = iter(loader)
    next(second)
    for _ in loader:
        break
    gc.collect()
    assert not enabled()  # the second loop continues
    del second
    gc.collect()
    assert enabled()


def test_cudnn_attention_stays_off_for_a_user_who_turned_it_off() -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        split = Split(ratios=[1], global_batch=8)
        assert list(split.loader(TEXTS, lengths=TEXTS.lengths, collate_fn=collate))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_cudnn_attention_is_off_in_a_trainers_loop_over_assigned_rows() -> None:
    enabled = torch.backends.cuda.cudnn_sdp_enabled
    loader = StepLoader(list(range(3)), StepSampler(sampler(0)), collate_fn=list)
    assert [enabled() for _ in loader] == [False]
    assert enabled()


def test_a_rank_without_a_row_keeps_step_with_the_shortest() -> None:
    batches = [list(sampler(rank)) for rank in range(4)]
    sizes = sampler(0).sizes_at(0)
    assert sorted(sizes) == [0, 1, 1, 1]
    assert batches[sizes.index(0)] == [[0]]
    assert sorted(row for rank, (rows,) in enumerate(batches) if sizes[rank] for row in rows) == [
        0,
        1,
        2,
    ]


def test_tokens_are_counted_without_and_with_padding() -> None:
    counted = [StepSampler(sampler(rank)).count_tokens(range(1)) for rank in range(4)]
    assert sorted(counted) == [(0, 0), (5, 5), (7, 7), (9, 9)]
    assigner = RowAssigner((RankCost(Cost(99, 1, 0)),), (1.0,))
    whole = LengthSampler(3, (3,), 0, lengths=[5, 9, 7], assigner=assigner)
    assert StepSampler(whole).count_tokens(range(1)) == (21, 27)
    assert StepSampler(UnevenBatchSampler(3, (3,), 0)).count_tokens(range(1)) == (0, 0)


def test_a_state_is_that_of_a_loader_without_lengths() -> None:
    plain = UnevenBatchSampler(41, (2, 6), 0)
    assigner = RowAssigner((RankCost(Cost(0, 1, 0)),) * 2, (1.0, 3.0))
    assigned = LengthSampler(41, (2, 6), 1, lengths=TEXTS.lengths, assigner=assigner)
    assert assigned.state_dict(2) == plain.state_dict(2)
    assigned.load_state_dict(plain.state_dict(2))
    left = [rows.tolist() for rows in assigned.batches()]
    whole = [row for batch in UnevenBatchSampler(41, (8,), 0) for row in batch]
    assert assigned.steps_left == 4
    assert {row for rows in left for row in rows} < set(whole[16:])


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Make float64 PyTorch's default, so that printed sums don't depend on the CPU's kernels."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("in_float64")
def test_the_example_learns_by_length_what_it_learns_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.toml"
    plan(Cost(10, 1, 0)).save(path)
    said = []
    for words in (["--plan", str(path)], ["--global-batch", str(BATCH)]):
        monkeypatch.setattr("sys.argv", ["text_train.py", "--rows", "20", "--epochs", "1", *words])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        said.append(
            re.findall(r"epoch \d: loss ([\d.]+), [\d,]+ tokens/s", capsys.readouterr().out)
        )
    assert len(said[0]) == 1
    assert said[0] == said[1]
