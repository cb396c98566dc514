"""The network interface by which this host reaches another."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
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
