"""Compare step times of evener's gradient exchange with DistributedDataParallel.

  python -m benchmarks.gpu_steps [--ranks 2] [--models 0 5] [--passes 2] [--float32]
  [--last-percent 60] [--profile DIR] [--json FILE]

The models are decoder-only, over NCCL with one GPU per rank, or on two CPU ranks over gloo if there
is no GPU. The last model is transformers' Llama with 100 M parameters in float32 under autocast;
the others are in bfloat16. The variants of a model run in the same processes and take turns of a
few steps; each round builds them anew. The result is the median ratio of neighbouring turns,
because a machine's own speed changes from second to second. Each variant also has its CPU time per
step and its peak memory, and with `--profile` the time of its GPU kernels. With `--last-percent`,
an MPS daemon gives the last rank that percentage of its GPU's multiprocessors.
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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu_bench import mps_daemon
from evener.torch.step.wrapped import wrap_module
from tests.support.torch_start import free_port, rank_environment

GPU = torch.cuda.is_available()
Size = tuple[int, int, int]
LLAMA = 0  # stands for a width
MODELS: tuple[Size, ...] = (  # width, layers, rows
    (512, 8, 128),
    (512, 8, 16),
    (128, 24, 8),
    (1024, 24, 16),
    (768, 12, 32),
    (LLAMA, 12, 32),
)
SMALL: tuple[Size, ...] = ((64, 4, 8), (128, 2, 16), (16, 24, 1))
LENGTH, WORDS = (256, 4096) if GPU else (16, 64)
WAYS = ("alone", "ddp", "ddp with a hook", "exchange")
WARM_UP, PROFILED = 8, 4  # steps: after a variant is built, and in a profile


class Decoder(nn.Module):  # type: ignore[misc]  # torch isn't followed
    """A small decoder-only model."""

    def __init__(self, width: int, layers: int, words: int = WORDS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, max(1, width // 64), 4 * width, 0.0, "gelu", batch_first=True
            )
            for _ in range(layers)
        )
        self.last = nn.Linear(width, words)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            rows.shape[1], rows.device, self.last.weight.dtype
        )
        hidden = self.words(rows)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        made: torch.Tensor = self.last(hidden)
        return made


class Llama(nn.Module):  # type: ignore[misc]
    """A Llama that maps words to logits, like the other models."""

    def __init__(self) -> None:
        super().__init__()
        from benchmarks.trainer_models import network

        self.model = network("large")

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            made: torch.Tensor = self.model(input_ids=rows).logits
        return made


class Variant:
    """A model with an optimizer and one of the variants of gradient synchronization."""

    def __init__(
        self, name: str, size: Size, device: torch.device, options: argparse.Namespace
    ) -> None:
        self._held = torch.cuda.memory_allocated() if GPU else 0
        width, layers, rows = size
        plain = options.float32 or not GPU or width == LLAMA
        model: Any = Llama() if width == LLAMA else Decoder(width, layers)
        model = model.to(device, torch.float32 if plain else torch.bfloat16)
        self._words = torch.randint(0, WORDS, (rows, LENGTH), device=device).chunk(options.passes)
        self._model = self._wrap(name, model, device)
        self._optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=GPU)
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(WARM_UP):
            self.step()
        self.gib = (torch.cuda.max_memory_allocated() - self._held) / 2**30 if GPU else 0.0
        self.wall: list[float] = []
        self.cpu: list[float] = []

    @staticmethod
    def _wrap(name: str, model: Any, device: torch.device) -> Any:
        if name.startswith("ddp"):
            model = DistributedDataParallel(
                model, device_ids=[device] if GPU else None, gradient_as_bucket_view=True
            )
        if name == "ddp with a hook":
            model.register_comm_hook(None, _weigh)
        if name == "exchange":
            model = wrap_module(model, device)
            model.exchange.weigh(0.5)
        return model

    def step(self) -> None:
        """Run a training step as users write it."""
        self._optimizer.zero_grad()
        for number, rows in enumerate(self._words, 1):
            with self._unsynced() if number < len(self._words) else nullcontext():
                logits = self._model(rows).flatten(0, 1)
                (nn.functional.cross_entropy(logits, rows.flatten()) / len(self._words)).backward()
        self._optimizer.step()

    def _unsynced(self) -> AbstractContextManager[Any]:
        unsynced: AbstractContextManager[Any] = getattr(self._model, "no_sync", nullcontext)()
        return unsynced

    def take_turn(self, steps: int) -> None:
        """Time some steps: wall time and this process's CPU time per step in ms."""
        self.step()
        if GPU:
            torch.cuda.synchronize()
        started, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.step()
        cpu = time.process_time() - cpu  # read before the wait, which uses the CPU, too
        if GPU:
            torch.cuda.synchronize()
        self.wall.append((time.perf_counter() - started) / steps * 1e3)
        self.cpu.append(cpu / steps * 1e3)

    def profile(self) -> tuple[float, str]:
        """Return the GPU kernel time of a step in ms, and a table of the host's time."""
        kinds = torch.profiler.ProfilerActivity
        with torch.profiler.profile(
            activities=[kinds.CPU, kinds.CUDA] if GPU else [kinds.CPU]
        ) as seen:
            for _ in range(PROFILED):
                self.step()
            if GPU:
                torch.cuda.synchronize()
        kernels = sum(
            each.device_time_total
            for each in seen.events()
            if each.device_type.name == "CUDA" and not each.is_user_annotation
        )
        table = seen.key_averages().table(
            sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60
        )
        return float(kernels / PROFILED / 1e3), str(table)


def _weigh(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    return (
        dist.all_reduce(bucket.buffer().mul_(0.5), async_op=True)
        .get_future()
        .then(lambda done: done.value()[0])
    )


def measure(size: Size, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the variants of one model in turns."""
    every: list[dict[str, Variant]] = []
    profiles: dict[str, tuple[float, str]] = {}
    for _ in range(options.rounds):
        gc.collect()
        ways = {name: Variant(name, size, device, options) for name in options.ways}
        for turn in range(options.turns):
            for name in options.ways[:: 1 if turn % 2 else -1]:
                ways[name].take_turn(options.steps)
        for name, way in ways.items():
            if options.profile and name not in profiles:
                profiles[name] = way.profile()
            way._model = way._optimizer = None  # frees the memory; the times stay
        every.append(ways)
    if options.profile and dist.get_rank() == 0:
        options.profile.mkdir(parents=True, exist_ok=True)
        for name, (_, table) in profiles.items():
            words = "-".join(map(str, (*size, name))).replace(" ", "-")
            (options.profile / f"profile-{words}.txt").write_text(table)
    return {
        "size": size,
        "passes": options.passes,
        "float32": options.float32,
        "ms": {
            name: _median([each for ways in every for each in ways[name].wall])
            for name in options.ways
        },
        "cpu ms": {
            name: _median([each for ways in every for each in ways[name].cpu])
            for name in options.ways
        },
        "kernels ms": {name: round(kernels, 3) for name, (kernels, _) in profiles.items()},
        "gib": {name: round(max(ways[name].gib for ways in every), 2) for name in options.ways},
        "to ddp": {
            name: compare(every, name)
            for name in options.ways
            if name != "ddp" and "ddp" in options.ways
        },
    }


def compare(every: Sequence[dict[str, Variant]], name: str) -> dict[str, Any]:
    """Compare each turn with the DistributedDataParallel turn next to it.

    Returns the median ratio, the middle half of the ratios, the median of each round, and the
    median ratio of CPU times.
    """
    pairs = [
        [own / its for own, its in zip(ways[name].wall, ways["ddp"].wall, strict=True)]
        for ways in every
    ]
    used = [
        own / its
        for ways in every
        for own, its in zip(ways[name].cpu, ways["ddp"].cpu, strict=True)
    ]
    every_turn = [each for ratios in pairs for each in ratios]
    low, _, high = statistics.quantiles(every_turn * 2 if len(every_turn) < 2 else every_turn, n=4)
    rounds = [_median(ratios) for ratios in pairs]
    return {
        "wall": _median(every_turn),
        "middle half": (low, high),
        "rounds": rounds,
        "cpu": _median(used),
    }


def _median(figures: Sequence[float]) -> float:
    return round(statistics.median(figures), 4)


def print_row(row: dict[str, Any]) -> None:
    """Print one line for a model."""
    shown = ", ".join(
        f"{way} {wall:.2f} ms (CPU {row['cpu ms'][way]:.2f}), {row['gib'][way]} GiB"
        for way, wall in row["ms"].items()
    )
    ratios = ", ".join(
        f"{way} / ddp {each['wall']:.3f} [{each['middle half'][0]:.3f} to "
        f"{each['middle half'][1]:.3f}], rounds"
        f" {each['rounds']}, CPU {each['cpu']:.3f}"
        for way, each in row["to ddp"].items()
    )
    print(f"{row['size']}: {shown}; {ratios}", flush=True)


def run_rank(options: argparse.Namespace) -> None:
    """Run the steps of one rank; rank 0 prints and saves the results after each model."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank) if GPU else torch.device("cpu")
    if GPU:
        torch.cuda.set_device(device)
        os.environ.setdefault("RANK", "0")
        os.environ.setdefault("WORLD_SIZE", "1")
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    found = []
    for number in options.models:
        found.append(measure(MODELS[number] if GPU else SMALL[number], device, options))
        if dist.get_rank() == 0:
            print_row(found[-1])
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


def start(
    module: str,
    world: int,
    *words: str,
    more: dict[str, str] | None = None,
    of_last: dict[str, str] | None = None,
) -> list[subprocess.Popen[str]]:
    """Start the processes of a benchmark's ranks.

    `more` has environment variables for all ranks, and `of_last` for the last rank alone.
    """
    port, ranks = free_port(), []
    for rank in range(world):
        place = (
            {"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            if world > 1
            else {}
        )
        environment = {
            **os.environ,
            **rank_environment(GPU),
            "MASTER_PORT": str(port),
            **place,
            **(more or {}),
        }
        if rank == world - 1:
            environment |= of_last or {}
        command = [sys.executable, "-m", module, *words]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    return ranks


def main() -> None:
    """Start the ranks and show the output of rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=int, default=1 if GPU else 2, help="GPUs, or processes on CPUs"
    )
    parser.add_argument(
        "--models", type=int, nargs="+", default=list(range(len(MODELS if GPU else SMALL)))
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=2, help="each with new models")
    parser.add_argument("--turns", type=int, default=6, help="of each round")
    parser.add_argument(
        "--steps", type=int, default=16, help="of each turn; where the host is uneven, few"
    )
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--last-percent", type=int, default=100, help="of the last rank's GPU")
    parser.add_argument("--float32", action="store_true")
    parser.add_argument(
        "--profile", type=Path, help="a folder, for what host and GPU spend their time on"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options)
        return
    words = ("benchmarks.gpu_steps", options.ranks, *sys.argv[1:], "--rank")
    if options.last_percent == 100:
        sys.exit(show_first(start(*words)))
    percent = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(options.last_percent)}
    with tempfile.TemporaryDirectory() as folder, mps_daemon(Path(folder)) as variables:
        code = show_first(start(*words, more=variables, of_last=percent))
    sys.exit(code)


def show_first(ranks: list[subprocess.Popen[str]]) -> int:
    """Show the output of rank 0 until all ranks have ended; return 1 if one failed."""
    show: Callable[[str], Any] = sys.stdout.write
    for line in ranks[0].stdout or ():
        show(line)
        sys.stdout.flush()
    codes = [each.wait() for each in ranks]
    return int(any(codes))


if __name__ == "__main__":
    main()
