"""Adapters on bitsandbytes' 4-bit layers learn on unequal ranks what one process learns.

They train in shards, wrapped, in passes, with checkpointing, and in bfloat16. Without bitsandbytes
these tests are skipped; tests/support/torch_shard_programs.py has packed layers of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

if not all(map(find_spec, ("torch", "bitsandbytes", "peft", "transformers", "accelerate"))):
    pytest.skip("bitsandbytes, or a trainer, isn't installed", allow_module_level=True)

import torch

pytestmark = pytest.mark.slow
PROGRAMS = "tests.support.packed_programs"
CASES = (
    "shards",
    "shards, in passes, checkpointed",
    "shards, checkpointed, reentrant, autocast",
    "shards, in bfloat16",
    "shards, packed later",
    "wrapped",
    "wrapped, in passes",
)

Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def trained(trainer_ranks: Run) -> tuple[Any, list[Any]]:
    """Return the results of one process, and of each of two ranks."""
    (expected,) = trainer_ranks(f"{PROGRAMS}.reference_all")
    return expected, trainer_ranks(f"{PROGRAMS}.train_all", world=2)


def check(own: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], most: float) -> None:
    """Check that the tensors differ by at most a fraction of their norm."""
    assert own.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (own[name].double() - tensor.double()).norm()
        assert difference <= most * max(1e-6, float(tensor.double().norm())), name


@pytest.mark.parametrize("name", CASES)
def test_adapters_learn_what_one_process_learns(trained: Any, name: str) -> None:
    """The one process computes the same batches, so it rounds alike also in bfloat16."""
    expected, ranks = trained
    for rank in ranks:
        for what in ("first", "weights"):
            check(rank[name][what], expected[name][what], 1e-5)


def test_a_trainer_learns_it_too(trained: Any) -> None:
    expected, ranks = trained
    for rank in ranks:
        check(rank["trainer"], expected["trainer"], 1e-5)


def test_peft_loads_what_is_saved(trained: Any) -> None:
    for rank in trained[1]:
        for name in CASES:
            if "saved" in rank[name]:
                check(rank[name]["saved"], rank[name]["weights"], 0.0)


def test_packed_bytes_are_shared_by_memory(trained: Any) -> None:
    """The bytes are those of one process, and the ranks hold them 1 : 3."""
    first, second = (rank["shards"]["ledger"]["shards"] for rank in trained[1])
    assert second == pytest.approx(3 * first, rel=0.05)  # parts are multiples of 8 elements
    for rank in trained[1]:
        packed = rank["shards"]["bytes"].values()
        assert sum(each.numel() for each in packed) == rank["shards"]["packed"]


def test_8_bits_are_refused_with_a_message(trained: Any) -> None:
    for rank in trained[1]:
        assert "Int8Params, which can't be cut into shards" in rank["8 bits"]
