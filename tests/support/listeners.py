"""Lists the sockets that a tree of processes listens on, from /proc."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

LISTENING = "0A"  # the state LISTEN in /proc/net/tcp; a UDP socket without a peer has UNCONNECTED
UNCONNECTED = "07"
TABLES = {"tcp": LISTENING, "tcp6": LISTENING, "udp": UNCONNECTED, "udp6": UNCONNECTED}
LOOK_SECONDS = 0.1  # between two looks; each look takes about 0.01 s of CPU time


class Listener(NamedTuple):
    """A socket that accepts connections or datagrams."""

    pid: int
    address: str
    port: int

    @property
    def on_loopback(self) -> bool:
        """True if only this machine can reach it."""
        return ipaddress.ip_address(self.address).is_loopback


def list_tree(root: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            stat = Path(f"/proc/{name}/stat").read_text()
            children[int(stat.rpartition(") ")[2].split()[1])].append(int(name))
    found, left = [], [root]
    while left:
        found.append(left.pop())
        left += children[found[-1]]
    return found


def list_listeners(root: int) -> set[Listener]:
    """Return the sockets on which a process and its descendants listen now."""
    owned = {pid: _list_sockets(pid) for pid in list_tree(root)}
    found = set()
    for socket, address in _list_waiting():
        for pid, sockets in owned.items():
            if socket in sockets:
                found.add(Listener(pid, *_read_address(address)))
    return found


def _list_sockets(pid: int) -> set[str]:
    """Return the link names of a process's open sockets; none if it has ended."""
    sockets = set()
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                sockets.add(os.readlink(entry.path))
    return sockets


def _list_waiting() -> Iterator[tuple[str, str]]:
    """Yield the link name and the address of each listening socket in this network namespace."""
    for table, state in TABLES.items():
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == state:
                yield f"socket:[{words[9]}]", words[1]


def _read_address(text: str) -> tuple[str, int]:
    """Parse an address as the kernel writes it: 4-byte words in the machine's own byte order."""
    digits, _, port = text.partition(":")
    words = bytes.fromhex(digits)
    if sys.byteorder == "little":
        words = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    return str(ipaddress.ip_address(words)), int(port, 16)


class ListenerLog:
    """A context that watches a tree of processes; `seen` has every listening socket that
    appeared.
    """

    def __init__(self, root: int) -> None:
        self.root, self.seen, self.looks = root, set[Listener](), 0
        self._over = Event()
        self._thread = Thread(target=self._look, daemon=True)

    def __enter__(self) -> ListenerLog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self.seen |= list_listeners(self.root)
            self.looks += 1
