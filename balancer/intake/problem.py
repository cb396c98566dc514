"""The problem that a search is to solve: made here alone, for a new job as for a journal that is replayed."""

from __future__ import annotations

from collections.abc import Iterable

from ..journal import Header
from ..request import Job, allows_passes
from ..types import Problem


def make_problem(asked: Job | Header, spend_all: bool = False) -> Problem:
    """The problem of a job or a journal; with `spend_all`, to measure the best layouts until the budget is spent."""
    request, devices = asked.request, asked.devices
    hosts = _number(device.host for device in devices)
    return Problem(
        devices=len(devices),
        memory_bytes=tuple(device.usable_memory_bytes for device in devices),
        global_batch=request.global_batch,
        max_global_batch=request.max_global_batch,
        multiple_of=request.multiple_of,
        tolerance=request.tolerance,
        budget_seconds=request.budget_seconds,
        largest_share=asked.largest_share,
        micro=allows_passes(request, asked.framework),
        spend_all=spend_all,
        objective=request.objective,
        max_slowdown=request.max_slowdown,
        hosts=hosts if any(hosts) else (),
        products=_number((device.kind, device.name) for device in devices),
    )


def _number(values: Iterable[object]) -> tuple[int, ...]:
    """A number from 0 for each value, equal ones for equal values."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(value, len(numbers)) for value in values)
