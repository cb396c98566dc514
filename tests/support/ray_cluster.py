"""A Ray cluster on loopback: two nodes, each with an address of its own, that nothing else joins."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from evener.devices.cluster.agents import end_agents

FIRST, SECOND = "127.0.0.2", "127.0.0.3"
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@contextlib.contextmanager
def running_cluster(state: Path) -> Iterator[Any]:
    """`ray.cluster_utils.Cluster` with two nodes; this process isn't connected to it yet. `state` is for locks."""
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "XDG_STATE_HOME": str(state)}
    with mock.patch.dict(os.environ, variables):
        import ray
        from ray.cluster_utils import Cluster

        head = {**NODE, "node_ip_address": FIRST, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        with mock.patch.dict(os.environ, variables):
            cluster.add_node(node_ip_address=SECOND, **NODE)
        yield cluster
    finally:
        end_agents()
        ray.shutdown()
        cluster.shutdown()


def kill_raylet(node: Any) -> None:
    """End a node's own process as a crash would."""
    os.kill(node.all_processes["raylet"][0].process.pid, 9)
