"""The interface of the workloads that a probe child runs: built once for a place, then prepared
for shares and stepped.

A workload knows nothing about batch search, time or memory limits. When memory runs out, its
framework raises an exception of its own type, which `evener.balancer.probes` recognises.
"""

from __future__ import annotations

import ctypes
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from evener.shares.curves import Cost, Work

Precision = Literal["float32", "mixed_bfloat16", "mixed_float16"]
Input = Literal["host", "device"]
BACKENDS = {
    "tensorflow": "evener.workloads.keras_backend",
    "torch": "evener.workloads.torch_backend",
}  # by framework


class Place(msgspec.Struct, frozen=True):
    """The devices on which a child trains, as its framework names them, and the child's group if it
    is one of several ranks.
    """

    # the framework's own names in this process: ("cuda:0",), ("GPU:0", "GPU:1")
    devices: tuple[str, ...]
    # the framework's memory cap for each, if it can set one
    memory_limit_bytes: tuple[int | None, ...] = ()
    rank: int = 0
    # the address of each rank, this one included: "127.0.0.1:port"; for PyTorch on one host, the
    # path of their rendezvous file instead; empty: no group
    peers: tuple[str, ...] = ()
    trainings: int = 1  # separate trainings side by side: a pack
    threads: int | None = None  # compute threads; None: the framework's own choice
    precision: Precision = "float32"
    xla: bool = False
    input: Input = "host"  # host: batches come from host memory each step, as in training
    # worker processes of the loader for the user's data; None: as in the user's code
    loader_workers: int | None = None
    placement: str = ""  # for place layouts: the name of one of the workload's placements
    # the fraction of a sharded model on each rank; for a rank measured alone, only its own fraction
    state: tuple[float, ...] = ()

    @property
    def world(self) -> int:
        """The number of processes that step together."""
        return max(1, len(self.peers))


class PhaseSeconds(msgspec.Struct, frozen=True):
    """The seconds that two phases of the steps took since the last reading; None if unknown."""

    input_seconds: float | None = None  # waiting for the rows of a batch
    update_seconds: float | None = None  # the optimizer's own step


class LinkSpeed(msgspec.Struct, frozen=True):
    """The latency and speed of an all-reduce between the ranks of a group. `wrong` describes an
    incorrect sum; empty if all sums were correct.
    """

    latency_seconds: float
    bytes_per_second: float
    wrong: str = ""


class Workload(ABC):
    """A model that trains, built at its place. The constructor may take minutes. `step` may return
    before the devices have finished.
    """

    memory: MemoryMeter

    @abstractmethod
    def prepare(self, shares: Sequence[int], micro: Sequence[int] = ()) -> None:
        """Prepare batches with these shares (rows per device), and whatever the first step needs.
        In a group, `shares` has one share per rank, otherwise one per device of the place, in
        order. A device with share 0 is left out. Called again for each new size.

        `micro` has the rows per pass for each device; if empty, each share is one pass.
        """

    def prepare_dealt(
        self, shares: Sequence[int], costs: Sequence[Cost], tokens: Sequence[int]
    ) -> None:
        """Prepare shares of global batches whose rows are distributed by cost. A pass has at
        most `tokens` padded tokens.

        This method and `prepare_length` are only called if the workload's facts have `lengths`, an
        even sample of the rows' lengths.
        """
        raise NotImplementedError

    def prepare_length(self, shares: Sequence[int], micro: Sequence[int], length: int) -> None:
        """Prepare shares whose rows are padded to this length in every pass."""
        raise NotImplementedError

    @abstractmethod
    def step(self) -> None:
        """Take an optimizer step on the next batch, over all devices of the layout."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until every enqueued step is done on the devices."""

    @abstractmethod
    def loss_is_finite(self) -> bool:
        """True if the loss of the last step was finite or is unknown. Called when no
        step is pending.
        """

    def work(self) -> Work | None:
        """Return the total work of all steps so far in this process; None if
        rows have no lengths.
        """
        return None

    def read_waits(self) -> float | None:
        """Return the seconds that this process's device waited for other ranks since the last
        reading; None if that can't be measured.
        """
        return None

    def read_phases(self) -> PhaseSeconds:
        """Return the seconds of each phase, summed over the steps since the last reading. Called
        when no step is pending.
        """
        return PhaseSeconds()

    def keep_batch(self, kept: bool) -> bool:
        """Reuse one batch in all following steps if `kept`, otherwise take new batches again.
        Returns False if the workload can't reuse a batch.

        After `prepare`, steps take new batches.
        """
        return False

    def measure_link(self) -> LinkSpeed | None:
        """Return the speed of an all-reduce between all ranks of this group; None if there is no
        group or the framework doesn't report it. All ranks must call this at the same time.
        """
        return None

    def time_on_device(self) -> float | None:
        """Return the seconds that a device needs for one step whose kernels are all enqueued
        beforehand; None if no device supports this. All ranks of a group must call this at
        the same time.
        """
        return None

    def max_memory_bytes(self) -> tuple[int | None, ...]:
        """Return the peak bytes of the framework's allocator on each of this process's devices
        since `prepare`; None if unknown.
        """
        return self.memory.read()

    def release_memory(self) -> tuple[int | None, ...]:
        """Release memory that isn't in use. Returns the bytes kept on each device; None if the
        framework keeps all of it.
        """
        return self.memory.release()

    def read_shortage(self) -> str:
        """Return the framework's out-of-memory error if a step since `prepare` ended, but only in
        smaller passes than were asked for, so that the other ranks of a group didn't wait. Else
        the result is empty.
        """
        return ""

    def recover(self) -> bool:
        """Release the memory of a step that ran out of memory. True if the workload is back in its
        state before that step, so that it can be prepared again.
        """
        return False

    @abstractmethod
    def facts(self) -> Mapping[str, str]:
        """Return what the plan records about the workload: framework
        version, parameters, engine, ...
        """


class Entry(msgspec.Struct, frozen=True):
    """A workload in the registry. Nothing is imported until it is built."""

    name: str
    framework: Literal["tensorflow", "torch", "none"]
    home: str  # what builds it: "evener.workloads.keras_backend.models:build"
    summary: str  # one line
    source: str  # where the model comes from
    settings: dict[str, Any]  # parameters that `--set` can override, with their defaults
    # a larger batch isn't possible with its data or its kernels
    largest_share: int | None = None
    least: Mapping[str, int] = {}  # minimum values of settings
    # names of its place layouts; "single" is one device, as in a solo layout
    placements: tuple[str, ...] = ()
    placement_devices: int = 2  # the maximum number of devices in a placement


def pick(function: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are parameters of this function or class."""
    return {key: settings[key] for key in inspect.signature(function).parameters if key in settings}


class MemoryMeter:
    """Measures the growth of this process's memory, because allocators on a CPU report nothing.
    Create it before the model.

    Its subclasses for GPUs read their framework's allocator instead.
    """

    def __init__(self, devices: int) -> None:
        self._devices = devices
        _return_unused()
        self._before = _status_bytes("VmRSS") or 0

    def reset(self) -> None:
        """Start measuring from here. Unused memory from earlier sizes is released."""
        _return_unused()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now

    def read(self) -> tuple[int | None, ...]:
        """Return how far the process's peak since `reset` exceeds its memory before the model, in
        bytes. None for each device if several devices share the process's memory, or if the
        kernel doesn't report it.
        """
        peak = _status_bytes("VmHWM")
        if self._devices != 1 or peak is None:
            return (None,) * self._devices
        return (max(0, peak - self._before),)

    def release(self) -> tuple[int | None, ...]:
        """Release unused memory. Returns the bytes kept on each device; None if unknown."""
        return (None,) * self._devices

    def held(self) -> int:
        """Return the bytes allocated now; 0 if the kernel doesn't report them."""
        _return_unused()
        return _status_bytes("VmRSS") or 0


def _return_unused() -> None:
    """Return freed memory to the operating system."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(key: str) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None
