"""A check that hosts reach each other's ports: each listens for a moment, and the others connect."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from ..host.network import RENDEZVOUS_PORT

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
