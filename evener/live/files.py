"""The files in which training processes report their state, each with one JSON record.

Files aren't trusted. A file is ignored unless it is small, regular and well-formed, no other user
can access it or its folder, and the process that its name refers to is alive.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ..system.files import make_private
from ..training.noise_scale import NoiseScale
from ..training.step_sums import Seconds, StepSums

LARGEST_FILE_BYTES = 64 << 10
LONGEST_TEXT = 200
MOST_FILES = 4096
MOST_DEVICES = 256
MOST_CHANGES = 16
MOST_KNOTS = 64
MOST_STEPS = 24  # number of recent steps that are stored with their parts

# pid, start in ticks, reporter
_NAME = re.compile(r"(\d{1,10})\.(\d{1,20})\.(\d{1,9})\.(json|tmp)", re.ASCII)

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Part = Annotated[float, msgspec.Meta(ge=0, le=1)]
Text = Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)]
# activities in the order of a step
Doing = Literal["", "own work", "sum", "update", "between steps", "input"]


class LiveDevice(msgspec.Struct, frozen=True):
    """A device in the record of a training process: its rows, its speed and its times per step."""

    id: Text  # the GPU's UUID or a CPU slice's name; empty: known by its index alone
    # the framework's index of the device; -1: unknown
    index: Annotated[int, msgspec.Meta(ge=-1, le=1 << 20)]
    batch: Count  # samples per step; 0: unknown
    samples_per_second: Rate
    micro: Count = 0  # samples per pass; 0: unknown
    own_work_s: Rate = 0.0  # median per step, until the last gradient is ready; 0: unknown
    waiting_s: Rate = 0.0  # median per step, from there to the end of the backward pass
    host: Text = ""  # the host's name in the plan; empty: this host
    # the plan's curve as (rows, seconds per step); only if own work is known
    curve: Annotated[tuple[tuple[Rate, Rate], ...], msgspec.Meta(max_length=MOST_KNOTS)] = ()
    most: Count = 0  # maximum samples per pass in its memory, from the plan; 0: unknown
    # first decile of waiting: only the exchange, from steps in which this rank was last
    least_waiting_s: Rate = 0.0
    own_spread: Rate = 0.0  # interquartile range of own work over its median


class ShareChange(msgspec.Struct, frozen=True):
    """A change of shares during training, with the reason."""

    step: Count  # the first step with the new shares
    at: Rate  # Unix time in seconds
    # samples of each rank
    before: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_DEVICES)]
    after: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_DEVICES)]
    reason: Text


class LastStep(msgspec.Struct, frozen=True, array_like=True):
    """How the time of one step was spent."""

    number: Count  # the number of the batch
    input_s: Seconds
    own_work_s: Seconds  # includes `meeting_s` if only their sum is known
    meeting_s: Seconds  # waiting for other ranks, and the exchange
    between_s: Seconds  # includes the optimizer and the time before the step


class PendingShares(msgspec.Struct, frozen=True):
    """How many windows of steps were measured, and how many are needed before shares may change."""

    windows: Count  # number of windows observed with the current shares
    needed: Count  # minimum number of windows for a change


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """The optional fields of a record, such as rank, plan, step times and memory."""

    training: Text = ""  # the same in all processes of one training
    # rank of this process; -1: a single process, or unknown
    rank: Annotated[int, msgspec.Meta(ge=-1, le=1 << 20)] = -1
    world: Count = 0  # processes of the training; 0: unknown
    step_s: Rate = 0.0  # median of a step; 0: unknown
    step_spread: Rate = 0.0  # interquartile range of a step over its median
    input_s: Rate = 0.0  # median per step, waiting for data
    plan_samples_per_second: Rate = 0.0  # of the whole training run, from the plan; 0: no plan
    # the latest changes of shares
    changes: Annotated[tuple[ShareChange, ...], msgspec.Meta(max_length=MOST_CHANGES)] = ()
    # median per step, between the backward pass and the next batch, without the optimizer
    between_s: Rate = 0.0
    retreats: Count = 0  # passes that ran out of memory and were computed again in smaller ones
    retreat: Text = ""  # a message about the latest retreat
    noise: NoiseScale | None = None  # noise scale of the gradient; null: unknown
    recent: StepSums = StepSums()  # sums over this rank's last steps
    # half-width of the 95 % interval of each of their means, per step
    errors: StepSums = StepSums()
    whole: StepSums = StepSums()  # sums over all of this rank's steps except the first ones
    # oldest first
    last_steps: Annotated[tuple[LastStep, ...], msgspec.Meta(max_length=MOST_STEPS)] = ()
    # fraction of the last steps in which the GPU was behind its host; -1: unknown
    behind: Annotated[float, msgspec.Meta(ge=-1, le=1)] = -1.0
    # fraction of the last seconds for which this process's threads waited for a core
    starved: Part = 0.0
    starved_so_far: Part = 0.0  # the same over the whole time
    memory_bytes: Count = 0  # peak memory of this rank on the device; 0: unknown
    memory_of_bytes: Count = 0  # the device's memory; 0: unknown
    pending: PendingShares | None = None  # null: shares stay as they are
    # True if the rows come from no DataLoader, so that waiting for them counts as own work
    without_loader: bool = False
    run: Text = ""  # the run that holds its journal; empty: no journal


class LiveRecord(Details, frozen=True):
    """The state of a training process: its speed, its devices and what it is doing now."""

    framework: Text
    workload: Text
    # of all devices of the process, over the last seconds of reporting
    samples_per_second: Rate
    step: Count  # number of reports
    updated_at: Rate  # Unix time; doesn't advance while the process validates, waits or hangs
    # empty if the report named none
    devices: Annotated[tuple[LiveDevice, ...], msgspec.Meta(max_length=MOST_DEVICES)]
    tokens_per_second: Rate = 0.0  # without padding; 0 if rows have no lengths
    padding: Part = 0.0  # fraction of the computed tokens that is padding
    due_at: Rate = 0.0  # Unix time at which the next record is due if steps continue; 0: unknown
    batch: Count = 0  # the latest batch, if no step has ended in time
    # the process's activity with that batch; empty while steps end in time or if it is stopped
    doing: Doing = ""
    # of all steps but the first ones, including the time between them
    counted_steps: Count = 0
    counted_samples: Count = 0
    counted_seconds: Rate = 0.0

    def late_seconds(self, at_seconds: float) -> float:
        """Return how many seconds late the next record is at the Unix time `at_seconds`.

        Returns 0 if it isn't due yet.
        """
        return max(0.0, at_seconds - max(self.updated_at, self.due_at))


class Training(LiveRecord, frozen=True, kw_only=True):
    """The record of a running training process, with its process id."""

    pid: int


def read_trainings(folders: Sequence[Path] | None = None) -> tuple[Training, ...]:
    """Read the records of all running training processes of this user.

    `folders` defaults to `live_folders()`. Files of processes that have ended are deleted, and
    invalid files are ignored. The result is sorted by process id and time.
    """
    found: list[Training] = []
    for folder in live_folders() if folders is None else folders:
        with contextlib.suppress(OSError):
            found.extend(_read_folder(folder))
    return tuple(sorted(found, key=lambda training: (training.pid, training.updated_at)))


def live_folders() -> tuple[Path, ...]:
    """Return the folders that may contain records, with the preferred folder first.

    If EVENER_LIVE_DIR is set, the result is only that folder. Otherwise, the result is the user's
    private runtime folders and a folder for this machine in the user's state folder.
    """
    override = os.environ.get("EVENER_LIVE_DIR")
    if override:
        return (Path(override),)
    runtime = [os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.getuid()}"]
    folders = [
        Path(base) / "evener" / "live"
        for base in dict.fromkeys(runtime)
        if base and _is_private(base)
    ]
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    # machines with separate pids may share a home folder
    return (*folders, Path(state) / "evener" / "live" / os.uname().nodename)


def file_name(pid: int, ticks: int, serial: int) -> str:
    """Return the name of the file for a record.

    `ticks` is the process's start time in clock ticks since boot. `serial` is a number that
    distinguishes the reporters of the process.
    """
    return f"{pid}.{ticks}.{serial}.json"


def prepare_folder(folder: Path) -> None:
    """Create a private folder for records, and delete the files of processes that have ended.

    Raises OSError if that fails, and PermissionError if another user owns the folder.
    """
    make_private(folder)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{folder} is not this user's folder")
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    for _ in _read_folder(folder):
        pass


def replace_file(target: Path, content: bytes) -> None:
    """Write a file atomically, so that only this user can read it.

    Raises OSError if it can't be written.
    """
    temporary = target.with_suffix(".tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o600), "wb") as stream:
        stream.write(content)
    os.replace(temporary, target)


def start_ticks(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot, or None if it has ended."""
    fields = read_stat(pid)
    return int(fields[19]) if fields and fields[0] not in (b"Z", b"X") else None


def read_stat(pid: int) -> list[bytes]:
    """Return the fields of `/proc/PID/stat`, starting with the process's state.

    Returns [] if there is no such process.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as stream:
            return stream.read(4096).rpartition(b")")[2].split()
    except OSError:
        return []


def clean(text: object) -> str:
    """Return the text's first 200 characters, with "?" in place of unprintable ones."""
    return "".join(sign if sign.isprintable() else "?" for sign in str(text)[:LONGEST_TEXT])


def _read_folder(folder: Path) -> Iterator[Training]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _is_ours(os.fstat(descriptor)):
            return
        for named in filter(None, map(_NAME.fullmatch, os.listdir(descriptor)[:MOST_FILES])):
            pid = int(named[1])
            ticks = int(named[2])
            if start_ticks(pid) != ticks:
                with contextlib.suppress(OSError):
                    os.unlink(named[0], dir_fd=descriptor)
            elif named[4] == "json":
                record = _read_record(named[0], descriptor)
                if record is not None:
                    yield Training(**msgspec.structs.asdict(record), pid=pid)
    finally:
        os.close(descriptor)


def _read_small(name: str, folder: int) -> bytes:
    """Read a small file of this user. `folder` is the descriptor of its folder.

    If the file is too large, only one byte more than the largest size of a record is read. Returns
    b"" if the file isn't a regular file, or if other users may access it.
    """
    # a pipe is opened so that it doesn't block the reader
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, dir_fd=folder), "rb", buffering=0) as stream:
        status = os.fstat(stream.fileno())
        ours = stat.S_ISREG(status.st_mode) and _is_ours(status)
        return stream.read(LARGEST_FILE_BYTES + 1) if ours else b""


def _read_record(name: str, folder: int) -> LiveRecord | None:
    """Read a record, or return None if the file is invalid or doesn't exist.

    `folder` is the descriptor of its folder.
    """
    try:
        return parse_record(_read_small(name, folder))
    except OSError:
        return None


def parse_record(content: bytes) -> LiveRecord | None:
    """Decode a record, or return None if it is too large, invalid or not printable."""
    if len(content) > LARGEST_FILE_BYTES:
        return None
    try:
        record = msgspec.json.decode(content, type=LiveRecord)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    texts = (record.framework, record.workload, *(device.id for device in record.devices))
    return record if all(map(str.isprintable, texts)) else None


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and not status.st_mode & 0o077


def _is_private(folder: str) -> bool:
    try:
        return _is_ours(os.stat(folder))
    except OSError:
        return False
