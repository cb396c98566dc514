"""The journal of a run: a JSON Lines file that is only appended to.

Each line is written to disk before the session acts on it. A kill or a full disk may leave an
incomplete last line. Such a line is cut off. Any other broken line is an error that names the line.
A journal is trusted only if it belongs to this user and nobody else may write to it.
"""

from __future__ import annotations

import os
import stat
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from evener.devices.types import Device
from evener.errors import RequestError, as_request_error

from .events import Finished
from .old_verdicts import upgrade_verdict
from .request import Job, Request
from .types import (
    Facts,
    Failed,
    Layout,
    Observation,
    Probe,
    Timed,
    upgrade_observation,
    upgrade_probe,
)

SCHEMA = 2  # 1: before shares could be computed in passes
# limits against files that are no journals: a search writes 600 bytes per observation, so this is
# half a million of them
LARGEST_FILE_BYTES = 256 << 20
LONGEST_LINE_BYTES = 8 << 20  # 8 KiB for each of 1024 devices; two need 8 KiB, with sampled lengths
MOST_DEVICES = 4096  # in a journal; more than a search accepts
NAME_ONE = "Give journal.jsonl of a search's folder, or the run's id."


class UnwrittenError(RequestError):
    """An entry can't be written, for example because the disk is full."""


class Header(msgspec.Struct, frozen=True, tag="header", tag_field="entry"):
    """First line of a journal: the request, and the devices that were found for it."""

    run: str
    created: str  # UTC, RFC 3339
    request: Request
    devices: tuple[Device, ...]
    workload: str
    framework: str
    evener: str  # evener's version
    # the largest batch that the workload can make for one device; None: no limit
    largest_share: int | None = None
    notes: tuple[str, ...] = ()  # about the devices, for the plan
    schema: int = SCHEMA

    @property
    def job(self) -> Job:
        """The job of this run, without the description of a simulated machine."""
        return Job(
            self.request,
            self.devices,
            self.workload,
            self.framework,
            self.largest_share,
            self.notes,
        )


class AskedEntry(msgspec.Struct, frozen=True, tag="asked", tag_field="entry"):
    """Journal entry: probes that the search has asked for."""

    probes: tuple[Probe, ...]
    at_seconds: float  # on the session's clock


class ObservationEntry(msgspec.Struct, frozen=True, tag="seen", tag_field="entry"):
    """Journal entry: the outcome of a probe."""

    seen: Observation
    at_seconds: float


class FactsEntry(msgspec.Struct, frozen=True, tag="known", tag_field="entry"):
    """Journal entry: what probes have reported about the software, the workload and its data."""

    facts: Facts


class FailedEntry(msgspec.Struct, frozen=True, tag="failed", tag_field="entry"):
    """Journal entry: the search has ended with an error, without a plan."""

    message: str
    at_seconds: float


LaterEntry = AskedEntry | ObservationEntry | FactsEntry | Finished | FailedEntry
Entry = Header | LaterEntry
_decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


class JournalContents(msgspec.Struct, frozen=True):
    """The entries of a journal file.

    `whole_bytes` is the length of the file up to its last complete line.
    """

    header: Header
    entries: tuple[LaterEntry, ...]
    whole_bytes: int

    @property
    def seen(self) -> tuple[ObservationEntry, ...]:
        """Outcomes of probes with their times, in order."""
        return tuple(entry for entry in self.entries if isinstance(entry, ObservationEntry))

    @property
    def observations(self) -> tuple[Observation, ...]:
        """Outcomes of probes, in order."""
        return tuple(entry.seen for entry in self.seen)

    @property
    def facts(self) -> Facts:
        """The latest facts about software, workload and data.

        The facts are empty if none were written.
        """
        return next(
            (entry.facts for entry in reversed(self.entries) if isinstance(entry, FactsEntry)),
            Facts(),
        )

    @property
    def pending(self) -> tuple[AskedEntry, tuple[Probe, ...]] | None:
        """The search's last request for probes, and the requested probes without an outcome.

        It is None if every requested probe has an outcome.
        """
        answered: set[Probe] = set()
        for entry in reversed(self.entries):
            if isinstance(entry, AskedEntry):
                missing = tuple(probe for probe in entry.probes if probe not in answered)
                return (entry, missing) if missing else None
            if isinstance(entry, ObservationEntry):
                answered.add(entry.seen.probe)
        return None

    @property
    def clock_seconds(self) -> float:
        """How many seconds the search had run when its last complete round of probes ended."""
        pending = self.pending
        if pending is not None:
            return pending[0].at_seconds
        return max((entry.at_seconds for entry in self.seen), default=0.0)

    @property
    def last_end(self) -> Finished | FailedEntry | None:
        """The entry that says how the search last ended: with a plan, or with an error.

        It is None if the search was killed before its end, or was resumed and hasn't ended since.
        """
        last = next(
            (
                entry
                for entry in reversed(self.entries)
                if not isinstance(entry, FactsEntry | AskedEntry)
            ),
            None,
        )
        return last if isinstance(last, Finished | FailedEntry) else None

    @property
    def ended(self) -> Finished | None:
        """The journal's last entry if the search ended with a plan, else None."""
        last = self.last_end
        return last if isinstance(last, Finished) else None


class Journal:
    """A journal open for appending."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path = path
        self._stream = stream

    def append(self, entry: Entry) -> None:
        """Append an entry and flush it to the disk.

        Raises UnwrittenError if that fails; the file then keeps only whole lines.
        """
        descriptor = self._stream.fileno()
        content = msgspec.json.encode(entry) + b"\n"
        before = os.lseek(descriptor, 0, os.SEEK_END)
        remedy = "Free disk space, then go on with evener balance --resume."
        with _writing(self.path, remedy, UnwrittenError):
            try:
                while content:
                    content = content[os.write(descriptor, content) :]
                os.fsync(descriptor)
            except OSError:
                # an incomplete line is also cut off when the journal is read
                with suppress(OSError):
                    os.ftruncate(descriptor, before)
                raise

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def create(path: Path, header: Header) -> Journal:
    """Create a journal that only its owner can read, and write its header.

    Raises RequestError if the file exists or can't be written.
    """
    with _writing(path, "Set XDG_STATE_HOME to a folder that you may write."):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW, 0o600
        )
    journal = Journal(path, os.fdopen(descriptor, "r+b", buffering=0))
    try:
        journal.append(header)
    except BaseException:
        journal.close()
        path.unlink(missing_ok=True)
        raise
    return journal


def reopen(path: Path) -> tuple[Journal, JournalContents]:
    """Read a journal, cut off an incomplete last line, and open it for appending.

    Raises RequestError if it is broken, not trusted, or can't be written.
    """
    record = read(path)
    with _writing(path, "Check who may write it."):
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)
        os.ftruncate(descriptor, record.whole_bytes)
    return Journal(path, os.fdopen(descriptor, "r+b", buffering=0)), record


def read(path: Path, *, foreign: bool = False) -> JournalContents:
    """Read a journal.

    `foreign` allows a journal of another user. Raises RequestError if the journal is broken or,
    without `foreign`, if others may write to it. An incomplete last line is left out.
    """
    content = read_trusted(path, foreign=foreign)
    if foreign and b'"header"' not in content.partition(b"\n")[0]:
        raise RequestError(f"{path} isn't the journal of a search.", NAME_ONE)
    *lines, incomplete = content.split(b"\n")
    if not lines:
        raise RequestError(
            f"{path} holds no whole line.",
            NAME_ONE if foreign else "Delete the run: nothing was measured in it.",
        )
    header, *rest = (_entry(text, path, number, foreign) for number, text in enumerate(lines, 1))
    if not isinstance(header, Header):
        raise RequestError(
            f"{path}: line 1 isn't a header.", "The file is not a journal, or was changed."
        )
    entries = tuple(
        _check_against_header(entry, header, f"{path}: line {number}", foreign)
        for number, entry in enumerate(rest, 2)
    )
    return JournalContents(header, entries, len(content) - len(incomplete))


def _explain_broken_line(line: str, foreign: bool) -> str:
    """Return what the user should do about a broken line of a journal.

    `foreign` says whether the journal may be another user's.
    """
    return (
        "Copy the file again."
        if foreign
        else f"Delete the file from {line} on to keep what is above it."
    )


def _entry(text: bytes, path: Path, number: int, foreign: bool) -> Entry:
    remedy = _explain_broken_line(f"line {number}", foreign)
    if len(text) > LONGEST_LINE_BYTES:
        raise RequestError(f"{path}: line {number} is longer than any entry.", remedy)
    if number == 1:
        _check_schema(text, path)
    try:
        entry = _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise RequestError(
            f"{path}: line {number} is broken: {str(error)[:200]}.", remedy
        ) from None
    if isinstance(entry, AskedEntry):
        return msgspec.structs.replace(entry, probes=tuple(map(upgrade_probe, entry.probes)))
    if isinstance(entry, ObservationEntry):
        return msgspec.structs.replace(entry, seen=upgrade_observation(entry.seen))
    if isinstance(entry, Header):
        if not 1 <= len(entry.devices) <= MOST_DEVICES:
            raise RequestError(f"{path}: line {number} names {len(entry.devices)} devices.", remedy)
        if entry.schema == 1:
            return msgspec.structs.replace(
                entry, request=msgspec.structs.replace(entry.request, micro="off")
            )
    return entry


def _decode(text: bytes) -> Entry:
    """Decode a line of a journal, including lines that an older version wrote."""
    try:
        return _decoder.decode(text)
    except msgspec.ValidationError:
        # before version 0.3, a verdict's fields had other names
        fields = msgspec.json.decode(text)
        if not isinstance(fields, dict) or not isinstance(fields.get("found"), dict):
            raise
        fields["found"] = upgrade_verdict(fields["found"])
        return _decoder.decode(msgspec.json.encode(fields))


class _SchemaOnly(msgspec.Struct):
    schema: int = 0


def _check_schema(text: bytes, path: Path) -> None:
    """Raise RequestError if a newer version has written the journal."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # other errors in the line are reported when it is decoded
        schema = msgspec.json.decode(text, type=_SchemaOnly).schema
        if schema > SCHEMA:
            message = f"{path} has schema {schema}; this evener reads up to {SCHEMA}."
            raise RequestError(message, "Update evener on this machine.")


def _check_against_header(entry: Entry, header: Header, where: str, foreign: bool) -> LaterEntry:
    """Return the entry, or raise RequestError if it doesn't match the journal's header.

    `where` names the entry's line in the error. `foreign` says whether the journal may be another
    user's, which changes the advice in the error.
    """
    if isinstance(entry, Header):
        raise RequestError(
            f"{where} is a second header.", _explain_broken_line("that line", foreign)
        )
    if not _has_right_lengths(entry, header):
        raise RequestError(
            f"{where} doesn't fit the run's devices.", _explain_broken_line("that line", foreign)
        )
    return entry


def _has_right_lengths(entry: LaterEntry, header: Header) -> bool:
    """Return whether the tuples in an entry have one item for each device in the header."""
    # the decoder has already checked single values
    devices = len(header.devices)
    match entry:
        case AskedEntry():
            return all(_layout_sound(probe.layout, devices) for probe in entry.probes)
        case ObservationEntry(seen):
            short = () if isinstance(seen, Failed) else seen.short_bytes
            sound = _layout_sound(seen.probe.layout, devices) and len(short) in (0, devices)
            return sound and (not isinstance(seen, Timed) or _timed_sound(seen, devices))
        case Finished():
            return len(entry.plan.layout.share) == devices
    return True


def _layout_sound(layout: Layout, devices: int) -> bool:
    shares = layout.shares
    if not any(shares) or not len(shares) == len(layout.pass_rows) == devices:
        return False
    if len(layout.costs) not in (0, devices) or len(layout.costs) != len(layout.tokens):
        return False
    if not all(cost.is_valid() for cost in layout.costs if cost):
        return False
    pairs = zip(layout.pass_rows, shares, strict=True)
    return all(min(1, share) <= rows <= share for rows, share in pairs)


def _timed_sound(measurement: Timed, devices: int) -> bool:
    ordered = measurement.low_seconds <= measurement.step_seconds <= measurement.high_seconds
    return (
        ordered
        and len(measurement.memory_bytes) == len(measurement.device_seconds) == devices
        and len(measurement.work) in (0, devices)
        and len(measurement.parts) in (0, devices)
    )


def read_trusted(path: Path, *, foreign: bool = False) -> bytes:
    """Return the bytes of a journal file after checking that it can be trusted.

    Raises RequestError if the file can't be read, isn't a regular file or is too large. Without
    `foreign`, also raises it for a symbolic link, and for a file that another user owns or may
    write to.
    """
    follow = 0 if foreign else os.O_NOFOLLOW
    with (
        as_request_error(f"The journal {path} can't be read", "List the runs with evener runs."),
        os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | follow), "rb") as stream,
    ):
        _check_trust(path, os.fstat(stream.fileno()), foreign)
        return stream.read()


def _check_trust(path: Path, status: os.stat_result, foreign: bool) -> None:
    remedy = NAME_ONE if foreign else "Delete the run."
    if not stat.S_ISREG(status.st_mode):
        raise RequestError(f"{path} is not a plain file.", remedy)
    if not foreign and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise RequestError(
            f"{path} belongs to, or may be written by, somebody else, and is not trusted.",
            "If you know what is in it, make it yours and chmod 600 it.",
        )
    if status.st_size > LARGEST_FILE_BYTES:
        raise RequestError(f"{path} is larger than any journal.", remedy)


def _writing(
    path: Path, remedy: str, kind: type[RequestError] = RequestError
) -> AbstractContextManager[None]:
    return as_request_error(f"The journal {path} can't be written", remedy, kind)
