"""Faults that a person can act on: whose they are, what was seen, what to do.

Only these reach the user as an error. Running out of memory or losing a child is an observation, not a fault.
"""

from __future__ import annotations

from typing import ClassVar


class EvenerError(Exception):
    """A fault with one sentence that names it and one that mends it; never raised itself."""

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class RequestError(EvenerError):
    """What was asked for can't be done as asked: a name, number or file of the user's is wrong."""

    kind = "request"
    exit_code = 2


class PlanError(RequestError):
    """A plan that can't be read, or doesn't fit the training it is given to."""

    kind = "plan"


class DeviceError(EvenerError):
    """A device or its driver is missing or broke."""

    kind = "device"
    exit_code = 3


class NoLayoutError(EvenerError):
    """Nothing could be measured on the devices that were asked for."""

    kind = "no_layout"
    exit_code = 1
