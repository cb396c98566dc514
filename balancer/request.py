"""A user's request, and the job that it means on this machine."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from evener.devices.machine import Machine
from evener.devices.types import Device
from evener.errors import RequestError

from .number_format import join_words
from .objectives.registry import OBJECTIVES, SPEED, find_objective
from .search.layouts import LayoutOptions

LARGEST_BATCH = 1 << 30
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
INPUTS = ("host", "device")
ENGINES = ("auto", "towers", "mirrored", "multiworker")
MICROS = ("auto", "off")


class Request(msgspec.Struct, frozen=True):
    """Devices, workload and bounds of a search; journalled whole, so a run can be resumed by its id."""

    devices: str = "auto"
    ray_address: str = ""  # of the cluster for `ray`; empty: RAY_ADDRESS, else this machine's
    workload: str | None = None  # None: the default for the devices
    framework: str = "tensorflow"
    settings: dict[str, Any] = {}
    global_batch: int | None = None  # fixed: the shares sum to it
    max_global_batch: int | None = None
    multiple_of: int = 1
    objective: str = SPEED.name  # the name of what to have most of
    max_slowdown: float = 0.1  # that an objective which trades speed may cost: a part of the fastest layout's
    budget_seconds: float | None = 120.0  # None: until the evidence is enough
    tolerance: float = 0.02  # within it of the best, the smallest global batch wins
    seed: int = 0
    precision: str = "float32"
    xla: bool = False
    input: str = "host"  # where each step's batch comes from
    engine: str = "auto"  # how TensorFlow keeps a split in step
    micro: str = "auto"  # a share that doesn't fit at once is computed in passes; off: each share is one pass
    pace: float = 0.0  # simulated devices: 1 takes real time
    share: bool = False  # run even if another session is using the devices
    compare: LayoutOptions | None = None  # which layouts to compare; None: find the best split


class Job(msgspec.Struct, frozen=True):
    """A request that was checked, with the devices, the workload and the framework that it means here."""

    request: Request
    devices: tuple[Device, ...]
    workload: str
    framework: str  # tensorflow | torch | none
    largest_share: int | None = None  # the workload can't make a larger batch for one device
    notes: tuple[str, ...] = ()  # about the devices
    machine: Machine | None = None  # the physics, if the devices are simulated
    driver: str = ""  # version of the GPUs' driver


def allows_passes(request: Request, framework: str) -> bool:
    """True if a share may be computed in passes: it is asked for, and the training's way of stepping can."""
    from_device = framework == "tensorflow" and request.input == "device"
    return request.micro == "auto" and not (request.xla or from_device or request.engine == "mirrored")


def deals_by_cost(request: Request, framework: str) -> bool:
    """True if rows of unequal length are assigned by what they cost: that takes passes, and PyTorch's loader."""
    possible = framework == "torch" and request.input == "host" and allows_passes(request, framework)
    return possible and find_objective(request.objective).uses_lengths


def check_request(request: Request) -> None:
    """Raise RequestError for the first number or word that is out of range."""
    unit, batch, largest = request.multiple_of, request.global_batch, request.max_global_batch
    for option, number in (("--multiple-of", unit), ("--global-batch", batch), ("--max-global-batch", largest)):
        if number is not None and not 1 <= number <= LARGEST_BATCH:
            raise RequestError(f"{option} is {number}.", f"Give a whole number from 1 to {LARGEST_BATCH}.")
    if largest is not None and largest < unit:
        raise RequestError(
            f"--max-global-batch {largest} is below one share of {unit} samples.", "Raise it, or lower --multiple-of."
        )
    if batch is not None and batch % unit:
        raise RequestError(f"--global-batch {batch} is not a multiple of {unit}.", "Change it, or --multiple-of.")
    if batch is not None and largest is not None and batch > largest:
        raise RequestError(f"--global-batch {batch} is above --max-global-batch {largest}.", "Give one of them.")
    budget = request.budget_seconds
    if budget is not None and not (math.isfinite(budget) and budget > 0):
        raise RequestError(f"--budget is {budget} seconds.", "Give a time above 0, like 120s or 5m.")
    if not (math.isfinite(request.tolerance) and 0 <= request.tolerance < 1):
        raise RequestError(f"--tolerance is {request.tolerance}.", "Use a value of at least 0 and less than 1.")
    if not 0 <= request.max_slowdown < 1:
        raise RequestError(f"--max-slowdown is {100 * request.max_slowdown:g}%.", "Give 0% or more and below 100%.")
    if not (math.isfinite(request.pace) and request.pace >= 0):
        raise RequestError(f"--pace is {request.pace}.", "Give 0 for no waiting, 1 for real time.")
    for option, word, words in (
        ("--objective", request.objective, tuple(OBJECTIVES)),
        ("--precision", request.precision, PRECISIONS),
        ("--input", request.input, INPUTS),
        ("--engine", request.engine, ENGINES),
        ("--micro", request.micro, MICROS),
    ):
        if word not in words:
            raise RequestError(f"{option} {word!r} is not known.", f"Choose {join_words(words, 'or')}.")
