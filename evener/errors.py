"""Errors that a person can act on: whose fault, what was seen, what to do.

Only these reach the user as an error. Running out of memory or losing a child process is an
observation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from .printable import printable


class EvenerError(Exception):
    """An error with one sentence that says what is wrong and one that says what to do; only
    subclasses are raised.

    Both may quote a plan or a driver, and Python prints an exception as it is: characters that
    control a terminal are replaced.
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, remedy: str = "") -> None:
        self.message = printable(message)
        self.remedy = printable(remedy)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class RequestError(EvenerError):
    """The request can't be done as it is: a name, number or file of the user's is wrong."""

    kind = "request"
    exit_code = 2


@contextmanager
def as_request_error(
    what: str, remedy: str, kind: type[RequestError] = RequestError
) -> Iterator[None]:
    """A failing system call of the block becomes an error: what can't be done, the system's reason,
    what to do.
    """
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise kind(f"{what}: {getattr(error, 'strerror', None) or error}.", remedy) from None


class PlanError(RequestError):
    """A plan that can't be read, or doesn't fit the training that uses it."""

    kind = "plan"


class DeviceError(EvenerError):
    """A device or its driver is missing or failed."""

    kind = "device"
    exit_code = 3


class NoLayoutError(EvenerError):
    """No layout could be measured on the requested devices."""

    kind = "no_layout"
    exit_code = 1
