"""Training runs on one GPU that run out of memory, compared with undisturbed ones.

  python -m benchmarks.gpu_oom [step] [transformers] [lightning] [--only cap8 long ...]
  [--json FILE]

A decoder-only model in float64 is trained by `split.step`, by transformers' Trainer and by
Lightning, also with expandable segments. `cap8`, `cap12`, `cap20`: memory caps of the process in
GiB, from a quarter to two thirds of what the batch needs. `long`: one batch whose rows are four
times as long, under 12 GiB. `neighbour`: another process allocates all but 1 GiB at step 40 and
exits at step 80. `libraries`: a process leaves 64 MiB to convolutions and an LSTM, whose workspaces
cuDNN and cuBLAS allocate. Prints for each run how often memory ran out, the seconds lost and the
step times compared with the undisturbed run, and the largest difference of any weight.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset, SequentialSampler

from benchmarks.gpu_exchange import Neighbour
from benchmarks.gpu_steps import WORDS, Decoder
from evener.torch import Split
from evener.training.passes import PassLimit

GPU = torch.cuda.is_available()
WAYS = ("step", "transformers", "lightning")


class Case(msgspec.Struct, frozen=True):
    """A training run and its disturbance."""

    cap: float = 0.0  # GiB
    long_at: int = -1  # step whose rows are four times as long
    comes: int = -1  # step at which a neighbour allocates memory
    leaves: int = 10**9
    left: float = 0.0  # GiB that the neighbour leaves free
    steps: int = 14
    rows: int = 128 if GPU else 8
    layers: int = 8 if GPU else 1
    conv: bool = False  # convolutions and an LSTM, with `split.step` only

    def calm(self) -> Case:
        """Return the same run without the disturbance."""
        return msgspec.structs.replace(self, cap=0.0, comes=-1)


CASES = {
    "cap20": Case(cap=20),
    "cap12": Case(cap=12),
    "cap8": Case(cap=8),
    "long": Case(cap=12, long_at=5, rows=32 if GPU else 8),
    "neighbour": Case(
        comes=40, leaves=80, left=1, steps=340, rows=32 if GPU else 8, layers=4 if GPU else 1
    ),
    "libraries": Case(comes=5, left=1 / 16, steps=12, rows=512 if GPU else 8, conv=True),
}


class Rows(Dataset[dict[str, torch.Tensor]]):  # type: ignore[misc]
    """Random texts of one length, except those of one step."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __len__(self) -> int:
        return self._case.steps * self._case.rows

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        length = (256 if GPU else 8) * (4 if row // self._case.rows == self._case.long_at else 1)
        words = torch.randint(0, WORDS, (length,), generator=torch.Generator().manual_seed(row))
        return {"input_ids": words, "labels": words}


class Net(nn.Module):  # type: ignore[misc]  # torch isn't followed
    """A network of convolutions and an LSTM over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 64)
        self.convolutions = nn.Sequential(
            nn.Conv1d(64, 128, 5, padding=2), nn.GELU(), nn.Conv1d(128, 64, 3, padding=1)
        )
        self.lstm = nn.LSTM(64, 128, 2, batch_first=True)
        self.last = nn.Linear(128, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.convolutions(self.words(words).transpose(1, 2)).transpose(1, 2)
        made: torch.Tensor = self.last(self.lstm(hidden)[0])
        return made


class WithLoss(nn.Module):  # type: ignore[misc]
    """Wraps a language model to compute its own loss, as transformers' Trainer expects."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "loss": nn.functional.cross_entropy(
                self.model(input_ids).flatten(0, 1), labels.flatten()
            )
        }


def make_model(case: Case) -> Any:
    """Return the case's model in float64, always with the same weights.

    transformers' own models aren't used, because they compute norms and losses in float32.
    """
    torch.manual_seed(0)
    return WithLoss(Net() if case.conv else Decoder(512 if GPU else 16, case.layers)).double()


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad rows to one length as a batch; the padding has no loss."""
    longest = max(len(row["labels"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100}
    return {
        name: torch.stack(
            [
                nn.functional.pad(row[name], (0, longest - len(row[name])), value=value)
                for row in rows
            ]
        )
        for name, value in fill.items()
    }


def by_step(case: Case, model: Any, _: str) -> None:
    """Train by a plain loop with `split.step`."""
    split = Split(ratios=[1], global_batch=case.rows)
    wrapped = split.wrap(model.to(split.device))
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-4)
    for batch in split.loader(Rows(case), shuffle=False, collate_fn=pad, prefetch=0):
        split.step(batch, lambda part: wrapped(**part.batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()


def by_transformers(case: Case, model: Any, folder: str) -> None:
    """Train by transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    from evener.huggingface import with_plan

    class Ordered(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    quiet = {
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(
        folder,
        max_steps=case.steps,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        **quiet,
    )
    kind = with_plan(Ordered, ratios=[1], global_batch=case.rows)
    kind(model=model, args=arguments, train_dataset=Rows(case), data_collator=pad).train()


def by_lightning(case: Case, model: Any, folder: str) -> None:
    """Train by Lightning's Trainer with automatic optimization."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-4)

    split = Split(ratios=[1], global_batch=case.rows)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        devices=1,
        strategy=split.strategy(),
        use_distributed_sampler=False,
        max_epochs=1,
        enable_checkpointing=False,
        default_root_dir=folder,
        accelerator="gpu" if GPU else "cpu",
        **quiet,
    )
    trainer.fit(Module(), split.loader(Rows(case), shuffle=False, collate_fn=pad))


TRAIN: dict[str, Callable[[Case, Any, str], None]] = {
    "step": by_step,
    "transformers": by_transformers,
    "lightning": by_lightning,
}


class StepRecorder:
    """Records the end of each optimizer step and each failure; starts and stops the neighbour."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._neighbour = Neighbour() if GPU and case.comes >= 0 else None
        self.starting = (
            0.0  # seconds for starting and stopping the neighbour, which count for no step
        )
        self.ends: list[float] = []
        self.passes: list[
            str
        ] = []  # of each retry: the rows that ran out of memory, and the next try

    def note_step(self, *_: Any) -> None:
        if GPU:
            torch.cuda.synchronize()
        at = time.perf_counter()
        if len(self.ends) == self._case.comes and self._neighbour is not None:
            self._neighbour.take(self._case.left)
        if len(self.ends) == self._case.leaves:
            self.end()
        self.starting += time.perf_counter() - at
        self.ends.append(time.perf_counter() - self.starting)

    def halve(self, limit: PassLimit, rows: int, *more: int) -> int:
        smaller = HALVE(limit, rows, *more)
        self.passes.append(f"{limit.step}: {rows} -> {smaller}")
        return smaller

    def end(self) -> None:
        if self._neighbour is not None:
            self._neighbour.leave()
            self._neighbour = None


HALVE = PassLimit.halve


def train(way: str, case: Case) -> dict[str, Any]:
    """Train a case and return the weights, the step times and the out-of-memory errors."""
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, case.cap * 2**30 / total) if case.cap else 1.0
        )
    recorder, model, error = StepRecorder(case), make_model(case), ""
    handle = register_optimizer_step_post_hook(recorder.note_step)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            patch.object(
                PassLimit, "halve", lambda limit, rows, *more: recorder.halve(limit, rows, *more)
            ),
        ):
            TRAIN[way](case, model, folder)
    except Exception as failure:  # the message is the result
        error = f"{type(failure).__name__}: {failure}"[:300]
    finally:
        handle.remove()
        recorder.end()
    times = [
        after - before for before, after in zip(recorder.ends, recorder.ends[1:], strict=False)
    ]
    peak = torch.cuda.max_memory_reserved() / 2**30 if GPU else 0.0
    weights = [each.detach().cpu().clone() for each in model.parameters()]
    return {
        "weights": weights,
        "times": times,
        "passes": recorder.passes,
        "error": error,
        "gib": peak,
    }


def compare(way: str, name: str, calm: dict[str, Any]) -> dict[str, Any]:
    """Return the row of the table that compares a case with its undisturbed run."""
    case = CASES[name]
    found = train(way, case)
    pairs = zip(found["weights"], calm["weights"], strict=True)
    row = {
        "way": way,
        "case": name,
        "expandable": "expandable" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "failures": found["passes"],
        "ended": found["error"] or f"{len(found['times']) + 1} of {case.steps} steps",
        "seconds lost": round(sum(found["times"]) - sum(calm["times"]), 2),
        "slowest step, ms": round(1e3 * max(found["times"], default=0.0)),
        "last steps, ms": [
            round(1e3 * statistics.median(each["times"][-5:] or [0.0]), 1) for each in (calm, found)
        ],
        "peak, GiB": [round(each["gib"], 1) for each in (calm, found)],
        "difference": max(float((mine - its).abs().max()) for mine, its in pairs),
    }
    if case.comes >= 0:
        marks = {"before": case.comes - 10, "beside": case.leaves - 10, "after": case.leaves + 10}
        spans = {
            word: found["times"][mark : mark + 8]
            for word, mark in marks.items()
            if mark < len(found["times"])
        }
        row["ms"] = {
            word: round(1e3 * statistics.median(span), 1) for word, span in spans.items() if span
        }
    return row


def run_here(way: str, only: list[str]) -> None:
    """Run the cases in this process and print a JSON line for each."""
    calm: dict[Case, dict[str, Any]] = {}
    if GPU:
        train(way, msgspec.structs.replace(CASES["cap8"].calm(), steps=3))  # warm up
    for name in only:
        case = CASES[name]
        if case.conv and way != "step":
            continue
        if case.calm() not in calm:
            calm[case.calm()] = train(way, case.calm())
        print(json.dumps(compare(way, name, calm[case.calm()])), flush=True)


def main() -> None:
    """Run the cases and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ways", nargs="*", default=list(WAYS))
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        run_here(options.ways[0], options.only)
        return
    rows = []
    for way in options.ways:
        for expandable in (False, True):
            only = (
                options.only
                if not expandable
                else [name for name in options.only if name in ("cap8", "long")]
            )
            setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if expandable else {}
            if GPU:  # transformers' Trainer refuses more in one process
                setting["CUDA_VISIBLE_DEVICES"] = os.environ.get(
                    "CUDA_VISIBLE_DEVICES", "0"
                ).partition(",")[0]
            command = [sys.executable, "-m", "benchmarks.gpu_oom", "--here", way, "--only", *only]
            if not only:
                continue
            made = subprocess.run(
                command,
                env={**os.environ, **setting},
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
            print(made.stdout, end="", flush=True)
            rows += [json.loads(line) for line in made.stdout.splitlines() if line.startswith('{"')]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
