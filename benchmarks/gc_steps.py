"""Measure how long Python's garbage collector runs in a training, and how long after gc.freeze().

  python -m benchmarks.gc_steps [--steps 150] [--turns 2]

A Llama of 32 small layers is trained by LoRA with activation checkpointing, by transformers'
Trainer on one CPU thread, in turns: as it is, and after `gc.freeze()`. Prints the samples/s, and
the part of the time in which the collector ran. `python -m evener probe --devices cpu/2 --gpus 0
--workload benchmarks/gc_steps.py:build --batches 8` measures the same steps as a probe.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from evener.balancer.probes.gc_clock import GcClock

LAYERS, ROWS, TOKENS = 32, 8, 8
UNTIMED = 20  # first steps


class Rows(Dataset[dict[str, torch.Tensor]]):  # type: ignore[misc]
    """Equal rows of tokens."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(TOKENS)
        return {"input_ids": tokens, "labels": tokens}


class Clock(TrainerCallback):  # type: ignore[misc]
    """Notes when the timed steps began, and how long the collector ran since."""

    def __init__(self) -> None:
        self.began, self.steps = 0.0, 0
        self.collector = GcClock()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Count the step."""
        self.steps += 1
        if self.steps == UNTIMED:
            self.began = time.perf_counter()
            self.collector.read()


def build(steps: int = 150) -> Any:
    """Return the Trainer."""
    from peft import LoraConfig, get_peft_model

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=ROWS,
        max_steps=steps,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=steps,
        disable_tqdm=True,
    )
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    return Trainer(model=adapted, args=arguments, train_dataset=Rows())


def train(steps: int, freezes: bool) -> None:
    """Train, and print the samples/s and the collector's part of the time."""
    torch.set_num_threads(1)
    trainer, clock = build(steps), Clock()
    trainer.add_callback(clock)
    if freezes:
        gc.collect()
        gc.freeze()
    trainer.train()
    seconds = time.perf_counter() - clock.began
    collecting, _ = clock.collector.read()
    rate = ROWS * (steps - UNTIMED) / seconds
    name = "frozen" if freezes else "as it is"
    print(f"{name}: {rate:.1f} samples/s, {collecting / seconds:.1%} in the collector", flush=True)


def main() -> None:
    """Train in turns, each time in a new process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--one", choices=("frozen", "plain"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        train(options.steps, options.one == "frozen")
        return
    for way in ("plain", "frozen") * options.turns:
        command = [sys.executable, "-m", "benchmarks.gc_steps", "--steps", str(options.steps)]
        subprocess.run([*command, "--one", way], check=True)


if __name__ == "__main__":
    main()
