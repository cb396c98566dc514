"""Saves a checkpoint if any rank of a Trainer gets SIGTERM.

All ranks save it at the same step. transformers' own callback saves it three seconds after the
signal, by each rank's clock. Ranks in different steps would then wait for each other forever.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from ..torch.ranks.stop_signal import StopSignal


def stop_on_signal(trainer: Trainer, world: int) -> None:
    """Make the Trainer's option `enable_jit_checkpoint` work with several ranks.

    This replaces the Trainer's own SIGTERM callback. `world` is the number of ranks.
    """
    if not getattr(trainer.args, "enable_jit_checkpoint", False):
        return
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback  # only in transformers 5

    own = trainer.pop_callback(JITCheckpointCallback)
    if own is not None:
        own.on_train_end(trainer.args, trainer.state, trainer.control)  # restores SIGTERM's handler
        trainer.add_callback(_StopOnSignal(world))


class _StopOnSignal(TrainerCallback):  # type: ignore[misc]  # transformers has no complete types
    def __init__(self, world: int) -> None:
        self._world = world
        self._stop_signal: StopSignal | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Install a handler for SIGTERM."""
        self._stop_signal = StopSignal(self._world)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save a checkpoint and stop training if any rank has received SIGTERM.

        Every rank calls this after each step, so all stop at the same step.
        """
        if self._stop_signal is not None and self._stop_signal.is_agreed():
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the SIGTERM handler from before the training."""
        if self._stop_signal is not None:
            self._stop_signal.close()
