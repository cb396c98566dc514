"""The words of one rank of a program: a line at its start, figures for the table at its end, or why
it must end.
"""

from __future__ import annotations

import atexit
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ..errors import RequestError
from ..training.launched import PROGRAM, launched_device, launched_run

FIRST_STEPS = 20  # whose medians are those of the beginning
SECONDS = 30.0  # in which the first rank's end stops the others


class SharesOrigin(msgspec.Struct, frozen=True):
    """The training that remembered shares were learned in; another one may need other shares."""

    model: str  # a digest of the shapes and types of its parameters and buffers
    rows: int  # of a step


class ProgramSettings(msgspec.Struct, frozen=True):
    """The words of `evener run` for the processes that it starts."""

    folder: str  # for a RankNote of each rank
    name: str  # of the program, for people
    strict: bool = False
    rebalance: bool = True
    noise: bool = False
    origin: SharesOrigin | None = None  # of the plan's shares, if an earlier training left them


class StepFigures(msgspec.Struct, frozen=True):
    """A rank's share of a full batch, and medians of its steps; 0 for what isn't known."""

    shares: tuple[int, ...]  # of every rank
    own_work_s: float
    step_s: float


class RankNote(msgspec.Struct):
    """A rank's training, as it leaves it at its end."""

    rank: int
    device: str  # its id
    run: str  # the journal's name
    hooks: str = ""  # that took; empty where the program trained as it is
    why: str = ""  # its shares stayed even, or nothing of it was touched
    first: StepFigures | None = None
    last: StepFigures | None = None
    retreats: int = 0  # passes that ran out of memory and were computed again
    noise: str = ""  # a sentence of the noise scale
    model: str = ""  # a digest of the shapes and types of its parameters and buffers


def read_settings() -> ProgramSettings:
    """The settings of the program that this process belongs to; empty where `evener run` hasn't
    started it.
    """
    text = os.environ.get(PROGRAM)
    return msgspec.json.decode(text, type=ProgramSettings) if text else ProgramSettings("", "")


def say(words: str) -> None:
    """Print a line of evener's own, on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"evener: {words}", file=sys.stderr, flush=True)


def refuse_accelerate(_: Any, __: Any, arguments: Any, keywords: Any) -> NoReturn:
    """End the program in a sentence where it starts processes as `accelerate launch` does."""
    given = arguments[0] if arguments else keywords["args"]
    module = ["-m"] if given.module else []
    _refuse("accelerate launch", [*module, given.training_script, *given.training_script_args])


def refuse_torchrun(_: Any, __: Any, arguments: Any, keywords: Any) -> NoReturn:
    """End the program in a sentence where it starts processes as torchrun does."""
    words = list(arguments[2] if len(arguments) > 2 else keywords["args"])
    _refuse("torchrun", words[1:] if words[:1] == ["-u"] else words)


def note_spawn(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Say what becomes of processes that each of evener run's own starts, as torch.multiprocessing
    does.
    """
    say(
        "this program starts processes by torch.multiprocessing.spawn; if they train, let it "
        "read RANK and WORLD_SIZE"
        " instead, as under torchrun"
    )
    return wrapped(*arguments, **keywords)


def _refuse(launcher: str, words: Sequence[str]) -> NoReturn:
    say(
        f"this program starts its processes by {launcher}, which evener run does in its "
        f"place. Write evener run --"
        f" {shlex.join(words)}"
    )
    if os.environ.get("RANK", "0") != "0":
        time.sleep(SECONDS)
    raise SystemExit(RequestError.exit_code)


class Notebook:
    """Notes what becomes of this rank, and leaves it in the settings' folder as the process
    ends.
    """

    def __init__(self, settings: ProgramSettings) -> None:
        self.settings = settings
        self.hooks = self.why = ""
        self.model = ""  # a digest of what trains by shares
        self.last_words = ""  # why, where nothing else was said by the end
        self.warned: set[str] = set()
        self.was_uneven = False  # ranks have had different numbers of rows in a step
        self._training: Any = None
        self._first: StepFigures | None = None
        self._steps = 0
        self._before: tuple[int, ...] = ()  # shares of the last step
        atexit.register(self.leave)

    def watch(self, training: Any, hooks: str) -> None:
        """Note the figures of this PlannedTraining, which these hooks made, and say how it
        starts.
        """
        self.hooks, self._training, self._first, self._steps = hooks, training, None, 0
        training.listeners.insert(0, self._note_step)
        shares = training.ranks
        names = ", ".join(each.name or each.device for each in shares.shares)
        split = "+".join(map(str, shares.batches)) + " = " if len(shares.batches) > 1 else ""
        say(
            f"{self.settings.name} trains on {names}: {split}{shares.global_batch} rows a "
            f"step, by {hooks}"
        )

    def stay(self, why: str) -> None:
        """Note why the program trains as it is, and say so once."""
        if not self.why:
            self.why = why.rstrip(".")
            say(f"shares stay even: {self.why}")

    def warn(self, words: str) -> None:
        """Say once what the program does differently now."""
        if words not in self.warned:
            self.warned.add(words)
            say(words)

    def _note_step(self, _: Any) -> None:
        self._steps += 1
        self.was_uneven |= len(set(self._training.ranks.batches)) > 1
        changed = self._steps > 1 and self._training.ranks.batches != self._before
        if self._first is None and (self._steps == FIRST_STEPS or changed):
            self._first = self._figures(self._before if changed else None)
        self._before = self._training.ranks.batches

    def _figures(self, shares: tuple[int, ...] | None = None) -> StepFigures:
        work, step = self._training.timer.medians()
        return StepFigures(shares or self._training.ranks.batches, work.own_work_s, step.step_s)

    def leave(self) -> None:
        """Write the note."""
        if not self.settings.folder:
            return
        if not self.hooks and self.last_words:
            self.stay(self.last_words)
        note = RankNote(
            int(os.environ.get("RANK", "0")),
            launched_device(),
            launched_run(),
            self.hooks,
            self.why,
        )
        if self._training is not None:
            note.last = self._figures()
            note.first = self._first or note.last
            note.noise = self._training.noise.describe() if self._training.noise else ""
            note.retreats = self._training.reporter.retreats
            note.model = self.model
        Path(self.settings.folder, f"{note.rank}.json").write_bytes(msgspec.json.encode(note))
