"""Addresses to listen at, and whether a request was meant for this machine's loopback."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple
from urllib.parse import urlsplit

from evener.errors import RequestError


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
        host, port = parts.hostname, parts.port
        if host and port is not None and parts.netloc == text and "@" not in text:
            return Address("127.0.0.1" if host == "localhost" else str(ipaddress.ip_address(host)), port)
    except ValueError:
        pass
    raise RequestError(f"{option} {text!r} is not an address.", "Give an IP address and a port, like 127.0.0.1:9401.")


def is_loopback(host: str) -> bool:
    """True if a host, as a URL or the Host header has it, with or without a port, is this machine's loopback.

    A web page elsewhere can make a browser send a request here under a name of its own, but not under these.
    """
    try:
        name = "" if "@" in host else urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
