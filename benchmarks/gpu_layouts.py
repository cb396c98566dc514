"""Sections of benchmarks.gpu: layouts other than splits, and more GPUs."""

from __future__ import annotations

from benchmarks.gpu_bench import WORKLOADS, GpuBench

PLACED = {
    "tensorflow": ("keras_towers",),
    "torch": ("torch_depth", "torch_tiles"),
}


def layouts(bench: GpuBench) -> None:
    """7. Compare all layouts; try XLA and mixed precision on the large network."""
    small, large = WORKLOADS[bench.framework]
    common = ("--framework", bench.framework, "--budget", bench.budget, "--json")

    def compare(name: str, devices: str, workload: str, *more: str) -> None:
        where = ("--devices", devices, "--workload", workload)
        bench.run(f"compare {name}", "compare", *where, *more, *common, seconds=300)

    alone = f"gpu:{bench.gpus[0]}"
    compare(small, bench.pair, small, "--global-batch", "256")
    compare(f"{small} packed", alone, small, "--global-batch", "256")
    for workload in PLACED[bench.framework]:
        compare(workload, bench.pair, workload, "--global-batch", "512")
    knobs = "xla,mixed" if bench.framework == "tensorflow" else "mixed"
    compare(
        f"{large} knobs", alone, large, "--global-batch", "512", "--layouts", "solo", "--try", knobs
    )


def scaling(bench: GpuBench) -> None:
    """7. Train on one, two and four GPUs with equal shares."""
    devices = "gpu:" + ",".join(map(str, bench.gpus))
    common = (
        "--framework",
        bench.framework,
        "--budget",
        bench.budget,
        "--json",
        "--layouts",
        "solo,even",
    )
    for workload in WORKLOADS[bench.framework]:
        bench.run(
            f"scaling {workload}", "compare", "--devices", devices, "--workload", workload, *common
        )
