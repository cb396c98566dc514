"""If a rank exits during training, each other rank names it and exits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from tests.support import torch_leaving_programs as programs
from tests.support.torch_start import free_port, rank_environment

SHORTER = (
    "evener: rank 1 ended in its batch {}, and this rank can't go on without it: it has "
    "called sys.exit(), or its loop"
    " was shorter. Every rank has to take every batch."
)
WORDS = (
    "evener: rank 1 ended, and this rank can't go on without it: OSError: No space left on device."
)
INTERRUPTED = (
    "evener: rank 1 ended, and this rank can't go on without it: it was interrupted by Ctrl-C."
)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raises", [WORDS, 1]),
        ("is interrupted", [INTERRUPTED, 1]),
        ("breaks", [SHORTER.format(0), 1]),
        ("leaves", [SHORTER.format(0), 1]),
        ("works alone", [0]),
    ],
)
def test_a_rank_that_waits_for_one_that_has_ended_says_so(
    trainer_ranks: Callable[..., list[Any]], how: str, expected: list[Any]
) -> None:
    """A rank reports it if it has another exchange, or hangs after the other's error.

    A rank that has no more exchanges doesn't.
    """
    ended, _ = trainer_ranks("tests.support.torch_leaving_programs.wait_for", how, world=2)
    assert ended == expected


def test_each_training_of_a_process_finds_its_own_ranks(
    trainer_ranks: Callable[..., list[Any]],
) -> None:
    """The store of earlier groups still has the addresses of ranks that have left."""
    trained = trainer_ranks("tests.support.torch_leaving_programs.train_often", 3, world=2)
    assert trained == [[3.0] * 3] * 2


@pytest.mark.parametrize(
    ("how", "way"),
    [
        *(
            (how, "loop")
            for how in ("raises", "raises in backward", "exits", "breaks", "is killed")
        ),
        *((how, "destroys") for how in ("raises", "breaks", "leaves out the last")),
        *((how, "lightning") for how in ("raises", "exits", "is killed")),
    ],
)
def test_on_two_gpus_the_other_rank_ends_with_a_message(tmp_path: Path, how: str, way: str) -> None:
    """NCCL would wait for ten minutes in the sum, or while leaving the group."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    (code, said), (own, its) = run_pair(how, way, tmp_path)
    assert code == 1, said + its
    # both wait to leave the group then, and the first one's exit may be an error to the other
    if how != "leaves out the last":
        assert own == {"exits": 3, "breaks": 0, "is killed": -9}.get(how, 1), its
    words = (
        "rank 1 doesn't answer"
        if how == "is killed"
        else "OSError"
        if "raises" in how
        else "ended in its batch"
    )
    assert words in said.splitlines()[-1]


def run_pair(how: str, way: str, folder: Path) -> list[tuple[int, str]]:
    """Return the exit codes and the output of two ranks."""
    common = {
        **os.environ,
        **rank_environment(gpus=True),
        "WORLD_SIZE": "2",
        "MASTER_PORT": str(free_port()),
    }
    words = [sys.executable, "-m", programs.__name__, how, way]
    ranks = [
        subprocess.Popen(
            words,
            env={
                **common,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "EVENER_LIVE_DIR": str(folder),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=90)[1] for rank in ranks]
        return [(rank.returncode, words) for rank, words in zip(ranks, said, strict=True)]
    finally:
        for rank in ranks:
            rank.kill()
