"""Checks of a problem against its devices; a request's own numbers were checked before."""

from __future__ import annotations

from evener.errors import RequestError

from ..types import Problem

MOST_DEVICES = 1024


def check_problem(problem: Problem) -> None:
    """Raise RequestError for a problem that has no answer."""
    _check_devices(problem)
    _check_batches(problem)


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
    quantum, batch, largest = problem.multiple_of, problem.global_batch, problem.largest_share
    if largest is not None and largest < quantum:
        raise RequestError(f"A largest share of {largest} is below {quantum}.", f"Give {quantum} samples or more.")
    if batch is not None and batch < problem.devices * quantum:
        raise RequestError(
            f"A global batch of {batch} can't give each of {problem.devices} devices {quantum} or more.",
            "Make it larger, or name fewer devices.",
        )
