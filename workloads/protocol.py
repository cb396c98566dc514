"""The interface between a probe process and the model that it trains.

A workload is built once for a worker's setup. It is then prepared for shares and trained for some
steps, any number of times. It knows nothing about searches or time limits. If memory runs out, the
framework's own exception is raised; `evener.balancer.probes` recognizes it.
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
    """Settings of a process that trains a workload, either on its own or as a rank of a group."""

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
        """The number of ranks in the group; 1 without a group."""
        return max(1, len(self.peers))


class PhaseSeconds(msgspec.Struct, frozen=True):
    """How many seconds a rank waited for input, and how many its optimizer ran; None if unknown."""

    input_seconds: float | None = None  # waiting for the rows of a batch
    update_seconds: float | None = None  # the optimizer's own step


class LinkSpeed(msgspec.Struct, frozen=True):
    """Measured speed of an all-reduce between the ranks.

    `wrong` describes an incorrect result; "" if all results were correct.
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

        `shares` are the rows of each device or, in a group, of each rank. A device with 0 rows
        takes no part. `micro` is the largest number of rows that each device computes in one pass;
        if it is empty, each share is one pass. The memory meter is reset. This is called again
        whenever the sizes change.
        """

    def prepare_assigned(
        self, shares: Sequence[int], costs: Sequence[Cost], tokens: Sequence[int]
    ) -> None:
        """Prepare steps in which rows are assigned to ranks and passes by their lengths.

        This and `prepare_length` are called only if `facts` has `lengths`, a uniform sample of the
        rows' lengths.

        - `shares`: the mean number of rows of each rank.
        - `costs`: for each rank, how its time depends on the number and length of rows.
        - `tokens`: for each rank, the most tokens in a pass, including padding; 0 for no limit.
        """
        raise NotImplementedError

    def prepare_length(self, shares: Sequence[int], micro: Sequence[int], length: int) -> None:
        """Prepare steps on rows that all have about `length` tokens.

        `shares` and `micro` have the same meaning as in `prepare`.
        """
        raise NotImplementedError

    @abstractmethod
    def step(self) -> None:
        """Train for one step.

        The device may still be computing when this returns.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished all steps."""

    @abstractmethod
    def loss_is_finite(self) -> bool:
        """Return whether the latest loss is finite or unknown.

        It is only called when the devices have finished all steps.
        """

    def work(self) -> Work | None:
        """Return the tokens and passes computed so far, or None if rows have no lengths."""
        return None

    def read_waits(self) -> float | None:
        """Return how many seconds were spent on exchanging gradients since the previous call.

        Waiting for slower ranks is included. Returns None if the time is unknown.
        """
        return None

    def read_phases(self) -> PhaseSeconds:
        """Return how long steps waited for input, and how long the optimizer ran.

        Both cover the time since the previous call. It is only called when the devices have
        finished all steps.
        """
        return PhaseSeconds()

    def keep_batch(self, keep: bool) -> bool:
        """Reuse the same batch for every step if `keep` is set, else draw new batches again.

        The difference in step time is the cost of loading data. Returns False if the workload
        doesn't support it. `prepare` switches back to new batches.
        """
        return False

    def measure_link(self) -> LinkSpeed | None:
        """Measure the speed of an all-reduce between the ranks.

        All ranks have to call this at the same time. Returns None without a group, or if it isn't
        supported.
        """
        return None

    def time_on_device(self) -> float | None:
        """Return the seconds that the GPU needs for a step whose kernels are enqueued beforehand.

        The difference from the normal step time is the host's overhead of launching kernels. All
        ranks have to call this at the same time. Returns None if it can't be measured.
        """
        return None

    def max_memory_bytes(self) -> tuple[int | None, ...]:
        """Return each device's peak memory since `prepare`, in bytes; None where unknown."""
        return self.memory.read()

    def count_memory_retries(self) -> int:
        """Return how often the allocator of a GPU had to free cached memory to fulfil a request.

        Each time counts, since the process began. The result is 0 where that is unknown.
        """
        return 0

    def release_memory(self) -> tuple[int | None, ...]:
        """Free cached memory, and return the bytes that remain reserved on each device.

        The value is None for a device on which that is unknown.
        """
        return self.memory.release()

    def read_shortage(self) -> str:
        """Return the error of a step that ran out of memory but was completed anyway.

        In a group, the other ranks wait for such a step. So the rank computes the rest of the step
        in smaller passes. Returns "" if no step ran out of memory since `prepare`.
        """
        return ""

    @property
    def is_updating(self) -> bool:
        """Whether the optimizer is updating the weights, or its last update failed.

        If an error occurs while this is True, the weights may be inconsistent. It is False if the
        workload can't say.
        """
        return False

    def recover(self) -> bool:
        """Clean up after a step that ran out of memory, and return whether training can go on.

        If it can, the workload is in the state before that step, and may be prepared again.
        """
        return False

    @abstractmethod
    def facts(self) -> Mapping[str, str]:
        """Return facts about the model and its libraries, by name."""


class Entry(msgspec.Struct, frozen=True):
    """A workload in the registry, which can be chosen by its name."""

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
    """Return only those settings that are parameters of the function."""
    return {key: settings[key] for key in inspect.signature(function).parameters if key in settings}


class MemoryMeter:
    """Measures the peak memory of this process, above what it used when the meter was created.

    Create it before the model. On GPUs, a meter of GPU memory is used instead.
    """

    def __init__(self, devices: int) -> None:
        self._devices = devices
        _return_unused()
        self._before = _status_bytes("VmRSS") or 0

    def reset(self) -> None:
        """Reset the peak to the memory that is in use now."""
        _return_unused()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the resident memory

    def read(self) -> tuple[int | None, ...]:
        """Return the peak memory of each device, in bytes.

        The values are None if several devices share the process, or if the kernel doesn't report
        them.
        """
        peak = _status_bytes("VmHWM")
        if self._devices != 1 or peak is None:
            return (None,) * self._devices
        return (max(0, peak - self._before),)

    def release(self) -> tuple[int | None, ...]:
        """Free cached memory, and return the bytes that remain reserved on each device.

        On a CPU, this does nothing and returns None for each device.
        """
        return (None,) * self._devices

    def used_bytes(self) -> int:
        """Return the bytes of memory in use now; 0 if the kernel doesn't report them."""
        _return_unused()
        return _status_bytes("VmRSS") or 0


def _return_unused() -> None:
    """Release heap memory that the C library holds but no longer uses."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(key: str) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None
