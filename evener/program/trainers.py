"""Hooks that make a user's transformers Trainer train with a plan's shares.

When the user's script calls `Trainer.train`, a second Trainer with the same attributes trains
instead. `evener run --balance` runs the script up to that call, and measures the script's Trainer.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from ..errors import RequestError
from ..system.replaced import replaced
from ..torch.audit.state import kept_state
from ..torch.step.unowned import trains_others
from ..training.launched import PROGRAM_COMMAND
from .program import PROGRAM, share_state, stays_if_refused
from .views import OUTSIDE

_LOGGED = (
    "the losses that the Trainer logs are means of its ranks' means, which have different numbers "
    "of rows now"
)


def train(wrapped: Any, trainer: Any, arguments: Any, keywords: Any) -> Any:
    """Hook of `Trainer.train`: train with unequal shares if the user's Trainer allows that."""
    new = not hasattr(trainer, "_planned")
    if new and dist.is_available() and dist.is_initialized() and _trains_as_loop(trainer):
        PROGRAM.remarks = [_LOGGED]
        return wrapped(*arguments, **keywords)
    with PROGRAM.left_unchanged():
        if new and (os.environ.get("WORLD_SIZE") == "1" or dist.is_initialized()):
            _plan(trainer)
        planned = _planned.get(trainer)
        if planned is None:
            return wrapped(*arguments, **keywords)
        return wrapped.__func__(planned, *arguments, **keywords)


# The program's own Trainer -> the trainer by shares with the same state.
_planned: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _trains_as_loop(trainer: Any) -> bool:
    """Return whether the hooks for plain PyTorch loops handle this Trainer.

    They do with FSDP, with DeepSpeed, or with a batch sampler other than PyTorch's.
    """
    if trainer.args.world_size == 1 or PROGRAM.notebook.why:
        return False
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return True
    from ..huggingface.rows import makes_batches

    # an error of the trainer's own method is raised again later
    with kept_state(), suppress(Exception):
        return makes_batches(trainer, trainer.get_train_dataloader)
    return False


def _plan(trainer: Any) -> None:
    """Create a second Trainer, like the user's but with unequal shares, and check its loss."""
    own, settings = type(trainer), PROGRAM.notebook.settings
    world = trainer.args.world_size
    with stays_if_refused(trainer):
        from ..huggingface import with_plan
        from ..huggingface.private import pass_rows

        global_batch = pass_rows(trainer) * world

        kind = with_plan(
            own,
            PROGRAM.choose_plan([trainer.model], global_batch),
            global_batch=global_batch,
            journal=True,
            rebalance=settings.rebalance,
            noise=settings.noise,
        )
        kind.__name__ = own.__name__  # programs may print the class name
        kind.__qualname__ = own.__qualname__
        kind.keeps_launcher = True
        if world > 1 and _steps_others(trainer):
            raise RequestError(OUTSIDE, "Have it in the model.")
        planned = share_state(trainer, kind)
        planned.begin_plan()
        planned.get_train_dataloader()
        planned.check_loss()
        if world > 1:
            PROGRAM.audit(planned._planned)
            _warn_of_tail(trainer, global_batch)
        _planned[trainer] = planned
        hooks = f"{own.__name__}, a transformers.Trainer"
        if world > 1:
            PROGRAM.begin_even(planned._planned, hooks)
        else:
            PROGRAM.notebook.watch(planned._planned, hooks)
        if global_batch == world > 1:
            PROGRAM.notebook.warn(
                "each rank has one row at a time, so none can be moved; they could be with a "
                "larger per_device_train_batch_size"
            )
        if planned.excess > 1:
            model = type(trainer.accelerator.unwrap_model(trainer.model)).__name__
            PROGRAM.notebook.warn(
                f"its loss is {planned.excess} times the mean, as with its own launcher: {model} "
                f"ignores num_items_in_batch, and transformers multiplies by the number of "
                f"processes"
            )


def _steps_others(trainer: Any) -> bool:
    """Return whether the Trainer's optimizer also trains parameters that aren't in its model."""
    # each rank would update such parameters with its own gradients
    from transformers import Trainer

    if type(trainer).create_optimizer is not Trainer.create_optimizer:
        trainer.create_optimizer()
    return trainer.optimizer is not None and trains_others(trainer.optimizer, [trainer.model])


def _warn_of_tail(trainer: Any, global_batch: int) -> None:
    """Warn if the last batch of an epoch has fewer rows than with the script's own launcher."""
    # the program's own launcher would fill the last batch up
    rows = len(trainer.train_dataset)
    if rows % global_batch and not trainer.args.dataloader_drop_last:
        PROGRAM.notebook.warn(
            f"the last batch of an epoch has the {rows % global_batch} rows that are left of "
            f"{rows}; with equal shares it"
            f" would be filled up to {global_batch} with rows seen before"
        )


class _TrainerFound(BaseException):
    """Exception that ends the script at `Trainer.train` and carries its Trainer."""

    # The function `build` catches this. As a BaseException, it isn't caught by programs that catch
    # Exception.

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer


def build() -> Any:
    """Run the user's script up to its call of `Trainer.train`, and return that Trainer.

    Raises RequestError if the script ends without training.
    """
    from transformers import Trainer

    ended = "ended"
    try:
        with (
            replaced(Trainer, "train", _find),
            replaced(subprocess.Popen, "__init__", _start_no_python),
        ):
            _run_program(json.loads(os.environ[PROGRAM_COMMAND]))
    except _TrainerFound as found:
        return found.trainer
    except SystemExit as end:
        ended = f"ended with exit code {end.code}"
    raise RequestError(
        f"The program {ended} without training with a transformers.Trainer, so there is nothing "
        f"to measure.",
        "Give it a function build() that returns its model and data, or leave --balance out.",
    )


_start = subprocess.Popen.__init__


def _start_no_python(process: Any, command: Any, *more: Any, **options: Any) -> None:
    """Replacement for `Popen.__init__` that doesn't let the script start Python or torchrun.

    Raises RequestError if the script tries to.
    """
    # the program would train there instead of in this process
    first = command if isinstance(command, str | bytes | os.PathLike) else next(iter(command), "")
    if Path(os.fsdecode(first).split(" ")[0]).name.startswith(("python", "torchrun")):
        raise RequestError(
            "The program trains in processes that it starts itself, and --balance measures a "
            "trainer in its own.",
            "Leave --balance out: its shares follow its devices' speed.",
        )
    _start(process, command, *more, **options)


def _find(trainer: Any, *_: Any, **__: Any) -> NoReturn:
    raise _TrainerFound(trainer)


def _run_program(command: Sequence[str]) -> None:
    """Run the user's script or module as `__main__`, with its arguments.

    `command` is a script, or "-m" and a module, followed by the arguments.
    """
    module = command[0] == "-m"
    target, *arguments = command[module:]
    place = os.getcwd() if module else str(Path(target).absolute().parent)
    with (
        replaced(sys, "argv", [target, *arguments]),
        replaced(sys, "path", [place, *sys.path]),
    ):
        (runpy.run_module if module else runpy.run_path)(target, run_name="__main__")
