"""A workload without a framework: its step keeps the CPU busy for a set time, and it holds real
memory.

It fails on request in every way a child can fail, so that probes are tested against real children
in milliseconds.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from evener.errors import RequestError
from evener.shares.whole_rows import split_passes
from evener.workloads.protocol import WorkerSetup, Workload

MIB = 1 << 20
FAILURES = ("", "raise", "exit", "kill", "hang", "garbage", "memory", "grow", "nan")
CONNECT_SECONDS = 30.0


class Synthetic(Workload):
    """A workload whose pass takes `base_ms + per_sample_ms * rows` on its slowest device.

    The ranks of a group wait for each other after each step.

    The settings are those of `synthetic_entry`. If ranks are on several hosts, each step takes
    `network_ms` longer. `fail` (one of FAILURES) happens in the first step, counted from 0 since
    `prepare`, with step number >= `at_step` and own share >= `at_share`; "memory" happens in
    `prepare`. "grow" makes that one step 100 times longer and holds that much memory a second time.
    """

    def __init__(self, setup: WorkerSetup, settings: Mapping[str, Any]) -> None:
        if settings["fail"] not in FAILURES:
            raise RequestError(
                f"synthetic can't fail by {settings['fail']!r}.",
                f"Choose one of {', '.join(FAILURES[1:])}.",
            )
        self._setup = setup
        self._settings = dict(settings)
        self._random = random.Random(setup.rank)
        self._shares: tuple[int, ...] = ()
        self._passes: tuple[tuple[int, ...], ...] = ()  # the rows of each pass, by own device
        self._held: list[bytearray] = []
        self._steps = 0
        self._barrier = Barrier(setup.peers, setup.rank) if setup.world > 1 else None
        hosts = {peer.rpartition(":")[0] for peer in setup.peers}
        self._network_seconds = settings["network_ms"] / 1000 if len(hosts) > 1 else 0.0

    def prepare(self, shares: Sequence[int], micro: Sequence[int] = ()) -> None:
        """Allocate the memory that a pass needs.

        Raises MemoryError if that is more than the setup's limit or the machine's memory.
        """
        own = slice(self._setup.rank, self._setup.rank + 1) if self._barrier else slice(None)
        self._shares = tuple(shares[own])
        sizes = (micro or shares)[own]
        self._passes = tuple(
            split_passes(*each) if each[0] else () for each in zip(self._shares, sizes, strict=True)
        )
        self._steps = 0
        self._held.clear()
        if self._settings["fail"] == "memory" and self._struck():
            raise MemoryError(
                f"synthetic was asked to run out of memory at {self._largest} samples"
            )
        self._hold()

    def _hold(self) -> None:
        """Allocate the memory of the largest pass on each device."""
        limits = [*self._setup.memory_limit_bytes, *[None] * len(self._shares)]
        for passes, limit in zip(self._passes, limits, strict=False):
            size = self._bytes(max(passes)) if passes else 0
            if limit is not None and size > limit:
                raise MemoryError(
                    f"synthetic needs {size} bytes for {max(passes)} samples, its device has "
                    f"{limit}"
                )
            self._held.append(_touched(size))

    def step(self) -> None:
        """Keep the CPU busy for the step's time, then wait for the other ranks."""
        started = time.perf_counter()
        seconds = self._seconds()
        if self._struck():
            seconds = self._fail(seconds)
        keep_busy(started + seconds)
        self._steps += 1
        if self._barrier:
            self._barrier.wait()
            time.sleep(self._network_seconds)

    def synchronize(self) -> None:
        """Do nothing: a step has ended when it returns."""

    def loss_is_finite(self) -> bool:
        """Return False from the step on in which the settings ask for a loss that isn't finite."""
        return not (self._settings["fail"] == "nan" and self._steps > self._settings["at_step"])

    def max_memory_bytes(self) -> tuple[int | None, ...]:
        """Return the bytes allocated for each own device."""
        return tuple(len(block) for block in self._held)

    def release_memory(self) -> tuple[int | None, ...]:
        """Release all memory until the next `prepare`."""
        self._held = [bytearray()] * len(self._held)
        return self.max_memory_bytes()

    def close(self) -> None:
        """Leave the group."""
        if self._barrier:
            self._barrier.close()

    def facts(self) -> Mapping[str, str]:
        """Return the number of parameters that the settings name, and a digest of the settings."""
        digest = "-".join(f"{key}={value}" for key, value in sorted(self._settings.items()))
        return {
            "parameters": str(self._settings["parameters"]),
            "engine": "barrier",
            "digest": digest,
        }

    @property
    def _largest(self) -> int:
        return max(self._shares, default=0)

    def _bytes(self, share: int) -> int:
        mib = self._settings["memory_base_mib"] + self._settings["memory_per_sample_mib"] * share
        return int(mib * MIB)

    def _seconds(self) -> float:
        settings = self._settings
        passes = max(map(len, self._passes), default=0)
        milliseconds = settings["base_ms"] * passes + settings["per_sample_ms"] * self._largest
        return float(milliseconds * max(0.0, self._random.gauss(1.0, settings["noise"]))) / 1000

    def _struck(self) -> bool:
        settings = self._settings
        return bool(
            settings["fail"]
            and self._largest >= settings["at_share"]
            and self._steps >= settings["at_step"]
        )

    def _fail(self, seconds: float) -> float:
        match self._settings["fail"]:
            case "raise":
                raise ValueError(
                    f"synthetic was asked to raise at step {self._steps} of {self._largest} samples"
                )
            case "exit":
                os._exit(self._settings["exit_code"])
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                while True:
                    time.sleep(3600)
            case "garbage":
                os.write(sys.stdout.fileno(), b"\x00\xff this is not a message\n")
                os.write(1, b'{"half": \n')
            case "grow" if self._steps == self._settings["at_step"]:
                self._held = [_touched(2 * len(block)) for block in self._held]
                return seconds * 100
        return seconds


def build(_name: str, setup: WorkerSetup, settings: Mapping[str, Any]) -> Synthetic:
    """Return the workload for a worker's setup."""
    return Synthetic(setup, settings)


def keep_busy(until: float) -> None:
    """Keep the CPU busy until `time.perf_counter()` reaches `until`."""
    while time.perf_counter() < until:
        pass


class Barrier:
    """Makes the ranks of a group wait for each other, over loopback sockets.

    Rank 0 listens at its peer address, and the others connect to it. When a rank has died, the
    others get a ConnectionError, as a framework's collective operation would raise it.
    """

    def __init__(self, peers: Sequence[str], rank: int) -> None:
        host, _, port = peers[0].rpartition(":")
        self._links: list[socket.socket] = []
        self._rank = rank
        if rank == 0:
            with socket.create_server((host, int(port))) as server:
                server.settimeout(CONNECT_SECONDS)
                self._links = [server.accept()[0] for _ in peers[1:]]
        else:
            self._links = [_connect(host, int(port))]
        for link in self._links:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def wait(self) -> None:
        """Return once every rank has called this."""
        if self._rank == 0:
            for link in self._links:
                _receive(link)
        for link in self._links:
            link.sendall(b".")
        if self._rank != 0:
            _receive(self._links[0])

    def close(self) -> None:
        """Leave the group: ranks that wait for this one get a ConnectionError."""
        for link in self._links:
            link.close()


def _connect(host: str, port: int) -> socket.socket:
    until = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            link = socket.create_connection((host, port))
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)
        else:
            return link


def _receive(link: socket.socket) -> None:
    if not link.recv(1):
        raise ConnectionError("a rank of the group has gone")


def _touched(size: int) -> bytearray:
    """Return `size` bytes of memory whose pages have been written, so that they are really
    allocated.
    """
    block = bytearray(size)
    block[::4096] = b"\x01" * len(range(0, size, 4096))
    return block
