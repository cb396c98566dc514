"""Section of benchmarks.gpu: a training that follows a neighbour, and what evener says of it
meanwhile.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu_bench import GpuBench
from benchmarks.gpu_watch import compare_monitors

STEPS = ("500", "1500", "2000")
TINY_STEPS = ("60", "200", "300")
START_SECONDS, END_SECONDS = 150.0, 260.0
BETWEEN_SECONDS = 6.0


def rebalance(bench: GpuBench) -> None:
    """6., 8. Shares that follow a neighbour on the second GPU; beside it energy, the monitor and
    its rivals.
    """
    steps = TINY_STEPS if bench.small else STEPS
    command = [
        sys.executable,
        "-m",
        "benchmarks.rebalance",
        "gpus",
        "--json",
        str(bench.out / "rebalance.json"),
    ]
    log = bench.out / "rebalance.txt"
    with log.open("w") as lines:
        training = subprocess.Popen(
            [*command, "--steps", *steps],
            stdout=lines,
            stderr=subprocess.STDOUT,
            env=bench.environment,
        )
        try:
            _watch(bench, training, log)
            training.wait(END_SECONDS)
        finally:
            training.terminate()
            training.wait()
    print(log.read_text()[-3000:], flush=True)


def _watch(bench: GpuBench, training: subprocess.Popen[bytes], log: Path) -> None:
    """Energy and what the monitor says while the rule trains, a picture, and the monitors' cost
    when it has.
    """
    _wait_for("nothing disturbs", training, log)
    devices = ["--devices", bench.pair]
    energy = None
    if not bench.small:
        module = [sys.executable, "-m", "benchmarks.gpu_energy", "--seconds", "60", *devices]
        energy = subprocess.Popen(module, stdout=subprocess.PIPE, text=True, env=bench.environment)
    picture = [
        sys.executable,
        "-m",
        "benchmarks.gpu_screen",
        str(bench.out / "trainings.svg"),
        *devices,
    ]
    drawing = subprocess.Popen(picture, env=bench.environment)
    for number in range(40):
        if training.poll() is not None or "by the rule" in log.read_text():
            break
        bench.run(
            f"live {number} at {time.time():.0f}",
            "monitor",
            "--once",
            *devices,
            "--json",
            seconds=30,
        )
        time.sleep(BETWEEN_SECONDS)
    bench.keep("monitors", compare_monitors(20.0, bench.environment, bench.pair))
    drawing.wait(60)
    if energy is not None:
        out, _ = energy.communicate(timeout=120)
        bench.keep("energy", out)
        print(out, flush=True)


def _wait_for(words: str, training: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while words not in log.read_text():
        if training.poll() is not None or time.monotonic() > deadline:
            raise OSError(f"the training never said {words!r}: {log.read_text()[-1500:]}")
        time.sleep(0.2)
