"""transformers' and TRL's trainers under a plan end with the weights of one process.

The programs are the rows of the tables in docs/training_huggingface.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if not all(map(find_spec, ("torch", "transformers", "accelerate"))):
    pytest.skip("a trainer isn't installed", allow_module_level=True)

import torch

from tests.support.frameworks import skip_without
from tests.support.rank_server import run_on_gpus

PROGRAMS = "tests.support.huggingface_programs"
# shares, and rows per pass: 3 to 1 passes, and 2 to 1 to 1
TWO, THREE = (((6, 2), (2, 2)), ((5, 2, 1), (3, 2, 1)))
THREE_RANKS = ("tokens", "resumed in other shards", "LoRA, resumed in other shards")
NAMES = (
    *THREE_RANKS,
    "resumed",
    "rows, rebalanced",
    "rows, accumulated, drop last",
    "tokens, in shards",
    "tokens, accumulated, cosine",
    "tokens, in reentrant checkpoints",
    "tokens by length",
    "rows",
    "rows, compiled",
    "rows by a compute_loss",
    "rows by a compute_loss that doesn't say so",
    "rows by a compute_loss that has tensors",
    "tokens without a mean over ranks",
    "tokens by cost",
    "rows by cost",
    "tokens, rebalanced",
    "tokens, FSDP2",
    "bf16",
    "in shards, resumed whole",
    "the best, in shards",
    "a rank without rows, in shards",
    "bf16, in shards",
    "LoRA, in shards",
    "LoRA and a whole layer, the best, in shards",
)
IN_SHARDS = ("tokens, in shards", "resumed in other shards", "the best, in shards")
ON_GPUS = (
    "tokens",
    "tokens by cost",
    "rows, accumulated, drop last",
    "resumed",
    "rows, rebalanced",
)
REFUSED = {
    "auto_find_batch_size": "auto_find_batch_size",
    "batch_rebalance": "batch_rebalance",
    "rows that are generated": "generates the rows",
    "no trainer": "a Trainer class",
    "a plan and ratios": "the plan has its own ratios",
    "no plan": "start the script with evener launch",
    "experts in passes": "output_router_logits=False",
    "a gathered baseline in passes": "The loss depends on values that it gathers",
    "several GPUs": "torchrun --nproc-per-node 2",
    "a wrapped model": "in DistributedDataParallel already",
    "DeepSpeed": "Use DistributedDataParallel or FSDP2",
    "FSDP1": "Use FSDP2",
    "tensor parallelism": "Use data parallelism",
    "in shards, an optimizer": "the Trainer has an optimizer that was made before",
    "in shards, FSDP": "the Trainer has FSDP or DeepSpeed",
    "in shards, compiled": "the Trainer has torch.compile",
    "a bare training's batch": (
        "An epoch has 6 steps in the checkpoint's training, 9 of 5 rows here"
    ),
    "own batches": (
        "OwnBatches.get_train_dataloader gives a DataLoader that makes its batches itself"
    ),
    "another global batch": "8 of 16 rows in each optimizer step",
}
pytestmark = pytest.mark.slow

Ended = dict[str, dict[str, Any]]
Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def expected(trainer_ranks: Run) -> Ended:
    """Return the results of one process by program."""
    (found,) = trainer_ranks(f"{PROGRAMS}.reference_all")
    return found


@pytest.fixture(scope="module")
def trained(trainer_ranks: Run, expected: Ended) -> list[tuple[str, Ended, Ended]]:
    """Return (program, result of one process, result of a rank) for all programs and ranks."""
    found = []
    for (shares, micros), names in ((TWO, NAMES), (THREE, THREE_RANKS)):
        for rank in trainer_ranks(f"{PROGRAMS}.train_all", shares, micros, world=len(shares)):
            assert len(rank.pop("threads")) == 1  # all of a rank's threads are on its own cores
            assert set(rank) == set(names)
            found += [(name, expected[name], rank[name]) for name in names]
    return found


def test_in_shards_a_check_of_the_loss_has_no_more_rows_than_a_pass(trained: Any) -> None:
    checked = {name: rank["most rows checked"] for name, _, rank in trained if "changes" in rank}
    assert checked["LoRA, in shards"] == 2
    assert checked["tokens by cost"] == 8


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_what_one_process_learns(trained: Any, name: str) -> None:
    atol = 5e-3 if "bf16" in name else 1e-12
    for _, expected, rank in (each for each in trained if each[0] == name):
        for mine, its in zip(rank["weights"], expected["weights"], strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=atol)
        assert rank["losses"][-1] == pytest.approx(expected["losses"][-1], abs=atol + 2e-6)
        if "resumed" not in name:  # the trainer itself logs the mean since the resume
            assert rank["losses"] == pytest.approx(expected["losses"], abs=atol + 2e-6)
            assert rank["mean loss"] == pytest.approx(expected["mean loss"], abs=atol + 2e-6)
            # the rate has three digits
            assert rank["samples"] == pytest.approx(expected["samples"], rel=0.02)
        for figure in ("steps", "tokens", "total"):
            assert rank[figure] == expected[figure]
        assert rank["evaluated"] == pytest.approx(expected["evaluated"], abs=1e-6)
        assert rank["saved"].keys() == expected["saved"].keys()
        for key, its in expected["saved"].items():
            torch.testing.assert_close(rank["saved"][key], its, rtol=0, atol=1e-12)
        if "rebalanced" in name:
            assert rank["changes"] > 0
        if name == "bf16, in shards":  # linear layers are cast like in autocast, the rest isn't
            assert rank["gathered in"] == {torch.bfloat16, torch.float32}
        if rank["predicted"] is not None:  # each row occurs once
            torch.testing.assert_close(rank["predicted"], expected["predicted"], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "names", [ON_GPUS, IN_SHARDS, ("tokens, FSDP2",)], ids=("DDP", "shards", "FSDP2")
)
def test_two_gpus_learn_what_one_gpu_learns(
    gpu_ranks: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    """Two GPUs have the weights of one.

    Llama computes its norms in float32, so another rounding may be as large as the bound.
    """
    ranks = gpu_ranks(f"{PROGRAMS}.train_all", *TWO, names)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    run_on_gpus(f"{PROGRAMS}.reference_all", tmp_path / "one", names, world=1)
    expected = torch.load(tmp_path / "one" / "0.pt")
    for rank in ranks:
        for name in names:
            assert rank[name]["losses"][-1] == pytest.approx(expected[name]["losses"][-1], abs=2e-6)
            for mine, its in zip(rank[name]["weights"], expected[name]["weights"], strict=True):
                torch.testing.assert_close(mine, its, rtol=0, atol=1e-8)


def test_trl_learns_what_one_process_learns(trainer_ranks: Run) -> None:
    """TRL's losses are float32 internally, and so is the bound."""
    skip_without("trl", "peft", "datasets")
    (expected,) = trainer_ranks("tests.support.trl_programs.reference_all")
    for rank in trainer_ranks("tests.support.trl_programs.train_all", *TWO, world=2):
        for kind, its in expected.items():
            assert rank[kind]["steps"] == its["steps"]
            assert rank[kind]["losses"] == pytest.approx(its["losses"], abs=2e-6)
            for mine, other in zip(rank[kind]["weights"], its["weights"], strict=True):
                torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def test_what_would_not_be_exact_is_refused_before_the_first_step(trainer_ranks: Run) -> None:
    (found,) = trainer_ranks("tests.support.huggingface_refusals.refuse_all")
    assert {name: words for name, words in REFUSED.items() if words not in found[name]} == {}
    assert (
        found["a gathered baseline at once"]
        == found["experts at once"]
        == found["nothing"]
        == found["nothing in shards"]
        == ""
    )
    assert "wasn't checked, as memory ran out" in found["no memory for a check"]
    # other ranks wait for its part of the model there, so it has to exit
    assert "Memory ran out" in found["no memory for a check in shards"]
    assert found["lengths"] == [1, 2, 3]
    assert found["items"] == "meta", "a step waits for its GPU"
    assert json.loads(found["evener.json"]) == {"rows": 16, "step_rows": 8}
    assert found["the same by global_batch"] == 4
    assert found["gone on from a bare training"] < 1e-12
    assert found["rows of an own loader"] == list(range(11, 2, -1))
    assert found["the user's"] == (1, 8)
    assert found["by ratios"] == [(8,), (6,)]
    assert found["the trainer's"] == (1, 3)


def test_a_loss_that_compares_rows_is_refused_in_shards_too(trainer_ranks: Run) -> None:
    """No rank has a gradient there, and linear layers are gathered in autocast's dtype."""
    for rank in trainer_ranks("tests.support.huggingface_refusals.refuse_contrast", world=2):
        for said in (rank["float32"], rank["bf16"]):
            assert "isn't the mean of its parts' losses" in said


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_trl_trainers_that_generate_have_the_method_by_which_they_are_refused(name: str) -> None:
    skip_without("trl")
    trl = find_spec("trl")
    assert trl is not None
    assert trl.origin is not None
    source = Path(trl.origin).with_name("trainer") / f"{name}_trainer.py"
    assert "def _generate_and_score_completions(" in source.read_text()


def test_a_pinned_batch_is_copied_without_waiting_for_the_device() -> None:
    """A copy that waits lets the device idle until the next forward pass is launched."""
    from transformers import Trainer

    from evener.huggingface import with_plan
    from tests.support.huggingface_programs import make_plan

    waits = list[bool]()

    class Pinned(torch.Tensor):
        """A tensor that says that it is in pinned memory, which a CPU alone doesn't have."""

        def is_pinned(self, *_: Any) -> bool:
            return True

        def to(self, *_: Any, non_blocking: bool = False, **__: Any) -> Any:
            waits.append(not non_blocking)
            return torch.ones(2)

    kind: Any = with_plan(Trainer, make_plan([2]))
    trainer = kind.__new__(kind)
    trainer.args, trainer.is_deepspeed_enabled = SimpleNamespace(device="cpu"), False
    batch = {"labels": torch.zeros(2).as_subclass(Pinned), "others": [torch.zeros(3)], "name": "a"}
    found = trainer._prepare_input(batch)
    assert waits == [False]
    assert found["labels"].tolist() == [1.0, 1.0]
    assert (found["others"][0].tolist(), found["name"]) == ([0.0] * 3, "a")

    class Doubled(Trainer):
        def _prepare_input(self, data: Any) -> Any:
            return torch.zeros(2) + 2 if isinstance(data, torch.Tensor) else data

    kind = with_plan(Doubled, make_plan([2]))
    trainer = kind.__new__(kind)
    trainer.args, trainer.is_deepspeed_enabled = SimpleNamespace(device="cpu"), False
    assert trainer._prepare_input(batch["labels"]).tolist() == [2.0, 2.0]


def test_every_row_is_in_one_pass_of_one_rank(trainer_ranks: Run) -> None:
    """Each row is computed once, even in a last batch with fewer rows than passes.

    Filler rows fill up such a batch.
    """
    (found,) = trainer_ranks(f"{PROGRAMS}.assign_passes")
    assert {rows for rows, _ in found} == set(range(9, 34))
    for rows, batches in found:
        assert [len(batches[rank]) for rank in (0, 1)] == [-(-rows // 8)] * 2
        for rank, passes in enumerate((3, 1)):
            assert {len(batch) for batch, _ in batches[rank]} == {passes}
        seen = [
            row
            for rank in batches
            for batch, sizes in rank
            for each, size in zip(batch, sizes, strict=True)
            for row in each[:size]
        ]
        assert sorted(seen) == list(range(rows))


@pytest.fixture(scope="module")
def exploded(trainer_ranks: Run) -> Ended:
    """Return the results by program of one process whose memory never ran out."""
    (found,) = trainer_ranks("tests.support.huggingface_oom_programs.reference_all")
    return found


@pytest.mark.parametrize(
    "given", [TWO, ((6, 2), (3, 1)), ((8,), (8,))], ids=("passes", "as many passes", "one device")
)
def test_it_learns_the_same_where_passes_run_out_of_memory(
    trainer_ranks: Run, exploded: Ended, given: Any
) -> None:
    shares, micros = given
    found = trainer_ranks(
        "tests.support.huggingface_oom_programs.train_all", shares, micros, world=len(shares)
    )
    for name, its in exploded.items():
        assert sum(rank[name]["burst"] for rank in found) >= 2 * len(found)
        for each in (rank[name] for rank in found):
            for mine, other in zip(each["weights"], its["weights"], strict=True):
                torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
            assert each["losses"] == pytest.approx(its["losses"], abs=2e-6)
            for figure in ("steps", "tokens", "counted", "noted"):
                assert each[figure] == its[figure]
            assert each["calls"] == its["calls"] * (
                -(-shares[each["rank"]] // micros[each["rank"]])
            )
            for mine, other in (
                zip(each["figures"], its["figures"], strict=True) if each["figures"] else ()
            ):
                assert mine == pytest.approx(other, rel=1e-12)
            assert bool(each["figures"]) == (given != TWO)


def test_a_sum_is_not_computed_in_smaller_passes(trainer_ranks: Run) -> None:
    (said,) = trainer_ranks("tests.support.huggingface_oom_programs.refuse_sum")
    assert (
        "Rank 0 ran out of memory in a pass of 8 rows, and smaller passes would learn "
        "something else"
    ) in said


def test_a_compute_loss_that_waits_for_other_ranks_is_an_error_on_each(
    trainer_ranks: Run,
) -> None:
    waited, said = trainer_ranks("tests.support.huggingface_oom_programs.meet", world=2)
    assert said.startswith("DeviceError: Rank 1")
    assert "the loop communicates with other ranks in a pass" in said
    assert waited.splitlines()[-1].startswith(
        "evener: rank 1 ended, and this rank can't go on without it: DeviceError"
    )
