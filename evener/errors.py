"""Exceptions for problems that a user can correct."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from .printable import printable


class EvenerError(Exception):
    """Base class of evener's errors, with a message, a remedy and an exit code.

    `str()` returns the message followed by the remedy.
    """

    # control characters are replaced in both

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
    """An error for an invalid request, option or file of the user."""

    kind = "request"
    exit_code = 2


@contextmanager
def as_request_error(
    what: str, remedy: str, kind: type[RequestError] = RequestError
) -> Iterator[None]:
    """A context manager that turns an OSError or ValueError into an error of class `kind`.

    The message consists of `what`, which says what failed, and the reason from the system.
    """
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        raise kind(f"{what}: {getattr(error, 'strerror', None) or error}.", remedy) from None


class PlanError(RequestError):
    """An error for a plan that is invalid, or doesn't match the devices or the model."""

    kind = "plan"


class DeviceError(EvenerError):
    """An error for a device or a host that is missing or doesn't work."""

    kind = "device"
    exit_code = 3


class NoLayoutError(EvenerError):
    """An error for a model that can't be trained on the requested devices in any layout."""

    kind = "no_layout"
    exit_code = 1
