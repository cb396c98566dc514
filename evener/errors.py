"""Errors that users can act on: each says what is wrong and what to do.

An error's class shows what is at fault: the request, the plan or a device. If memory runs out or a
child process is lost during a measurement, no error is raised; it is part of the measurement's
result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from .printable import printable


class EvenerError(Exception):
    """Base class of evener's errors; only subclasses are raised.

    The message says what is wrong, and the remedy what to do. `kind` names the class in JSON
    output, and `exit_code` is evener's exit code after this error.
    """

    # terminal control characters are replaced in the message and the remedy

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, remedy: str = "") -> None:
        # messages and remedies may quote a plan or a driver, and Python prints an exception's text
        # unescaped
        self.message = printable(message)
        self.remedy = printable(remedy)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class RequestError(EvenerError):
    """A name, number or file in the request is invalid."""

    kind = "request"
    exit_code = 2


@contextmanager
def as_request_error(
    what: str, remedy: str, kind: type[RequestError] = RequestError
) -> Iterator[None]:
    """Return a context that converts an OSError or ValueError into a RequestError.

    `what` says what failed; the system's reason is added. `remedy` tells the user what to do.
    `kind` is the class of the new error.
    """
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        raise kind(f"{what}: {getattr(error, 'strerror', None) or error}.", remedy) from None


class PlanError(RequestError):
    """The plan can't be read, or doesn't fit the training run that uses it."""

    kind = "plan"


class DeviceError(EvenerError):
    """A device or its driver is missing or has failed."""

    kind = "device"
    exit_code = 3


class NoLayoutError(EvenerError):
    """No layout could be measured on the requested devices."""

    kind = "no_layout"
    exit_code = 1
