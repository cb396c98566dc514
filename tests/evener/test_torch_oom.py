"""Passes that run out of memory: no row is lost or counted twice.

They fail in any layer, forward or backward, on any rank.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from evener.errors import DeviceError
from evener.torch import Split
from evener.torch.rows.structure import each_tensor
from evener.torch.step import step
from evener.torch.step.checks import check_memory
from evener.torch.step.recovery import is_out_of_memory
from evener.training.passes import MOST_FAILURES
from tests.support import torch_collective_programs as collectives
from tests.support import torch_oom_programs as programs

SHARES, SEEDS = (24, 12, 8), (0,)


@pytest.fixture(scope="module")
def trained(trainer_ranks: Callable[..., list[Any]]) -> list[Any]:
    """Return the results of each of three ranks in each case."""
    return trainer_ranks("tests.support.torch_oom_programs.train_all", SHARES, SEEDS, world=3)


@pytest.mark.slow
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", programs.CASES)
def test_it_learns_what_one_process_learns_that_takes_the_same_passes(
    trained: list[Any], name: str, seed: int
) -> None:
    ranks = [rank[name, seed] for rank in trained]
    case = msgspec.structs.replace(programs.CASES[name], seed=seed)
    assert sum(rank["burst"] for rank in ranks) >= 5
    for rank, share in zip(ranks, SHARES, strict=True):
        assert [sum(sizes) for sizes in rank["kept"]] == [share] * case.steps, "each row once"
    expected = programs.reference(case, SHARES, [rank["kept"] for rank in ranks])
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected["losses"], abs=1e-12)
        for mine, its in zip(rank["state"], expected["state"], strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-12)


def test_on_two_gpus_too(gpu_ranks: Callable[..., list[Any]]) -> None:
    """Over NCCL, a rank waits in the sum on the device, while its host continues."""
    shares, ranks = (
        (20, 12),
        gpu_ranks("tests.support.torch_oom_programs.train_all", (20, 12), SEEDS[:1]),
    )
    for name, seed in ranks[0]:
        own = [rank[name, seed] for rank in ranks]
        expected = programs.reference(
            programs.CASES[name], shares, [rank["kept"] for rank in own], "cuda"
        )
        assert sum(rank["burst"] for rank in own) >= 3
        for rank in own:
            assert rank["losses"] == pytest.approx(expected["losses"], abs=1e-12)
            for mine, its in zip(rank["state"], expected["state"], strict=True):
                torch.testing.assert_close(mine, its, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", ["plain", "plain in passes", "by parts, counted", "accumulated"])
def test_rows_that_depend_on_nothing_are_learned_as_if_nothing_had_happened(
    trained: list[Any], name: str
) -> None:
    case = programs.CASES[name]
    undisturbed = [[[share]] * case.steps for share in SHARES]
    expected = programs.reference(msgspec.structs.replace(case), SHARES, undisturbed)
    for mine, its in zip(trained[0][name, 0]["state"], expected["state"], strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-12)


ROWS = torch.utils.data.TensorDataset(
    torch.randn(64, 3, dtype=torch.float64), torch.randn(64, 1, dtype=torch.float64)
)


@pytest.fixture
def split(alone_on_the_cpu: None) -> Split:
    """A split over one device that computes 8 rows at once."""
    gc.freeze()  # each failed pass collects garbage, which would scan everything that is imported
    return Split(ratios=[1], global_batch=8)


def take_steps(split: Split, most: int, steps: int) -> list[list[int]]:
    """Return the rows of each step's passes, on a device that holds up to `most` rows."""
    model = split.wrap(torch.nn.Linear(3, 1).double())
    tried: list[list[int]] = []

    def compute(part: Any) -> Any:
        tried[-1].append(part.rows)
        if part.rows > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        inputs, targets = part.batch
        return torch.nn.functional.mse_loss(model(inputs), targets)

    for _, batch in zip(range(steps), split.loader(ROWS), strict=False):
        tried.append([])
        split.step(batch, compute)
    return tried


def test_smaller_passes_are_kept_and_larger_ones_tried_again(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evener.training.passes.CLEAN_STEPS", 2)
    first, *kept = take_steps(split, 3, 6)
    assert first == [8, 4, 2, 2, 2, 2]
    assert kept[:2] == [[2, 2, 2, 2]] * 2
    assert kept[2] == [4, 2, 2, 2, 2], "twice the rows are tried, and given up"


def test_rows_for_which_the_device_has_no_room_are_sent_in_smaller_passes(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour may have taken all memory between two steps."""

    def send(move: Callable[[Any], Any], batch: Any) -> Any:
        if len(batch[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return each_tensor(move, batch)

    monkeypatch.setattr(step, "each_tensor", send)
    assert take_steps(split, 8, 2) == [[2, 2, 2, 2]] * 2


def test_a_row_that_never_fits_ends_in_an_error(
    split: Split, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DeviceError, match=r"no memory left to check whether smaller passes learn"):
        take_steps(split, 0, 1)
    capsys.readouterr()
    split.passes.recovery.checked = True  # an audit checked it when there was memory
    with pytest.raises(
        DeviceError, match=r"Rank 0 ran out of memory 20 times in a row with a pass of 1 rows"
    ):
        take_steps(split, 0, 1)
    said = capsys.readouterr().err.splitlines()
    assert "ran out of memory at step 2: passes of 8 -> 4 rows" in said[0]
    assert len(said) == 3 + MOST_FAILURES - 1


def test_other_errors_and_loops_without_a_context_end_as_they_did(split: Split) -> None:
    split.wrap(torch.nn.Linear(3, 1).double())
    batch = next(iter(split.loader(ROWS)))

    def fail(_: Any) -> Any:
        raise RuntimeError("a shape")

    with pytest.raises(RuntimeError, match="a shape"):
        split.step(batch, fail)

    def loop() -> None:
        for _ in split.parts(batch):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        loop()


def test_memory_that_runs_out_after_a_parts_backward_pass_ends_the_step(split: Split) -> None:
    """The part's gradients are complete, so its rows would count twice if it were retried."""
    model = split.wrap(torch.nn.Linear(3, 1).double())
    batch = next(iter(split.loader(ROWS)))
    tried: list[int] = []

    def loop() -> None:
        for part in split.parts(batch):
            with part:
                tried.append(part.rows)
                part.backward(model(part.batch[0]).square().mean())
                raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        loop()
    assert tried == [8]


def test_a_loss_whose_parts_do_not_add_up_is_not_computed_in_smaller_passes(split: Split) -> None:
    """On one device, a sum over rows or in-batch negatives are fine, but not in parts."""
    model = split.wrap(torch.nn.Linear(3, 1).double())
    batch = next(iter(split.loader(ROWS)))

    def compute(part: Any) -> Any:
        if part.rows == 8 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(part.batch[0]).square().sum()

    with pytest.raises(DeviceError, match=r"ran out of memory in a pass of 8 rows.*mean over"):
        split.step(batch, compute)
    assert model.weight.grad is None


ENDS = """
import os, sys
import torch
from evener.torch import Split
sys.excepthook = lambda kind, error, trace: print(f"own: {error}", file=sys.stderr)
for error in (torch.OutOfMemoryError("CUDA out of memory."), ValueError("another")):
    if os.fork() == 0:
        split = Split(global_batch=4)
        raise error
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
"""


@pytest.mark.slow
def test_a_plain_loop_that_ran_out_of_memory_is_shown_the_line_that_goes_on() -> None:
    """The advice is printed below the error, which is shown as usual; below another, there is
    none.
    """
    environment = {**os.environ, "WORLD_SIZE": "1", "RANK": "0"}
    command = [sys.executable, "-c", ENDS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    first, advice, second = ended.stderr.splitlines()
    assert first == "own: CUDA out of memory."
    assert "split.step(batch, lambda part:" in advice
    assert second == "own: another"


@pytest.mark.slow
@pytest.mark.parametrize("name", collectives.CASES)
def test_a_loss_that_waits_for_other_ranks_is_an_error_on_the_rank_that_ran_out(
    trainer_ranks: Callable[..., list[Any]], name: str
) -> None:
    """In pieces it would run more collectives than the other ranks, which would wait."""
    (waited, steps), (said, own_steps) = trainer_ranks(
        "tests.support.torch_collective_programs.train", name, world=2
    )
    expected = (
        "something other than evener sums its gradients"
        if name == "sharded"
        else "the loop communicates with other ranks in a pass"
    )
    assert said.startswith("DeviceError: Rank 1")
    assert expected in said
    assert waited.startswith("RuntimeError"), "it ends as the other one does"
    assert waited.splitlines()[-1].startswith(
        "evener: rank 1 ended, and this rank can't go on without it: DeviceError"
    )
    assert steps == own_steps == (2 if "two steps" in name else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "how", "words"),
    [
        (
            1,
            "raises",
            (
                "evener: rank 1 ended, and this rank can't go on without it: OSError: No space "
                "left on device."
            ),
        ),
        (
            1,
            "is killed",
            "evener: rank 1 doesn't answer, and this rank can't go on without it: it was killed",
        ),
        (0, "raises", "evener: rank 0 ended, and this rank can't go on without it"),
    ],
)
def test_the_rank_that_ended_is_named_on_the_others(
    trainer_ranks: Callable[..., list[Any]], who: int, how: str, words: str
) -> None:
    """Rank 0 has the store in its own process, so its message is lost when it exits."""
    said = trainer_ranks("tests.support.torch_collective_programs.leave", who, how, world=2)
    assert said[1 - who].splitlines()[-1].startswith(words)
    assert ("OSError" in said[who]) == (how == "raises")


@pytest.mark.slow
def test_the_journal_has_the_retreats_of_all_ranks(
    trainer_ranks: Callable[..., list[Any]], own_state: Path
) -> None:
    lines, said = trainer_ranks(
        "tests.support.torch_collective_programs.train_noted", str(own_state), world=2
    )
    assert len(lines) == 3
    assert said == [line for line in lines if "at step 1:" not in line], "of the second rank"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("HIP error: out of memory"), True),
        (RuntimeError("NCCL error, unhandled cuda error: Cuda failure 2 'out of memory'"), False),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to "
                "allocate 8 bytes"
            ),
            True,
        ),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_what_means_that_memory_ran_out(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize("times", [1, 2])
def test_room_for_the_optimizer_s_state_is_tried_before_its_first_step(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Cached memory may be in the way once; otherwise no weight is changed."""
    failures = iter([True] * times)
    empty = torch.empty_like

    def allocate(like: torch.Tensor) -> torch.Tensor:
        if next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return empty(like)

    monkeypatch.setattr(torch, "empty_like", allocate)
    weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights, 0.1)
    if times == 1:
        check_memory(optimizer, weights)
    else:
        with pytest.raises(
            DeviceError, match=r"no room for the 0\.0 GiB of AdamW's state.*No weight was changed"
        ):
            check_memory(optimizer, weights)


@pytest.mark.parametrize(("given", "kept"), [(5, True), (4, False), (3, False)])
def test_an_optimizer_updates_its_parameters_in_turn_where_temporaries_of_all_find_no_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: int, kept: bool
) -> None:
    """AdamW's state takes 4 tensors for two parameters; updating both at once takes 2 more."""
    alive: list[Any] = []
    empty = torch.empty_like

    def allocate(like: torch.Tensor) -> torch.Tensor:
        alive[:] = [each for each in alive if each() is not None]
        if len(alive) > given:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        made = empty(like)
        alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr(torch, "empty_like", allocate)
    weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    for each in weights:
        each.grad = torch.ones(4)
    optimizer = torch.optim.AdamW(weights, 0.1, foreach=True)
    check_memory(optimizer, weights)
    assert optimizer.param_groups[0]["foreach"] is kept
    assert ("updates one parameter at a time" in capsys.readouterr().err) is not kept
