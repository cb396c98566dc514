"""Find out why a probe process failed, and whether it ran out of memory."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

import msgspec

from evener.devices.registry import all_backends

from ..number_format import size
from ..types import HOST_MEMORY, Cause
from .protocol import (
    ChildError,
    Exited,
    Stack,
)

_CAUSE_ORDER: tuple[Cause, ...] = (
    "device",
    "raised",
    "signal",
    "exit",
    "protocol",
    "unsupported",
    "timeout",
)
_LOST_A_PEER = (
    "unavailable",
    "cancelled",
    "canceled",
    "connection reset",
    "connection closed",
    "has gone",
    "aborted",
)
_USER_ERRORS = ("UserCodeError", "RequestError", "SyntaxError")
_OWN_WORDS = (
    "UserCodeError",
    "RequestError",
    "EvenerError",
)  # exceptions whose text says which kind of error they are
_DEVICE_TYPES = ("ResourceExhaustedError", "OutOfMemoryError")
_TYPES = (*_DEVICE_TYPES, "MemoryError")
_NOT_MEMORY = ("larger than max",)  # gRPC also reports ResourceExhausted if a message is too long
_TEXT = (
    "out of memory",
    "out_of_memory",
    "oom when allocating",
    "can't allocate memory",
    "cannot allocate memory",
    "unable to allocate",
    "failed to allocate memory",
    "std::bad_alloc",
    "no algorithm worked",
    "could not create a primitive",
)
# these are of the host's memory, unless a text names a device
_HOST_TEXT = ("defaultcpuallocator", "std::bad_alloc", "[errno 12] cannot allocate memory")
_HARDWARE = ("gpu", "driver", "device-side")
# fraction of the cap above which memory ran out: a peak excludes the allocation that fails
_AT_CAP = 0.7
_MEMORY_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
_GPU = re.compile(r"(?:device:|/)GPU:(\d+)\b")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_UNPRINTABLE = re.compile(r"[^\x20-\x7e\u00a0-\uffff]+")
# TensorFlow: the place, then the error
_LAST_LINE_BEHIND = ("in user code:", "Graph execution error:")
# Keras: the layer, the error, then the arguments
_NEXT_LINE_BEHIND = ("Exception encountered when calling",)
_PLACES = ("[[", "[Op:", "File ", "Detected at", "Node:", "Hint: ", "<stack traces unavailable>")


class StoppedError(Exception):
    """A probe was stopped.

    `stack` is the probe process's stack if its user's code may have been running, else None.
    """

    def __init__(self, stack: Stack | None = None) -> None:
        super().__init__(stack)
        self.stack = stack


class RankFailure(msgspec.Struct, frozen=True):
    """Why one rank of a probe failed."""

    rank: int
    cause: Cause
    detail: str  # one line
    out_of_memory: bool = False
    # the framework's number of the GPU that ran out of memory, if it named one
    gpu: int | None = None
    output: str = ""  # the whole traceback, or the end of standard error
    user_code: bool = False  # the workload's own code or settings are wrong, whatever the device
    recovered: bool = False  # memory ran out in a step, and its child can continue
    fits_no_rows: bool = False  # memory ran out for the model or its optimizer's state
    killed: bool = False  # by Linux, because the host's memory was short

    @property
    def lost_a_peer(self) -> bool:
        """Whether the rank failed only because it lost its connection to another rank."""
        return self.cause == "raised" and any(sign in self.detail.lower() for sign in _LOST_A_PEER)


class GroupError(Exception):
    """One or more ranks of a probe have failed.

    `silent` lists the ranks that neither replied nor failed.
    """

    def __init__(self, *failures: RankFailure, silent: Sequence[int] = ()) -> None:
        super().__init__(failures)
        self.failures = failures
        self.silent = tuple(silent)

    @property
    def recovered(self) -> bool:
        """Whether ranks only ran out of memory in a step, so that all ranks can continue."""
        short = all(failure.out_of_memory and failure.recovered for failure in self.failures)
        return short and not self.silent

    @property
    def root(self) -> RankFailure:
        """The failure that most likely caused the others."""
        return min(
            self.failures,
            key=lambda f: (not f.out_of_memory, f.lost_a_peer, _CAUSE_ORDER.index(f.cause), f.rank),
        )


def exit_failure(rank: int, end: Exited) -> RankFailure:
    """Return the failure of a rank whose process exited."""
    memory = exit_is_memory(end.code, end.cap_share, end.kernel_killed, end.output)
    cause, words = describe_exit(end.code)
    killed = memory and end.code == -signal.SIGKILL
    return RankFailure(rank, cause, words, memory, output=end.output, killed=killed)


def error_failure(rank: int, error: ChildError) -> RankFailure:
    """Return the failure of a rank whose process reported an exception."""
    host_is_full = error.host_free_bytes is not None
    memory = not host_is_full and error_is_memory(error.types, error.text)
    words = one_line(error.text)
    if error.types and error.types[0] not in _OWN_WORDS and not words.startswith(error.types[0]):
        words = f"{error.types[0]}: {words}"
    if host_is_full:
        free = f" ({size(error.host_free_bytes)} were free)" if error.host_free_bytes else ""
        words = f"{HOST_MEMORY}{free}: {words}"
    if error.where and error.where not in words:
        words = f"{error.where}: {words}"
    gpu = find_gpu_number(error.text) if memory else None
    own = host_is_full or bool(error.where) or any(kind in _USER_ERRORS for kind in error.types)
    user_code = own and not memory and not names_hardware(error.text)
    return RankFailure(
        rank,
        "raised",
        words,
        memory,
        gpu,
        error.traceback,
        user_code,
        error.recovered,
        error.fits_no_rows,
    )


def error_is_memory(types: Sequence[str], text: str) -> bool:
    """Return whether an exception means that memory ran out.

    `types` are the names of its class and base classes.
    """
    lowered = text.lower()
    if any(sign in lowered for sign in _NOT_MEMORY):
        return False
    return any(kind in _TYPES for kind in types) or any(sign in lowered for sign in _memory_words())


def is_host_memory(types: Sequence[str], text: str) -> bool:
    """Return whether an exception means that the host's memory ran out, rather than a GPU's.

    `types` are the names of its class and base classes. On CPU devices, both are the same memory.
    """
    lowered = text.lower()
    if names_hardware(text) or any(kind in _DEVICE_TYPES for kind in types):
        return False
    return "MemoryError" in types or any(sign in lowered for sign in _HOST_TEXT)


def names_hardware(text: str) -> bool:
    """Return whether the text of an error is about a GPU or its driver."""
    lowered = text.lower()
    makers = [word for backend in all_backends() for word in backend.device_words]
    return any(sign in lowered for sign in (*_HARDWARE, *makers))


def exit_is_memory(code: int, cap_share: float, kernel_killed: bool, stderr_tail: str) -> bool:
    """Return whether a process exited because memory ran out.

    - `code`: its exit code, negative for a signal.
    - `cap_share`: its peak memory as a fraction of its memory limit.
    - `kernel_killed`: whether Linux killed any process for lack of memory while it ran.
    - `stderr_tail`: the end of its standard error.
    """
    if code == -signal.SIGKILL:
        return kernel_killed
    if code == 0:
        return False
    end = stderr_tail[-4000:].lower()
    if any(sign in end for sign in _memory_words()):
        return True
    return cap_share >= _AT_CAP and (code > 0 or -code in _MEMORY_SIGNALS)


def _memory_words() -> tuple[str, ...]:
    return *_TEXT, *(word for backend in all_backends() for word in backend.memory_words)


def describe_exit(code: int) -> tuple[Cause, str]:
    """Return the cause and a description for an exit code, which is negative for a signal."""
    if code >= 0:
        return "exit", f"its process ended by itself with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return "signal", f"its process was ended by {name}"


def find_gpu_number(text: str) -> int | None:
    """Return the GPU number in an error's text, or None unless exactly one is named."""
    found = {int(number) for number in _GPU.findall(text)}
    return found.pop() if len(found) == 1 else None


def one_line(text: str, longest: int = 300) -> str:
    """Return the most informative line of an error's text.

    Colors and control characters are removed, and the line is cut to `longest` characters. Returns
    "" if the text is blank.
    """
    lines = [_UNPRINTABLE.sub(" ", line).strip() for line in _COLORS.sub("", text).splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        return ""
    chosen = lines[0]
    if chosen in _LAST_LINE_BEHIND:
        chosen = ([line for line in lines if not line.startswith(_PLACES)] or lines)[-1]
    elif chosen.startswith(_NEXT_LINE_BEHIND) and len(lines) > 1:
        chosen = lines[1]
    return chosen if len(chosen) <= longest else f"{_cut_at_space(chosen, longest - 2)} …"


def _cut_at_space(text: str, longest: int) -> str:
    """Shorten a text to at most `longest` characters, between two words if possible."""
    return text[: longest + 1].rpartition(" ")[0].rstrip() or text[:longest]
