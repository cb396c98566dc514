"""Steps with evener's exchange beside DistributedDataParallel's, and trainings that really run out of memory.

    python -m benchmarks.gpu_exchange [steps] [caps] [neighbour] [kill] [--ranks 2] [--json FILE]

`steps`: decoder-only models in bfloat16 over NCCL, a GPU for each rank (one unless `--ranks` says more), or two ranks
on CPUs over gloo where there is no GPU; the ways of a model take turns, and each gives the median of its turns: the
wall time of a step, this process's CPU time, and the time of its kernels on the GPU. `--models` takes some of them.
`caps`: two ranks on one GPU over gloo in float64, the second with less and less memory, beside one process.
`neighbour`: another program takes most of the last rank's GPU in the middle of a training. `kill`: a rank dies while
another computes its pass again.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evener.torch_split import Split
from evener.torch_split.wrapped import watch, wrap_module
from tests.support.torch_start import free_port, rank_environment

MODELS = ((512, 8, 128), (512, 8, 16), (128, 24, 8), (1024, 24, 16), (768, 12, 32))  # width, layers, rows
SMALL = ((64, 4, 8), (128, 2, 16))
LENGTH, WORDS = (256, 4096) if torch.cuda.is_available() else (16, 64)
TURNS, STEPS = 8, 20
WAYS = ("alone", "ddp", "ddp with a hook", "exchange")
CAPS = (1.8, 1.6, 1.45)  # GiB of the second rank
SHARES = (4096, 2048) if torch.cuda.is_available() else (64, 32)


class Decoder(nn.Module):  # type: ignore[misc]  # torch isn't followed
    """A small decoder-only model."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, 0.0, "gelu", batch_first=True)
            for _ in range(layers)
        )
        self.last = nn.Linear(width, WORDS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(rows.shape[1], rows.device, self.last.weight.dtype)
        hidden = self.words(rows)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        made: torch.Tensor = self.last(hidden)
        return made


def make_step(way: str, size: tuple[int, int, int], device: torch.device) -> Callable[[], None]:
    """A training step as users write it."""
    width, layers, rows = size
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    model: Any = Decoder(width, layers).to(device, kind)
    words = torch.randint(0, WORDS, (rows, LENGTH), device=device)
    if way.startswith("ddp"):
        devices = [device] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    if way == "ddp with a hook":
        model.register_comm_hook(None, _weigh)
    if way == "exchange":
        model = wrap_module(model, device, {})
        watch(model, device, lambda *_: None)
        model.exchange.weigh(0.5)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=device.type == "cuda")

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
        optimizer.step()

    return step


def _weigh(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    return dist.all_reduce(bucket.buffer().mul_(0.5), async_op=True).get_future().then(lambda done: done.value()[0])


def time_steps(device: torch.device, chosen: list[int]) -> list[dict[str, Any]]:
    """Milliseconds of a step and peak memory of each way, in turns."""
    found = []
    gpu = device.type == "cuda"
    for size in [MODELS[i] for i in chosen] if gpu else SMALL:
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        host: dict[str, list[float]] = {way: [] for way in WAYS}
        peaks: dict[str, float] = {}
        kernels: dict[str, float] = {}
        for turn in range(TURNS):
            for way in WAYS[:: 1 if turn % 2 else -1]:
                gc.collect()
                if gpu:
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                step = make_step(way, size, device)
                wall, used = _time(step, gpu)
                times[way].append(wall)
                host[way].append(used)
                if gpu and way not in kernels:
                    kernels[way] = _time_kernels(step)
                peaks[way] = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0
                del step
        middle = {way: statistics.median(each) for way, each in times.items()}
        ratios = [own / other for own, other in zip(times["exchange"], times["ddp"], strict=True)]
        cpu = {way: statistics.median(each) for way, each in host.items()}
        spread = sorted(ratios)[len(ratios) // 4 :: max(1, len(ratios) // 2)][:2]
        row = {"size": size, "ms": middle, "cpu ms": cpu, "kernels ms": kernels, "gib": peaks}
        found.append({**row, "ratio": statistics.median(ratios), "middle half": spread})
        if dist.get_rank() == 0:
            shown = ", ".join(
                f"{way} {middle[way]:.2f} ms (CPU {cpu[way]:.2f}, GPU {kernels.get(way, 0):.2f}) {peaks[way]:.2f} GiB"
                for way in WAYS
            )
            print(f"{size}: {shown}; exchange / ddp {found[-1]['ratio']:.3f} {spread}", file=sys.stderr, flush=True)
    return found


def _time(step: Callable[[], None], gpu: bool) -> tuple[float, float]:
    """Milliseconds of a step, and of this process's CPUs in it."""
    for _ in range(6):
        step()
    if gpu:
        torch.cuda.synchronize()
    started, cpu = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        step()
    cpu = time.process_time() - cpu  # before the wait, which spins
    if gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / STEPS * 1e3, cpu / STEPS * 1e3


def _time_kernels(step: Callable[[], None]) -> float:
    """Milliseconds of a step's kernels on the GPU, added up."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    return float(sum(each.device_time_total for each in seen.events()) / 3e3)


def train_capped(cap: float) -> dict[str, Any]:
    """Twelve steps of this rank; the first one also trains alone, and compares the weights."""
    width = 2048 if torch.cuda.is_available() else 64
    split = Split(ratios=SHARES, global_batch=sum(SHARES), backend="gloo")
    if split.rank and split.device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(cap * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2 * sum(SHARES), width, generator=generator, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(rows, torch.randint(0, 16, (len(rows),), generator=generator))
    net = _make_net(width).to(split.device)
    model, loss = split.wrap(net), nn.CrossEntropyLoss()
    optimizer, times = torch.optim.AdamW(model.parameters(), 1e-3), []
    for _ in range(6):
        for batch in split.loader(data, shuffle=False, prefetch=0):
            started = time.perf_counter()
            split.step(batch, lambda part: loss(model(part.batch[0]), part.batch[1]))
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - started)
    found = {
        "rank": split.rank,
        "cap": cap,
        "ooms": split._planned.reporter.retreats,
        "slowest": max(times),
        "last": times[-1],
    }
    del batch  # what follows is no training of the split's
    if split.rank == 0:
        alone = _make_net(width).to(split.device)
        optimizer = torch.optim.AdamW(alone.parameters(), 1e-3)
        for first in [0, sum(SHARES)] * 6:
            chunk = sum(SHARES) // 6
            for start in range(first, first + sum(SHARES), chunk):
                own = [each[start : start + chunk].to(split.device) for each in data.tensors]
                (loss(alone(own[0]), own[1]) * (chunk / sum(SHARES))).backward()
            optimizer.step()
            optimizer.zero_grad()
        pairs = zip(net.parameters(), alone.parameters(), strict=True)
        found["difference"] = max(float((mine - its).detach().abs().max()) for mine, its in pairs)
    return found


def _make_net(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [each for _ in range(8) for each in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))]
    made: nn.Module = nn.Sequential(*layers, nn.Linear(width, 16)).double()
    return made


def meet_neighbour(_: float) -> dict[str, Any]:
    """A program takes most of the last rank's GPU in the middle of a training; on two GPUs it also leaves again.

    One rank: 12 GiB are left to it from step 8 on. Two: 4 GiB from step 200 to step 600, and shares follow own work.
    """
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    rows, steps, comes, leaves = (1024, 24, 8, 24) if alone else (512, 1400, 200, 600)
    split = Split(ratios=[1] if alone else [1, 1], global_batch=rows, rebalance=not alone)
    model, loss = split.wrap(Decoder(512, 8).to(torch.bfloat16)), nn.CrossEntropyLoss()
    optimizer, times, shares, other = torch.optim.AdamW(model.parameters(), 1e-4), [], [], None
    words = torch.utils.data.TensorDataset(torch.randint(0, WORDS, (steps * rows, LENGTH)))
    for number, batch in enumerate(split.loader(words)):
        if number == comes and split.rank == split.world - 1:
            other = take_memory(12 if alone else 4)
        if number == leaves and other is not None:
            other.kill()
            other.wait()
        started = time.perf_counter()
        split.step(batch, lambda part: loss(model(part.batch[0]).flatten(0, 1), part.batch[0].flatten()))
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        shares.append(split.shares[split.rank])
    if other is not None:
        other.kill()
    marks = sorted({comes - 1, comes, comes + 1, comes + 60, leaves - 1, leaves + 60, steps - 1} & set(range(steps)))
    return {
        "rank": split.rank,
        "ooms": split._planned.reporter.retreats,
        "rows": split._planned.passes.limit.most,
        "slowest after it came, ms": 1e3 * max(times[comes:leaves]),
        "ms": {mark: 1e3 * statistics.median(times[max(0, mark - 5) : mark + 1]) for mark in marks},
        "shares": {mark: shares[mark] for mark in marks},
    }


def take_memory(left: float) -> subprocess.Popen[str]:
    """A process that holds all but `left` GiB of what is free on this rank's GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    code = (
        f"import torch; torch.cuda.set_device({torch.cuda.current_device()}); free, _ = torch.cuda.mem_get_info();"
        f" held = torch.empty(free - {int(left * 2**30)}, dtype=torch.uint8, device='cuda');"
        " print(len(held), flush=True); input()"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    other.stdout.readline()
    return other


def kill_beside_a_retry(_: float) -> dict[str, Any]:
    """The second rank computes its pass again and again; the first one dies meanwhile: how long until it ends."""
    split = Split(ratios=[1, 1], global_batch=16)
    model = split.wrap(nn.Linear(8, 8).double())
    data = torch.utils.data.TensorDataset(torch.randn(64, 8, dtype=torch.float64))
    started = time.monotonic()

    def compute(part: Any) -> torch.Tensor:
        made: torch.Tensor = model(part.batch[0]).square().mean()
        if split.rank == 0 and made.requires_grad:
            os._exit(0)
        if split.rank == 1 and part.rows > 1 and made.requires_grad:
            time.sleep(0.5)
            raise torch.OutOfMemoryError("CUDA out of memory (injected).")
        return made

    try:
        for batch in split.loader(data):
            split.step(batch, compute)
            torch.cuda.synchronize()
    except Exception as error:  # whichever says it: NCCL's watchdog, the store or gloo
        return {"seconds": time.monotonic() - started, "error": f"{type(error).__name__}: {str(error)[:200]}"}
    return {"seconds": time.monotonic() - started, "error": ""}


RANKS: dict[str, Callable[[float], Any]] = {
    "caps": train_capped,
    "neighbour": meet_neighbour,
    "kill": kill_beside_a_retry,
}


def start(name: str, world: int, *more: str) -> list[Any]:
    """What each rank found."""
    port, ranks = free_port(), []
    for rank in range(world):
        place = {"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}
        environment = {**os.environ, **rank_environment(torch.cuda.is_available()), "MASTER_PORT": str(port), **place}
        if torch.cuda.is_available() and name == "caps":
            environment["CUDA_VISIBLE_DEVICES"] = "0"
        command = [sys.executable, "-m", "benchmarks.gpu_exchange", "--rank", name, *more]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    ends = [each.communicate()[0] for each in ranks]
    codes = [each.returncode for each in ranks]
    assert name == "kill" or not any(codes), (name, codes)
    return [json.loads(end.splitlines()[-1]) for end in ends if end] + [{"exit codes": codes}]


def run_steps(chosen: list[int]) -> list[dict[str, Any]]:
    """Steps of one rank in a group of its own or with others, on its GPU or a CPU."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("RANK", "0")
        os.environ.setdefault("WORLD_SIZE", "1")
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    return time_steps(device, chosen)


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["steps", "caps", "neighbour"])
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that `steps` takes")
    parser.add_argument("--models", type=int, nargs="+", default=list(range(len(MODELS))), help="their numbers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--cap", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        print(json.dumps(run_steps(options.models) if options.rank == "steps" else RANKS[options.rank](options.cap)))
        return
    found: dict[str, Any] = {}
    if "steps" in options.what:
        models = map(str, options.models)
        found["steps"] = start("steps", options.ranks if torch.cuda.is_available() else 2, "--models", *models)[0]
    if "caps" in options.what:
        found["caps"] = []
        for cap in CAPS:
            found["caps"].append(start("caps", 2, "--cap", str(cap)))
            print(found["caps"][-1], flush=True)
    if "neighbour" in options.what and torch.cuda.is_available():
        found["neighbour"] = start("neighbour", options.ranks)
        print(found["neighbour"], flush=True)
    if "kill" in options.what:
        found["kill"] = start("kill", 2)
        print(found["kill"], flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
