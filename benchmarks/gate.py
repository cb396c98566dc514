"""Measure how often `evener runs compare` is wrong.

  python -m benchmarks.gate [--trainings 100] [--slower 20] [--seconds 30] [--cores 2,3,4]
                            [--keep FOLDER]

Compares 40 pairs of equal training runs, and 20 pairs of an equal run and a slower one. With fewer
trainings than 100 and 20, some are in several pairs. Each run is a PyTorch process on its own core,
and as many run at once as there are cores but one. They start in random order, so the two runs of
a pair train at different times, as in CI. On cores that share hardware with others, equal steps
take different times for seconds; the figures of each run show it. Prints the false alarms and the
slowdowns found, for the whole runs and for their first parts; exits with 1 if there are more than 2
false alarms in 40 pairs, or if fewer than 18 of the 20 slower runs are found.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from statistics import median

from evener.balancer.store.compared import compare_trainings
from evener.balancer.store.runs import load_training
from evener.live.journal import TRAINING_JOURNAL, RecordedTraining, StepsEntry
from evener.system.cores import allowed_cpus, core_groups
from evener.system.files import runs_folder

MOST, SLOWER = 0.05, 0.1
ROWS, WIDTH = 128, 256
EQUAL_PAIRS, SLOWER_PAIRS = 40, 20
SHORTER = (10.0, 20.0)  # seconds from the start for which the gate is judged, too


def train(seconds: float, slowdown: float) -> None:
    """Train for `seconds`; each step computes a fraction `slowdown` longer."""
    import torch

    from evener.torch import Split

    torch.set_num_threads(1)
    split = Split(ratios=(1,), global_batch=ROWS, journal=True)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = split.wrap(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.utils.data.TensorDataset(torch.randn(100 * ROWS, WIDTH))
    end = time.monotonic() + seconds
    began = time.thread_time()
    while time.monotonic() < end:
        for (inputs,) in split.loader(data):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            until = time.thread_time() + slowdown * (time.thread_time() - began)
            while time.thread_time() < until:
                pass
            began = time.thread_time()
    split.close()


def run_all(slowdowns: Sequence[float], seconds: float, cores: Sequence[int]) -> list[str]:
    """Train once for each slowdown, in random order, and return the runs in the given order."""
    free: Queue[int] = Queue()
    for core in cores:
        free.put(core)

    def run_one(place: int) -> str:
        core, name = free.get(), f"20261129-{place:06d}-gate"
        try:
            words = ["--train", str(seconds), str(slowdowns[place])]
            subprocess.run(
                ["taskset", "-c", str(core), sys.executable, "-m", "benchmarks.gate", *words],
                env={**os.environ, "EVENER_RUN": name, "CUDA_VISIBLE_DEVICES": ""},
                check=True,
            )
        finally:
            free.put(core)
        return name

    places = list(range(len(slowdowns)))
    random.Random(0).shuffle(places)
    with ThreadPoolExecutor(len(cores)) as pool:
        return sorted(pool.map(run_one, places))


def choose_pairs(equal: Sequence[str], slower: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of equal runs, then pairs of an equal and a slower one.

    Each run is in about the same number of pairs.
    """
    count = len(equal)
    pairs = []
    for place in range(EQUAL_PAIRS):
        first, apart = 2 * place % count, 1 + 2 * (2 * place // count)
        pairs.append((equal[first], equal[(first + apart) % count]))
    unused = 2 * EQUAL_PAIRS
    beside = [
        (equal[(unused + place) % count], slower[place % len(slower)])
        for place in range(SLOWER_PAIRS)
    ]
    return pairs + beside


def find_cores() -> list[int]:
    """Return a CPU of each physical core but one, which the rest of the machine may use.

    On a virtual machine that doesn't show which CPUs share a core, it is every second CPU.
    """
    groups = core_groups(allowed_cpus())
    cores = [group[0] for group in groups]
    if max(map(len, groups)) == 1:
        cores = cores[::2]
    return cores[:-1] or cores


def describe_windows(run: str, slowdown: float) -> str:
    """Return the times of a run's windows: of quick steps in ms, and of a core's product in us."""
    windows = [each for each in load(run).entries if isinstance(each, StepsEntry)]
    quick = _describe_range([1e3 * each.quick_s for each in windows])
    core = _describe_range([1e6 * each.core_s for each in windows])
    return f"{100 * slowdown:.0f} %: {len(windows)} windows, quick {quick} ms; core {core} us"


def _describe_range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} {median(values):.2f} {max(values):.2f}"


def load(run: str, seconds: float = math.inf) -> RecordedTraining:
    """Return the first `seconds` of a run."""
    training = load_training(run)
    assert training is not None
    until = training.began_at + seconds
    entries = (
        each for each in training.entries if not isinstance(each, StepsEntry) or each.at <= until
    )
    return RecordedTraining(run, tuple(entries))


def judge(pairs: Sequence[tuple[str, str]], seconds: float) -> bool:
    """Print how the gate does on the first `seconds` of each run; return True if well enough."""
    found = [compare_trainings(load(one, seconds), load(other, seconds)) for one, other in pairs]
    equal, slower = found[:EQUAL_PAIRS], found[EQUAL_PAIRS:]
    false = sum(each.is_beyond(MOST) for each in equal)
    seen = sum(each.is_beyond(MOST) for each in slower)
    for name, each in (("equal", equal), ("slower", slower)):
        said = ", ".join(f"{100 * one.slowdown:+.1f}" for one in each)
        print(f"{name}: slowdowns in % {said}")
    halves = median((each.high - each.low) / 2 for each in found)
    held = sum(each.low <= 0 <= each.high for each in equal)
    held_slower = sum(each.low <= SLOWER <= each.high for each in slower)
    print(
        f"{seconds:.0f} s: false alarms {false} of {len(equal)}; found {seen} of {len(slower)}; "
        f"intervals ± {100 * halves:.1f} %, which hold the truth in {held} of {len(equal)} and "
        f"{held_slower} of {len(slower)}",
        flush=True,
    )
    return false <= 0.05 * len(equal) and seen >= 0.9 * len(slower)


def main() -> int:
    """Train, compare and print; return 1 if too much is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainings", type=int, default=100)
    parser.add_argument("--slower", type=int, default=20)
    parser.add_argument("--cores", default="", help="CPUs, as 2,3,4; else one of each core but one")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--keep", default="", help="a folder for the journals of all runs")
    parser.add_argument("--train", type=float, nargs=2)
    given = parser.parse_args()
    if given.train:
        train(*given.train)
        return 0
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state
        os.environ["EVENER_LIVE_DIR"] = f"{state}/live"
        cores = [int(core) for core in given.cores.split(",") if core] or find_cores()
        slowdowns = [0.0] * given.trainings + [SLOWER] * given.slower
        runs = run_all(slowdowns, given.seconds, cores)
        if given.keep:
            for name in runs:
                shutil.copy(runs_folder() / name / TRAINING_JOURNAL, f"{given.keep}/{name}.jsonl")
        for run, slowdown in zip(runs, slowdowns, strict=True):
            print(describe_windows(run, slowdown))
        pairs = choose_pairs(runs[: given.trainings], runs[given.trainings :])
        parts = [seconds for seconds in SHORTER if seconds < given.seconds]
        *_, enough = [judge(pairs, seconds) for seconds in (*parts, given.seconds)]
    return int(not enough)


if __name__ == "__main__":
    sys.exit(main())
