"""Five minutes of benchmarks, as one JSON line: `make benchmark`, or `python -m
benchmarks.short_set [FILE]`.

The search on simulated machines (regret against the oracle, probes, CPU), the monitor (first paint,
CPU, memory), a PyTorch step's cost, and dealing rows by length. The line has the commit, and is
appended to FILE, else to build/benchmark.jsonl. Times depend on the machine and on what else runs
on it (`load`); regrets and probes don't.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import dealing, monitor
from benchmarks.search import QUICK_NOISES, QUICK_SIZES, jobs
from benchmarks.search_runs import Job, run

ROOT = Path(__file__).resolve().parents[1]
MONITOR_SECONDS, STARTS = 20.0, 5
STEPS = 2_000  # in each turn
BATCHES = 100  # of rows to deal
RANKS, ROWS, SIGMA = 4, 256, 1.0


def measure_search() -> dict[str, float]:
    """Over every kind of machine, batch and noise, once."""
    todo = [
        Job(each.family, each.devices, each.noise, each.mode, each.seed)
        for each in jobs(1, QUICK_SIZES, QUICK_NOISES, True)
    ]
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = list(pool.map(run, todo, chunksize=4))
    regrets = sorted(each.regret for each in found)
    return {
        "searches": len(found),
        "regret_mean": statistics.fmean(regrets),
        "regret_p95": regrets[round(0.95 * (len(regrets) - 1))],
        "regret_most": regrets[-1],
        "probes_mean": statistics.fmean(each.probes for each in found),
        "out_of_memory": sum(each.out_of_memory for each in found),
        "cpu_s_median": statistics.median(each.cpu_seconds for each in found),
    }


def measure_monitor() -> dict[str, float]:
    """Eight working devices and three trainings, on a terminal of its own."""
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"], os.environ["EVENER_LIVE_DIR"] = state, f"{state}/live"
        with monitor.training(Path(state) / "live"):
            cost = monitor.measure("evener", monitor.LOADED, b"SIM:7", MONITOR_SECONDS)
            paint_s, paint_cpu_s = monitor.first_paint(monitor.EVENER, b"SIM:7", STARTS)
            once_s = monitor.once_seconds(STARTS)
    return {
        "cpu_percent": cost.cpu_percent,
        "memory_mib": cost.memory_mib,
        "first_paint_s": paint_s,
        "first_paint_cpu_s": paint_cpu_s,
        "once_s": once_s,
    }


def measure_step() -> dict[str, float] | None:
    """Microseconds that evener's own code takes of a step; None without PyTorch."""
    if find_spec("torch") is None:
        return None
    import torch

    from benchmarks.torch_hooks import step_costs

    return step_costs(torch.device("cpu"), STEPS)


def measure_dealing() -> dict[str, float]:
    """A batch of rows whose lengths differ."""
    over, seconds = dealing.time_deals(RANKS, ROWS, SIGMA, BATCHES)
    return {"over_bound_median": over, "ms_a_batch": 1e3 * seconds}


def _rounded(value: Any) -> Any:
    """Figures of five digits: more say nothing."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    """Measure everything, print the line, and append it."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "benchmark.jsonl"
    begun, load = time.monotonic(), os.getloadavg()[0]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    line: dict[str, object] = {
        "commit": commit.stdout.strip(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": load,
    }
    parts = {
        "search": measure_search,
        "dealing": measure_dealing,
        "step": measure_step,
        "monitor": measure_monitor,
    }
    for name, measure in parts.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        line[name] = measure()
    line["seconds"] = time.monotonic() - begun
    text = json.dumps(_rounded(line))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{text}\n")
    print(text)


if __name__ == "__main__":
    main()
