"""One process of a training run of benchmarks.trainers.

It reads what to do once its imports are done.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Trainer, TrainerCallback

from benchmarks import trainer_models
from benchmarks.trainer_models import COLLATED, SHARDED, Done, Texts, make_trainer, network
from benchmarks.trainer_processes import MARK, name_build
from evener.devices.terms import parse_limit
from evener.huggingface import with_plan
from evener.plan.file import Plan, load_plan
from evener.torch import Split
from evener.torch.ranks.ranks import claim_device, visible_gpus
from evener.workloads.protocol import WorkerSetup
from evener.workloads.torch_backend.user_model import build

WARM_UP = 8  # steps; the second half is the first block
SHARDED_STEPS = 6
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl.h
Train = Callable[[Plan | None, argparse.Namespace, Done], None]


class EachStep(TrainerCallback):
    """Stops training after an optimizer step if `done` says so."""

    def __init__(self, done: Done) -> None:
        self._done = done

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop training if it is done."""
        control.should_training_stop |= self._done()  # or-ed, because max_steps may be reached, too


def train_huggingface(
    plan: Plan | None, options: argparse.Namespace, done: Done, **arguments: Any
) -> Any:
    """Train with transformers' `Trainer`, and return it."""
    kind, rows = with_plan(Trainer, plan) if plan else Trainer, options.bare or 1
    arguments |= {"per_device_train_batch_size": rows, "train_sampling_strategy": options.sampling}
    trainer = make_trainer(
        kind, options.size, options.bf16, options.texts, num_train_epochs=1000, **arguments
    )
    trainer.add_callback(EachStep(done))
    trainer.train()
    return trainer


def train_sharded(plan: Plan | None, options: argparse.Namespace, _: Done) -> None:
    """Train a few steps with `Trainer` and FSDP2; send the losses and the peak memory."""
    more = {"max_steps": SHARDED_STEPS, "logging_strategy": "steps", "logging_steps": 1}
    trainer = train_huggingface(plan, options, lambda: False, **SHARDED, **more)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    send_message(
        {
            "losses": losses,
            "most_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        }
    )


def train_lightning(plan: Plan | None, options: argparse.Namespace, done: Done) -> None:
    """Train with `lightning.Trainer`, which is imported only here."""
    from benchmarks.trainer_lightning import train

    train(plan, options, done)


def train_accelerate(plan: Plan | None, options: argparse.Namespace, done: Done) -> None:
    """Train with accelerate in a plain loop."""
    precision = "bf16" if options.bf16 else "no"
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=precision)
    model: Any = network(options.size)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 5e-5))
    data, loader = Texts(options.size), None
    if plan:
        split = Split(plan)
        model, loader = split.wrap(model), split.loader(data, **COLLATED)
    loader = loader or accelerator.prepare(DataLoader(data, options.bare, shuffle=True, **COLLATED))
    loop(model, optimizer, loader, accelerator.backward, done)


def loop(
    model: Any, optimizer: Any, loader: Any, backward: Callable[[Any], None], done: Done
) -> None:
    """Train until `done`, with the same steps as a probe of `build_torch`."""
    while True:
        for batch in loader:
            backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            if done():
                return


def train_torch(plan: Plan | None, options: argparse.Namespace, done: Done) -> None:
    """Train with PyTorch alone."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    model, data = network(options.size).to(device), Texts(options.size)
    loader: Any
    if plan:
        split = Split(plan)
        model, loader = split.wrap(model), split.loader(data, **COLLATED)
    else:
        torch.distributed.init_process_group("nccl" if gpu else "gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
        loader = DataLoader(data, options.bare, sampler=DistributedSampler(data), **COLLATED)

    def run(**batch: torch.Tensor) -> Any:
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
            return model(
                **{name: values.to(device, non_blocking=True) for name, values in batch.items()}
            )

    loop(run, torch.optim.AdamW(model.parameters(), 5e-5), loader, torch.Tensor.backward, done)


def step_as_probe(options: argparse.Namespace, done: Done) -> None:
    """Run the steps that a probe of this trainer times."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    peers = (f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",) * world
    device = f"GPU:{rank}" if torch.cuda.is_available() else "CPU:0"
    setup = WorkerSetup((device,), rank=rank, peers=peers if world > 1 else (), threads=1)
    workload = build(name_build(options.trainer), setup, {"size": options.size})
    workload.prepare((options.probe,) * world)
    while not done():
        workload.step()
        workload.synchronize()


TRAININGS: dict[str, Train] = {
    "huggingface": train_huggingface,
    "lightning": train_lightning,
    "accelerate": train_accelerate,
    "torch": train_torch,
    "sharded": train_sharded,
}


class Turns:
    """Sends the duration of each step and waits for a line before the next one."""

    def __init__(self) -> None:
        self._began = _clocks()

    def __call__(self) -> bool:
        send_message([now - then for now, then in zip(_clocks(), self._began, strict=True)])
        stop = sys.stdin.readline() == ""
        self._began = _clocks()
        return stop


def _clocks() -> tuple[float, float]:
    _synchronize_gpu()
    return time.perf_counter(), time.process_time()


class Clock:
    """Sends the speed of each block of steps, and reads the length of the next one.

    The first step after the pause counts for no block, because it refills memory and caches.
    Training ends when the pipe is closed.
    """

    def __init__(self) -> None:
        self._steps = WARM_UP // 2
        self._left = WARM_UP
        self._began, self._tokens = (0.0, 0.0), 0

    def __call__(self) -> bool:
        self._left -= 1
        if self._left == self._steps:
            self._began, self._tokens = _clocks(), trainer_models.collated_tokens
        return self._left == 0 and self._end_block()

    def _end_block(self) -> bool:
        """Send the block's speed; return True if it was the last block."""
        seconds, cpu = (now - then for now, then in zip(_clocks(), self._began, strict=True))
        tokens = trainer_models.collated_tokens - self._tokens
        rates = {"steps_per_second": self._steps / seconds, "tokens_per_second": tokens / seconds}
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # a probe on the same GPU needs the memory meanwhile
        send_message({"steps": self._steps, "cpu_seconds": cpu / self._steps, **rates})
        line = sys.stdin.readline()
        self._steps = int(line or 0)
        self._left = self._steps + 1
        return not line


def _synchronize_gpu() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def send_message(figures: Any) -> None:
    """Send a message to the parent."""
    sys.stdout.write(f"{MARK}{json.dumps(figures)}\n")
    sys.stdout.flush()


def hold(plan: Plan, options: argparse.Namespace) -> None:
    """Limit this process as in the plan: to a slice's cores or a GPU's memory limit."""
    share = plan.layout.active[options.place]
    if not torch.cuda.is_available():
        claim_device(torch.device("cpu"), share)
        return
    device = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(device)
    most = parse_limit(share.limit).memory_bytes if share.limit else None
    if most and not options.free:
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(most / whole, device)


def name_gpus(plan: Plan) -> Plan:
    """Return a made-up plan with the names of this process's GPUs."""
    named = zip(plan.layout.share, visible_gpus(), strict=True)
    shares = tuple(msgspec.structs.replace(share, device=device) for share, device in named)
    return msgspec.structs.replace(plan, layout=msgspec.structs.replace(plan.layout, share=shares))


def read_options(words: list[str]) -> argparse.Namespace:
    """Parse the options that the parent sends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trainer", choices=list(TRAININGS))
    parser.add_argument("--plan", required=True)
    parser.add_argument("--made-up", action="store_true", help="the plan is of no search")
    parser.add_argument(
        "--place", type=int, default=int(os.environ.get("RANK", 0)), help="this process's share"
    )
    parser.add_argument("--free", action="store_true", help="without the plan's limits of memory")
    parser.add_argument(
        "--bare", type=int, help="without the plan, with so many rows in each process"
    )
    parser.add_argument(
        "--probe", type=int, help="steps as a probe makes them, of so many rows in each process"
    )
    parser.add_argument("--size", default="small")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--texts", action="store_true", help="rows of unequal length")
    parser.add_argument(
        "--sampling", default="random", help="transformers' train_sampling_strategy"
    )
    parser.add_argument("--turns", action="store_true", help="a step for each line from the parent")
    return parser.parse_args(words)


def main() -> None:
    """Train until the parent closes the pipe or kills this process."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    send_message("ready")
    line = sys.stdin.readline()
    if not line:  # another training run of the comparison has failed
        return
    options = read_options(json.loads(line))
    plan = load_plan(options.plan)
    if options.made_up and torch.cuda.is_available():
        plan = name_gpus(plan)
    hold(plan, options)
    done = Turns() if options.turns else Clock()
    if options.probe:
        step_as_probe(options, done)
    else:
        TRAININGS[options.trainer](None if options.bare else plan, options, done)
    sys.stdout.flush()
    os._exit(0)  # destroying the process group would wait for the other ranks


if __name__ == "__main__":
    main()
