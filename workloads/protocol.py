"""The interface between a probe process and the model that it trains.

A workload is built once for a worker's setup, then prepared for shares and trained for some steps,
any number of times. It knows nothing about searches or time limits. If memory runs out, the
framework's own exception is raised; `evener.balancer.probes` recognises it.
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
    """Settings of one process that trains a workload, alone or as a rank of a group."""

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
        """Number of ranks in the group; 1 without a group."""
        return max(1, len(self.peers))


class PhaseSeconds(msgspec.Struct, frozen=True):
    """Seconds that a rank's steps waited for input and ran the optimizer; None if unknown."""

    input_seconds: float | None = None  # waiting for the rows of a batch
    update_seconds: float | None = None  # the optimizer's own step


class LinkSpeed(msgspec.Struct, frozen=True):
    """Measured speed of an all-reduce between the ranks.

    `wrong` describes an incorrect result, "" if all were correct.
    """

    latency_seconds: float
    bytes_per_second: float
    wrong: str = ""


class Workload(ABC):
    """A model with its data and optimizer, which a probe trains step by step.

    The constructor may take minutes. `step` may return before the devices have finished.
    """

    memory: MemoryMeter

    @abstractmethod
    def prepare(self, shares: Sequence[int], micro: Sequence[int] = ()) -> None:
        """Prepare steps in which each device computes its share of the batch.

        `shares` are rows by device, or by rank in a group; a device with 0 takes no part. `micro`
        is the largest number of rows per pass on each device; empty: a share is one pass. Resets
        the memory meter. It is called again whenever the sizes change.
        """

    def prepare_assigned(
        self, shares: Sequence[int], costs: Sequence[Cost], tokens: Sequence[int]
    ) -> None:
        """Prepare steps in which rows are assigned to ranks and passes by their lengths.

        - `costs`: for each rank, how its time depends on the number and length of rows.
        - `tokens`: for each rank, the maximum of tokens in a pass, with padding; 0 for no
          maximum.

        `shares` are the mean rows of each rank. This and `prepare_length` are called only if
        `facts` has `lengths`, a uniform sample of the rows' lengths.
        """
        raise NotImplementedError

    def prepare_length(self, shares: Sequence[int], micro: Sequence[int], length: int) -> None:
        """Prepare steps in which all rows have about the same length, in tokens."""
        raise NotImplementedError

    @abstractmethod
    def step(self) -> None:
        """Train for one step. It may return before the device has finished."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished all steps."""

    @abstractmethod
    def loss_is_finite(self) -> bool:
        """Return whether the latest loss is finite or unknown.

        It is called only when the devices have finished all steps.
        """

    def work(self) -> Work | None:
        """Return the tokens and passes computed so far, or None if rows have no lengths."""
        return None

    def read_waits(self) -> float | None:
        """Return the seconds spent on exchanging gradients since the previous reading.

        Waiting for slower ranks is included. None if unknown.
        """
        return None

    def read_phases(self) -> PhaseSeconds:
        """Return the seconds of input and optimizer since the previous reading.

        It is called only when the devices have finished all steps.
        """
        return PhaseSeconds()

    def keep_batch(self, kept: bool) -> bool:
        """Train on the same batch in all further steps (`kept`), or on new batches again.

        The difference in step time is the cost of loading data. Returns False if the workload can't
        do it. `prepare` switches back to new batches.
        """
        return False

    def measure_link(self) -> LinkSpeed | None:
        """Measure all-reduce between the ranks. None without a group, or if it isn't supported.

        All ranks have to call this at the same time.
        """
        return None

    def time_on_device(self) -> float | None:
        """Return the seconds of a step on the GPU when all its kernels are enqueued beforehand.

        The difference from a normal step's time is the host's overhead of launching kernels. None
        if it can't be measured. All ranks have to call this at the same time.
        """
        return None

    def max_memory_bytes(self) -> tuple[int | None, ...]:
        """Return each device's peak memory since `prepare`, in bytes; None if unknown."""
        return self.memory.read()

    def release_memory(self) -> tuple[int | None, ...]:
        """Free cached memory, and return the bytes still reserved on each device.

        None where it is unknown.
        """
        return self.memory.release()

    def read_shortage(self) -> str:
        """Return the error of a step that ran out of memory but was completed, or "".

        Such a step's rest is computed in smaller passes. It is "" if there was none since
        `prepare`. Only a rank of a group completes such a step, because the others wait for it.
        """
        return ""

    @property
    def updates(self) -> bool:
        """Whether the optimizer is updating the weights, or its last update failed.

        An error then leaves the weights inconsistent. False if that is unknown.
        """
        return False

    def recover(self) -> bool:
        """Clean up after a step that ran out of memory, and return whether training can go on.

        It can if the workload is back in its state before that step, and may be prepared again.
        """
        return False

    @abstractmethod
    def facts(self) -> Mapping[str, str]:
        """Return facts about the model and its libraries, by name."""


class Entry(msgspec.Struct, frozen=True):
    """A workload that can be chosen by name."""

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
    """Return only the settings that are parameters of the function."""
    return {key: settings[key] for key in inspect.signature(function).parameters if key in settings}


class MemoryMeter:
    """Measures the peak memory of this process, above what it held when the meter was created.

    GPU backends replace it by a meter of GPU memory. Create it before the model.
    """

    def __init__(self, devices: int) -> None:
        self._devices = devices
        _return_unused()
        self._before = _status_bytes("VmRSS") or 0

    def reset(self) -> None:
        """Reset the peak to the memory in use now."""
        _return_unused()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the resident memory

    def read(self) -> tuple[int | None, ...]:
        """Return the peak in bytes for each device; None if several devices share the process.

        None also if the kernel doesn't report it.
        """
        peak = _status_bytes("VmHWM")
        if self._devices != 1 or peak is None:
            return (None,) * self._devices
        return (max(0, peak - self._before),)

    def release(self) -> tuple[int | None, ...]:
        """Free cached memory, and return the bytes still reserved on each device.

        On a CPU this does nothing, and all values are None.
        """
        return (None,) * self._devices

    def held(self) -> int:
        """Return the bytes of memory in use now, or 0 if the kernel doesn't report them."""
        _return_unused()
        return _status_bytes("VmRSS") or 0


def _return_unused() -> None:
    """Return heap memory that the C library no longer uses to the kernel."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(key: str) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None
