"""Compare the limits that evener names with the known causes.

  python -m benchmarks.gpu_limits [PART...] [--devices gpu]

`loader`: a data set whose rows take 2 ms each: the speed that a probe promises with rows in memory,
compared with training from memory; and the samples/s for several numbers of loader workers,
compared with a plain DataLoader. `causes`: the limits named for each training run. `gains`: the
same for limits with a remedy: the promised gain compared with the real one. `neighbour`: another
process computes on the first device. `exchange`: a split over two devices with slow transports.
`links`: the bandwidth between all devices, compared with a plain all-reduce. `faults`: a rank that
never joins the others, and one that gets a wrong sum: what is said of them, and after how long.
Without GPUs, CPU slices are used.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

from evener.balancer.diagnostics import describe_link
from evener.balancer.probes.child_prober import ChildProber
from evener.balancer.probes.links import TRANSPORTS, LinkMeasurement, measure_links
from evener.balancer.request import Job, Request
from evener.balancer.result.training_limits import find_training_limits
from evener.balancer.search.layouts import LayoutOptions
from evener.balancer.search.report import SearchReport
from evener.balancer.types import (
    Interval,
    KeptBatch,
    Layout,
    Probe,
    Problem,
    Result,
    Stage,
    Timed,
    layout_of,
    solo,
)
from evener.devices.discover import discover
from evener.devices.types import Device
from evener.system.memory_files import make_memory_file
from evener.torch.stores import open_file_store
from evener.torch.sums.link import LARGE_BYTES, LARGE_SUMS, WARM_UP
from evener.training.limits import TrainingLimit
from tests.support import limited_trainings

ROWS = 64  # rows per step
TURNS = 3
SECONDS = 1.5
WORKERS = (0, 2, 4, 8)
NAMED_SECONDS = 20.0  # longest time until a faulty link is named
CLOSE = 0.15  # largest relative error of a promise that counts as kept


class Case(NamedTuple):
    """A training script, its rows per step, and the limit to be named first; empty if none."""

    code: str
    rows: int
    first: str = ""
    micro: int = 0  # rows per pass


CAUSES = {
    "optimizer": Case(limited_trainings.MANY_WEIGHTS, 512, "optimizer"),
    "many launches": Case(limited_trainings.MANY_LAUNCHES, 16, "host_launches"),
    "little memory": Case(limited_trainings.LARGE_WEIGHTS, 64, "memory", micro=8),
    "convolutions, loader workers": Case(limited_trainings.CONVOLUTIONS, 256),
    "rows on the device": Case(limited_trainings.ROWS_ON_DEVICE, 2048),
    "transformer by Trainer": Case(limited_trainings.TRAINER, 64),
}
GAINS = ("little memory", "many launches", "optimizer")
NEIGHBOUR = """
import sys, torch
one = torch.randn(4096, 4096, device=sys.argv[1])
print("begun", flush=True)
while True:
    one @ one
    if sys.argv[1] != "cpu":
        torch.cuda.synchronize()
"""


class SlowRows(Dataset[Any]):  # type: ignore[misc]  # torch is not followed
    """The same slow rows for a plain DataLoader."""

    def __len__(self) -> int:
        return 20_000

    def __getitem__(self, row: int) -> Any:
        time.sleep(0.002)
        return torch.randn(256), row % 10


def measure(
    code: str,
    devices: Sequence[Device],
    layouts: Sequence[Layout],
    turns: int = TURNS,
    **request: Any,
) -> Iterator[Timed]:
    """Probe these layouts of a training script one after the other, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(code)
        job = Job(Request(**request), tuple(devices), f"{script}:build", "torch")
        with closing(ChildProber(job)) as prober:
            for turn in range(turns):
                for layout in layouts:
                    probe = Probe(layout, Stage.CHECK, SECONDS, turn)
                    (seen,) = prober.measure((probe,), lambda _: None, threading.Event())
                    if isinstance(seen, Timed):
                        yield seen
                    else:
                        print(f"{layout}: {seen}", file=sys.stderr)


def find(seen: Sequence[Timed], layout: Layout, devices: Sequence[Device]) -> list[TrainingLimit]:
    """Return the limits that these measurements show for a layout."""
    rate = rate_of(seen, layout)
    report = SearchReport(
        problem=Problem(len(devices), (None,) * len(devices)),
        options=LayoutOptions(),
        chosen=Result(layout, Interval(rate, rate, rate), len(seen)),
        turns={layout: tuple(one for one in seen if one.probe.layout == layout)},
    )
    return list(find_training_limits(report, seen, devices))


def rate_of(seen: Sequence[Timed], layout: Layout) -> float:
    """Return the median samples/s of a layout."""
    found = [one.samples_per_second for one in seen if one.probe.layout == layout]
    return median(found)


def describe(limit: TrainingLimit) -> str:
    """Describe a limit, such as "input 93 % of a step, +1200 % (1100 to 1300)"."""
    low, high = 100 * limit.gain_low, 100 * limit.gain_high
    by = f" [{limit.by}]" if limit.by else ""
    kind, share = limit.kind.value, 100 * limit.share
    return (
        f"{kind} {share:.0f} % of a step, +{100 * limit.gain:.0f} % ({low:.0f} to {high:.0f}){by}"
    )


def print_cause(name: str, first: str, limits: Sequence[TrainingLimit]) -> None:
    """Print whether the limit named first is the cause."""
    named = limits[0].kind.value if limits else ""
    said = "; ".join(map(describe, limits)) or "nothing over 5 %"
    print(f"{'ok  ' if named == first else 'MISS'} {name}: {said}", flush=True)


def print_gain(name: str, limit: TrainingLimit | None, true: float) -> None:
    """Print a promised gain next to the true one."""
    if limit is None:
        print(f"MISS {name}: not named; the remedy gave {100 * true:+.0f} %", flush=True)
        return
    off = (1 + limit.gain) / (1 + true) - 1
    inside = limit.gain_low <= true <= limit.gain_high
    half = (limit.gain_high - limit.gain_low) / 2 / (1 + limit.gain)
    print(
        f"{'ok  ' if abs(off) <= CLOSE else 'MISS'} {name}: {describe(limit)}; the remedy gave "
        f"{100 * true:+.0f} %: off by {100 * off:+.1f} %, interval ± {100 * half:.0f} %, "
        f"{'holds' if inside else 'does not hold'}",
        flush=True,
    )


def try_loader(devices: Sequence[Device]) -> None:
    """Check both promises about a slow loader against real speeds."""
    one = devices[:1]
    layout = solo(1, 0, ROWS)
    seen: list[Timed] = []
    true: list[Timed] = []
    for _ in range(3):  # in turns, because a host's speed changes within seconds
        seen += measure(limited_trainings.SLOW_ROWS, one, [layout], turns=1)
        true += measure(limited_trainings.SLOW_ROWS, one, [layout], turns=2, input="device")
    limits = find(seen, layout, one)
    print_cause("slow.py", "input", limits)
    print(f"a step with rows at hand: promised {_list_steps(one.kept for one in seen)} ms, "
          f"measured {_list_steps(true)} ms", flush=True)  # fmt: skip
    gain = rate_of(true, layout) / rate_of(seen, layout) - 1
    print_gain("slow.py, rows at hand", limits[0] if limits else None, gain)
    knobs = [Layout("solo", (ROWS,), knobs=(f"workers{count}",)) for count in WORKERS]
    tried = list(measure(limited_trainings.SLOW_ROWS, one, knobs, turns=2))
    evener = {count: rate_of(tried, each) for count, each in zip(WORKERS, knobs, strict=True)}
    by_hand = {count: _load_by_hand(count) for count in WORKERS}
    best = max(evener, key=evener.__getitem__)
    part = by_hand[best] / max(by_hand.values())
    print(f"--try workers: {_round(evener)}, by hand {_round(by_hand)}; best {best}: {part:.3f} of")
    print(f"the best by hand; evener's figure of it {evener[best] / by_hand[best]:.3f} of by hand")


def _list_steps(timed: Iterable[Timed | KeptBatch | None]) -> str:
    return ", ".join(f"{1e3 * each.step_seconds:.2f}" for each in timed if each is not None)


def _round(rates: dict[int, float]) -> dict[int, int]:
    return {count: round(each) for count, each in rates.items()}


def _load_by_hand(workers: int) -> float:
    """Return the samples/s of a DataLoader without a model."""
    loader = DataLoader(SlowRows(), ROWS, shuffle=True, num_workers=workers)
    batches = iter(loader)
    for _ in range(2 * workers + 2):
        next(batches)
    steps = 20 if workers else 10
    started = time.perf_counter()
    for _ in range(steps):
        next(batches)
    return steps * ROWS / (time.perf_counter() - started)


def name_causes(devices: Sequence[Device]) -> None:
    """Print the limits named for each training script, the largest first.

    Scripts run at the same time, each on its own device.
    """
    cases = [(name, case) for name, case in CAUSES.items() if name not in GAINS]
    threads = [
        threading.Thread(target=_name_some, args=(device, cases[place :: len(devices)]))
        for place, device in enumerate(devices)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _name_some(device: Device, cases: Sequence[tuple[str, Case]]) -> None:
    for name, case in cases:
        layout = solo(1, 0, case.rows, case.micro)
        alone = [solo(1, 0, case.micro), solo(1, 0, case.micro // 2)] if case.micro else []
        seen = list(measure(case.code, [device], [*alone, layout], turns=2))
        if any(one.probe.layout == layout for one in seen):
            print_cause(name, case.first, find(seen, layout, [device]))


def compare_gains(devices: Sequence[Device]) -> None:
    """Compare the promised gain of each remedy with the real one."""
    one = devices[:1]
    for name in GAINS:
        case = CAUSES[name]
        now, other = solo(1, 0, case.rows, case.micro), solo(1, 0, 2 * case.rows)
        few, remedy = [], "twice the batch"
        if case.micro:
            other, remedy = solo(1, 0, case.rows), "one pass"
            few = [solo(1, 0, case.micro), solo(1, 0, case.micro // 2)]
        seen = list(measure(case.code, one, few, turns=1))
        seen += measure(case.code, one, [now, other], turns=2)
        true = rate_of(seen, other) / rate_of(seen, now) - 1
        limits = find([each for each in seen if each.probe.layout != other], now, one)
        print_cause(name, case.first, limits)
        print_gain(f"{name}, {remedy}", _pick(limits, case.first), true)


def _pick(limits: Sequence[TrainingLimit], kind: str) -> TrainingLimit | None:
    return next((limit for limit in limits if limit.kind.value == kind), None)


def try_neighbour(devices: Sequence[Device]) -> None:
    """Train next to another process that computes on the same device, and alone."""
    case = CAUSES["rows on the device"]
    layout, one = solo(1, 0, case.rows), devices[:1]
    alone = list(measure(case.code, one, [layout], turns=2))
    place = "cpu" if one[0].on_cpu else f"cuda:{one[0].index}"
    other = subprocess.Popen([sys.executable, "-c", NEIGHBOUR, place], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        beside = list(measure(case.code, one, [layout], turns=2))
    finally:
        other.kill()
        other.wait()
    limits = find(beside, layout, one)
    print_cause("a neighbour", "host_starved" if one[0].on_cpu else "neighbour", limits)
    true = rate_of(alone, layout) / rate_of(beside, layout) - 1
    print_gain("the neighbour stopped", limits[0] if limits else None, true)


def try_exchange(devices: Sequence[Device]) -> None:
    """Split a model that is large for its batch over two devices with slow transports.

    Prints the limit that is named, and the gains from twice the batch and from twice the passes.
    """
    ways = [(way, variables) for way, variables in TRANSPORTS.items() if variables]
    now, twice = layout_of((ROWS, ROWS)), layout_of((2 * ROWS, 2 * ROWS))
    passes = layout_of((2 * ROWS, 2 * ROWS), (ROWS, ROWS))
    two = devices[:2]
    for way, variables in ways:
        os.environ.update(variables)
        code = limited_trainings.LARGE_WEIGHTS
        seen = list(measure(code, two, [now, twice, passes], turns=2))
        limits = find(seen, now, two)
        print_cause(f"exchange, {way}", "exchange", limits)
        named = _pick(limits, "exchange")
        for name, layout in (("twice the batch", twice), ("twice the passes", passes)):
            true = rate_of(seen, layout) / rate_of(seen, now) - 1
            print_gain(f"exchange, {way}, {name}", named, true)
    for name in {name for _, variables in ways for name in variables}:
        os.environ.pop(name, None)


def try_faults(devices: Sequence[Device]) -> None:
    """Print what is said of a link with a faulty rank, and how long it takes until it is said."""
    root = Path(__file__).parents[1]
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(root), os.environ.get("PYTHONPATH", "")])
    )
    script = root / "tests" / "support" / "faulty_links.py"
    for fault, outcome in (("silent", "hangs"), ("corrupt", "wrong")):
        began = time.monotonic()
        try:
            measure_links(devices[:2], _raise_named, (sys.executable, str(script), fault, "1"))
        except _LinkNamedError as named:
            seconds = time.monotonic() - began
            right = named.measurement.outcome == outcome and seconds <= NAMED_SECONDS
            print(
                f"{'ok  ' if right else 'MISS'} {fault} rank: named after {seconds:.1f} s, of "
                f"which the ranks' start is a part: {describe_link([named.measurement]).found}",
                flush=True,
            )


class _LinkNamedError(Exception):
    """The first measurement of a link is known, and no other is needed."""

    def __init__(self, measurement: LinkMeasurement) -> None:
        super().__init__(measurement.outcome)
        self.measurement = measurement


def _raise_named(measurement: LinkMeasurement) -> None:
    raise _LinkNamedError(measurement)


def try_links(devices: Sequence[Device]) -> None:
    """Compare the bandwidth that evener measures between all devices with a plain all-reduce."""
    figures = measure_links(devices)
    world = len(devices)
    size = LARGE_BYTES["cuda" if torch.cuda.is_available() else "cpu"]
    for way, variables in TRANSPORTS.items():
        own = [one for one in figures if one.transport == way and len(one.devices) == world]
        if not own:
            continue
        os.environ.update(variables)
        with mp.Manager() as manager:
            seconds = manager.dict()
            mp.spawn(_sum_by_hand, (world, make_memory_file(), seconds), nprocs=world)
            slowest = max(seconds.values())
        by_hand = 2 * (world - 1) / world * size / slowest
        off = own[-1].bytes_per_second / by_hand - 1
        print(
            f"{'ok  ' if abs(off) <= CLOSE else 'MISS'} link {own[-1].devices}, {way}: "
            f"{own[-1].outcome}, {own[-1].bytes_per_second / 1e9:.2f} GB/s, by hand "
            f"{by_hand / 1e9:.2f}: off by {100 * off:+.1f} %, "
            f"{1e6 * own[-1].latency_seconds:.0f} us",
            flush=True,
        )


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


PARTS = {
    "loader": try_loader,
    "causes": name_causes,
    "gains": compare_gains,
    "neighbour": try_neighbour,
    "exchange": try_exchange,
    "links": try_links,
    "faults": try_faults,
}


def main() -> None:
    """Run the named parts, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--devices", default="auto")
    given = parser.parse_args()
    devices = discover(given.devices).devices
    for name in given.parts or PARTS:
        began = time.monotonic()
        PARTS[name](devices)
        print(f"({name}: {time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
