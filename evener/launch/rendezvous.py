"""Rendezvous backends for PyTorch's elastic agent.

A single agent opens no port. The agents of several hosts meet at a port that is open on only one
address. PyTorch's own rendezvous would open it on every address of the machine.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from evener.devices.network import find_own_address

from ..torch.stores import open_tcp_store
from ..training.launched import is_here
from .job import HostJob

# names under which the rendezvous backends are registered
SINGLE_AGENT = "evener-alone"
SEVERAL_AGENTS = "evener-several"


class SingleAgentRendezvous(RendezvousHandler):  # type: ignore[misc]
    """A rendezvous for one agent on one host, without a TCP server."""

    def __init__(self, run_id: str, address: str) -> None:
        self._run_id = run_id
        host, _, port = address.rpartition(":")
        self._store_info = RendezvousStoreInfo(host, int(port))
        self._store = HashStore()
        self._rounds = 0
        self._closed = False

    def get_backend(self) -> str:
        return SINGLE_AGENT

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the next rendezvous, with an empty store."""
        self._rounds += 1
        store = PrefixStore(str(self._rounds), self._store)
        return RendezvousInfo(store, 0, 1, self._store_info)

    def is_closed(self) -> bool:
        """Return True if the rendezvous has been closed."""
        return self._closed

    def set_closed(self) -> None:
        """Mark the rendezvous as closed."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0, because no other node can join."""
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        """Return True, because there is nothing to shut down."""
        return True


class OneAddressBackend(C10dRendezvousBackend):  # type: ignore[misc]
    """PyTorch's c10d backend under another name, for a store that listens on only one address."""

    @property
    def name(self) -> str:
        return SEVERAL_AGENTS


def _make_single_agent(parameters: RendezvousParameters) -> RendezvousHandler:
    return SingleAgentRendezvous(parameters.run_id, parameters.endpoint)


def _make_several_agents(parameters: RendezvousParameters) -> RendezvousHandler:
    """Connect to the rendezvous store of all hosts, or open it if this host serves it."""
    host, _, port = parameters.endpoint.rpartition(":")
    serves = bool(parameters.get_as_bool("is_host"))
    timeout = timedelta(seconds=parameters.get_as_int("read_timeout", 60) or 60)
    try:
        store = open_tcp_store(host, int(port), serves, timeout)
    except (ValueError, RuntimeError) as error:
        raise RendezvousConnectionError(str(error)) from error
    return create_handler(store, OneAddressBackend(store, parameters.run_id), parameters)


def choose_rendezvous(job: HostJob, address: str) -> dict[str, Any]:
    """Register evener's rendezvous backends, and return the settings for the launch of `job`.

    `address` is the HOST:PORT to use if all processes are on one host.
    """
    way: dict[str, Any] = {
        "rdzv_backend": SINGLE_AGENT,
        "rdzv_endpoint": address,
        "local_addr": "127.0.0.1",
    }
    if len(job.hosts) > 1:
        host, port = job.rendezvous
        own = find_own_address(job.host, job.hosts)
        serves = host == job.host or (host not in job.hosts and is_here(host))
        seconds = math.ceil(job.wait_seconds)
        times = {"timeout": seconds, "join_timeout": seconds, "read_timeout": seconds}
        way = {
            "rdzv_backend": SEVERAL_AGENTS,
            "rdzv_endpoint": f"{own if host == job.host else host}:{port}",
            "rdzv_configs": {**times, "is_host": serves},
            "local_addr": own,
        }
    rendezvous_handler_registry.register(SINGLE_AGENT, _make_single_agent)
    rendezvous_handler_registry.register(SEVERAL_AGENTS, _make_several_agents)
    hosts = len(job.hosts)
    return {"run_id": job.identity, "min_nodes": hosts, "max_nodes": hosts, **way}
