"""The exceptions that evener raises for faults a user can correct."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from .printable import printable


class EvenerError(Exception):
    """Base class of evener's errors, with a message, a remedy and an exit code.

    `str()` joins the message and the remedy.
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
    """A request, option or file that the user gave is invalid."""

    kind = "request"
    exit_code = 2


@contextmanager
def as_request_error(
    what: str, remedy: str, kind: type[RequestError] = RequestError
) -> Iterator[None]:
    """Context manager: turn an OSError or ValueError into an error of class `kind`.

    `what` says what failed; the system's reason is added to it.
    """
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        raise kind(f"{what}: {getattr(error, 'strerror', None) or error}.", remedy) from None


class PlanError(RequestError):
    """A plan is invalid, or doesn't match the devices or the model."""

    kind = "plan"


class DeviceError(EvenerError):
    """A device or a host is missing, or doesn't work."""

    kind = "device"
    exit_code = 3


class NoLayoutError(EvenerError):
    """No layout of the model can be trained on the requested devices."""

    kind = "no_layout"
    exit_code = 1
