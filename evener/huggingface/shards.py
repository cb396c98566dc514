"""Trainer for plans in which each device holds only a part of the model's weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import AutocastKwargs
from transformers import Trainer

from ..errors import RequestError
from ..torch.planned import PlannedTraining
from ..torch.shards import checkpoint
from ..torch.shards.make import shard
from ..torch.step.wrapped import hook_forward

SCHEDULER = "scheduler.pt"  # transformers' own file names
ARGUMENTS = "training_args.bin"


class ShardMixin(Trainer):  # type: ignore[misc]  # transformers has no complete types
    """Trainer mixin that shards the model unevenly over ranks, and saves it as one checkpoint."""

    args: Any
    accelerator: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    processing_class: Any
    state: Any
    _planned: PlannedTraining

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Do nothing, because the model may not fit on the device before it is sharded."""

    def begin_plan(self) -> None:
        """Shard the model, and keep accelerate from moving or wrapping it.

        Raises RequestError if the Trainer's settings conflict with a sharded model.
        """
        check_shards(self)
        super().begin_plan()
        autocast_dtype = find_autocast(self.accelerator)
        shard(self._planned, self.model, "all", None, None, None, autocast_dtype)
        _set_device_map(self.model, self.args.device)
        hook_forward(self.model, None, lambda *_: None)  # the trainer weighs losses itself
        prepare = self.accelerator.prepare_model
        self.accelerator.prepare_model = lambda model, *_, **__: prepare(
            model, device_placement=False, evaluation_mode=True
        )
        disable_cast_cache(self.accelerator)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as one checkpoint that other programs can load.

        Every rank has to call this. Shards are gathered a few layers at a time.
        """
        folder = self.args.output_dir if output_dir is None else output_dir
        whole = _internal_call and not self.args.save_only_model
        checkpoint.save(folder, self.model, _unwrap_optimizer(self) if whole else None)
        if self.args.should_save:
            if not hasattr(self.model, "peft_config"):  # PEFT's files are already written
                self.model.config.save_pretrained(folder)
                if self.model.can_generate():
                    self.model.generation_config.save_pretrained(folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, Path(folder) / ARGUMENTS)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str | os.PathLike[str], model: Any = None
    ) -> None:
        checkpoint.load(resume_from_checkpoint, self.model)

    def _load_optimizer_and_scheduler(self, folder: str | os.PathLike[str] | None) -> None:
        if folder is not None:
            checkpoint.load(folder, self.model, _unwrap_optimizer(self))
            self.lr_scheduler.load_state_dict(
                torch.load(Path(folder) / SCHEDULER, weights_only=True)
            )

    def _load_best_model(self) -> None:
        checkpoint.load(self.state.best_model_checkpoint, self.model)


def load_from_shards(trainer: Any, folder: str | os.PathLike[str] | None) -> None:
    """Load optimizer and scheduler from a checkpoint that was saved from a sharded model.

    Do nothing if `folder` is None, or for other checkpoints, which the trainer loads itself.
    """
    if folder is None or not checkpoint.has_optimizer(folder, trainer.model):
        return
    # transformers can't read this state, and would continue with a new optimizer
    checkpoint.load_whole(folder, trainer.model, _unwrap_optimizer(trainer))
    path = Path(folder) / SCHEDULER
    trainer.lr_scheduler.load_state_dict(torch.load(path, weights_only=True))


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def find_autocast(accelerator: Any) -> torch.dtype | None:
    """Return the dtype that accelerate uses for autocast, or None without autocast."""
    return HALVES.get(str(accelerator.mixed_precision)) if accelerator.native_amp else None


def disable_cast_cache(accelerator: Any) -> None:
    """Turn off autocast's weight cache, which would hold the unsharded model in memory."""
    # Only the weights of a few layers are gathered at a time. The cache would keep copies of the
    # weights of all layers until the end of the forward pass.
    accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)


def _set_device_map(model: Any, device: torch.device) -> None:
    """Make accelerate assume that the whole model is on this device."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(base, "hf_device_map", None):
        base.hf_device_map = {"": device}


def _unwrap_optimizer(trainer: Any) -> Any:
    """Return the trainer's optimizer without accelerate's wrapper."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def check_shards(trainer: Any) -> None:
    """Raise RequestError if the Trainer's settings conflict with a sharded model."""
    refused = {
        "an optimizer that was made before": trainer.optimizer is not None,
        "FSDP or DeepSpeed, which have shards of their own": trainer.is_fsdp_enabled
        or trainer.is_deepspeed_enabled,
        "torch.compile": trainer.args.torch_compile,
    }
    for what, is_there in refused.items():
        if is_there:
            raise RequestError(
                f"The plan has each device hold a part of the model, and the Trainer has {what}.",
                "Leave that out, or call split.shard in a loop of your own.",
            )
