"""How PyTorch's elastic agents find each other, and what they tell their processes of that.

Alone, an agent needs nobody. Over several hosts agents meet at a port of one address; PyTorch's own
rendezvous would open it on every address of the machine.
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

# names of the ways for PyTorch
ALONE = "evener-alone"
SEVERAL = "evener-several"


class AloneRendezvous(RendezvousHandler):  # type: ignore[misc]
    """The rendezvous of an agent without others; its store is in this process, and has no port."""

    def __init__(self, run_id: str, address: str) -> None:
        self._run_id = run_id
        host, _, port = address.rpartition(":")
        self._place = RendezvousStoreInfo(host, int(port))
        self._store = HashStore()
        self._rounds = 0
        self._closed = False

    def get_backend(self) -> str:
        """The name of this way."""
        return ALONE

    def next_rendezvous(self) -> RendezvousInfo:
        """The only agent, and the address that its processes are told."""
        self._rounds += 1
        store = PrefixStore(str(self._rounds), self._store)
        return RendezvousInfo(store, 0, 1, self._place)

    def is_closed(self) -> bool:
        """True once the agent has ended."""
        return self._closed

    def set_closed(self) -> None:
        """Note that the agent ends."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """No other agent ever comes."""
        return 0

    def get_run_id(self) -> str:
        """The name of the training."""
        return self._run_id

    def shutdown(self) -> bool:
        """There is nothing to close."""
        return True


class OneAddressBackend(C10dRendezvousBackend):  # type: ignore[misc]
    """PyTorch's own backend, by the name under which it is asked for."""

    @property
    def name(self) -> str:
        """The name of this way."""
        return SEVERAL


def _meet_alone(parameters: RendezvousParameters) -> RendezvousHandler:
    return AloneRendezvous(parameters.run_id, parameters.endpoint)


def _meet_several(parameters: RendezvousParameters) -> RendezvousHandler:
    """PyTorch's dynamic rendezvous, by a store that its host serves on one address alone."""
    host, _, port = parameters.endpoint.rpartition(":")
    serves = bool(parameters.get_as_bool("is_host"))
    timeout = timedelta(seconds=parameters.get_as_int("read_timeout", 60) or 60)
    try:
        store = open_tcp_store(host, int(port), serves, timeout)
    except (ValueError, RuntimeError) as error:
        raise RendezvousConnectionError(str(error)) from error
    return create_handler(store, OneAddressBackend(store, parameters.run_id), parameters)


def choose_way(job: HostJob, address: str) -> dict[str, Any]:
    """The words of PyTorch's LaunchConfig on how the agents of all hosts find each other.

    Alone, the processes are told the `address`, HOST:PORT.
    """
    way: dict[str, Any] = {
        "rdzv_backend": ALONE,
        "rdzv_endpoint": address,
        "local_addr": "127.0.0.1",
    }
    if len(job.hosts) > 1:
        host, port = job.meeting
        own = find_own_address(job.host, job.hosts)
        serves = host == job.host or (host not in job.hosts and is_here(host))
        seconds = math.ceil(job.wait_seconds)
        times = {"timeout": seconds, "join_timeout": seconds, "read_timeout": seconds}
        way = {
            "rdzv_backend": SEVERAL,
            "rdzv_endpoint": f"{own if host == job.host else host}:{port}",
            "rdzv_configs": {**times, "is_host": serves},
            "local_addr": own,
        }
    rendezvous_handler_registry.register(ALONE, _meet_alone)
    rendezvous_handler_registry.register(SEVERAL, _meet_several)
    hosts = len(job.hosts)
    return {"run_id": job.identity, "min_nodes": hosts, "max_nodes": hosts, **way}
