"""Which sockets a tree of processes listens on, as /proc shows them while it runs."""

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

LISTENING = "0A"  # the state in /proc/net/tcp; a UDP socket without a peer has UNCONNECTED
UNCONNECTED = "07"
LOOK_SECONDS = 0.02


class Listener(NamedTuple):
    """A socket that waits for others."""

    pid: int
    address: str
    port: int

    @property
    def on_loopback(self) -> bool:
        """True if only this machine can reach it."""
        return ipaddress.ip_address(self.address).is_loopback


def list_tree(root: int) -> list[int]:
    """A process and all that descend from it."""
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
    """The sockets on which a process and its descendants wait now."""
    return {listener for pid in list_tree(root) for listener in _list_own(pid)}


def _list_own(pid: int) -> Iterator[Listener]:
    with suppress(OSError):
        links = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
        sockets = set()
        for link in links:
            with suppress(OSError):
                sockets.add(os.readlink(link))
        for table, state in (
            *(("tcp", LISTENING), ("tcp6", LISTENING)),
            *(("udp", UNCONNECTED), ("udp6", UNCONNECTED)),
        ):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == state and f"socket:[{words[9]}]" in sockets:
                    yield Listener(pid, *_read_address(words[1]))


def _read_address(text: str) -> tuple[str, int]:
    """An address as the kernel writes it: words of four bytes in the machine's own order."""
    digits, _, port = text.partition(":")
    words = bytes.fromhex(digits)
    if sys.byteorder == "little":
        words = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    return str(ipaddress.ip_address(words)), int(port, 16)


class ListenerLog:
    """Looks at a tree of processes until it is left; `seen` has all sockets that were there."""

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
