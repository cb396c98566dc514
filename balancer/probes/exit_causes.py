"""The meaning of a child's exception, exit code or signal: out of memory, or something else. Pure.

The lists come from TensorFlow's and PyTorch's issue trackers and from experiments with capped CPU allocators. Kills by
the kernel for lack of memory are counted by the kernel itself.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from evener.devices.registry import all_backends

from ..types import Cause

_TYPES = ("ResourceExhaustedError", "OutOfMemoryError", "MemoryError")
_NOT_MEMORY = ("larger than max",)  # gRPC also says ResourceExhausted of a message that is too long
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
_HARDWARE = ("gpu", "driver", "device-side")
_AT_CAP = 0.7  # of the cap at the last sample: a large allocation fails before it is seen
_MEMORY_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
_GPU = re.compile(r"(?:device:|/)GPU:(\d+)\b")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_UNPRINTABLE = re.compile(r"[^\x20-\x7e\u00a0-\uffff]+")
_LAST_LINE_BEHIND = ("in user code:", "Graph execution error:")  # TensorFlow: where it was, then what it was
_NEXT_LINE_BEHIND = ("Exception encountered when calling",)  # Keras: the layer, what it was, then the arguments
_PLACES = ("[[", "File ", "Detected at", "Node:", "<stack traces unavailable>")


def error_is_memory(types: Sequence[str], text: str) -> bool:
    """True if an exception with these class names and this text means that memory ran out."""
    lowered = text.lower()
    if any(sign in lowered for sign in _NOT_MEMORY):
        return False
    return any(kind in _TYPES for kind in types) or any(sign in lowered for sign in _memory_words())


def names_hardware(text: str) -> bool:
    """True if an error's text mentions a GPU or its libraries, so that the fault may be that of one device."""
    lowered, makers = text.lower(), [word for backend in all_backends() for word in backend.device_words]
    return any(sign in lowered for sign in (*_HARDWARE, *makers))


def exit_is_memory(code: int, cap_share: float, kernel_killed: bool, stderr_tail: str) -> bool:
    """True if a child that ended with `code` (negative: by a signal) ran out of memory.

    `cap_share` is the part of its memory cap that it held when last sampled (0: no cap).
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
    """The cause of a child's end, and one line on it."""
    if code >= 0:
        return "exit", f"its process ended by itself with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return "signal", f"its process was ended by {name}"


def find_gpu_number(text: str) -> int | None:
    """The framework's number of the GPU that an error names; None if it names none, or several."""
    found = {int(number) for number in _GPU.findall(text)}
    return found.pop() if len(found) == 1 else None


def one_line(text: str, longest: int = 300) -> str:
    """The line of an error's text that says what was wrong, without colors and control characters."""
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
    """The whole words that fit; a single long one is cut."""
    return text[: longest + 1].rpartition(" ")[0].rstrip() or text[:longest]
