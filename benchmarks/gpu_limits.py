"""What limits trainings with one known cause, beside the truth: `python -m benchmarks.gpu_limits`.

    python -m benchmarks.gpu_limits [loader] [causes] [links] [--devices gpu] [--json FILE]

`loader`: of rows that take 2 ms each, the speed with rows at hand that a probe promises, beside a
training from memory; and the samples/s by the number of loader workers, beside a DataLoader by
hand. `causes`: the limits that are named for each training, on the first device. `links`: the
bandwidth between all devices, beside an all-reduce by hand. Without GPUs, on slices of the CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

from evener.balancer.probes.child_prober import ChildProber
from evener.balancer.probes.links import measure_links
from evener.balancer.request import Job, Request
from evener.balancer.result.training_limits import find_training_limits
from evener.balancer.search.layouts import LayoutOptions
from evener.balancer.search.report import SearchReport
from evener.balancer.types import Interval, Layout, Probe, Problem, Result, Timed, solo
from evener.devices.discover import discover
from evener.devices.types import Device
from evener.system.memory_files import make_memory_file
from evener.torch.stores import open_file_store
from evener.torch.sums.link import LARGE_BYTES, LARGE_SUMS, WARM_UP
from tests.support import limited_trainings

ROWS = 64  # of a step
TURNS = 5
SECONDS = 3.0
WORKERS = (0, 2, 4, 8)
MANY_LAUNCHES = (
    limited_trainings.HEAD
    + """
def build():
    model = plain_model(width=64, layers=300)
    return model, torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()

def training_data():
    return plain_data(width=64)
"""
)
CAUSES = {
    "slow rows": (limited_trainings.SLOW_ROWS, ROWS),
    "slow collate": (limited_trainings.SLOW_COLLATE, ROWS),
    "large optimizer": (limited_trainings.LARGE_OPTIMIZER, 8),
    "a model that sleeps": (limited_trainings.SLEEPING_MODEL, ROWS),
    "many launches": (MANY_LAUNCHES, 16),
    "plain": (limited_trainings.PLAIN, 2048),
    "deeper": (limited_trainings.DEEPER, 2048),
}


class SlowRows(Dataset[Any]):  # type: ignore[misc]  # torch is not followed
    """The rows of the slow loader, by hand."""

    def __len__(self) -> int:
        return 20_000

    def __getitem__(self, row: int) -> Any:
        time.sleep(0.002)
        return torch.randn(256), row % 10


def measure(
    code: str, devices: Sequence[Device], layouts: Sequence[Layout], **request: Any
) -> Iterator[Timed]:
    """Probes of these layouts of a training, one after the other, `TURNS` times."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(code)
        job = Job(Request(**request), tuple(devices), f"{script}:build", "torch")
        with closing(ChildProber(job)) as prober:
            for turn in range(TURNS):
                for layout in layouts:
                    probe = Probe(layout, "check", SECONDS, turn)
                    (seen,) = prober.measure((probe,), lambda _: None, threading.Event())
                    if isinstance(seen, Timed):
                        yield seen


def try_loader(devices: Sequence[Device]) -> dict[str, Any]:
    """Both promises about a slow loader, beside what came true."""
    one = devices[:1]
    layout = solo(1, 0, ROWS)
    promised = [
        seen.kept.step_seconds
        for seen in measure(limited_trainings.SLOW_ROWS, one, [layout])
        if seen.kept is not None
    ]
    true = [
        seen.step_seconds
        for seen in measure(limited_trainings.SLOW_ROWS, one, [layout], input="device")
    ]
    knobs = [Layout("solo", (ROWS,), knobs=(f"workers{count}",)) for count in WORKERS]
    rates: dict[str, list[float]] = {}
    for seen in measure(limited_trainings.SLOW_ROWS, one, knobs):
        rates.setdefault(seen.probe.layout.knobs[0], []).append(seen.samples_per_second)
    return {
        "ceiling_over_true": median(promised) / median(true),
        "evener": {name.removeprefix("workers"): median(each) for name, each in rates.items()},
        "by_hand": {count: _load_by_hand(count) for count in WORKERS},
    }


def _load_by_hand(workers: int) -> float:
    """Samples/s of a DataLoader alone, whose model takes no time beside it."""
    loader = DataLoader(SlowRows(), ROWS, shuffle=True, num_workers=workers)
    batches = iter(loader)
    for _ in range(2 * workers + 2):
        next(batches)
    steps = 30
    started = time.perf_counter()
    for _ in range(steps):
        next(batches)
    return steps * ROWS / (time.perf_counter() - started)


def name_causes(devices: Sequence[Device]) -> dict[str, Any]:
    """The limits named for each training, the largest first."""
    found = {}
    for name, (code, rows) in CAUSES.items():
        layout = solo(1, 0, rows)
        seen = list(measure(code, devices[:1], [layout]))
        rate = rows / median(one.step_seconds for one in seen)
        report = SearchReport(
            problem=Problem(1, (None,)),
            options=LayoutOptions(),
            chosen=Result(layout, Interval(rate, rate, rate), len(seen)),
            turns={layout: tuple(seen)},
        )
        limits = find_training_limits(report, seen, devices[:1])
        found[name] = [(each.kind.value, each.share, each.gain, each.by) for each in limits]
    return found


def try_links(devices: Sequence[Device]) -> dict[str, Any]:
    """The bandwidth between all devices, as evener measures it and by hand."""
    figures = measure_links(devices)
    own = next(one for one in reversed(figures) if one.way == "as it is")
    with mp.Manager() as manager:
        seconds = manager.dict()
        world = len(devices)
        mp.spawn(_sum_by_hand, (world, make_memory_file(), seconds), nprocs=world)
        slowest = max(seconds.values())
    size = LARGE_BYTES["cuda" if torch.cuda.is_available() else "cpu"]
    by_hand = 2 * (world - 1) / world * size / slowest
    rows = [(one.devices, one.way, one.outcome, one.bytes_per_second) for one in figures]
    return {"over_by_hand": own.bytes_per_second / by_hand, "by_hand": by_hand, "figures": rows}


def _sum_by_hand(rank: int, world: int, file: str, seconds: Any) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{rank}" if on_gpu else "cpu")
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=open_file_store(file), world_size=world, rank=rank)
    tensor = torch.zeros(LARGE_BYTES[device.type] // 4, device=device)
    taken = []
    for _ in range(WARM_UP + LARGE_SUMS):
        started = time.perf_counter()
        dist.all_reduce(tensor)
        if on_gpu:
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    seconds[rank] = median(taken[WARM_UP:])
    dist.destroy_process_group()


PARTS = {"loader": try_loader, "causes": name_causes, "links": try_links}


def main() -> None:
    """Run the parts that are named, or all, and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    devices = discover(given.devices).devices
    found = {}
    for name in given.parts or PARTS:
        found[name] = PARTS[name](devices)
        print(name, json.dumps(found[name], indent=1, default=str), flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    main()
