"""The interface of the workloads that a probe's child process runs.

A workload is a model that trains. It is built once for a worker's setup; then it is
prepared for shares and runs steps.

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
LEFT_BYTES = 128 << 20  # memory that libraries allocate on first use and never free
BACKENDS = {
    "tensorflow": "evener.workloads.keras_backend",
    "torch": "evener.workloads.torch_backend",
}  # by framework


class WorkerSetup(msgspec.Struct, frozen=True):
    """The devices on which a child process trains, its group of ranks, and its options.

    The devices' names are those that the framework uses in this process.
    """

    # the framework's own names in this process: ("cuda:0",), ("GPU:0", "GPU:1")
    devices: tuple[str, ...]
    # the framework's memory cap for each device, if it supports caps
    memory_limit_bytes: tuple[int | None, ...] = ()
    rank: int = 0
    # the address of each rank, this one included: "127.0.0.1:port"; for PyTorch on one host, the
    # path of their rendezvous file instead; empty: no group
    peers: tuple[str, ...] = ()
    trainings: int = 1  # number of separate trainings that run at the same time (a pack)
    threads: int | None = None  # compute threads; None: the framework's own choice
    precision: Precision = "float32"
    xla: bool = False
    input: Input = "host"  # "host": each step's batch comes from host memory, as in training
    # worker processes of the loader for the user's data; None: as in the user's code
    loader_workers: int | None = None
    placement: str = ""  # the name of one of the workload's placements, or empty
    # fraction of a sharded model on each rank; a rank that is measured alone is the first of them,
    # and the others may be left out
    state: tuple[float, ...] = ()

    @property
    def world(self) -> int:
        """The number of processes in the group."""
        return max(1, len(self.peers))


class PhaseSeconds(msgspec.Struct, frozen=True):
    """The total seconds of two phases since the last reading; None if unknown."""

    input_seconds: float | None = None  # waiting for the rows of a batch
    update_seconds: float | None = None  # the optimizer's own step


class LinkSpeed(msgspec.Struct, frozen=True):
    """The latency and the bandwidth of an all-reduce between the ranks of a group.

    `wrong` describes an incorrect result; it is empty if all results were correct.
    """

    latency_seconds: float
    bytes_per_second: float
    wrong: str = ""


class Workload(ABC):
    """A model that trains, built for a worker's setup.

    The constructor may take minutes. `step` may return before the devices have finished.
    """

    memory: MemoryMeter

    @abstractmethod
    def prepare(self, shares: Sequence[int], micro: Sequence[int] = ()) -> None:
        """Prepare batches with these shares, and everything else that the first step needs.

        - `shares`: the rows per step of each rank in a group, or of each device without a group. A
          device with share 0 is left out.
        - `micro`: the rows per pass for each share; if empty, each share is one pass.

        This method is called again whenever the sizes change.
        """

    def prepare_assigned(
        self, shares: Sequence[int], costs: Sequence[Cost], tokens: Sequence[int]
    ) -> None:
        """Prepare global batches in which rows are assigned to ranks by their lengths and costs.

        - `shares`: the ranks' mean rows.
        - `costs`: predict the duration of a pass on each rank.
        - `tokens`: the maximum tokens per pass on each rank, padding included.

        This method and `prepare_length` are called only for a workload with rows of unequal length.
        Its `facts` must contain `lengths`, a uniform sample of the rows' lengths.
        """
        raise NotImplementedError

    def prepare_length(self, shares: Sequence[int], micro: Sequence[int], length: int) -> None:
        """Prepare shares whose rows are padded to `length` tokens in every pass.

        Such steps measure how the cost of a pass depends on the length. `prepare` describes the
        other parameters.
        """
        raise NotImplementedError

    @abstractmethod
    def step(self) -> None:
        """Run an optimizer step on the next batch, over all devices with a share."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the devices have finished all enqueued steps."""

    @abstractmethod
    def loss_is_finite(self) -> bool:
        """True if the loss of the last step was finite or is unknown.

        It is called only when the devices have finished all steps.
        """

    def work(self) -> Work | None:
        """Return the passes and the tokens, with and without padding, of this process's steps.

        Return None if all rows have the same length.
        """
        return None

    def read_waits(self) -> float | None:
        """Return the seconds that this process's device waited for other ranks.

        They are counted from the last reading. Return None if the wait can't be measured.
        """
        return None

    def read_phases(self) -> PhaseSeconds:
        """Return the seconds of each phase, summed over the steps since the last reading.

        It is called only when the devices have finished all steps.
        """
        return PhaseSeconds()

    def keep_batch(self, kept: bool) -> bool:
        """Reuse one batch in all following steps if `kept`, otherwise use new batches again.

        The steps that reuse a batch show how long a step takes without its input. Return False if
        the workload can't reuse a batch. `prepare` switches back to new batches.
        """
        return False

    def measure_link(self) -> LinkSpeed | None:
        """Return the speed of an all-reduce between all ranks of this group.

        Return None if there is no group or the framework doesn't report the speed. All ranks must
        call this method at the same time.
        """
        return None

    def time_on_device(self) -> float | None:
        """Return a step's seconds on the device if the host never delays it.

        All of the step's kernels are enqueued before the device begins. Return None if the device
        doesn't support that. All ranks of a group must call this method at the same time.
        """
        return None

    def max_memory_bytes(self) -> tuple[int | None, ...]:
        """Return the peak memory on each of this process's devices since `prepare`, in bytes.

        It is read from the framework's allocator if possible. A value is None if it is unknown.
        """
        return self.memory.read()

    def release_memory(self) -> tuple[int | None, ...]:
        """Release memory that isn't in use; return the bytes that stay reserved on each device.

        If the number of bytes on a device is unknown, it is None.
        """
        return self.memory.release()

    def read_shortage(self) -> str:
        """Return the out-of-memory error of a step that was then completed in smaller passes.

        Return "" if there was no such step since `prepare`. Only a rank of a group completes such a
        step, because the other ranks wait for it.
        """
        return ""

    @property
    def updates(self) -> bool:
        """True during the optimizer's update of the weights, and after an update that failed.

        An update can fail because memory ran out; the memory of the step's rows is free by then.
        False if the workload doesn't know.
        """
        return False

    def recover(self) -> bool:
        """Release the memory of a step that ran out of memory.

        Return True if the workload is back in its state before that step, so that it can be
        prepared again.
        """
        return False

    @abstractmethod
    def facts(self) -> Mapping[str, str]:
        """Return facts about the workload by name, which are written to the plan.

        Examples are the framework's version, the number of parameters and the engine.
        """


class Entry(msgspec.Struct, frozen=True):
    """A workload in the registry. Its framework isn't imported until it is built."""

    name: str
    framework: Literal["tensorflow", "torch", "none"]
    home: str  # its build function, such as "evener.workloads.keras_backend.models:build"
    summary: str  # a description in one line
    source: str  # where the model comes from
    settings: dict[str, Any]  # parameters that `--set` can override, with their defaults
    # maximum batch for its data or kernels
    largest_share: int | None = None
    least: Mapping[str, int] = {}  # minimum values of settings
    # names of its placements on several devices; "single" is one device, as in a solo layout
    placements: tuple[str, ...] = ()
    placement_devices: int = 2  # the maximum number of devices in a placement


def pick(function: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are parameters of this function or class."""
    return {key: settings[key] for key in inspect.signature(function).parameters if key in settings}


class MemoryMeter:
    """Measures the growth of this process's memory, because CPU allocators don't report it.

    The meter must exist before the model. `devices` is the process's number of devices. Subclasses
    for GPUs read their framework's allocator instead.
    """

    def __init__(self, devices: int) -> None:
        self._devices = devices
        _return_unused()
        self._before = _status_bytes("VmRSS") or 0

    def reset(self) -> None:
        """Start a new measurement of the peak.

        Memory that was freed before is returned to the operating system.
        """
        _return_unused()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the resident memory

    def read(self) -> tuple[int | None, ...]:
        """Return how far the peak since `reset` exceeds the memory before the model, in bytes.

        Several devices share the process's memory, so each has None. The result is also None if the
        kernel doesn't report the peak.
        """
        peak = _status_bytes("VmHWM")
        if self._devices != 1 or peak is None:
            return (None,) * self._devices
        return (max(0, peak - self._before),)

    def release(self) -> tuple[int | None, ...]:
        """Return None for each device, because a CPU's allocator doesn't report reserved memory."""
        return (None,) * self._devices

    def held(self) -> int:
        """Return the process's resident memory in bytes; 0 if the kernel doesn't report it."""
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
