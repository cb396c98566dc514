"""The workload that a probe child drives: built once for a place, then prepared for shares and
stepped.

A workload knows nothing of batches to try, of time or of memory limits. When memory runs out, its
framework raises what it likes; `evener.balancer.probes` recognises such errors.
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
    """The place of a child as its framework sees it: its own devices, and its group if it is one of
    several.
    """

    # the framework's own names in this process: ("cuda:0",), ("GPU:0", "GPU:1")
    devices: tuple[str, ...]
    # the framework's cap for each, where it can set one
    memory_limit_bytes: tuple[int | None, ...] = ()
    rank: int = 0
    # where each rank is met, this one too: "127.0.0.1:port"; of PyTorch on one host the path of a
    # file that all have in common; empty: no group
    peers: tuple[str, ...] = ()
    trainings: int = 1  # of their own side by side: a pack
    threads: int | None = None  # compute threads; None: the framework's own choice
    precision: Precision = "float32"
    xla: bool = False
    input: Input = "host"  # host: batches come from host memory each step, as in training
    # worker processes of the loader of the user's data; None: as the user's code says
    loader_workers: int | None = None
    placement: str = ""  # place layouts: the workload's own name for it
    # of a sharded model: the part of each rank; alone, of a rank measured by itself
    state: tuple[float, ...] = ()

    @property
    def world(self) -> int:
        """Processes that step together."""
        return max(1, len(self.peers))


class PhaseSeconds(msgspec.Struct, frozen=True):
    """What the steps since the last reading took in two of their phases; None: unknown."""

    input_seconds: float | None = None  # waiting for the rows of a batch
    update_seconds: float | None = None  # the optimizer's own step


class LinkSpeed(msgspec.Struct, frozen=True):
    """What an all-reduce between the ranks of a group takes; `wrong` says how a sum differed."""

    latency_seconds: float
    bytes_per_second: float
    wrong: str = ""


class Workload(ABC):
    """A model that trains, built at its place. Its constructor may take minutes; `step` returns
    when it is enqueued.
    """

    memory: MemoryMeter

    @abstractmethod
    def prepare(self, shares: Sequence[int], micro: Sequence[int] = ()) -> None:
        """Make batches of these samples per device (of all ranks in a group, else of the place's
        devices, in order) and whatever a first step needs. Called again for each new size; a share
        of 0 leaves that device out.

        `micro` has the rows of one pass for each device; without it, each share is one pass.
        """

    def prepare_dealt(
        self, shares: Sequence[int], costs: Sequence[Cost], tokens: Sequence[int]
    ) -> None:
        """Prepare shares of global batches that are dealt by cost; a pass has at most `tokens`
        padded tokens.

        This and the next are asked of workloads whose facts have an even sample of their rows'
        `lengths`.
        """
        raise NotImplementedError

    def prepare_length(self, shares: Sequence[int], micro: Sequence[int], length: int) -> None:
        """Prepare shares with rows that are padded to this length in every pass."""
        raise NotImplementedError

    @abstractmethod
    def step(self) -> None:
        """Take an optimizer step on the next batch, over all devices of the layout."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until every enqueued step is done on the devices."""

    @abstractmethod
    def loss_is_finite(self) -> bool:
        """True if the loss of the last step was finite, or isn't known; called when nothing is
        pending.
        """

    def work(self) -> Work | None:
        """The sum over all steps of this process; None where rows have no lengths."""
        return None

    def read_waits(self) -> float | None:
        """The seconds that its device waited for others since this was last read; None where that
        can't be known.
        """
        return None

    def read_phases(self) -> PhaseSeconds:
        """The phases of all steps since this was last read; called when nothing is pending."""
        return PhaseSeconds()

    def keep_batch(self, kept: bool) -> bool:
        """Step on one batch that is kept and used again, or no longer; False where that can't be
        done.

        `prepare` ends it too.
        """
        return False

    def measure_link(self) -> LinkSpeed | None:
        """The speed of the link between all ranks of this group, which call it at once; None where
        there is none, or the framework doesn't tell.
        """
        return None

    def time_on_device(self) -> float | None:
        """The seconds that a device needs for one step whose kernels are all enqueued before; None
        where there is no such device. All ranks of a group call it at once.
        """
        return None

    def max_memory_bytes(self) -> tuple[int | None, ...]:
        """Peak of the framework's allocator on each of this process' devices since `prepare`; None:
        unknown.
        """
        return self.memory.read()

    def release_memory(self) -> tuple[int | None, ...]:
        """Give back memory that isn't in use; the bytes kept on each device, None where the
        framework keeps all.
        """
        return self.memory.release()

    def recover(self) -> bool:
        """Give back what a step held that ran out of memory; True if the workload is again what it
        was before that step, so that another may be prepared.
        """
        return False

    @abstractmethod
    def facts(self) -> Mapping[str, str]:
        """The plan's facts about the workload: framework version, parameters, engine, ..."""


class Entry(msgspec.Struct, frozen=True):
    """A workload in the registry; nothing is imported until it is built."""

    name: str
    framework: Literal["tensorflow", "torch", "none"]
    home: str  # what builds it: "evener.workloads.keras_backend.models:build"
    summary: str  # one line
    source: str  # where the model comes from
    settings: dict[str, Any]  # parameters that `--set` can override, with their defaults
    # its data can't make, or its kernels can't take, a larger batch
    largest_share: int | None = None
    least: Mapping[str, int] = {}  # of settings
    # place layouts that it has; "single" is one device, as in a solo layout
    placements: tuple[str, ...] = ()
    placement_devices: int = 2  # most devices that a placement uses


def pick(function: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are parameters of a function, or of a class."""
    return {key: settings[key] for key in inspect.signature(function).parameters if key in settings}


class MemoryMeter:
    """The memory of this process, made before the model: its growth since then, as allocators on a
    CPU tell nothing.

    GPUs have meters with the same three methods, by their framework's allocator.
    """

    def __init__(self, devices: int) -> None:
        self._devices = devices
        _return_unused()
        self._before = _status_bytes("VmRSS") or 0

    def reset(self) -> None:
        """Count from here on; memory that earlier sizes left unused is given back."""
        _return_unused()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now

    def read(self) -> tuple[int | None, ...]:
        """The most bytes for each device; None where several share the process' memory, or the
        kernel doesn't say.
        """
        peak = _status_bytes("VmHWM")
        if self._devices != 1 or peak is None:
            return (None,) * self._devices
        return (max(0, peak - self._before),)

    def release(self) -> tuple[int | None, ...]:
        """Give back what isn't in use: the bytes kept on each device; None where that can't be
        done.
        """
        return (None,) * self._devices

    def held(self) -> int:
        """The bytes that are allocated now; 0 where the kernel doesn't say."""
        _return_unused()
        return _status_bytes("VmRSS") or 0


def _return_unused() -> None:
    """Give memory that was freed back to the system."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(key: str) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None
