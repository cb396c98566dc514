"""Trainings whose first rank is fast but has memory for few rows.

Each function is one rank of a RankServer.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from evener.huggingface import with_plan
from evener.system.replaced import replaced
from evener.torch import Split
from evener.torch.rebalancing import Rebalancing
from evener.torch.step.memory import MemoryGauge
from evener.training.bottleneck import RankTimes
from tests.support.fewer_audits import audit_first_step
from tests.support.huggingface_programs import Plain, Points
from tests.support.lightning_programs import Module, make_trainer, points
from tests.support.lightning_programs import Program as LightningProgram

GLOBAL_BATCH, STEPS, EPOCHS = 24, 80, 4
AT_ONCE = 20  # the largest number of rows that fit in the first rank's memory
ROW_BYTES, OTHER_BYTES = 1e6, 1e7
SECONDS_PER_ROW = (0.1, 0.7)  # of each rank


def train(folder: Path, rank: int, trainer: str) -> None:
    """Train with equal shares, then with shares that change, and save the results of both."""
    torch.set_num_threads(1)
    audit_first_step()
    train_by = globals()[f"by_{trainer}"]
    variables = dict(os.environ)
    results = [train_by(rank, False)]
    os.environ.update(variables)  # Lightning has deleted WORLD_SIZE
    results.append(train_by(rank, True))
    torch.save(results, folder / f"{rank}.pt")


def by_transformers(rank: int, rebalance: bool) -> dict[str, Any]:
    """Train with a plain Trainer."""
    torch.manual_seed(0)
    kind = with_plan(Trainer, ratios=(1, 1), global_batch=GLOBAL_BATCH, rebalance=rebalance)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            learning_rate=0.01,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = kind(Plain(), arguments, train_dataset=Points(GLOBAL_BATCH * 20))
        with capped(rank, trainer.model.layers) as passes:
            trainer.train()
    return describe(trainer._planned, trainer.model, passes)


def by_lightning(rank: int, rebalance: bool) -> dict[str, Any]:
    """Train with Lightning's automatic optimization."""
    split = Split(ratios=(1, 1), global_batch=GLOBAL_BATCH, rebalance=rebalance)
    module = Module(manual=False)
    with tempfile.TemporaryDirectory() as folder, capped(rank, module.layers) as passes:
        trainer = make_trainer(
            LightningProgram(), folder, devices=2, strategy=split.strategy(), max_epochs=EPOCHS
        )
        trainer.fit(module, split.loader(points(GLOBAL_BATCH * 20)))
    return describe(split, module, passes)


def by_loop(rank: int, rebalance: bool) -> dict[str, Any]:
    """Train in a loop that computes its batches with `split.step`."""
    split = Split(ratios=(1, 1), global_batch=GLOBAL_BATCH, rebalance=rebalance)
    torch.manual_seed(0)
    model = Plain()
    wrapped = split.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    loader = split.loader(points(GLOBAL_BATCH * 20))
    with capped(rank, model.layers) as passes:
        for _ in range(EPOCHS):
            for batch in loader:
                split.step(batch, lambda part: wrapped(*part.batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
    return describe(split, model, passes)


def describe(training: Any, model: Any, passes: list[int]) -> dict[str, Any]:
    """Return the results of a training run."""
    weights = [each.detach().clone() for each in model.parameters()]
    retreats = training.reporter.retreats
    training.close()
    return {
        "weights": weights,
        "shares": training.ranks.batches,
        "passes": passes,
        "retreats": retreats,
    }


@contextmanager
def capped(rank: int, layers: Any) -> Iterator[list[int]]:
    """Simulate the ranks' memory and speed; yield the rows of each pass that trains."""
    passes: list[int] = []
    trains = torch.is_grad_enabled

    def hold(_: Any, given: tuple[torch.Tensor]) -> None:
        rows = len(given[0])
        if trains():
            passes.append(rows)
        if rank == 0 and rows > AT_ONCE:
            raise MemoryError(f"{rows} rows")

    def measure(gauge: MemoryGauge, rows: int) -> float:
        gauge._peaks.record(rows, OTHER_BYTES + rows * ROW_BYTES)
        held = AT_ONCE + 0.5 if rank == 0 else 1000
        return (OTHER_BYTES + held * ROW_BYTES) / (1 - gauge._left)

    def summarize(rebalancing: Rebalancing) -> Any:
        own = rebalancing._training.ranks.batches[rank] * SECONDS_PER_ROW[rank]
        original(rebalancing)
        return RankTimes(own, 0.0, own)

    original: Callable[[Rebalancing], Any] = Rebalancing._medians_of_window
    handle = layers.register_forward_pre_hook(hold)
    with (
        replaced(MemoryGauge, "_measure_process", measure),
        replaced(Rebalancing, "_medians_of_window", summarize),
    ):
        yield passes
    handle.remove()
