"""A Ray cluster on loopback: two nodes, each with an address of its own, that nothing else joins."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

FIRST, SECOND, THIRD = "127.0.0.2", "127.0.0.3", "127.0.0.4"
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@contextlib.contextmanager
def running_cluster() -> Iterator[Any]:
    """`ray.cluster_utils.Cluster` with two nodes; this process isn't connected to it yet."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    from evener.devices.cluster.agents import end_agents

    cluster = Cluster(
        initialize_head=True, head_node_args={**NODE, "node_ip_address": FIRST, "include_dashboard": False}
    )
    try:
        cluster.add_node(node_ip_address=SECOND, **NODE)
        yield cluster
    finally:
        end_agents()
        ray.shutdown()
        cluster.shutdown()


def kill_raylet(node: Any) -> None:
    """End a node's own process as a crash would."""
    os.kill(node.all_processes["raylet"][0].process.pid, 9)
