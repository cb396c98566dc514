"""Sections of benchmarks.gpu: search for splits of both networks on equal and unequal GPUs."""

from __future__ import annotations

from benchmarks.gpu_bench import WORKLOADS, GpuBench
from benchmarks.gpu_watch import loaded

BATCHES: dict[str, tuple[str, ...]] = {
    "free": (),
    "at 256": ("--global-batch", "256"),
    "at 2048": ("--global-batch", "2048"),
}
STEPS_WITHOUT_FAILURE = 500


def control(bench: GpuBench) -> None:
    """2. Search on two equal GPUs, where the even split is best."""
    for workload in WORKLOADS[bench.framework]:
        bench.balance(f"control {workload}", bench.pair, workload)


def unequal(bench: GpuBench) -> None:
    """3. Search with the second GPU at 60 % and 30 %, with a free and a fixed global batch."""
    with bench.mps() as variables:
        for workload in WORKLOADS[bench.framework]:
            for name, fixed in BATCHES.items():
                bench.balance(
                    f"60 % {workload} {name}",
                    bench.limited("", "60%"),
                    workload,
                    *fixed,
                    env=variables,
                )
            bench.balance(
                f"30 % {workload} free", bench.limited("", "30%"), workload, env=variables
            )


def neighbour(bench: GpuBench) -> None:
    """3. Search while another process runs matrix products on the second GPU.

    The driver shares the GPU's time between the processes.
    """
    for workload in WORKLOADS[bench.framework]:
        for name, fixed in BATCHES.items():
            if bench.match in f"neighbour {workload} {name}":
                with loaded(bench.gpus[1:2], 600.0):
                    bench.balance(f"neighbour {workload} {name}", bench.pair, workload, *fixed)


def engines(bench: GpuBench) -> None:
    """3. Compare TensorFlow's engines at the same shares of two unlimited GPUs."""
    for workload in WORKLOADS["tensorflow"] if bench.framework == "tensorflow" else ():
        for engine in ("towers", "multiworker"):
            where = ("--devices", bench.pair, "--workload", workload, "--engine", engine)
            shares = (
                "--gpus",
                "0",
                "1",
                "--batches",
                "1024",
                "1024",
                "--repeat",
                "2",
                "--seconds",
                "5s",
            )
            bench.run(f"engine {engine} {workload}", "probe", *where, *shares, "--json")


def caps(bench: GpuBench) -> None:
    """4. Search under caps of 8 GiB and 5 GiB, and train 500 steps by the plan.

    Shows real out-of-memory errors and how the search avoids them.
    """
    devices = bench.limited("8GiB", "5GiB")
    for workload in WORKLOADS[bench.framework]:
        found = bench.balance(f"caps {workload}", devices, workload, "--tolerance", "0")
        if "layout" not in found:
            continue
        active = [
            (i, share["batch"])
            for i, share in enumerate(found["layout"]["share"])
            if share["batch"]
        ]
        gpus = (
            "--gpus",
            *(str(i) for i, _ in active),
            "--batches",
            *(str(batch) for _, batch in active),
        )
        where = ("--devices", devices, "--framework", bench.framework, "--workload", workload)
        steps = ("--repeat", "1", "--steps", str(STEPS_WITHOUT_FAILURE), "--json")
        bench.run(f"500 steps {workload}", "probe", *where, *gpus, *steps)


def regret(bench: GpuBench) -> None:
    """5. Time a grid around the plan in turns, then its winner and the plan in pairs."""
    devices = bench.limited("", "60%")
    with bench.mps() as variables:
        for workload in WORKLOADS[bench.framework]:
            plan = bench.out / f"regret-{workload}.toml"
            more = ("--global-batch", "4096", "--export", str(plan))
            bench.balance(f"regret {workload}", devices, workload, *more, env=variables)
            if not plan.exists():
                continue
            where = ("--devices", devices, "--workload", workload, "--framework", bench.framework)
            bench.script(
                f"grid {workload}", "benchmarks.grid", str(plan), *where, seconds=300, env=variables
            )
