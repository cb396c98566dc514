"""Whether a problem can be solved at all: every fault is named before anything is measured."""

from __future__ import annotations

import math

from evener.balancer.types import Problem
from evener.errors import RequestError

MOST_DEVICES = 1024


def check_problem(problem: Problem) -> None:
    """Raise RequestError for a problem that has no answer."""
    _check_devices(problem)
    _check_batches(problem)
    if not (math.isfinite(problem.tolerance) and 0 <= problem.tolerance < 1):
        raise RequestError(
            f"A tolerance of {problem.tolerance} is not a share of the throughput.", "Give 0 or more and below 1."
        )
    budget = problem.budget_seconds
    if budget is not None and not (math.isfinite(budget) and budget > 0):
        raise RequestError(f"A budget of {budget} seconds measures nothing.", "Give a time above 0.")


def _check_devices(problem: Problem) -> None:
    if not 1 <= problem.devices <= MOST_DEVICES:
        raise RequestError(
            f"{problem.devices} devices can't be balanced.", f"Name between 1 and {MOST_DEVICES} devices."
        )
    if len(problem.memory_bytes) != problem.devices:
        raise RequestError(
            f"{len(problem.memory_bytes)} memory sizes are given for {problem.devices} devices.",
            "Give one for each device, None where it is unknown.",
        )
    for name, numbers in (("hosts", problem.hosts), ("products", problem.products)):
        if numbers and len(numbers) != problem.devices:
            raise RequestError(
                f"{len(numbers)} {name} are given for {problem.devices} devices.", "Give one for each device."
            )
    for position, size in enumerate(problem.memory_bytes):
        if size is not None and size <= 0:
            raise RequestError(f"Device {position} has {size} bytes of memory.", "Give a size above 0, or none.")


def _check_batches(problem: Problem) -> None:
    quantum = problem.multiple_of
    if quantum < 1:
        raise RequestError(f"Shares can't be a multiple of {quantum}.", "Give a multiple of 1 or more.")
    for name, batch in (
        ("global batch", problem.global_batch),
        ("largest global batch", problem.max_global_batch),
        ("largest share", problem.largest_share),
    ):
        if batch is not None and batch < quantum:
            raise RequestError(f"A {name} of {batch} is below {quantum}.", f"Give {quantum} samples or more.")
    batch = problem.global_batch
    if batch is None:
        return
    if batch < problem.devices * quantum:
        raise RequestError(
            f"A global batch of {batch} can't give each of {problem.devices} devices {quantum} or more.",
            "Make it larger, or name fewer devices.",
        )
    if batch % quantum:
        raise RequestError(
            f"A global batch of {batch} is not a multiple of {quantum}.",
            f"{batch // quantum * quantum} and {-(-batch // quantum) * quantum} are.",
        )
    if problem.max_global_batch is not None and batch > problem.max_global_batch:
        raise RequestError(
            f"The global batch of {batch} is above the largest allowed, {problem.max_global_batch}.",
            "Drop one of them.",
        )
