"""Real ranks end with the float64 weights of one process, or with a message.

The message names what to change. The cases are loops of every kind, and programs as users write
them: the rows of the tables in docs/training_torch.md. The programs' data sets have 25 rows, so the
last batch of 8 has 1, on two ranks; and 29 on three ranks, whose last batch has 5, if a program
does something with rows. Ranks use gloo, or NCCL if there are GPUs.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import msgspec
import pytest
import torch

from evener.torch import Split
from evener.torch.ranks.peers import ExitNote, PeerWatcher, watch_peers
from tests.support import torch_programs as programs
from tests.support import torch_ranks as RANKS  # noqa: N812 - its cases are constants

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]

Ended = dict[tuple[str, int], list[Any]]  # rank by rank
Trained = dict[str, Any]


@pytest.fixture(scope="module")
def three(trainer_ranks: Callable[..., list[Any]]) -> list[Any]:
    """Return the results of a plan's ranks with 5:2:1 rows and a device left out.

    They have every case, and programs with a last batch of 5 rows.
    """
    given = (5, 0, 2, 1), programs.TAIL, True
    return trainer_ranks(
        "tests.support.torch_programs.run_all", *given, world=3, imports="torch.distributed.fsdp"
    )


@pytest.fixture(scope="module")
def two(trainer_ranks: Callable[..., list[Any]]) -> list[Any]:
    """Return the results of two ranks with 6:2 rows: every program with a last batch of one row."""
    given = (6, 2), programs.SHORT_TAIL, False
    return trainer_ranks(
        "tests.support.torch_programs.run_all", *given, world=2, imports="torch.distributed.fsdp"
    )


@pytest.fixture
def ended(two: list[Any], three: list[Any]) -> Ended:
    """Return each program's result or error, rank by rank."""
    return {
        key: [found[key] for found, _ in ranks] for ranks in (two, three) for key in ranks[0][0]
    }


@pytest.fixture
def trained(three: list[Any]) -> list[Trained]:
    """Return the results of every case, rank by rank."""
    return [cases for _, cases in three]


def check(trained: list[Trained], name: str, case: Any) -> None:
    """Check that every rank has the weights and losses of the plain loop."""
    weights, losses = RANKS.reference(case, case.global_batch(8), RANKS.OVER_AN_EPOCH)
    for rank in trained:
        for mine, expected in zip(rank[name][0], weights, strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
        assert rank[name][1] == pytest.approx(losses, abs=1e-12)


@pytest.mark.parametrize("name", RANKS.CASES)
def test_the_weights_are_those_of_one_process(trained: list[Trained], name: str) -> None:
    check(trained, name, RANKS.CASES[name])


def test_on_two_gpus_too(gpu_ranks: Callable[..., list[Any]]) -> None:
    """Tests NCCL, and batch normalization over the global batch."""
    trained = gpu_ranks("tests.support.torch_ranks.train_all", (6, 2))
    for name, case in {**RANKS.CASES, **RANKS.GPU_CASES}.items():
        check(trained, name, case)


def test_the_trainings_moved_the_weights() -> None:
    """Every case moves some weight by more than a thousandth, so the comparison is meaningful."""
    for case in {**RANKS.CASES, **RANKS.GPU_CASES}.values():
        start = [weights.detach() for weights in RANKS.model(case).parameters()]
        weights, _ = RANKS.reference(case, case.global_batch(8), RANKS.OVER_AN_EPOCH)
        assert (
            max(float((now - then).abs().max()) for now, then in zip(weights, start, strict=True))
            > 1e-3
        )


COMPILED = (
    "compiled_after_wrap",
    "compiled_before_wrap",
    "wrap_of_a_compiled_ddp",
)  # the model of wrap_of_a_ddp itself


@cache
def one_process(name: str, rows: int) -> list[torch.Tensor]:
    # a model that isn't compiled gives the same results, and starts a second sooner
    if name in COMPILED:
        return one_process("wrap_of_a_ddp", rows)
    result = programs.run(programs.EXACT[name], (8,), rows)
    assert not isinstance(result, str), result
    return result


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "rows"), [(name, rows) for name in programs.EXACT for rows in programs.rows_for(name)]
)
def test_it_learns_what_one_process_learns(ended: Ended, name: str, rows: int) -> None:
    expected = one_process(name, rows)
    for rank in ended[name, rows]:
        assert not isinstance(rank, str), rank
        for mine, tensor in zip(rank, expected, strict=True):
            torch.testing.assert_close(mine, tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", programs.REFUSED)
def test_it_is_refused_on_every_rank(ended: Ended, name: str) -> None:
    words, _ = programs.REFUSED[name]
    (rows,) = programs.rows_for(name)
    for said in ended[name, rows]:
        assert isinstance(said, str)
        assert words in said


def test_the_programs_move_the_weights() -> None:
    """The programs move the weights, so the comparison is meaningful."""
    start = programs.weights(programs.network())
    for mine, before in zip(one_process("plain", 29), start, strict=True):
        assert float((mine - before).abs().max()) > 1e-3


@contextmanager
def one_of(ranks: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Split]:
    """A process group of one rank that poses as the first of several, so models are wrapped."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with monkeypatch.context() as several:
            several.setattr(torch.distributed, "get_world_size", lambda *_: ranks)
            several.setattr(torch.distributed, "all_gather", _answer_alike)
            found = [Split(ratios=[3, 1][:ranks], global_batch=8)]
        yield found.pop()
    finally:
        torch.distributed.destroy_process_group()


def _answer_alike(every: list[torch.Tensor], own: torch.Tensor) -> None:
    """An all-gather in which the other ranks send the same as this one."""
    for each in every:
        each.copy_(own)


@pytest.fixture
def one_rank_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Split]:
    """A split that poses as the first of two ranks."""
    with one_of(2, monkeypatch) as split:
        yield split


def test_statistics_of_a_rank_s_own_rows_are_warned_of(one_rank_of_two: Split) -> None:
    """Statistics of a rank's own rows come from update_bn for averaged weights."""
    model, loader = torch.nn.BatchNorm1d(5).double(), one_rank_of_two.loader(programs.data(24))
    with pytest.warns(UserWarning, match="update_bn takes statistics of this rank's rows"):
        torch.optim.swa_utils.update_bn(loader, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for inputs, _ in loader:
            model(inputs)


def test_a_tail_without_rows_for_all_ranks_is_warned_of_if_metrics_would_count_it(
    one_rank_of_two: Split,
) -> None:
    with pytest.warns(UserWarning, match=r"last batch has 1 rows for 2 ranks.*split\.rows"):
        one_rank_of_two.loader(programs.data(25))
    for loader in (
        one_rank_of_two.loader(programs.data(29)),
        one_rank_of_two.loader(programs.data(25), training=False),
    ):
        assert len(loader) == 4 - (len(loader.dataset) == 25)


def test_models_that_are_dropped_are_not_kept(one_rank_of_two: Split) -> None:
    """A hundred models that are wrapped, trained for a step and dropped leave nothing behind."""
    split = one_rank_of_two
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    for _ in range(100):
        model = split.wrap(programs.network())
        for sizes in ((6, 2), (1, 0)):
            split.begin(sizes)
            model(programs.data(5).tensors[0]).sum().backward()
        alive.add(model)
    del model
    gc.collect()
    assert len(alive) == 0


def test_the_batch_in_which_a_rank_ended_is_that_of_its_last_training(
    one_rank_of_two: Split,
) -> None:
    """A process may train several times in one group."""
    watch_peers(one_rank_of_two.device, lambda: (7, None))
    others = PeerWatcher.newest
    assert others is not None
    others.note("")
    noted = msgspec.json.decode(others._store.get(others._key("ended", 0)), type=ExitNote)
    assert "in its batch 7," in noted.describe(0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_split_that_is_dropped_is_not_kept(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the exit message, the watcher of peers nor optimizer rules keep it alive."""
    with one_of(ranks, monkeypatch) as split:
        alive = weakref.ref(split.passes), weakref.ref(split.weights)
        del split
        gc.collect()
        assert [each() for each in alive] == [None, None]
