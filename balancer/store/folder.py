"""A person's note on a run, with tags, and the journal of a training, which lie in the run's folder."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from evener.errors import RequestError
from evener.live.files import start_ticks
from evener.live.journal import ChangeEntry, EndEntry, SpeedEntry, StartEntry, TrainingEntry
from evener.system.files import write_atomically

from ..journal import read_trusted

NOTE = "note.json"
LONGEST_NOTE = 1000
MOST_TAGS = 20
LARGEST_FILE_BYTES = 64 << 10
_TAG = re.compile(r"[\w.-]{1,40}")


class RunNote(msgspec.Struct, frozen=True):
    """Printable text in one line, and tags in alphabetical order."""

    note: Annotated[str, msgspec.Meta(max_length=LONGEST_NOTE)] = ""
    tags: Annotated[tuple[str, ...], msgspec.Meta(max_length=MOST_TAGS)] = ()


def read_note(folder: Path) -> RunNote:
    """The note in a run's folder; an empty one if there is none, or it can't be read."""
    with suppress(OSError, msgspec.MsgspecError, UnicodeError, RecursionError):
        with os.fdopen(os.open(folder / NOTE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
            found = msgspec.json.decode(stream.read(LARGEST_FILE_BYTES), type=RunNote)
        return RunNote(_clean(found.note), tuple(tag for tag in found.tags if _TAG.fullmatch(tag)))
    return RunNote()


def change_note(folder: Path, note: str | None, add_tags: Iterable[str], remove_tags: Iterable[str]) -> RunNote:
    """Write the changed note and return it; `note` None leaves the text as it is. RequestError for a bad tag."""
    before, added = read_note(folder), tuple(add_tags)
    for tag in added:
        if not _TAG.fullmatch(tag):
            raise RequestError(
                f"{tag!r} can't be a tag.", "Use up to 40 letters, digits, dots, dashes and underscores."
            )
    text = before.note if note is None else _clean(note)
    tags = sorted({*before.tags, *added} - set(remove_tags))
    if len(text) > LONGEST_NOTE or len(tags) > MOST_TAGS:
        raise RequestError(
            f"A note has at most {LONGEST_NOTE} characters, and a run at most {MOST_TAGS} tags.", "Write less."
        )
    found = RunNote(text, tuple(tags))
    write_atomically(folder / NOTE, msgspec.json.encode(found))
    return found


def _clean(text: str) -> str:
    """The text in one line, without control characters."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


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
