"""Training runs that really run out of memory, or one of whose ranks exits.

  python -m benchmarks.gpu_exchange [caps] [neighbour] [kill] [interrupt] [overflow] [--ranks 2]
  [--json FILE]

`caps`: two ranks on one GPU over gloo in float64, the second with less and less memory, compared
with one process. `neighbour`: another program allocates most of the last rank's GPU during
training. `kill`, `interrupt`: under torchrun, one rank is killed, or Ctrl-C is pressed, while
another retries its pass and further ones wait for it. `overflow`: one of two ranks overflows in
float16, and both skip that step. benchmarks/gpu_steps.py compares step times with
DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_steps import GPU, LENGTH, WORDS, Decoder, start
from evener.torch import Split
from tests.support.torch_start import free_port, rank_environment

CAPS = (1.8, 1.6, 1.45)  # GiB, memory caps of the second rank
SHARES = (4096, 2048) if GPU else (64, 32)
MODULE = "benchmarks.gpu_exchange"
PATIENCE_SECONDS = 120.0  # time limit for torchrun to exit after a rank has gone


def train_capped(cap: float) -> dict[str, Any]:
    """Train for twelve steps; rank 0 also trains alone and compares the weights."""
    width = 2048 if GPU else 64
    split = Split(ratios=SHARES, global_batch=sum(SHARES), backend="gloo")
    if split.rank and split.device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(
            cap * 2**30 / torch.cuda.get_device_properties(0).total_memory
        )
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2 * sum(SHARES), width, generator=generator, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(
        rows, torch.randint(0, 16, (len(rows),), generator=generator)
    )
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
        "ooms": split.reporter.retreats,
        "slowest": max(times),
        "last": times[-1],
    }
    del batch  # the rest is trained without the split
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
    layers = [
        each for _ in range(8) for each in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
    ]
    made: nn.Module = nn.Sequential(*layers, nn.Linear(width, 16)).double()
    return made


def meet_neighbour(_: float) -> dict[str, Any]:
    """Train while another program allocates most of the last rank's GPU.

    With one rank, 12 GiB are left from step 8 on. With two ranks, 2 GiB are left from step 150 to
    step 450, and shares follow the ranks' compute times (own work).
    """
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    rows, steps, comes, leaves = (1024, 24, 8, 24) if alone else (256, 1050, 150, 450)
    split = Split(ratios=[1] if alone else [1, 1], global_batch=rows, rebalance=not alone)
    model, loss = split.wrap(Decoder(512, 8).to(torch.bfloat16)), nn.CrossEntropyLoss()
    optimizer, times, shares, works = torch.optim.AdamW(model.parameters(), 1e-4), [], [], []
    other = Neighbour() if split.rank == split.world - 1 else None
    words = torch.utils.data.TensorDataset(torch.randint(0, WORDS, (steps * rows, LENGTH)))
    for number, batch in enumerate(split.loader(words)):
        if number == comes and other is not None:
            other.take(12 if alone else 2)
        if number == leaves and other is not None:
            other.leave()
        started = time.perf_counter()
        split.step(
            batch, lambda part: loss(model(part.batch[0]).flatten(0, 1), part.batch[0].flatten())
        )
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        shares.append(split.rows)
        if number % 10 == 9:
            works.append((number, split.rows, round(1e3 * split.timer.medians()[0].own_work_s, 1)))
    if other is not None:
        other.leave()
    changes = [step for step in range(1, len(shares)) if shares[step] != shares[step - 1]]
    marks = sorted(
        {comes - 1, comes, comes + 1, comes + 60, leaves - 1, leaves + 60, steps - 1}
        & set(range(steps))
    )
    return {
        "rank": split.rank,
        "ooms": split.reporter.retreats,
        "rows": split.passes.recovery.limit.most,
        "slowest after it came, ms": 1e3 * max(times[comes:leaves]),
        "ms": {mark: 1e3 * statistics.median(times[max(0, mark - 5) : mark + 1]) for mark in marks},
        "shares": {mark: shares[mark] for mark in marks},
        "spans": [
            (start, shares[start], round(1e3 * statistics.median(times[start:end]), 1))
            for start, end in pairwise([0, *changes, len(times)])
        ],
        "own": works,
    }


class Neighbour:
    """A process that allocates memory of this rank's GPU on request.

    It is started in advance, because its start takes seconds.
    """

    def __init__(self) -> None:
        code = (
            f"import torch; torch.cuda.set_device({torch.cuda.current_device()}); left = "
            f"int(input());"
            " free, _ = torch.cuda.mem_get_info(); held = torch.empty(free - left, "
            "dtype=torch.uint8, device='cuda');"
            " print(len(held), flush=True); input()"
        )
        command = [sys.executable, "-c", code]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def take(self, left: float) -> None:
        """Allocate all free memory but `left` GiB."""
        gc.collect()
        torch.cuda.empty_cache()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{int(left * 2**30)}\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def leave(self) -> None:
        """Kill the process, which frees its memory."""
        self._process.kill()
        self._process.wait()


def overflow_on_one(_: float) -> dict[str, Any]:
    """Train for eight steps with a GradScaler; the last rank's loss overflows in the fourth."""
    split = Split(ratios=[3, 1], global_batch=32)
    model, loss = split.wrap(Decoder(64, 2)), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler(split.device.type, init_scale=1024.0)
    words = torch.utils.data.TensorDataset(torch.randint(0, WORDS, (8 * 32, LENGTH)))
    sums, scales = [], []
    for step, (rows,) in enumerate(split.loader(words, shuffle=False)):
        kind = torch.float16 if GPU else torch.bfloat16
        with torch.autocast(split.device.type, kind):
            made = loss(model(rows).flatten(0, 1), rows.flatten())
        over = step == 3 and split.rank == split.world - 1
        optimizer.zero_grad()
        scaler.scale(made * (float("inf") if over else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        sums.append(float(sum(each.detach().double().sum() for each in model.parameters())))
        scales.append(scaler.get_scale())
    return {
        "rank": split.rank,
        "left out": [i for i in range(1, 8) if sums[i] == sums[i - 1]],
        "sums": sums,
        "scales": scales,
    }


def retry_for_ever(_: float) -> None:
    """Let the second rank retry its pass forever; the first kills itself for "kill"."""
    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])
    split = Split(ratios=[1] * world, global_batch=8 * world)
    model = split.wrap(nn.Linear(8, 8).double())
    data = torch.utils.data.TensorDataset(torch.randn(32 * world, 8, dtype=torch.float64))
    mark, dies = Path(os.environ["BENCHMARK_MARK"]), os.environ["BENCHMARK_ENDS"] == "kill"

    def compute(part: Any) -> torch.Tensor:
        made: torch.Tensor = model(part.batch[0]).square().mean()
        if made.requires_grad and split.rank == 1:
            mark.touch()  # it runs out of memory in every pass from now on
            time.sleep(0.5)
            raise torch.OutOfMemoryError("CUDA out of memory (injected).")
        return made

    for batch in split.loader(data):
        while dies and split.rank == 0 and not mark.exists():
            time.sleep(0.01)
        if dies and split.rank == 0:
            time.sleep(1.0)
            mark.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        split.step(batch, compute)


def end_beside_a_retry(how: str, world: int) -> dict[str, Any]:
    """Kill a rank, or press Ctrl-C, while the second rank retries; return how torchrun exits.

    The other ranks of `world` wait in the exchange of gradients.
    """
    with tempfile.TemporaryDirectory() as folder:
        mark, log = Path(folder, "mark"), Path(folder, "log")
        more = {"BENCHMARK_MARK": str(mark), "BENCHMARK_ENDS": how}
        words = [
            "--nproc-per-node",
            str(world),
            "--master-port",
            str(free_port()),
            "-m",
            MODULE,
            "--rank",
            "retry",
        ]
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        environment = {**os.environ, **rank_environment(GPU), **more}
        with log.open("w") as lines:
            launcher = subprocess.Popen(
                command, env=environment, stderr=lines, stdout=lines, start_new_session=True
            )
        try:
            if how == "interrupt":
                while not mark.exists() and launcher.poll() is None:
                    time.sleep(0.05)
                time.sleep(1.0)
                mark.write_text(str(time.time()))
                os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does
            code: int | None = launcher.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.time() - float(mark.read_text() or "nan")
        left = subprocess.run(
            ["pgrep", "-g", str(launcher.pid)], capture_output=True, text=True, check=False
        ).stdout
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        said = [line for line in log.read_text().splitlines() if _is_message(line)]
    return {
        "how": how,
        "exit code": code,
        "seconds": round(seconds, 2),
        "left": left.split(),
        "said": said[-6:],
    }


def _is_message(line: str) -> bool:
    """True if a line of a rank's output is a message, and not a line of a traceback's code."""
    return line.startswith("evener: ") or ("Error: " in line and "File " not in line)


RANKS: dict[str, Callable[[float], Any]] = {
    "caps": train_capped,
    "neighbour": meet_neighbour,
    "overflow": overflow_on_one,
    "retry": retry_for_ever,
}


def run(name: str, world: int, *words: str) -> list[Any]:
    """Start the ranks of a case and return the result of each."""
    one_gpu = {"CUDA_VISIBLE_DEVICES": "0"} if GPU and name == "caps" else {}
    ranks = start(MODULE, world, "--rank", name, *words, more=one_gpu)
    ends = [each.communicate()[0] for each in ranks]
    assert not any(each.returncode for each in ranks), name
    return [json.loads(end.splitlines()[-1]) for end in ends]


def main() -> None:
    """Run the cases and print each result as soon as it is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=["caps", "neighbour"])
    parser.add_argument(
        "--ranks", type=int, default=1, help="of `neighbour`, `kill` and `interrupt`, a GPU each"
    )
    parser.add_argument(
        "--caps", type=float, nargs="+", default=list(CAPS), help="GiB of the second rank"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--cap", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        print(json.dumps(RANKS[options.rank](options.cap)))
        return
    found: dict[str, Any] = {}
    for name in options.what:
        if name == "caps":
            found[name] = [run("caps", 2, "--cap", str(cap)) for cap in options.caps]
        elif name == "neighbour":
            found[name] = run("neighbour", options.ranks)
        elif name == "overflow":
            found[name] = run("overflow", 2)
            assert len({json.dumps({**each, "rank": 0}) for each in found[name]}) == 1, (
                "the ranks differ"
            )
        else:
            found[name] = end_beside_a_retry(name, max(2, options.ranks))
        print(json.dumps({name: found[name]}), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
