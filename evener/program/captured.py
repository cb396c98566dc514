"""The trainer of a program, for `evener run --balance`: the program makes it, and ends where it would train."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from ..errors import RequestError
from ..training.launched import PROGRAM_COMMAND


class _Found(BaseException):
    """A trainer that begins to train; no error, so that no program catches it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer


def build() -> Any:
    """The program's transformers.Trainer, which hasn't trained; RequestError where it ends without one."""
    from transformers import Trainer

    ended = "ended"
    try:
        with mock.patch.object(Trainer, "train", _find):
            _run(json.loads(os.environ[PROGRAM_COMMAND]))
    except _Found as found:
        return found.trainer
    except SystemExit as end:
        ended = f"ended with exit code {end.code}"
    raise RequestError(
        f"The program {ended} without training by a transformers.Trainer, so there is nothing to measure.",
        "Give it a function build() that returns its model and data, or leave --balance out.",
    )


def _find(trainer: Any, *_: Any, **__: Any) -> NoReturn:
    raise _Found(trainer)


def _run(words: Sequence[str]) -> None:
    """Run a script, or `-m` and a module, as Python does."""
    module = words[0] == "-m"
    target, *arguments = words[module:]
    place = os.getcwd() if module else str(Path(target).absolute().parent)
    with mock.patch.object(sys, "argv", [target, *arguments]), mock.patch.object(sys, "path", [place, *sys.path]):
        (runpy.run_module if module else runpy.run_path)(target, run_name="__main__")
