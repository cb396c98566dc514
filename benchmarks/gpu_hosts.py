"""Section of benchmarks.gpu: two hosts that are one machine, by Ray nodes on two loopback addresses
with a GPU each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from benchmarks.gpu_bench import GpuBench
from evener.plan.file import load_plan, make_layout
from tests.support.ray_cluster import FIRST, NODE, SECOND

SCRIPTS = Path(__file__).resolve().parents[1]
SHARES = (6, 2)
GLOBAL_BATCH = "8192"


def hosts(bench: GpuBench) -> None:
    """7. A plan over both, the training that it promises, and what a training in float64 learns."""
    plan, small = bench.out / "hosts.toml", bench.out / "hosts-small.toml"
    slices = ("/cpu:0", "/cpu:1") if bench.small else ("", "")
    devices = f"ray:{FIRST}{slices[0]},ray:{SECOND}{slices[1]}"
    with running_nodes(bench) as address:
        there = ("--ray-address", address)
        fixed = ("--global-batch", GLOBAL_BATCH, "--export", str(plan))
        bench.balance("hosts", devices, "torch_mnist", *fixed, *there)
        found = load_plan(plan)
        script = str(SCRIPTS / "examples" / "torch_train.py")
        trained = (
            ("--rows", "4096", "--seconds", "5")
            if bench.small
            else ("--rows", "1048576", "--seconds", "30")
        )
        launch = ("evener", "launch", "--ray", *there)
        bench.script("hosts, trained", *launch, str(plan), script, *trained, seconds=120)
        layout = make_layout("split", found.layout.share, SHARES)
        msgspec.structs.replace(found, layout=layout).save(small)
        script = str(SCRIPTS / "tests" / "support" / "launched_training.py")
        bench.script("hosts, exact", *launch, str(small), script, str(bench.out), seconds=120)
    bench.keep("hosts, off by", compare_ranks(bench.out))
    print(f"plan: {found.throughput}; off by {bench.answers['hosts, off by']}", flush=True)


@contextmanager
def running_nodes(bench: GpuBench) -> Iterator[str]:
    """A Ray node for each of the first two GPUs; their address."""
    from ray.cluster_utils import Cluster

    def options(address: str) -> dict[str, Any]:
        return {
            **NODE,
            "num_cpus": 8,
            "num_gpus": 0 if bench.small else 1,
            "node_ip_address": address,
        }

    def showing(gpu: int) -> dict[str, str]:
        return {
            **bench.environment,
            "RAY_USAGE_STATS_ENABLED": "0",
            "CUDA_VISIBLE_DEVICES": str(gpu),
        }

    with mock.patch.dict(os.environ, showing(bench.gpus[0])):
        cluster = Cluster(
            initialize_head=True, head_node_args={**options(FIRST), "include_dashboard": False}
        )
    try:
        with mock.patch.dict(os.environ, showing(bench.gpus[1])):
            cluster.add_node(**options(SECOND))
        yield cluster.address
    finally:
        cluster.shutdown()


def compare_ranks(folder: Path) -> dict[str, float]:
    """The largest difference of any weight or loss of a rank from those of one process."""
    import torch

    from tests.support import torch_ranks
    from tests.support.launched_training import NAME

    weights, losses = torch_ranks.reference(torch_ranks.CASES[NAME], sum(SHARES))
    ranks = [torch.load(folder / f"{rank}.pt", map_location="cpu") for rank in range(len(SHARES))]
    pairs = [
        (mine, its) for rank in ranks for mine, its in zip(rank["weights"], weights, strict=True)
    ]
    return {
        "weights": max(float((mine - its).abs().max()) for mine, its in pairs),
        "losses": max(
            abs(mine - its)
            for rank in ranks
            for mine, its in zip(rank["losses"], losses, strict=True)
        ),
    }
