"""A private Ray cluster on loopback: two nodes, each with an address of its own."""

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
THIRD = "127.0.0.4"  # of a host that joins later
GPUS = 2  # which Ray believes the second node to have
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@contextlib.contextmanager
def running_cluster(state: Path) -> Iterator[Any]:
    """Yield a `ray.cluster_utils.Cluster` with two nodes, to which this process isn't connected
    yet.

    `state` is the folder for its locks.
    """
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_health_check_initial_delay_ms": "300",
        # not 3 s: a lost node is noticed after five failed checks
        "RAY_health_check_period_ms": "300",
        "XDG_STATE_HOME": str(state),
    }
    with mock.patch.dict(os.environ, variables):
        import ray
        from ray._private.node import Node
        from ray.cluster_utils import Cluster

        unused = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
        head = {**NODE, "node_ip_address": FIRST, **unused}
        # it serves submitted jobs, which tests don't use
        with mock.patch.object(Node, "start_api_server"):
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
    """Stop every actor of this process, with the processes it started and the GPUs it reserved."""
    while agents._agents:
        agents._agents.popitem()[1].end()


def kill_raylet(node: Any) -> None:
    """Kill a node's main process, as a crash would."""
    os.kill(node.all_processes["raylet"][0].process.pid, 9)


def list_processes(word: str) -> list[psutil.Process]:
    """Return every process whose command line contains this word."""
    processes = [
        (process, process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    return [process for process, command in processes if any(word in part for part in command)]


def list_children() -> list[psutil.Process]:
    """Return the probe processes that the cluster's actors started; other tests may have
    their own.
    """
    actors = {process.pid for process in list_processes("ray::HostActor")}
    found = []
    for actor in actors:
        with contextlib.suppress(psutil.Error):
            found += list_probe_children(actor)
    return found


def until_gone(processes: Sequence[psutil.Process]) -> None:
    """Wait until all of them have ended."""
    until(lambda: not any(map(still_runs, processes)), f"the end of {processes}")


def until(condition: Callable[[], object], what: str, seconds: float = 120.0) -> None:
    """Wait until a condition holds."""
    wait_for(condition, what, seconds, pause=0.05)
