"""Checks that refuse a Trainer under a plan if what it learns would depend on the shares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ..errors import RequestError
from ..plan.file import Share
from ..torch_split.planned import raise_no_shares
from ..torch_split.wrapped import has_own_work, is_sharded

CHECKPOINT = "evener.json"  # beside trainer_state.json


def check_trainer_class(trainer_class: Any) -> None:
    """RequestError for what is no Trainer, and for one that generates the rows it trains on."""
    from transformers import Trainer

    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise RequestError(
            f"{trainer_class!r} isn't a Trainer class.", "Give the class: with_plan(Trainer, plan)(model=...)."
        )
    if hasattr(trainer_class, "_generate_and_score_completions"):
        raise RequestError(
            f"{trainer_class.__name__} generates the rows that it trains on, and a plan can't share them out exactly.",
            "Train it without a plan.",
        )


def check_setup(trainer: Any) -> None:
    """RequestError if the trainer's arguments leave the plan no say over its rows, or its gradients."""
    from transformers import Trainer

    args = trainer.args
    if args.n_gpu > 1:
        raise RequestError(
            f"One process has {args.n_gpu} GPUs, and DataParallel shares rows out evenly.",
            f"Start one process for each: torchrun --nproc-per-node {args.n_gpu} train.py.",
        )
    if isinstance(trainer.model, DistributedDataParallel):
        raise RequestError(
            "The model is in DistributedDataParallel already, and gradients would be exchanged and weighted twice.",
            "Give the trainer the bare model, without split.wrap.",
        )
    if args.include_num_input_tokens_seen not in ("no", False) and not hasattr(Trainer, "_track_num_input_tokens"):
        raise RequestError(
            "With a plan, include_num_input_tokens_seen needs transformers 5.",
            "Leave it out, or update.",
        )
    if args.auto_find_batch_size:
        raise RequestError("auto_find_batch_size=True changes the plan's batches.", "Leave it out.")
    if trainer.is_deepspeed_enabled:
        raise RequestError(
            "DeepSpeed averages gradients over ranks itself.", "Use DistributedDataParallel or FSDP2 with a plan."
        )
    if trainer.is_fsdp_enabled and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
        raise RequestError("FSDP1 isn't supported with a plan.", "Use FSDP2: fsdp_version 2 in the FSDP configuration.")
    sizes = (getattr(trainer, name, int)() for name in ("get_tp_size", "get_cp_size", "get_sp_size"))
    if max(sizes) > 1:  # older versions of transformers have fewer of them
        raise RequestError(
            "Tensor, context and sequence parallelism put several ranks on one row.",
            "Use data parallelism with a plan.",
        )
    if getattr(args, "train_sampling_strategy", "") == "batch_rebalance":
        raise RequestError(
            "train_sampling_strategy='batch_rebalance' makes ranks equally long, the plan as long as they are fast.",
            "Use 'random' or 'group_by_length'.",
        )


def check_rebalance(trainer: Any, share: Share) -> None:
    """RequestError where shares can't follow own work; `share` is this rank's of the plan."""
    has_own_work(trainer.model, rebalances=True)
    if trainer.is_fsdp_enabled:
        raise RequestError(
            "FSDP's ranks meet in layers, so none has times of its own to rebalance by.", "Leave rebalance out."
        )
    if share.cost is not None:
        raise_no_shares()


def needs_equal_passes(trainer: Any) -> bool:
    """True if ranks meet in every pass: FSDP gathers weights there, and TRL's trainers their metrics."""
    if trainer.is_fsdp_enabled or is_sharded(trainer.model):
        return True
    return any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__)


def check_checkpoint(folder: Path, rows: int, step_rows: int, epoch_steps: float) -> None:
    """RequestError if steps of the checkpoint were of other rows: positions in the epoch are counted in steps."""
    try:
        state = json.loads((folder / CHECKPOINT).read_text())
    except FileNotFoundError:  # of a training without a plan, which draws its rows in the same order
        _check_bare_checkpoint(folder / "trainer_state.json", step_rows, epoch_steps)
        return
    if state != {"rows": rows, "step_rows": step_rows}:
        raise RequestError(
            f"The checkpoint was made with {state['step_rows']} of {state['rows']} rows in each optimizer step, this"
            f" training has {step_rows} of {rows}.",
            f"Give with_plan(..., global_batch=N) the number that makes {state['step_rows']}, and the same data set.",
        )


def _check_bare_checkpoint(path: Path, step_rows: int, epoch_steps: float) -> None:
    try:
        state = json.loads(path.read_text())
        steps = state["max_steps"] / state["num_train_epochs"]
    except (FileNotFoundError, KeyError, ZeroDivisionError):
        return
    if abs(steps - epoch_steps) > 0.5:
        raise RequestError(
            f"An epoch has {steps:g} steps in the checkpoint's training, {epoch_steps:g} of {step_rows} rows here.",
            "Give with_plan(..., global_batch=N) the rows of the checkpoint's steps, and the same data set.",
        )
