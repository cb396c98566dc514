"""The network between hosts: the interface by which this one reaches another, and whether ports can be reached."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psutil

from evener.training.launched import resolve

RENDEZVOUS_PORT = 29400  # of a launch over several hosts: PyTorch's own
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def choose_interface(host: str, hosts: Iterable[str]) -> dict[str, str]:
    """The variables by which gloo and NCCL use the interface towards the other hosts, unless they are set already."""
    others = [other for other in hosts if other != host]
    interface = find_interface(others[0]) if others else ""
    return {variable: interface for variable in VARIABLES if interface and variable not in os.environ}


def find_interface(host: str) -> str:
    """The name of the interface whose address packets to `host` bear; empty if there is no way to it."""
    interfaces: dict[str, Any] = psutil.net_if_addrs()
    for family, kind, protocol, _, address in resolve(host, port=9):
        with suppress(OSError), socket.socket(family, kind, protocol) as door:
            door.connect(address)  # of UDP: chooses the way, sends nothing
            own = door.getsockname()[0]
            for name, addresses in interfaces.items():
                if own in {each.address for each in addresses}:
                    return name
    return ""


CONNECT_SECONDS = 3.0
Place = tuple[str, int]  # a host's address, and a port


class Listener:
    """Runs on a host: listens at any port of its address and at that of a launch, if it is free, until closed."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._doors = [socket.create_server((address, 0))]
        with suppress(OSError):
            self._doors.append(socket.create_server((address, RENDEZVOUS_PORT)))
        for door in self._doors:
            threading.Thread(target=_accept, args=(door,), name="listener", daemon=True).start()

    def places(self) -> list[Place]:
        """The address and ports on which the listener waits."""
        return [(self._address, door.getsockname()[1]) for door in self._doors]

    def close(self) -> None:
        """Stop listening."""
        for door in self._doors:
            with suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)  # ends the thread that waits
            door.close()


def _accept(door: socket.socket) -> None:
    with suppress(OSError):
        while True:
            door.accept()[0].close()


def find_unreachable(places: Sequence[Place]) -> list[tuple[Place, str]]:
    """The places that this host can't connect to, each with the reason."""
    with ThreadPoolExecutor(32) as pool:
        faults = list(pool.map(_try_connecting, places))
    return [(place, fault) for place, fault in zip(places, faults, strict=True) if fault]


def _try_connecting(place: Place) -> str:
    try:
        socket.create_connection(place, CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
