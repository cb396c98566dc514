"""A user's request for a search, and the job that it is resolved to."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import msgspec

from evener.devices.machine import Machine
from evener.devices.registry import is_simulated
from evener.devices.types import Device
from evener.training.noise_scale import NoiseScale

from .objectives import SPEED, find_objective
from .search.layouts import LayoutOptions
from .types import Problem

PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
INPUTS = ("host", "device")
ENGINES = ("auto", "towers", "multiworker")
MICROS = ("auto", "off")


class Request(msgspec.Struct, frozen=True):
    """Options of a search as the user gave them, before devices are discovered."""

    devices: str = "auto"
    ray_address: str = ""  # of the cluster for `ray`; empty: RAY_ADDRESS, else this machine's
    workload: str | None = None  # None: the default for the devices
    framework: str = "tensorflow"
    settings: dict[str, Any] = {}
    global_batch: int | None = None  # fixed: the shares sum to it
    max_global_batch: int | None = None
    multiple_of: int = 1
    objective: str = SPEED.name  # the name of the metric to maximize
    # the speed that an objective may trade away, as a fraction of the fastest layout's
    max_slowdown: float = 0.1
    noise_scale: NoiseScale | None = None  # noise scale of the gradient, as measured in a training
    # rows per step of the training script, or the rows that the noise scale refers to
    own_batch: int | None = None
    budget_seconds: float | None = 120.0  # None: until the results are precise enough
    tolerance: float = 0.02  # within this of the best layout, the smallest global batch wins
    seed: int = 0
    precision: str = "float32"
    xla: bool = False
    input: str = "host"  # the source of each step's batch
    engine: str = "auto"  # how TensorFlow synchronizes a split
    # a share that doesn't fit at once is computed in passes; off: each share is one pass
    micro: str = "auto"
    pace: float = 0.0  # fraction of real time that simulated devices take
    share: bool = False  # run even if another session uses the devices
    compare: LayoutOptions | None = None  # the layouts to compare; None: find the best split


class Job(msgspec.Struct, frozen=True, dict=True):
    """A request whose devices, workload and framework have been found."""

    request: Request
    devices: tuple[Device, ...]
    workload: str
    framework: str  # tensorflow | torch | none
    # the largest batch that the workload can make for one device; None: no limit
    largest_share: int | None = None
    notes: tuple[str, ...] = ()  # about the devices
    machine: Machine | None = None  # the physics, if the devices are simulated
    driver: str = ""  # version of the GPUs' driver

    @property
    def simulated(self) -> bool:
        """Whether the devices are simulated."""
        return is_simulated(device.kind for device in self.devices)

    @cached_property
    def problem(self) -> Problem:
        """The input of the search, such as batch limits and memory limits."""
        request = self.request
        devices = self.devices
        micro = allows_passes(request, self.framework)
        hosts = _number_distinct(device.host for device in devices)
        return Problem(
            devices=len(devices),
            memory_bytes=tuple(device.usable_memory_bytes for device in devices),
            global_batch=request.global_batch,
            max_global_batch=request.max_global_batch,
            multiple_of=request.multiple_of,
            tolerance=request.tolerance,
            budget_seconds=request.budget_seconds,
            largest_share=self.largest_share,
            micro=micro,
            objective=request.objective,
            max_slowdown=request.max_slowdown,
            hosts=hosts if any(hosts) else (),
            limits=_number_distinct(device.limit.percent for device in devices),
            shards=self.framework == "torch" and not self.simulated,
            labels=tuple(device.label for device in devices),
        )


def _number_distinct(values: Iterable[object]) -> tuple[int, ...]:
    """Number the distinct values from 0, and return the number of each value."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(value, len(numbers)) for value in values)


def allows_passes(request: Request, framework: str) -> bool:
    """Return whether a share may be split into several gradient-accumulation passes.

    XLA, and TensorFlow with `input="device"`, need each share in one pass.
    """
    from_device = framework == "tensorflow" and request.input == "device"
    return request.micro == "auto" and not (request.xla or from_device)


def assigns_by_cost(request: Request, framework: str) -> bool:
    """Return whether rows are assigned to devices by their computing time, not by their number.

    The computing time of a row depends on its length. This needs PyTorch, input from the host,
    gradient accumulation, and an objective that uses row lengths.
    """
    possible = (
        framework == "torch" and request.input == "host" and allows_passes(request, framework)
    )
    return possible and find_objective(request.objective).uses_lengths
