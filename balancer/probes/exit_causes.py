"""Out of memory, or something else: what an exception, an exit code or a signal of a child means. Pure.

Sources of the lists: TensorFlow's and PyTorch's issue trackers, and experiments with capped CPU allocators; the
kernel's killer is known by its own counter.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from evener.balancer.types import Cause

_TYPES = ("ResourceExhaustedError", "OutOfMemoryError", "MemoryError")
_NOT_MEMORY = ("larger than max",)  # gRPC says ResourceExhausted of a message, too
_TEXT = (
    "out of memory",
    "out_of_memory",
    "oom when allocating",
    "can't allocate memory",
    "cannot allocate memory",
    "unable to allocate",
    "failed to allocate memory",
    "std::bad_alloc",
    "cublas_status_alloc_failed",
    "cublas_status_not_initialized",
    "cudnn_status_alloc_failed",
    "cudnn_status_not_supported",
    "no algorithm worked",
    "could not create a primitive",
)
_AT_CAP = 0.7  # of the cap at the last look: a large allocation dies before it is seen
_MEMORY_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
_GPU = re.compile(r"(?:device:|/)GPU:(\d+)\b")


def error_is_memory(types: Sequence[str], text: str) -> bool:
    """Whether an exception with these class names and this text means that memory ran out."""
    lowered = text.lower()
    if any(sign in lowered for sign in _NOT_MEMORY):
        return False
    return any(kind in _TYPES for kind in types) or any(sign in lowered for sign in _TEXT)


def end_is_memory(code: int, cap_share: float, kernel_killed: bool, chatter: str) -> bool:
    """Whether a child that ended with `code` (negative: by a signal) ran out of memory.

    `cap_share` is how much of its cap it held when last seen (0: no cap); `chatter` the end of its standard error.
    """
    if code == -signal.SIGKILL:
        return kernel_killed
    if code == 0:
        return False
    last_words = chatter[-4000:].lower()
    if any(sign in last_words for sign in _TEXT):
        return True
    return cap_share >= _AT_CAP and (code > 0 or -code in _MEMORY_SIGNALS)


def end_in_words(code: int) -> tuple[Cause, str]:
    """The cause of a child's end, and one line on it."""
    if code >= 0:
        return "exit", f"its process ended by itself with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return "signal", f"its process was ended by {name}"


_HEADINGS = ("in user code:", "Graph execution error:")  # of TensorFlow's; where it was and what it was stand behind
_PLACES = ("[[", "File ", "Detected at", "Node:", "<stack traces unavailable>")


def gpu_named(text: str) -> int | None:
    """The framework's number of the GPU that an error names; None if it names none, or several."""
    found = {int(number) for number in _GPU.findall(text)}
    return found.pop() if len(found) == 1 else None


def one_line(text: str, longest: int = 300) -> str:
    """The first line that says something, without control characters; behind a heading of TensorFlow's the last one."""
    lines = [re.sub(r"[^\x20-\x7e\u00a0-\uffff]+", " ", line).strip() for line in text.splitlines()]
    telling = [line for line in lines if line]
    if not telling:
        return ""
    if telling[0] in _HEADINGS:
        telling = [line for line in telling if not line.startswith(_PLACES)] or telling
        return telling[-1][:longest]
    return telling[0][:longest]
