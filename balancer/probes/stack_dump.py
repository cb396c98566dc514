"""The place where a silent child is, by the stack that it writes to standard error on `SIGNAL`. Pure.

`faulthandler` writes it without the interpreter's help, so it also comes from a child that loops, waits or computes.
"""

from __future__ import annotations

import re
import signal
from typing import Literal

import msgspec

from evener.workloads.user_code import is_user_file

SIGNAL = signal.SIGUSR1
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\n", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_IMPORTS = "_find_and_load"  # of Python's import statement

Step = Literal["importing", "loading", "building", "preparing"]


class Stack(msgspec.Struct, frozen=True):
    """A child's main thread: it imports packages, runs the user's file, calls its function, or does neither."""

    step: Step
    where: str  # "file.py:12": the user's own line; empty: none
    text: str


def read_stack(output: str) -> Stack | None:
    """The newest whole stack of a child's main thread in its output; None if there is none yet."""
    for text in reversed(_THREAD.split(output)[1:]):
        frames = _FRAME.findall(text)  # the innermost first
        homes = {(file.rpartition("/")[2], function) for file, _, function in frames}
        if ("worker.py", "main") in homes:
            return _describe(frames, homes, text.strip())
    return None


def _describe(frames: list[tuple[str, str, str]], homes: set[tuple[str, str]], text: str) -> Stack:
    own = next((i for i, (file, _, _) in enumerate(frames) if is_user_file(file)), len(frames))
    where = "{}:{}".format(*frames[own]) if own < len(frames) else ""
    step: Step = "preparing"
    if any(function == _IMPORTS for _, _, function in frames[:own]):
        step = "importing"
    elif ("user_code.py", "_import") in homes:
        step = "loading"
    elif ("user_code.py", "load") in homes:
        step = "building"
    return Stack(step, where, text)
