"""Recordings of the monitor: JSON lines after a version header, written as they happen, read one at a time.

A torn last line is what a kill leaves, and is skipped. A broken line before it, or another version, is an error.
"""

from __future__ import annotations

import os
import stat
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import msgspec

from evener.errors import RequestError, as_request_error

from .types import Device, Snapshot

VERSION = 1
LONGEST_LINE_BYTES = 4 << 20
LARGEST_RECORDING_BYTES = 1 << 30
MOST_SNAPSHOTS = 10_000_000
REMEDY = "Give a file that evener monitor --record wrote."


class RecordingHeader(msgspec.Struct, frozen=True):
    """The first line of a recording."""

    evener_monitor: int  # the version of the format
    hostname: str = ""


_BROKEN = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Recorder(AbstractContextManager["Recorder"]):
    """Writes snapshots to a new file; it stops by itself before the file grows beyond `largest_bytes`."""

    def __init__(self, path: Path, hostname: str = "", largest_bytes: int = LARGEST_RECORDING_BYTES) -> None:
        self.path = path
        self._largest_bytes = largest_bytes
        self.full = False
        if os.path.lexists(path):
            raise RequestError(f"{path} exists already.", "Name a new file: a recording replaces nothing.")
        with self._explained():
            self._stream: BinaryIO = path.open("xb", buffering=0)
        self._append(msgspec.json.encode(RecordingHeader(VERSION, hostname)) + b"\n")

    def write(self, snapshot: Snapshot) -> bool:
        """Append one snapshot; False once the file is as large as it may get."""
        row = msgspec.json.encode(snapshot) + b"\n"
        self.full = self.full or self._stream.tell() + len(row) > self._largest_bytes
        if not self.full:
            self._append(row)
        return not self.full

    def _append(self, row: bytes) -> None:
        left = memoryview(row)
        with self._explained():
            while left:
                left = left[self._stream.write(left) :]

    def _explained(self) -> AbstractContextManager[None]:
        return as_request_error(f"The recording {self.path} can't be written", "Name a file in a folder of yours.")

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def _plain_file(path: Path) -> BinaryIO:
    """The file open for reading. Refused: a pipe, which could block the reader, and a device, which might never end."""
    with as_request_error(f"The recording {path} can't be read", REMEDY):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
        raise OSError("it is not a plain file")


class Recording:
    """A recording as a source of snapshots: each tick gives the next one; the last stays, with a note.

    Snapshots are found by position, and only one is in memory at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = -1
        self._stream = _plain_file(path)
        try:
            self.header = self._read_header()
            self._starts = self._find_lines()
            self._first = self.snapshot(0)
        except BaseException:
            self._stream.close()
            raise

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def interval_seconds(self) -> float:
        """The time between two snapshots of the recording."""
        return max(0.05, self._first.interval_seconds)

    @property
    def ended(self) -> bool:
        """True once the last snapshot has been given."""
        return self.position >= len(self) - 1

    def devices(self) -> tuple[Device, ...]:
        """The devices of the first snapshot."""
        return tuple(sample.device for sample in self._first.devices)

    def sample(self) -> Snapshot:
        """The next snapshot; a broken line ends the recording there, and a note says so."""
        ended, last = self.ended, len(self) - 1
        self.position = last if ended else self.position + 1
        try:
            snapshot = self.snapshot(self.position)
        except RequestError as fault:
            self.position = last
            return msgspec.structs.replace(self._first, devices=(), processes=(), notes=(str(fault),))
        notes = ("The recording ends here.",) if ended else ()
        return msgspec.structs.replace(snapshot, notes=(*snapshot.notes, *notes))

    def snapshot(self, position: int) -> Snapshot:
        """One snapshot, from 0; RequestError if its line is broken."""
        self._stream.seek(self._starts[position])
        try:
            return msgspec.json.decode(self._stream.readline(LONGEST_LINE_BYTES), type=Snapshot)
        except _BROKEN as error:
            raise RequestError(f"{self.path}, line {position + 2}: {error}.", REMEDY) from None

    def close(self) -> None:
        """Let go of the file; it may be called twice."""
        self._stream.close()

    def _read_header(self) -> RecordingHeader:
        try:
            header = msgspec.json.decode(self._stream.readline(LONGEST_LINE_BYTES), type=RecordingHeader)
        except _BROKEN:
            raise RequestError(f"{self.path} is not a recording of the monitor.", REMEDY) from None
        if header.evener_monitor != VERSION:
            raise RequestError(
                f"{self.path} is a recording of version {header.evener_monitor}; this evener reads version {VERSION}.",
                "Replay it with the version of evener that wrote it.",
            )
        return header

    def _find_lines(self) -> list[int]:
        """The offset of each whole line; the file must hold at least one snapshot."""
        starts: list[int] = []
        while (row := self._stream.readline(LONGEST_LINE_BYTES)).endswith(b"\n"):
            starts.append(self._stream.tell() - len(row))
            if len(starts) > MOST_SNAPSHOTS:
                raise RequestError(f"{self.path} is longer than {MOST_SNAPSHOTS} snapshots.", REMEDY)
        if len(row) >= LONGEST_LINE_BYTES:
            raise RequestError(f"{self.path}, line {len(starts) + 2}, is longer than any snapshot.", REMEDY)
        if not starts:
            raise RequestError(f"{self.path} holds no snapshot.", REMEDY)
        return starts
