"""transformers' Trainer by a plan, by even shares and alone: `python -m benchmarks.huggingface --plan plan.toml`.

    evener balance --framework torch --workload benchmarks/huggingface.py:build --set size=large --export plan.toml

Every variant trains a Llama from its configuration, the processes as torchrun starts them. `--percent 100,60`
holds the process of each device to so much of its GPU's multiprocessors (a running MPS daemon is needed). Prints a row
for each variant: samples/s | over the even split.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from evener.huggingface import with_plan
from evener.plan import load_plan

WORDS = 8192
SIZES = {"small": (128, 4, 64), "large": (768, 12, 512)}  # hidden size, layers, tokens of a row
ROWS = 1 << 16
WARM_UP_SECONDS = 5.0


class Texts(torch.utils.data.Dataset[dict[str, Any]]):
    """Random tokens."""

    def __init__(self, length: int) -> None:
        self.texts = torch.randint(0, WORDS, (4096, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        text = self.texts[row % len(self.texts)]
        return {"input_ids": text, "labels": text}


def network(size: str) -> LlamaForCausalLM:
    """A Llama; `large` has about 100 million parameters."""
    hidden, layers, length = SIZES[size]
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64 or 1,
        max_position_embeddings=length,
    )
    return LlamaForCausalLM(config)


def make_trainer(kind: Any, options: Mapping[str, Any], folder: str, **arguments: Any) -> Any:
    """A trainer of `kind` for a Llama of this size."""
    torch.manual_seed(0)
    common = TrainingArguments(
        folder,
        bf16=options["bf16"],
        use_cpu=not torch.cuda.is_available(),
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        **arguments,
    )
    return kind(model=network(options["size"]), args=common, train_dataset=Texts(SIZES[options["size"]][2]))


def build(size: str = "small", bf16: bool = False) -> Any:
    """For `--workload benchmarks/huggingface.py:build`."""
    return make_trainer(Trainer, {"size": size, "bf16": bf16}, tempfile.mkdtemp())


class Watch(TrainerCallback):
    """Times the steps after the warm-up."""

    def __init__(self) -> None:
        self.began, self.first, self.last, self.steps = time.monotonic(), 0.0, 0.0, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After each optimizer step."""
        now = time.monotonic()
        if now - self.began > WARM_UP_SECONDS:
            self.first = self.first or now
            self.last, self.steps = now, self.steps + 1

    def rate(self) -> float:
        """Steps per second."""
        return (self.steps - 1) / (self.last - self.first)


def train(options: argparse.Namespace) -> None:
    """One rank of one variant; the first prints its rate."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    kind = with_plan(Trainer, options.plan) if options.variant == "plan" else Trainer
    batch = load_plan(options.plan).layout.global_batch
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            kind, vars(options), folder, per_device_train_batch_size=batch // world, max_steps=options.steps
        )
        watch = Watch()
        trainer.add_callback(watch)
        trainer.train()
    if trainer.is_world_process_zero():
        print(json.dumps({"samples_per_second": watch.rate() * batch // world * world}))


def run(options: argparse.Namespace, variant: str, devices: list[int]) -> float:
    """The samples/s of a variant, trained on these devices (numbers of GPUs, or of CPU slices)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank, device in enumerate(devices):
        environment = {
            **os.environ,
            "WORLD_SIZE": str(len(devices)),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
        }
        if options.percent:
            environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = options.percent.split(",")[device]
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.huggingface", "--variant", variant, *sys.argv[1:]]
        children.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    output = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(f"The training {variant} failed.")
    rate: float = json.loads(output[0].splitlines()[-1])["samples_per_second"]
    return rate


def main() -> None:
    """Train every variant and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each variant")
    parser.add_argument("--percent", default="", help="of each GPU's multiprocessors: 100,60")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        train(options)
        return
    plan = load_plan(options.plan)
    places = [share.index for share in plan.layout.active]
    print(f"The plan says {plan.throughput.samples_per_second:,.1f} samples/s at {plan.layout.batches}.\n")
    print("| variant | samples/s | over even |\n| --- | ---: | ---: |", flush=True)
    for _ in range(options.repeat):
        found = {"plan": run(options, "plan", places), "even": run(options, "even", places)}
        found |= {f"device {place} alone": run(options, "alone", [place]) for place in places}
        for variant, rate in found.items():
            print(f"| {variant} | {rate:,.1f} | {rate / found['even'] - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
