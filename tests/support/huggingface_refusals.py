"""What a Trainer by a plan refuses or leaves unchanged, in one process.

See tests/support/huggingface_programs.py.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer

from evener.errors import EvenerError
from evener.huggingface import with_plan
from evener.huggingface.gathering import Gathering
from evener.huggingface.loss import ITEMS, TrainerLoss
from evener.huggingface.meaning import _find_on_first_rank
from evener.huggingface.passes import weigh_passes
from evener.huggingface.rows import check_setup, find_lengths
from evener.huggingface.shards import check_shards
from tests.support.huggingface_programs import (
    Program,
    make_arguments,
    make_parts,
    make_plan,
    plan_by_memory,
)

SMALL = Program(rows=12)


def sentence(called: Callable[[], Any]) -> str:
    """Return the error that the call raises; empty if it raises none."""
    try:
        called()
    except EvenerError as error:
        return str(error)
    return ""


def refuse_training(
    folder: Path, kind: Any = Trainer, model: Any = None, micro: int = 8, **arguments: Any
) -> str:
    """Return the error that ends a training before its first step."""
    parts = make_parts(SMALL)
    parts["model"] = model or parts["model"]
    before = [tensor.clone() for tensor in parts["model"].parameters()]
    chosen = make_arguments(SMALL, str(folder / "refused"), **arguments)
    found = sentence(
        lambda: with_plan(kind, make_plan((8,), (micro,)))(args=chosen, **parts).train()
    )
    assert not found or all(map(torch.equal, before, parts["model"].parameters()))
    return found


def refuse_setup(**changes: Any) -> str:
    """Return the error for a trainer with these changes.

    The required hardware and packages don't exist here.
    """
    none = {name: lambda: 1 for name in ("get_tp_size", "get_cp_size", "get_sp_size")}
    own = {"auto_find_batch_size": False, "include_num_input_tokens_seen": "no"}
    arguments = SimpleNamespace(n_gpu=changes.pop("n_gpu", 1), **own)
    whole: dict[str, Any] = {
        "model": torch.nn.Linear(1, 1),
        "is_deepspeed_enabled": False,
        "is_fsdp_enabled": False,
    }
    plugin = SimpleNamespace(
        fsdp_plugin=SimpleNamespace(fsdp_version=changes.pop("fsdp_version", 2))
    )
    state = SimpleNamespace(state=plugin)
    return sentence(
        lambda: check_setup(
            SimpleNamespace(args=arguments, accelerator=state, **{**whole, **none, **changes})
        )
    )


def refuse_in_shards(**changes: Any) -> str:
    """Return the error for a trainer under a plan in shards with these changes."""
    own: dict[str, Any] = {
        "optimizer": None,
        "model": torch.nn.Linear(1, 1),
        "is_fsdp_enabled": False,
    }
    arguments = SimpleNamespace(torch_compile=changes.pop("torch_compile", False))
    return sentence(
        lambda: check_shards(
            SimpleNamespace(args=arguments, is_deepspeed_enabled=False, **{**own, **changes})
        )
    )


def mixture() -> Any:
    """Return a mixture of experts with its auxiliary loss."""
    sizes = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_local_experts": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, output_router_logits=True))


class Baseline(Trainer):
    """A trainer whose loss has a baseline from gathered values.

    The baseline is 0 while the values are small, as KTO's is at first.
    """

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(*args, **options)
        return loss * (
            1 + self.accelerator.gather_for_metrics(loss.detach() - 1e3).mean().clamp(min=0)
        )


class Contrast(Trainer):
    """A trainer whose loss compares the rows of a pass with each other."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        outputs = model(**inputs)
        rows = outputs.logits.float().mean(1)
        pairs = torch.nn.functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))
        return outputs.loss + pairs


def refuse_contrast(folder: Path, rank: int) -> None:
    """Save the errors for a fully trained model in shards, in float32 and in half precision."""
    found = {}
    for half in (False, True):
        program = Program("float32", 24, {"optim": "sgd", "bf16": half})
        kind = with_plan(Contrast, plan_by_memory(make_plan((6, 2))))
        arguments = make_arguments(program, str(folder / f"{half}"))
        trainer = kind(args=arguments, **make_parts(program))
        found["bf16" if half else "float32"] = sentence(trainer.train)
    torch.save(found, folder / f"{rank}.pt")


def in_parallel() -> Any:
    """Return a model that is already wrapped."""
    wrapped = torch.nn.parallel.DistributedDataParallel.__new__(
        torch.nn.parallel.DistributedDataParallel
    )
    torch.nn.Module.__init__(wrapped)
    return wrapped


def refuse_checkpoint(folder: Path) -> dict[str, Any]:
    """Return the errors for a checkpoint of another global batch, and with `global_batch`."""
    path, program = str(folder / "saved"), Program(rows=16)
    arguments = make_arguments(program, path, save_strategy="epoch")
    with_plan(Trainer, make_plan((8,)))(args=arguments, **make_parts(program)).train()
    again, checkpoint = (
        make_arguments(program, path, num_train_epochs=2),
        str(folder / "saved" / "checkpoint-2"),
    )
    smaller = with_plan(Trainer, make_plan((4,)))(args=again, **make_parts(program))
    same = with_plan(Trainer, make_plan((4,)), global_batch=8)(args=again, **make_parts(program))
    return {
        "evener.json": (Path(checkpoint) / "evener.json").read_text(),
        "another global batch": sentence(lambda: smaller.train(resume_from_checkpoint=checkpoint)),
        "the same by global_batch": same.train(resume_from_checkpoint=checkpoint).global_step,
    }


def resume_bare(folder: Path) -> dict[str, Any]:
    """Continue a bare training, stopped in mid-epoch, by a plan and by another plan.

    They are compared with one that wasn't stopped.
    """
    program, path = Program(rows=45), str(folder / "bare")
    batches = {"per_device_train_batch_size": 8}
    whole = Trainer(args=make_arguments(program, path, **batches), **make_parts(program))
    whole.train()
    saves = {"save_strategy": "steps", "save_steps": 3}
    Trainer(args=make_arguments(program, path, **batches, **saves), **make_parts(program)).train()
    checkpoint = str(folder / "bare" / "checkpoint-3")
    same, other = (
        with_plan(Trainer, make_plan((rows,), (2,)))(
            args=make_arguments(program, path), **make_parts(program)
        )
        for rows in (8, 5)
    )
    same.train(resume_from_checkpoint=checkpoint)
    pairs = zip(whole.model.parameters(), same.model.parameters(), strict=True)
    return {
        "gone on from a bare training": max(
            float((mine - its).abs().max().detach()) for mine, its in pairs
        ),
        "a bare training's batch": sentence(lambda: other.train(resume_from_checkpoint=checkpoint)),
    }


class Backwards(Trainer):
    """Has its own training loader, or one that makes its own batches."""

    batches = False

    def get_train_dataloader(self) -> Any:
        rows = list(range(len(self.train_dataset)))[::-1][:9]
        options: Any = (
            {"batch_sampler": [rows]} if self.batches else {"batch_size": 8, "sampler": rows}
        )
        return torch.utils.data.DataLoader(
            self.train_dataset, collate_fn=self.data_collator, **options
        )


def load_by_own(folder: Path) -> dict[str, Any]:
    """Return the rows of the trainer's own loader, and the error for one that makes its batches
    itself.
    """
    trainer = with_plan(Backwards, make_plan((8,)))(
        args=make_arguments(SMALL, str(folder)), **make_parts(SMALL)
    )
    rows = [
        row
        for batch in trainer.get_train_dataloader().batch_sampler
        for each in batch
        for row in each
    ]
    own = type("OwnBatches", (Backwards,), {"batches": True})
    return {"rows of an own loader": rows, "own batches": refuse_training(folder, own)}


def keep_arguments(folder: Path) -> dict[str, Any]:
    """Return the user's arguments after a trainer was made with a launcher's plan, and the
    trainer's.
    """
    arguments = make_arguments(SMALL, str(folder))
    make_plan((8,), (3,)).save(folder / "plan.toml")
    os.environ["EVENER_PLAN"] = str(folder / "plan.toml")
    trainer = with_plan(Trainer)(args=arguments, **make_parts(SMALL))
    del os.environ["EVENER_PLAN"]
    both = {"the user's": arguments, "the trainer's": trainer.args}
    shared = (with_plan(Trainer, ratios=[1.0], global_batch=rows) for rows in (None, 6))
    batches = [each(args=arguments, **make_parts(SMALL))._shares.batches for each in shared]
    return {"by ratios": batches} | {
        who: (each.gradient_accumulation_steps, each.per_device_train_batch_size)
        for who, each in both.items()
    }


class Endless:
    """A data set that raises no error beyond its last row."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"input_ids": [0] * (row % 3 + 1)}


def count_tokens() -> Any:
    """Return the lengths of rows without a length column, as for an assignment by length."""
    arguments = SimpleNamespace(length_column_name="length")
    return find_lengths(
        SimpleNamespace(train_dataset=Endless(), args=arguments, processing_class=None)
    )


def items_on_device() -> str:
    """Return the device of a step's number of items, for a loss that is their mean.

    Nothing is read from that device.
    """
    accelerator: Any = SimpleNamespace(gather=lambda own: own, num_processes=1)
    items = torch.ones((), dtype=torch.int64, device="meta")
    gathering = Gathering(accelerator, Mock())
    _, total, _ = weigh_passes(
        TrainerLoss(ITEMS), [{}], [(4,)], [8], items, gathering, items.device
    )
    return str(total.device)


def check_without_memory() -> dict[str, str]:
    """Return the warning and the error of a check of the loss in which memory runs out."""

    def find() -> None:
        raise torch.OutOfMemoryError

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert _find_on_first_rank(find, keeps_launcher=False, is_sharded_model=False) is None
    in_shards = sentence(
        lambda: _find_on_first_rank(find, keeps_launcher=False, is_sharded_model=True)
    )
    return {
        "no memory for a check": str(seen[-1].message),
        "no memory for a check in shards": in_shards,
    }


def refuse_all(folder: Path, rank: int) -> None:
    """Save every error."""
    generates = type("Generates", (Trainer,), {"_generate_and_score_completions": None})
    found = {
        "auto_find_batch_size": refuse_training(folder, auto_find_batch_size=True),
        "batch_rebalance": refuse_training(folder, train_sampling_strategy="batch_rebalance"),
        "rows that are generated": refuse_training(folder, generates),
        "no trainer": refuse_training(folder, object),
        "no plan": sentence(lambda: with_plan(Trainer)),
        "a plan and ratios": sentence(lambda: with_plan(Trainer, make_plan((8,)), ratios=[1.0])),
        "experts in passes": refuse_training(folder, model=mixture(), micro=4),
        "experts at once": refuse_training(folder, model=mixture()),
        "a gathered baseline in passes": refuse_training(folder, Baseline, micro=4),
        "a gathered baseline at once": refuse_training(folder, Baseline),
        "several GPUs": refuse_setup(n_gpu=2),
        "a wrapped model": refuse_setup(model=in_parallel()),
        "DeepSpeed": refuse_setup(is_deepspeed_enabled=True),
        "FSDP1": refuse_setup(is_fsdp_enabled=True, fsdp_version=1),
        "tensor parallelism": refuse_setup(get_tp_size=lambda: 2),
        "in shards, an optimizer": refuse_in_shards(optimizer=object()),
        "in shards, FSDP": refuse_in_shards(is_fsdp_enabled=True),
        "in shards, compiled": refuse_in_shards(torch_compile=True),
        "nothing in shards": refuse_in_shards(),
        "lengths": count_tokens(),
        "items": items_on_device(),
        "nothing": refuse_setup(is_fsdp_enabled=True),
        **check_without_memory(),
        **refuse_checkpoint(folder),
        **resume_bare(folder),
        **load_by_own(folder),
        **keep_arguments(folder),
    }
    torch.save(found, folder / f"{rank}.pt")
