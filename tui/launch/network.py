"""The network interface by which this host reaches another."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

import psutil


def find_interface(host: str) -> str:
    """The name of the interface whose address packets to `host` bear; empty if there is no way to it."""
    with suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as door:
                door.connect(address)  # of UDP: chooses the way, sends nothing
                own = door.getsockname()[0]
                names: dict[str, Any] = psutil.net_if_addrs()
                found = [
                    name for name, own_addresses in names.items() if own in {each.address for each in own_addresses}
                ]
                if found:
                    return found[0]
    return ""
