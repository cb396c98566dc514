"""The journals that trainings keep of themselves, read from among the runs."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Literal

import msgspec

from evener.errors import RequestError
from evener.live.files import start_ticks
from evener.live.journal import ChangeEntry, EndEntry, SpeedEntry, StartEntry, TrainingEntry

from ..journal import read_trusted

_decoder: msgspec.json.Decoder[TrainingEntry] = msgspec.json.Decoder(TrainingEntry)
TrainingState = Literal["running", "finished", "stopped", "failed"]


class TrainingRecord(msgspec.Struct, frozen=True):
    """The content of a training's journal; the first entry is its start."""

    run: str
    entries: tuple[TrainingEntry, ...]

    @property
    def start(self) -> StartEntry:
        """The last start: its devices and shares are those of now."""
        return next(entry for entry in reversed(self.entries) if isinstance(entry, StartEntry))

    @property
    def state(self) -> TrainingState:
        """The state of the training; one that was killed or interrupted has stopped."""
        last, start = self.entries[-1], self.start
        if isinstance(last, EndEntry):
            return "failed" if last.failure else "finished"
        is_here = start.host == socket.gethostname()
        return "running" if is_here and start_ticks(start.pid) == start.ticks else "stopped"

    @property
    def failure(self) -> str:
        """The exception that ended it."""
        last = self.entries[-1]
        return last.failure if isinstance(last, EndEntry) else ""

    @property
    def began_at(self) -> float:
        """Seconds since the epoch."""
        first = self.entries[0]
        return first.at if isinstance(first, StartEntry) else 0.0

    @property
    def seconds(self) -> float:
        """The seconds from the first start to the last entry, or to now."""
        times = [entry.at for entry in self.entries if not isinstance(entry, ChangeEntry)]
        return (time.time() if self.state == "running" else times[-1]) - self.began_at

    @property
    def samples_per_second(self) -> float | None:
        """The last that was written."""
        speeds = (entry.samples_per_second for entry in reversed(self.entries) if isinstance(entry, SpeedEntry))
        return next(speeds, None)


def read_training(run: str, path: Path) -> TrainingRecord:
    """The journal in this file; RequestError names the line that can't be read. An incomplete last line is left out."""
    lines = read_trusted(path).split(b"\n")[:-1]
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(_decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            remedy = "Delete the file from that line on, or the run."
            raise RequestError(f"{path}: line {number} is broken: {str(error)[:200]}.", remedy) from None
    if not entries or not isinstance(entries[0], StartEntry):
        raise RequestError(f"{path} doesn't begin with the start of a training.", "Delete the run.")
    return TrainingRecord(run, tuple(entries))
