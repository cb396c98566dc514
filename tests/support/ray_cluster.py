"""A Ray cluster on loopback: two nodes, each with an address of its own, that nothing else
joins.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from evener.devices.cluster import agents
from tests.support.probe_children import list_probe_children, still_runs
from tests.support.waiting import wait_for

FIRST, SECOND = "127.0.0.2", "127.0.0.3"
THIRD = "127.0.0.4"  # of a host that joins
GPUS = 2  # that Ray believes the second node to have
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@contextlib.contextmanager
def running_cluster(state: Path) -> Iterator[Any]:
    """`ray.cluster_utils.Cluster` with two nodes; this process isn't connected to it yet. `state`
    is for locks.
    """
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_health_check_initial_delay_ms": "300",
        "RAY_health_check_period_ms": "300",  # not 3 s: a node has gone after five
        "XDG_STATE_HOME": str(state),
    }
    with mock.patch.dict(os.environ, variables):
        import ray
        from ray._private.node import Node
        from ray.cluster_utils import Cluster

        unused = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
        head = {**NODE, "node_ip_address": FIRST, **unused}
        with mock.patch.object(Node, "start_api_server"):  # for jobs that are submitted
            cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        with mock.patch.dict(os.environ, variables):
            cluster.add_node(node_ip_address=SECOND, num_gpus=GPUS, **NODE)
        yield cluster
    finally:
        end_agents()
        ray.shutdown()
        cluster.shutdown()


def end_agents() -> None:
    """End every actor of this process, and with it what it started and reserved."""
    while agents._agents:
        agents._agents.popitem()[1].end()


def kill_raylet(node: Any) -> None:
    """End a node's own process as a crash would."""
    os.kill(node.all_processes["raylet"][0].process.pid, 9)


def list_processes(word: str) -> list[psutil.Process]:
    """Every process with this in its command."""
    processes = [
        (process, process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    return [process for process, command in processes if any(word in part for part in command)]


def list_children() -> list[psutil.Process]:
    """The children of probes that the cluster's actors started; other tests may run some of their
    own meanwhile.
    """
    actors = {process.pid for process in list_processes("ray::HostActor")}
    found = []
    for actor in actors:
        with contextlib.suppress(psutil.Error):
            found += list_probe_children(actor)
    return found


def until_gone(processes: Sequence[psutil.Process]) -> None:
    """Wait until none of them runs."""
    until(lambda: not any(map(still_runs, processes)), f"the end of {processes}")


def until(condition: Callable[[], object], what: str, seconds: float = 120.0) -> None:
    """Wait until it holds."""
    wait_for(condition, what, seconds, pause=0.05)
