"""Trainings that get SIGTERM several times, each time on one rank only, and resume from
checkpoints.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evener.torch import Split

ROWS = 480
BATCH = 6
NOTICES = 10


def train_on(folder: Path, rank: int, ratios: Sequence[Sequence[int]] = ((2, 1), (1, 2))) -> None:
    """Save this rank's rows, and the steps at which trainings ended.

    Shares differ from one start to the next.
    """
    torch.set_num_threads(1)
    rows: list[float] = []
    steps: list[int] = []
    state: dict[str, Any] = {}
    for start in range(NOTICES + 1):
        net = nn.Linear(1, 1)
        split = Split(ratios=ratios[start % len(ratios)], global_batch=BATCH)
        model, loader = split.wrap(net), split.loader(torch.arange(float(ROWS)).view(-1, 1), seed=3)
        if state:
            split.load_state_dict(state)
        for step, batch in enumerate(loader):
            rows += batch[: split.rows, 0].tolist()
            model(batch / ROWS).mean().backward()
            net.zero_grad()
            if start < NOTICES and step == 2 and rank == start % len(ratios):
                os.kill(os.getpid(), signal.SIGTERM)
            if split.ending:
                state = json.loads(json.dumps(split.state_dict()))
                steps.append(step)
                break
        split._stop_signal.close()  # type: ignore[union-attr]  # the group stays for the next start
    torch.save((rows, steps), folder / f"{rank}.pt")


def train_on_alone(folder: Path, rank: int) -> None:
    """Do the same in one process."""
    train_on(folder, rank, ((1,),))


def end_trainer(folder: Path, rank: int) -> None:
    """End a transformers Trainer by a signal to the second rank, and resume it.

    Saves the step at which it ended, its checkpoints then, and the step at which the resumed
    training ended.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from evener.huggingface import with_plan

    class Notify(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if rank == 1 and state.global_step == 2 and not (folder / "sent").exists():
                (folder / "sent").touch()
                os.kill(os.getpid(), signal.SIGTERM)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(inputs).square().mean()}

    torch.set_num_threads(1)
    data = [{"inputs": torch.tensor([row / ROWS])} for row in range(ROWS)]
    arguments = TrainingArguments(
        str(folder / "out"),
        num_train_epochs=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        enable_jit_checkpoint=True,
    )
    before = signal.getsignal(signal.SIGTERM)
    ended = []
    for resume in (False, True):
        kind = with_plan(Trainer, ratios=[2, 1], global_batch=BATCH)
        trainer = kind(Net(), arguments, train_dataset=data, callbacks=[Notify()])
        trainer.train(resume_from_checkpoint=resume)
        ended.append(trainer.state.global_step)
    given_back = signal.getsignal(signal.SIGTERM) == before
    names = sorted(each.name for each in (folder / "out").glob("checkpoint-*"))
    torch.save((ended, names, given_back), folder / f"{rank}.pt")
