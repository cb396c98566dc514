"""The network between hosts, and addresses to listen at.

The interface by which this host reaches another, whether ports can be reached, and whether a
request was meant for this machine's loopback.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil

from evener.errors import RequestError
from evener.training.launched import resolve

RENDEZVOUS_PORT = 29400  # of a launch over several hosts: PyTorch's own
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
CONNECT_SECONDS = 3.0
MOST_CALLERS = 4096  # hosts that connect once each
Place = tuple[str, int]  # a host's address, and a port


def loopback_interface() -> dict[str, str]:
    """The variables by which gloo and NCCL keep to this machine, whatever is set for other
    trainings.
    """
    return dict.fromkeys(VARIABLES, "lo")


def choose_interface(host: str, hosts: Iterable[str]) -> dict[str, str]:
    """The variables by which gloo and NCCL use the interface towards the other hosts, unless they
    are set already.
    """
    others = [other for other in hosts if other != host]
    interface = find_interface(others[0]) if others else ""
    if not interface:
        return {}
    return {variable: interface for variable in VARIABLES if variable not in os.environ}


def find_interface(host: str) -> str:
    """The name of the interface whose address packets to `host` bear; empty if there is no way to
    it.
    """
    own = find_source(host)
    interfaces: dict[str, Any] = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if own and own in {each.address for each in addresses}:
            return name
    return ""


def find_source(host: str) -> str:
    """This machine's address that packets to `host` bear; empty if there is no way to it."""
    for family, kind, protocol, _, address in resolve(host, port=9):
        with suppress(OSError), socket.socket(family, kind, protocol) as door:
            door.connect(address)  # of UDP: chooses the way, sends nothing
            return str(door.getsockname()[0])
    return ""


def find_own_address(host: str, hosts: Iterable[str]) -> str:
    """The address at which the other hosts reach this one, which they know as `host`.

    A machine's own name often leads to its loopback (127.0.1.1 on Debian); then it is the address
    that packets to the others bear.
    """
    named = [str(address[0]) for *_, address in resolve(host)]
    others = [find_source(other) for other in hosts if other != host]
    outward = [source for source in others if source and not is_loopback(source)]
    if outward and (not named or is_loopback(named[0])):
        return outward[0]
    return named[0] if named else host


class Listener:
    """Runs on a host: listens at any port of its address and at that of a launch, if it is free,
    until closed.

    The kernel answers who connects; nothing is read.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._doors = [socket.create_server((address, 0), backlog=MOST_CALLERS)]
        with suppress(OSError):
            self._doors.append(
                socket.create_server((address, RENDEZVOUS_PORT), backlog=MOST_CALLERS)
            )

    def places(self) -> list[Place]:
        """The address and ports on which the listener waits."""
        return [(self._address, door.getsockname()[1]) for door in self._doors]

    def close(self) -> None:
        """Stop listening."""
        for door in self._doors:
            door.close()


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


class Address(NamedTuple):
    """The host and port where a server listens."""

    host: str
    port: int

    @property
    def authority(self) -> str:
        """The address as it stands in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, option: str) -> Address:
    """`127.0.0.1:9401`, `localhost:9401` or `[::1]:9401`; RequestError for anything else."""
    try:
        parts = urlsplit(f"//{text}")
        host = parts.hostname
        port = parts.port
        if host and port is not None and parts.netloc == text and "@" not in text:
            return Address(
                "127.0.0.1" if host == "localhost" else str(ipaddress.ip_address(host)), port
            )
    except ValueError:
        pass
    raise RequestError(
        f"{option} {text!r} is not an address.",
        "Give an IP address and a port, like 127.0.0.1:9401.",
    )


def is_loopback(host: str) -> bool:
    """True if a host, as a URL or the Host header has it, with or without a port, is this machine's
    loopback.

    A web page elsewhere can make a browser send a request here under a name of its own, but not
    under these.
    """
    try:
        name = "" if "@" in host else urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
