"""The network between hosts: interfaces, reachability, and addresses to listen on.

The module finds the interface through which this host reaches another host, and checks whether
ports can be reached. It also checks whether a request was addressed to this machine's loopback.
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

RENDEZVOUS_PORT = 29400  # for a launch over several hosts; PyTorch's default
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
CONNECT_SECONDS = 3.0
MOST_CALLERS = 4096  # backlog: each host connects once
Endpoint = tuple[str, int]  # a host's address, and a port


def loopback_interface() -> dict[str, str]:
    """Return the environment variables that make gloo and NCCL use only the loopback interface.

    They take precedence over inherited variables, which may be meant for other training runs.
    """
    return dict.fromkeys(VARIABLES, "lo")


def choose_interface(host: str, hosts: Iterable[str]) -> dict[str, str]:
    """Return variables that make gloo and NCCL use the interface to other hosts.

    `host` is this host's name among `hosts`. Variables that are already set are left out. Return an
    empty dictionary if there are no other hosts or no route to them.
    """
    others = [other for other in hosts if other != host]
    interface = find_interface(others[0]) if others else ""
    if not interface:
        return {}
    return {variable: interface for variable in VARIABLES if variable not in os.environ}


def find_interface(host: str) -> str:
    """Return the name of the interface through which packets to `host` leave this machine.

    Return "" if there is no route.
    """
    own = find_source_address(host)
    interfaces: dict[str, Any] = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if own and own in {address.address for address in addresses}:
            return name
    return ""


def find_source_address(host: str) -> str:
    """Return this machine's source address for packets to `host`; "" if there is no route."""
    for family, kind, protocol, _, address in resolve(host, port=9):
        with suppress(OSError), socket.socket(family, kind, protocol) as sock:
            sock.connect(address)  # on a UDP socket: chooses the route, sends nothing
            return str(sock.getsockname()[0])
    return ""


def find_own_address(host: str, hosts: Iterable[str]) -> str:
    """Return the address at which the other hosts can reach this host.

    `host` is this host's name among them. If it resolves to loopback, return the source address of
    packets to the other hosts.
    """
    # a machine's own name often resolves to loopback, such as 127.0.1.1 on Debian
    named = [str(address[0]) for *_, address in resolve(host)]
    others = [find_source_address(other) for other in hosts if other != host]
    outward = [source for source in others if source and not is_loopback(source)]
    if outward and (not named or is_loopback(named[0])):
        return outward[0]
    return named[0] if named else host


class Listener:
    """Listens on a free port of `address`, and on the rendezvous port if possible.

    Other hosts connect to check that they can reach this host. Nothing is read from the
    connections.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._sockets = [socket.create_server((address, 0), backlog=MOST_CALLERS)]
        with suppress(OSError):
            self._sockets.append(
                socket.create_server((address, RENDEZVOUS_PORT), backlog=MOST_CALLERS)
            )

    def endpoints(self) -> list[Endpoint]:
        """Return the pairs of address and port on which this listener listens."""
        return [(self._address, sock.getsockname()[1]) for sock in self._sockets]

    def close(self) -> None:
        """Stop listening, and free the ports."""
        for sock in self._sockets:
            sock.close()


def find_unreachable(endpoints: Sequence[Endpoint]) -> list[tuple[Endpoint, str]]:
    """Return the endpoints to which this host can't connect, each with the reason."""
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
    """The IP address and the port on which a server listens."""

    host: str
    port: int

    @property
    def authority(self) -> str:
        """The address as written in a URL: an IPv6 address is in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, option: str) -> Address:
    """Parse an address such as `127.0.0.1:9401`, `localhost:9401` or `[::1]:9401`.

    Raises RequestError for any other text; `option` is the option's name, for the message.
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
    """True if `host`, from a URL or a Host header, is this machine's loopback.

    `host` is a name or an address, and may include a port.
    """
    # This check protects a local server: a web page elsewhere can make a browser send a request to
    # this machine, but only under the page's own host name.
    try:
        name = "" if "@" in host else urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
