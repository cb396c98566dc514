"""Sections of benchmarks.gpu: trainings by a plan against what it says."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from benchmarks.gpu_bench import GpuBench


def training(bench: GpuBench) -> None:
    """6. The example scripts with their plan: samples/s of the plan, of the training, and in the monitor."""
    common = ("--framework", bench.framework, "--devices", bench.pair, "--budget", bench.budget, "--repeat", "1")
    for batch, seconds in ((32768, 60), (4096, 60)):
        if bench.match not in f"training at {batch}":
            continue
        more = ("--rows", "1048576", "--seconds", str(seconds), "--balance", "global-batch", str(batch))
        command = [sys.executable, "-m", "benchmarks.training", *common, *more]
        live: list[Any] = []
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=bench.environment
        )
        while child.poll() is None:
            time.sleep(5.0)
            seen = bench.run(f"live of training at {batch}", "monitor", "--once", "--devices", "gpu", "--json")
            live.append([device["samples_per_second"]["value"] for device in seen.get("devices", [])])
        out, _ = child.communicate()
        bench.keep(
            f"training at {batch}",
            {"command": command[1:], "exit_code": child.returncode, "output": out[-8000:], "live": live},
        )
        print(out[-2000:], live[-2:], flush=True)
