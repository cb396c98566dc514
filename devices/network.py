"""Network interfaces, addresses and ports for training processes on several hosts."""

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

RENDEZVOUS_PORT = 29400  # for a launch over several hosts; PyTorch's default
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
CONNECT_SECONDS = 3.0
MOST_CALLERS = 4096  # backlog: each host connects once
Endpoint = tuple[str, int]  # a host's address, and a port


def loopback_interface() -> dict[str, str]:
    """Return environment variables that make Gloo and NCCL use the loopback interface."""
    return dict.fromkeys(VARIABLES, "lo")


def choose_interface(host: str, hosts: Iterable[str]) -> dict[str, str]:
    """Return environment variables that make Gloo and NCCL use the interface to other hosts.

    `host` is this machine's name in `hosts`. Variables that are already set are left out. The
    result is empty if there are no other hosts, or no route to them.
    """
    others = [other for other in hosts if other != host]
    interface = find_interface(others[0]) if others else ""
    if not interface:
        return {}
    return {variable: interface for variable in VARIABLES if variable not in os.environ}


def find_interface(host: str) -> str:
    """Return the name of the network interface that leads to a host, or "" if none does."""
    own = find_source_address(host)
    interfaces: dict[str, Any] = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if own and own in {address.address for address in addresses}:
            return name
    return ""


def find_source_address(host: str) -> str:
    """Return the local address from which packets to a host are sent, or "" if there is no route.

    No packet is sent.
    """
    for family, kind, protocol, _, address in resolve(host, port=9):
        with suppress(OSError), socket.socket(family, kind, protocol) as sock:
            sock.connect(address)  # on a UDP socket: chooses the route, sends nothing
            return str(sock.getsockname()[0])
    return ""


def find_own_address(host: str, hosts: Iterable[str]) -> str:
    """Return the address at which the other hosts can reach this machine, whose name is `host`.

    If the name can't be resolved, or only to a loopback address, it is the local address of a route
    to another host.
    """
    # a machine's own name often resolves to loopback, such as 127.0.1.1 on Debian
    named = [str(address[0]) for *_, address in resolve(host)]
    others = [find_source_address(other) for other in hosts if other != host]
    outward = [source for source in others if source and not is_loopback(source)]
    if outward and (not named or is_loopback(named[0])):
        return outward[0]
    return named[0] if named else host


class Listener:
    """Accepts connections, to test whether other hosts can connect to this one.

    It listens at a free port. It also listens at port 29400, PyTorch's port for rendezvous, unless
    that is taken. Raises `OSError` if the address can't be used.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._sockets = [socket.create_server((address, 0), backlog=MOST_CALLERS)]
        with suppress(OSError):
            self._sockets.append(
                socket.create_server((address, RENDEZVOUS_PORT), backlog=MOST_CALLERS)
            )

    def endpoints(self) -> list[Endpoint]:
        """Return the address and the port of each socket."""
        return [(self._address, sock.getsockname()[1]) for sock in self._sockets]

    def close(self) -> None:
        """Close all sockets."""
        for sock in self._sockets:
            sock.close()


def find_unreachable(endpoints: Sequence[Endpoint]) -> list[tuple[Endpoint, str]]:
    """Try to connect to all endpoints at the same time, and return those that can't be reached.

    Each failed endpoint comes with its error. The timeout is 3 seconds.
    """
    with ThreadPoolExecutor(32) as pool:
        faults = list(pool.map(_try_connecting, endpoints))
    return [(endpoint, fault) for endpoint, fault in zip(endpoints, faults, strict=True) if fault]


def _try_connecting(endpoint: Endpoint) -> str:
    try:
        socket.create_connection(endpoint, CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


class Address(NamedTuple):
    """An IP address and a port."""

    host: str
    port: int

    @property
    def authority(self) -> str:
        """The address as `host:port`, with an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, option: str) -> Address:
    """Parse an address such as `IP:PORT`, `[IPv6]:PORT` or `localhost:PORT`.

    `option` is the name of the command-line option in error messages. Raises `RequestError` for any
    other text.
    """
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
    """Return True if a Host header or `host:port` names `localhost` or a loopback address."""
    # This check protects a local server: a web page elsewhere can make a browser send a request to
    # this machine, but only under the page's own host name.
    try:
        name = "" if "@" in host else urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
