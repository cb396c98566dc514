"""What the check of a loss costs: its time beside that of an optimizer step, of a Llama with 100
million parameters.

    torchrun --nproc-per-node 2 -m benchmarks.loss_check [--rows 16] [--tokens 128] [--bf16]

Shares 3:1 on CPU slices, or on the GPUs that PyTorch sees; one process takes its rows in two
passes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from evener.huggingface import with_plan
from evener.plan.file import Plan, Share, make_layout
from tests.support import launched_plan

STEPS = 4
WORLD = int(os.environ.get("WORLD_SIZE", 1))


class StepTimes(TrainerCallback):  # type: ignore[misc]  # transformers has no complete types
    """Seconds of each optimizer step, the first one with the check."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._ended = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The clock starts."""
        self._ended = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """A step is done."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self._ended)
        self._ended = now


def make_plan(rows: int) -> Plan:
    """For as many processes as there are."""
    names = [
        f"sim-{i}" if torch.cuda.is_available() else f"cpu-{i}-of-{WORLD}" for i in range(WORLD)
    ]
    shares = tuple(Share(name, i, "a device", 0, 0.0) for i, name in enumerate(names))
    if WORLD == 1:
        return launched_plan.make_plan(
            make_layout("solo", shares, (rows,), micros=(rows // 2,)), workload="llama"
        )
    sizes = (rows * 3 // 4, rows - rows * 3 // 4)
    return launched_plan.make_plan(make_layout("split", shares, sizes), workload="llama")


def train(check: bool, rows: int, tokens: int, half: bool) -> list[float]:
    """Seconds of the steps of a short training."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16_000, **sizes))
    texts = torch.randint(0, 16_000, (rows * STEPS, tokens))
    data = [{"input_ids": text, "labels": text} for text in texts]
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            optim="sgd",
            bf16=half,
        )
        planned = with_plan(Trainer, make_plan(rows), check=check)
        planned(model=model, args=arguments, train_dataset=data, callbacks=[times]).train()
    return times.seconds


def main() -> None:
    """Print the seconds of a step, and of the check."""
    parser = argparse.ArgumentParser(description="What the check of a loss costs.")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--bf16", action="store_true")
    given = parser.parse_args()
    train(
        False, given.rows, given.tokens, given.bf16
    )  # what only the first steps of a process take
    bare = train(False, given.rows, given.tokens, given.bf16)
    checked = train(True, given.rows, given.tokens, given.bf16)
    if os.environ.get("RANK", "0") == "0":
        step = sorted(bare[1:] + checked[1:])[STEPS - 1]
        cost = checked[0] - bare[0]
        print(f"step {step:.2f} s, check {cost:.2f} s, {cost / step:.1f} steps")


if __name__ == "__main__":
    main()
