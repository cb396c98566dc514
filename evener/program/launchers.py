"""Launchers that a program calls by itself: each of `evener run`'s processes would start all of them once more."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import RequestError
from .notes import say

SECONDS = 30.0  # in which the first rank's end stops the others


def refuse_accelerate(_: Any, __: Any, arguments: Any, keywords: Any) -> NoReturn:
    """End the program in a sentence where it starts processes as `accelerate launch` does."""
    given = arguments[0] if arguments else keywords["args"]
    module = ["-m"] if given.module else []
    _refuse("accelerate launch", [*module, given.training_script, *given.training_script_args])


def refuse_torchrun(_: Any, __: Any, arguments: Any, keywords: Any) -> NoReturn:
    """End the program in a sentence where it starts processes as torchrun does."""
    words = list(arguments[2] if len(arguments) > 2 else keywords["args"])
    _refuse("torchrun", words[1:] if words[:1] == ["-u"] else words)


def _refuse(launcher: str, words: Sequence[str]) -> NoReturn:
    say(
        f"this program starts its processes by {launcher}, which evener run does in its place. Write evener run --"
        f" {shlex.join(words)}"
    )
    if os.environ.get("RANK", "0") != "0":
        time.sleep(SECONDS)
    raise SystemExit(RequestError.exit_code)
