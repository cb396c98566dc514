"""Measure what audits cost in trainings of 1,000 steps, and whether they raise a false alarm.

  python -m benchmarks.gpu_audits [--programs loop step ...] [--ranks 2] [--steps 1000] [--tiny]

Five programs train the same Llama by shares of 5 : 3, on a GPU each: a loop of one's own, a loop
with `split.step`, accelerate, transformers' Trainer and Lightning. Audits come when they always do.
Prints a JSON line for each rank of each program: the time of a step; the audits with the time that
each adds, and their part of all steps; the peak memory of audited steps beside the others'; and the
audits that found a difference, with all warnings. The host waits for the GPU in each step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.trainer_models import COLLATED, Texts, make_trainer, network
from evener.torch import Split
from evener.torch.training_audits import TrainingAudits
from tests.support.torch_start import free_port

GPU = torch.cuda.is_available()
SHARES = (5, 3)
AUDITING = ("after_batch", "after_step", "_after_backward")  # methods in which an audit runs
SECONDS = 100.0  # time limit of a program


class Watch:
    """Records the time and the peak memory of each step, and its audit's result."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        self.audits: dict[int, str] = {}  # the results by step
        self.direct: dict[int, float] = {}  # seconds within the methods in AUDITING, by step
        self._began = time.perf_counter()

    def end_step(self, *_: Any) -> None:
        """Hook that runs after each optimizer step."""
        _wait()
        now = time.perf_counter()
        self.seconds.append(now - self._began)
        if GPU:
            self.peaks.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        self._began = time.perf_counter()

    def is_over(self) -> bool:
        """True once all steps are done."""
        return len(self.seconds) >= self.steps

    def note_result(self, decide: Any, audits: Any, found: Any, *more: Any, **options: Any) -> Any:
        """Record the result of an audit, in place of `TrainingAudits._share_result`."""
        audited = found.audited
        result = "fine"
        if audited is None or audited.fault:
            result = "not compared"
        elif audited.difference is not None:
            result = f"differs: {audited.difference}"
        self.audits[len(self.seconds) + 1] = result
        return decide(audits, found, *more, **options)

    def time_audit(self, method: Any, audits: Any, *given: Any, **options: Any) -> Any:
        """Call a method in which an audit may run, and record its time."""
        step = len(self.seconds) + 1
        _wait()
        began = time.perf_counter()
        try:
            return method(audits, *given, **options)
        finally:
            _wait()
            spent = time.perf_counter() - began
            if step in self.audits:
                self.direct[step] = self.direct.get(step, 0.0) + spent

    def summarize(self) -> dict[str, Any]:
        """Return the figures of the training."""
        usual = median(self.seconds[2:])
        added = {step: self.seconds[step - 1] - usual for step in self.audits}
        first = min(self.audits, default=0)
        if first in self.direct:  # its step also loads the kernels of the training
            added[first] = self.direct[first]
        figures: dict[str, Any] = {
            "steps": len(self.seconds),
            "step ms": round(1e3 * usual, 2),
            "audits": len(self.audits),
            "compared": sum(each != "not compared" for each in self.audits.values()),
            "alarms": [each for each in self.audits.values() if each.startswith("differs")],
            "added ms": {step: round(1e3 * each, 1) for step, each in added.items()},
            "itself ms": {step: round(1e3 * each, 1) for step, each in self.direct.items()},
            "part of all steps": round(sum(added.values()) / (len(self.seconds) * usual), 5),
        }
        if self.peaks:
            places = [step - 1 for step in self.audits if step > 1]
            audited = [self.peaks[place] for place in places]
            others = [each for place, each in enumerate(self.peaks) if place not in places]
            figures["peak beside others'"] = round(max(audited, default=0) / max(others[1:]), 4)
        return figures


def _wait() -> None:
    if GPU:
        torch.cuda.synchronize()


def train_loop(size: str, rows: int, watch: Watch) -> None:
    """Train by a loop that calls backward itself."""
    split = Split(ratios=SHARES, global_batch=rows)
    model = split.wrap(network(size).to(split.device))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-5)
    while not watch.is_over():
        for batch in split.loader(Texts(size), **COLLATED):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if watch.is_over():
                break


def train_step(size: str, rows: int, watch: Watch) -> None:
    """Train by a loop with `split.step`."""
    split = Split(ratios=SHARES, global_batch=rows)
    model = split.wrap(network(size).to(split.device))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-5)
    while not watch.is_over():
        for batch in split.loader(Texts(size), **COLLATED):
            split.step(batch, lambda part: model(**part.batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            if watch.is_over():
                break


def train_accelerate(size: str, rows: int, watch: Watch) -> None:
    """Train by a loop with accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=not GPU)
    plain: Any = network(size)
    plain, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), 5e-5))
    split = Split(ratios=SHARES, global_batch=rows)
    model = split.wrap(plain)
    while not watch.is_over():
        for batch in split.loader(Texts(size), **COLLATED):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            if watch.is_over():
                break


def train_trainer(size: str, rows: int, watch: Watch) -> None:
    """Train by transformers' Trainer."""
    from transformers import Trainer

    from evener.huggingface import with_plan

    kind = with_plan(Trainer, ratios=SHARES, global_batch=rows)
    arguments = {"max_steps": watch.steps, "lr_scheduler_type": "constant"}
    make_trainer(kind, size, False, False, **arguments).train()


def train_lightning(size: str, rows: int, watch: Watch) -> None:
    """Train by Lightning."""
    import lightning

    from benchmarks.trainer_lightning import Module

    split = Split(ratios=SHARES, global_batch=rows)
    trainer = lightning.Trainer(
        accelerator="auto" if GPU else "cpu",
        devices=split.world,
        strategy=split.strategy(),
        use_distributed_sampler=False,
        max_steps=watch.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(size), split.loader(Texts(size), **COLLATED))


PROGRAMS: dict[str, Callable[[str, int, Watch], None]] = {
    "loop": train_loop,
    "step": train_step,
    "accelerate": train_accelerate,
    "trainer": train_trainer,
    "lightning": train_lightning,
}


def run_rank(name: str, steps: int, tiny: bool) -> None:
    """Train a program in this process, and print its figures."""
    torch.manual_seed(0)
    watch = Watch(steps)
    said: list[str] = []

    def note(message: Any, category: Any, *_: Any, **__: Any) -> None:
        if "evener" in str(message) or category is UserWarning:
            said.append(str(message)[:200])

    size, rows = ("small", 8) if tiny else ("middle", 32)
    error = ""
    register_optimizer_step_post_hook(watch.end_step)
    decide = _as_method(watch.note_result, TrainingAudits._share_result)
    timed = {
        method: _as_method(watch.time_audit, getattr(TrainingAudits, method)) for method in AUDITING
    }
    warnings.showwarning = note
    with mock.patch.multiple(TrainingAudits, _share_result=decide, **timed):
        try:
            PROGRAMS[name](size, rows, watch)
        except Exception as failure:  # it is a result
            error = f"{type(failure).__name__}: {failure}"[:400]
    figures = {"program": name, "rank": int(os.environ["RANK"])}
    if watch.seconds:
        figures |= watch.summarize()
    print(json.dumps(figures | {"warned": sorted(set(said)), "error": error}), flush=True)


def _as_method(function: Callable[..., Any], own: Any) -> Any:
    """Return a method that calls `function` with the original method `own`."""

    def method(audits: Any, *given: Any, **options: Any) -> Any:
        return function(own, audits, *given, **options)

    return method


def main() -> int:
    """Train each program with ranks of its own; return 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options.rank, options.steps, options.tiny)
        return 0
    failed = 0
    for name in options.programs:
        own = ["--rank", name, "--steps", str(options.steps), *["--tiny"] * options.tiny]
        words = ["--nproc-per-node", str(options.ranks), "--master-port", str(free_port())]
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        command += ["-m", "benchmarks.gpu_audits", *own]
        child = subprocess.Popen(command, env={**os.environ, "NCCL_NVLS_ENABLE": "0"})
        try:
            failed += child.wait(SECONDS) != 0
        except subprocess.TimeoutExpired:
            child.terminate()
            child.wait()
            print(f"{name}: over {SECONDS:.0f} s", flush=True)
            failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
