"""Measure evener on NVIDIA GPUs: `python -m benchmarks.gpu --out DIR --framework torch [--gpus 0,1] SECTION...`.

Limits make equal GPUs unequal: a percentage of the multiprocessors, under an MPS daemon that this command starts and
ends, and the framework's memory limit. `python -m benchmarks.gpu_table JOURNAL...` makes the tables of
docs/benchmarks/gpu.md. Two of these can run at the same time on four GPUs, with different `--gpus` and `--out`.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_bench import GpuBench, mps_daemon
from benchmarks.gpu_screen import draw
from benchmarks.gpu_watch import compare_monitors, loaded

WORKLOADS = {"tensorflow": ("keras_mnist", "keras_maxer"), "torch": ("torch_mnist", "torch_maxer")}
PLACED = {
    "tensorflow": ("keras_towers",),
    "torch": ("torch_depth", "torch_tiles", "torch_dataparallel"),
}
BATCHES: dict[str, tuple[str, ...]] = {
    "free": (),
    "at 256": ("--global-batch", "256"),
    "at 2048": ("--global-batch", "2048"),
}
STEPS_WITHOUT_FAILURE = 500


def look(bench: GpuBench) -> None:
    """1. The machine."""
    bench.run("doctor", "doctor", "--json")
    bench.run("devices", "devices", "--devices", "gpu", "--json")


def watch(bench: GpuBench) -> None:
    """1. evener's monitor and others under load, and the time of a tick."""
    sampling = [sys.executable, "-m", "benchmarks.sampling", "--devices", "gpu", "--seconds", "20"]
    with loaded(bench.gpus, 90.0):
        bench.keep("watch", compare_monitors(30.0, bench.environment))
        done = subprocess.run(sampling, capture_output=True, text=True, timeout=60, env=bench.environment)
    bench.keep("sampling", {"answer": done.stdout, "stderr": done.stderr[-2000:]})


def control(bench: GpuBench) -> None:
    """2. Two equal GPUs: the even split."""
    for workload in WORKLOADS[bench.framework]:
        bench.balance(f"control {workload}", bench.pair, workload)


def unequal(bench: GpuBench) -> None:
    """3. The second GPU at 60 % and 30 % of its multiprocessors, free and fixed global batch."""
    with mps_daemon(bench.out / "mps") as variables:
        for workload in WORKLOADS[bench.framework]:
            for name, fixed in BATCHES.items():
                bench.balance(f"60 % {workload} {name}", bench.limited("", "60%"), workload, *fixed, env=variables)
            bench.balance(f"30 % {workload} free", bench.limited("", "30%"), workload, env=variables)


def neighbour(bench: GpuBench) -> None:
    """3. The second GPU shared with another process, which runs matrix products; the driver shares the time."""
    for workload in WORKLOADS[bench.framework]:
        for name, fixed in BATCHES.items():
            if bench.match in f"neighbour {workload} {name}":
                with loaded(bench.gpus[1:2], 600.0):
                    bench.balance(f"neighbour {workload} {name}", bench.pair, workload, *fixed)


def engines(bench: GpuBench) -> None:
    """3. Each of TensorFlow's engines at the same shares of two free GPUs."""
    for workload in WORKLOADS["tensorflow"] if bench.framework == "tensorflow" else ():
        for engine in ("towers", "mirrored", "multiworker"):
            where = ("--devices", bench.pair, "--workload", workload, "--engine", engine)
            shares = ("--gpus", "0", "1", "--batches", "1024", "1024", "--repeat", "2", "--seconds", "5s")
            bench.run(f"engine {engine} {workload}", "probe", *where, *shares, "--json")


def caps(bench: GpuBench) -> None:
    """4. 8 GiB and 5 GiB: real out-of-memory errors, how the search avoids them, and 500 steps of its plan."""
    devices = bench.limited("8GiB", "5GiB")
    for workload in WORKLOADS[bench.framework]:
        found = bench.balance(f"caps {workload}", devices, workload, "--tolerance", "0")
        if "layout" not in found:
            continue
        active = [(i, share["batch"]) for i, share in enumerate(found["layout"]["share"]) if share["batch"]]
        gpus = ("--gpus", *(str(i) for i, _ in active), "--batches", *(str(batch) for _, batch in active))
        where = ("--devices", devices, "--framework", bench.framework, "--workload", workload)
        steps = ("--repeat", "1", "--steps", str(STEPS_WITHOUT_FAILURE), "--json")
        bench.run(f"500 steps {workload}", "probe", *where, *gpus, *steps)


def regret(bench: GpuBench) -> None:
    """5. A grid around the plan, in turns; then its winner and the plan once more, in pairs."""
    devices = bench.limited("", "60%")
    with mps_daemon(bench.out / "mps") as variables:
        for workload in WORKLOADS[bench.framework]:
            plan = bench.out / f"regret-{workload}.toml"
            more = ("--global-batch", "4096", "--export", str(plan))
            bench.balance(f"regret {workload}", devices, workload, *more, env=variables)
            if not plan.exists():
                continue
            where = ("--devices", devices, "--workload", workload, "--framework", bench.framework)
            command = [sys.executable, "-m", "benchmarks.grid", str(plan), *where]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=300, env={**bench.environment, **variables}
            )
            found = json.loads(done.stdout) if done.returncode == 0 else done.stderr[-2000:]
            bench.keep(f"grid {workload}", {"command": command[1:], "exit_code": done.returncode, "answer": found})
            print(done.stderr[-1500:], flush=True)


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


def screen(bench: GpuBench) -> None:
    """8. The app on a pseudo-terminal, as pictures."""
    small, _ = WORKLOADS[bench.framework]
    bench.keep("screen", draw(bench.pair, small, bench.out, bench.framework, bench.environment))


def layouts(bench: GpuBench) -> None:
    """7. All layouts compared; XLA and mixed precision on the large network."""
    small, large = WORKLOADS[bench.framework]
    common = ("--framework", bench.framework, "--budget", bench.budget, "--json")

    def compare(name: str, devices: str, workload: str, *more: str) -> None:
        where = ("--devices", devices, "--workload", workload)
        bench.run(f"compare {name}", "compare", *where, *more, *common, seconds=300)

    alone = f"gpu:{bench.gpus[0]}"
    compare(small, bench.pair, small, "--global-batch", "256")
    compare(f"{small} packed", alone, small, "--global-batch", "256", "--mps")
    for workload in PLACED[bench.framework]:
        compare(workload, bench.pair, workload, "--global-batch", "512", "--profile")
    knobs = "xla,mixed" if bench.framework == "tensorflow" else "mixed"
    compare(f"{large} knobs", alone, large, "--global-batch", "512", "--layouts", "solo", "--try", knobs)


def scaling(bench: GpuBench) -> None:
    """7. One, two, four GPUs at even shares."""
    devices = "gpu:" + ",".join(map(str, bench.gpus))
    common = ("--framework", bench.framework, "--budget", bench.budget, "--json", "--layouts", "solo,even")
    for workload in WORKLOADS[bench.framework]:
        bench.run(f"scaling {workload}", "compare", "--devices", devices, "--workload", workload, *common)


SECTIONS = {
    "look": look,
    "watch": watch,
    "control": control,
    "unequal": unequal,
    "neighbour": neighbour,
    "engines": engines,
    "caps": caps,
    "regret": regret,
    "training": training,
    "screen": screen,
    "layouts": layouts,
    "scaling": scaling,
}


def main() -> None:
    """Run the sections that are named, in order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="+", choices=[*SECTIONS, "all"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--framework", choices=list(WORKLOADS), required=True)
    parser.add_argument("--gpus", default="0,1", help="two or more, by index; unequal GPUs are the first two")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--budget", default="90s", help="for each search")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the MPS daemon ends then, too
    gpus = tuple(int(gpu) for gpu in arguments.gpus.split(","))
    bench = GpuBench(arguments.out, arguments.framework, gpus, arguments.match, arguments.budget)
    chosen = list(SECTIONS) if "all" in arguments.sections else arguments.sections
    try:
        for section in chosen:
            try:
                SECTIONS[section](bench)
            except (OSError, ValueError, subprocess.SubprocessError, KeyError, TypeError, AttributeError) as error:
                bench.keep(f"{section} broke", {"error": f"{type(error).__name__}: {error}"})
                print(f"{section} broke: {type(error).__name__}: {error}", flush=True)
    finally:
        bench.pack_journals()


if __name__ == "__main__":
    main()
