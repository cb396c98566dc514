"""How often `evener runs compare` is wrong: pairs of equal trainings, and of one that is slower.

python -m benchmarks.gate [--equal 40] [--slower 20] [--seconds 15]

Each training is a process of its own on one core, in PyTorch; as many run at once as there are
cores but two. Prints the false alarms and what was found, and ends with 1 if there are more than 2
of 40, or less than 18 of 20 are found.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

from evener.balancer.store.compared import RunDifference, compare_trainings
from evener.balancer.store.runs import load_training

MOST, SLOWER = 0.05, 0.1
ROWS, WIDTH = 64, 512


def train(seconds: float, slowdown: float) -> None:
    """Train for some seconds, each step so much longer than it computes."""
    import torch

    from evener.torch import Split

    torch.set_num_threads(1)
    split = Split(ratios=(1,), global_batch=ROWS, journal=True)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = split.wrap(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.utils.data.TensorDataset(torch.randn(100 * ROWS, WIDTH))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for (inputs,) in split.loader(data):
            began = time.thread_time()
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            until = time.thread_time() + slowdown * (time.thread_time() - began)
            while time.thread_time() < until:
                pass
    split.close()


def run_all(slowdowns: Sequence[float], seconds: float) -> list[str]:
    """The runs of trainings with these slowdowns, in their order."""
    cores: Queue[int] = Queue()
    every = sorted(os.sched_getaffinity(0))
    for core in every[: max(1, len(every) - 2)]:
        cores.put(core)

    def run_one(place: int) -> str:
        core, name = cores.get(), f"20261129-{place:06d}-gate"
        try:
            words = ["--train", str(seconds), str(slowdowns[place])]
            subprocess.run(
                ["taskset", "-c", str(core), sys.executable, "-m", "benchmarks.gate", *words],
                env={**os.environ, "EVENER_RUN": name, "CUDA_VISIBLE_DEVICES": ""},
                check=True,
            )
        finally:
            cores.put(core)
        return name

    with ThreadPoolExecutor(cores.qsize()) as pool:
        return list(pool.map(run_one, range(len(slowdowns))))


def compare_pairs(runs: Sequence[str]) -> list[RunDifference]:
    """Each two runs in a row compared."""
    found = []
    for before, after in zip(runs[::2], runs[1::2], strict=True):
        first, second = load_training(before), load_training(after)
        assert first is not None
        assert second is not None
        found.append(compare_trainings(first, second))
    return found


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--equal", type=int, default=40)
    parser.add_argument("--slower", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--train", type=float, nargs=2)
    given = parser.parse_args()
    if given.train:
        train(*given.train)
        return 0
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state
        os.environ["EVENER_LIVE_DIR"] = f"{state}/live"
        pairs = [0.0] * given.equal + [SLOWER] * given.slower
        found = compare_pairs(
            run_all([each for slower in pairs for each in (0.0, slower)], given.seconds)
        )
    equal, slower = found[: given.equal], found[given.equal :]
    false = sum(each.is_beyond(MOST) for each in equal)
    seen = sum(each.is_beyond(MOST) for each in slower)
    for name, each in (("equal", equal), ("slower", slower)):
        slowdowns = ", ".join(f"{100 * one.slowdown:+.1f}" for one in each)
        print(f"{name}: slowdowns in % {slowdowns}")
    held = sum(each.low <= SLOWER <= each.high for each in slower)
    print(f"false alarms {false} of {len(equal)}; found {seen} of {len(slower)}; 10 % is in the")
    print(f"interval of {held} of {len(slower)}")
    enough = false <= 0.05 * len(equal) and seen >= 0.9 * len(slower)
    return int(not enough)


if __name__ == "__main__":
    sys.exit(main())
