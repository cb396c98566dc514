"""The runs of this user: where their journals lie, what they are called, and who holds which devices now.

Locks are the kernel's (flock): they end with the process that has them, however it ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import msgspec

from evener.balancer.store import journal
from evener.balancer.store.journal import Ended, Header
from evener.balancer.types import Observation
from evener.devices.types import Device
from evener.errors import DeviceError, EvenerError, NoLayoutError, RequestError
from evener.plan import Plan, parse_plan, to_json

JOURNAL = "journal.jsonl"
_ID = re.compile(r"[0-9a-z][0-9a-z-]{0,40}")
_LONGEST_NOTE_BYTES = 4096
State = Literal["finished", "interrupted", "unfinished", "unreadable"]


class RunSummary(msgspec.Struct, frozen=True):
    """One line of the list of runs."""

    run: str
    created: str
    devices: tuple[str, ...]  # labels
    workload: str
    state: State
    probes: int
    samples_per_second: float | None
    ratios: tuple[float, ...] = ()
    trouble: str = ""  # why it can't be read


class Run(msgspec.Struct, frozen=True):
    """A run as its journal has it; one that was cut off has the plan of what it had measured, if that is something."""

    header: Header
    observations: tuple[Observation, ...]
    plan: Plan | None
    verdict: str
    interrupted: bool


def state_folder() -> Path:
    """Where this user's state lies (XDG_STATE_HOME is honoured); made if it isn't there, for this user alone."""
    import platformdirs

    return _trusted(Path(platformdirs.user_state_path("evener")))


def runs_folder() -> Path:
    """Where each run has a folder of its own."""
    return _trusted(state_folder() / "runs")


def _trusted(folder: Path) -> Path:
    """The folder, made for this user alone; RequestError if, links followed, somebody else has it or may write it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise RequestError(
            f"The folder {folder} can't be used: {error.strerror or error}.",
            "Set XDG_STATE_HOME to a folder that you may write.",
        ) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise RequestError(
            f"{folder} belongs to, or may be written by, somebody else, and is not trusted.",
            "Set XDG_STATE_HOME to a folder of your own.",
        )
    return folder


def new_id(now: float | None = None) -> str:
    """A name that sorts by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{secrets.token_hex(2)}"


def journal_path(run: str) -> Path:
    """The journal of a run by its whole id."""
    return runs_folder() / run / JOURNAL


def find(name: str) -> str:
    """The run that an id, the unique beginning of one, or `last` means; RequestError if there is none, or several."""
    known = _known()
    if not known:
        raise RequestError("There are no runs yet.", "Make one with evener balance.")
    if name == "last":
        return known[-1]
    if not _ID.fullmatch(name):
        raise RequestError(f"{name!r} is not the name of a run.", "List the runs with evener runs.")
    if name in known:
        return name
    matches = [run for run in known if run.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise RequestError(f"{len(matches)} runs begin with {name!r}.", f"Say more, as in {matches[-1]}.")
    raise RequestError(f"There is no run {name!r}.", f"The last one is {known[-1]}; evener runs lists them.")


def list_runs() -> tuple[RunSummary, ...]:
    """Every run, the newest first; one that can't be read says why."""
    return tuple(_summary(run) for run in reversed(_known()))


def load_run(name: str) -> Run:
    """What was measured in a run and the plan it came to; RequestError if it can't be read."""
    path = journal_path(find(name))
    record = journal.read(path)
    ended = record.ended
    observations = tuple(entry.seen for entry in record.seen)
    if ended is None:
        from evener.balancer.store import replay

        with suppress(NoLayoutError):
            found = replay.recover(record)
            return Run(record.header, observations, found.plan, found.verdict, True)
        return Run(record.header, observations, None, "", True)
    plan = parse_plan(to_json(ended.plan), str(path))
    return Run(record.header, observations, plan, ended.verdict, ended.interrupted)


def delete_run(name: str) -> str:
    """Remove a run and its journal, and give its id; RequestError if it is going on or can't be removed."""
    run = find(name)
    folder = runs_folder() / run
    with RunLock(run):
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise RequestError(
                f"The run {run} can't be deleted: {error.strerror or error}.", f"Look at {folder}."
            ) from None
    return run


def forget_empty(run: str) -> None:
    """Remove the folder of a run that never came to a journal."""
    folder = runs_folder() / run
    with suppress(OSError):
        if not (folder / JOURNAL).exists():
            shutil.rmtree(folder)


class _Lock:
    """Exclusive locks on some files, with a note in each that says who has them."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def take(self, path: Path, note: dict[str, object]) -> dict[str, object] | None:
        """Lock a file; what its holder noted, if somebody else has it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = _read_note(descriptor)
            os.close(descriptor)
            return holder
        self._descriptors.append(descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(note).encode(), 0)
        return None

    def release(self) -> None:
        """Let go of all of them; it may be called twice."""
        for descriptor in self._descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> _Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class RunLock(_Lock):
    """A run that is going on can be neither resumed nor deleted."""

    def __init__(self, run: str) -> None:
        super().__init__()
        holder = _guarded(self, runs_folder() / run / "lock", {"pid": os.getpid()})
        if holder is not None:
            raise RequestError(f"The run {run} is going on{_by(holder)}.", "Wait for it, or stop it there.")


class DeviceLock(_Lock):
    """Two sessions on one device would measure each other; simulated devices are nobody's."""

    def __init__(self, run: str, devices: Iterable[Device]) -> None:
        super().__init__()
        folder = _trusted(state_folder() / "locks")
        note: dict[str, object] = {"pid": os.getpid(), "run": run}
        for device in devices:
            for name, unit in _units(device):
                holder = _guarded(self, folder / f"{blake2b(unit.encode(), digest_size=12).hexdigest()}.lock", note)
                if holder is not None:
                    self.release()
                    raise DeviceError(
                        f"{name} is being measured by another evener{_by(holder)}.",
                        "Wait for it, or run beside it with --share.",
                    )


def _units(device: Device) -> list[tuple[str, str]]:
    """What can't be had twice: a GPU, or each core of a slice however the CPU was cut."""
    if device.kind == "gpu":
        return [(device.label, device.id)]
    return [(device.label, f"core {core}") for core in device.cores]


def _guarded(lock: _Lock, path: Path, note: dict[str, object]) -> dict[str, object] | None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return lock.take(path, note)
    except OSError as error:
        lock.release()
        raise RequestError(
            f"The lock {path} can't be written: {error.strerror or error}.",
            "Set XDG_STATE_HOME to a folder that you may write.",
        ) from None


def _read_note(descriptor: int) -> dict[str, object]:
    try:
        note = json.loads(os.pread(descriptor, _LONGEST_NOTE_BYTES, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}


def _by(holder: dict[str, object]) -> str:
    pid, run = holder.get("pid"), holder.get("run")
    words = [f"process {pid}"] if isinstance(pid, int) else []
    if isinstance(run, str) and _ID.fullmatch(run):
        words.append(f"run {run}")
    return f" ({', '.join(words)})" if words else ""


def _known() -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(runs_folder()) if _ID.fullmatch(entry.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RequestError(
            f"The folder {runs_folder()} can't be read: {error.strerror or error}.", "Check who owns it."
        ) from None


def _summary(run: str) -> RunSummary:
    try:
        record = journal.read(journal_path(run))
    except EvenerError as fault:
        return RunSummary(run, "", (), "", "unreadable", 0, None, (), fault.message)
    header, ended = record.header, record.ended
    labels = tuple(device.label for device in header.devices)
    rate = ended.plan.throughput.samples_per_second if ended else None
    ratios = ended.plan.ratios if ended else ()
    return RunSummary(run, header.created, labels, header.workload, _state(ended), len(record.seen), rate, ratios)


def _state(ended: Ended | None) -> State:
    if ended is None:
        return "unfinished"
    return "interrupted" if ended.interrupted else "finished"
