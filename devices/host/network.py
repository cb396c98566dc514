"""The network interface by which this host reaches another."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

import psutil

from evener.launched import resolve


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
