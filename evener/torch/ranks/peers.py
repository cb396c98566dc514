"""End a rank with an explanation if another rank is lost; otherwise, it would wait forever."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Event, Thread, main_thread
from typing import Any
from weakref import WeakMethod

import msgspec
import torch
import torch.distributed as dist

from ...training.ending import end_process, last_error
from ...training.launched import abort_if_lost
from ...training.retreat import print_line
from ..private import LEAVING, abort_group, default_store
from ..sums.collectives import count_exchanges

LOOK_SECONDS = 1.0
# timeout for other ranks' notes, and time after which a rank without progress is stuck
WAIT_SECONDS = 3.0
# texts in error messages about lost ranks
_LOST_SIGNS = (
    "gloo/",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL",
)
INTERRUPTED = "it was interrupted by Ctrl-C"
_kept_groups: list[Any] = []  # references to process groups, held until the interpreter exits


class ExitNote(msgspec.Struct, frozen=True):
    """What a rank writes to the process group's store when it ends: its error and its progress."""

    error: str | None = None  # its error; "" if it had no error, None if it wrote no note
    batches: int = 0  # number of batches that it has begun
    exchanges: dict[str, int] = {}  # number of collectives that it has started, by process group

    def describe(self, rank: int) -> str:
        """Describe in a sentence, for other ranks, how the rank with index `rank` has ended."""
        end = "ended", self.error
        if self.error is None:
            end = "doesn't answer", "it was killed, ended early, or its machine is gone"
        elif not self.error:
            why = (
                "it has called sys.exit(), or its loop was shorter. Every rank has to take every "
                "batch"
            )
            end = f"ended in its batch {self.batches}", why
        return f"rank {rank} {end[0]}, and this rank can't go on without it: {end[1]}."


class PeerWatcher:
    """Detects when another rank has ended, so that this rank doesn't wait for it forever.

    `read_progress` returns this rank's number of batches and its current activity.
    """

    # on GPUs, a thread reads the notes; if this rank is stuck, it prints why and ends the process

    newest: PeerWatcher | None = None

    def __init__(self, device: torch.device, read_progress: Callable[[], tuple[int, Any]]) -> None:
        self.group, self._device, self._read_progress = dist.group.WORLD, device, read_progress
        self.on_gpu = device.type == "cuda" and "nccl" in dist.get_backend_config()
        self._rank, self._ranks = (
            dist.get_rank(),
            set(range(dist.get_world_size())) - {dist.get_rank()},
        )
        self._store = default_store().clone()  # a separate connection on which nothing else waits
        # the same on all ranks
        self._number: int = 0 if PeerWatcher.newest is None else PeerWatcher.newest._number + 1
        self._machine = f"{os.uname().nodename} {os.stat('/proc/self/ns/pid').st_ino}"
        self._store.set(self._key("process", self._rank), f"{os.getpid()} {self._machine}")
        self.notes: dict[int, ExitNote] = {}  # notes of ranks that have exited
        self._noted_error: str | None = None  # the error in this rank's note, once it is written
        self._over = Event()
        self._gpu_waits: list[Thread] = []
        self._thread = Thread(target=self._watch, name="evener-peers", daemon=True)
        if self.on_gpu:
            self._thread.start()

    def _key(self, name: str, rank: int) -> str:
        return f"evener/{self._number}/{name}/{rank}"

    def note(self, error: str) -> None:
        """Leave a note in the store that tells the other ranks that this rank is ending.

        `error` describes this rank's error, or is "" if there is none. Only the first call has an
        effect.
        """
        if self._noted_error is None:
            self._noted_error = error
            note = ExitNote(error, self._read_progress()[0], count_exchanges())
            with suppress(RuntimeError, ValueError):  # the store's process has exited
                self._store.set(self._key("ended", self._rank), msgspec.json.encode(note))

    def leave(self) -> None:
        """Write this rank's exit note, then wait a few seconds for the other ranks to end."""
        if self._over.is_set():
            return
        computed = self._wait_for_gpu()
        while computed.is_alive() and not (self._noted_error and self.notes):
            self._read_notes_soon()
        self.note("")
        # gloo itself detects that a rank has left
        end = time.monotonic() + WAIT_SECONDS * (self.on_gpu or not self._noted_error)
        while len(self.notes) < len(self._ranks) and time.monotonic() < end:
            self._read_notes_soon()
        self._over.set()

    def _read_notes_soon(self) -> None:
        time.sleep(0.05)
        self._read_notes()

    def _read_notes(self) -> None:
        """Read the exit notes that other ranks have written."""
        try:
            for each in self._ranks - self.notes.keys():
                gone, key = self._has_exited(each), self._key("ended", each)
                if self._store.check([key]):
                    self.notes[each] = msgspec.json.decode(self._store.get(key), type=ExitNote)
                elif gone:
                    self.notes[each] = ExitNote()
        except RuntimeError:  # the store's process, rank 0, has exited
            self.notes.setdefault(0, ExitNote("it was killed, or its output says why"))

    def _has_exited(self, rank: int) -> bool:
        """Return whether another rank on this machine has exited.

        The result is False for ranks on other machines, which can't be checked.
        """
        key = self._key("process", rank)
        process, _, place = (
            self._store.get(key).decode() if self._store.check([key]) else ""
        ).partition(" ")
        if place != self._machine:
            # a process on another machine can't be checked
            return False
        try:
            return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return True

    def explain(self) -> str:
        """After a failed collective, explain in a sentence which rank was lost and why.

        This waits up to 3 seconds for the notes of other ranks.
        """
        self._noted_error, silent, end = "lost", self._ranks, time.monotonic() + WAIT_SECONDS
        with suppress(RuntimeError):
            self._store.set(self._key("lost", self._rank), "")
            while silent and not self.notes and time.monotonic() < end:
                self._read_notes_soon()
                silent = {
                    each for each in silent if not self._store.check([self._key("lost", each)])
                }
        if self.notes or silent:
            return self._describe() if self.notes else ExitNote().describe(min(silent))
        return "all ranks answer, but have lost their connections: the network between them failed."

    def _describe(self) -> str:
        """Return a sentence that says how another rank has ended.

        If several have ended, one that failed is preferred.
        """
        # preferably one with an error, then one without an error, then one without a note
        rank = min(
            self.notes,
            key=lambda rank: (not self.notes[rank].error, self.notes[rank].error is None, rank),
        )
        return self.notes[rank].describe(rank)

    def _wait_for_gpu(self) -> Thread:
        """Start and return a thread that ends when the GPU has finished its work."""
        # Without a GPU, it ends at once. Any call to the GPU may block until the GPU has finished
        # its work, so the caller only checks whether the thread is alive.
        stream = torch.cuda.default_stream(self._device) if self.on_gpu else None
        thread = Thread(target=stream.synchronize if stream is not None else int, daemon=True)
        self._gpu_waits.append(thread)
        thread.start()
        return thread

    def join_threads(self) -> None:
        """Wait a few seconds for the watcher's threads to end."""
        # They may be blocked until the process leaves its group. A thread that is still inside
        # PyTorch when Python exits would abort the process.
        for thread in (self._thread, *self._gpu_waits):
            if thread.is_alive():
                thread.join(WAIT_SECONDS)

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS) and dist.group.WORLD in (None, self.group):
            leaves = is_leaving()
            if leaves:
                self.note(describe_error(find_error()))
            self._read_notes()
            if self.notes and self._is_stuck(leaves):
                self._exit()

    def _is_stuck(self, while_leaving: bool) -> bool:
        """Return whether this rank is waiting for a rank that has ended.

        This waits a few seconds before it checks. `while_leaving` is whether this rank is leaving
        its process group.
        """
        # while a rank leaves its process group, NCCL waits for all ranks
        notes = list(self.notes.values())
        computed = self._wait_for_gpu() if any(note.error != "" for note in notes) else None
        if self._over.wait(WAIT_SECONDS):
            return False
        own = count_exchanges()
        waits = any(
            own.get(name, 0) > count for note in notes for name, count in note.exchanges.items()
        )
        return waits or (
            computed is not None and (is_leaving() if while_leaving else computed.is_alive())
        )

    def _exit(self) -> None:
        """Print this rank's error and which rank was lost, then exit the process."""
        error = find_error()
        if isinstance(error, Exception):
            sys.excepthook(type(error), error, error.__traceback__)
            explain_failure(error)
            abort_if_lost(error)
        if self._noted_error != "lost":  # else explain_failure has printed it
            print_line(f"evener: {self._describe()}")
        end_process(1)  # because the main thread waits in NCCL


def watch_peers(device: torch.device, read_progress: Callable[[], tuple[int, Any]]) -> None:
    """Watch from now on whether other ranks of the default process group have ended.

    An earlier group is no longer watched. When this process exits, it notifies the other ranks and
    leaves the group.
    """
    newest = PeerWatcher.newest
    if newest is None:
        _ExitActions.leaves = True
        os.register_at_fork(after_in_child=lambda: setattr(PeerWatcher, "newest", None))
    elif newest.group is dist.group.WORLD:
        newest._read_progress = read_progress
        return
    else:
        newest._over.set()
    PeerWatcher.newest = PeerWatcher(device, read_progress)


def leave_group() -> None:
    """Leave the default process group, without waiting for ranks that have ended."""
    # A reference to the group is held until the interpreter exits. Otherwise a
    # DistributedDataParallel may hold the last one: when it is garbage-collected, it waits for
    # gloo's thread, which may wait for the interpreter's lock to free its tensors.
    watcher = PeerWatcher.newest
    if watcher is not None:
        watcher.leave()
    if dist.is_initialized():
        _kept_groups.append(dist.group.WORLD)
        if watcher is not None and watcher.on_gpu and watcher.group is dist.group.WORLD:
            # destroying the group would wait for ranks that never come
            abort_group()
        else:
            dist.destroy_process_group()
    if watcher is not None:
        watcher.join_threads()


class _ExitActions:
    """What to do when this process exits: leave the process group, print advice about errors."""

    leaves = False  # True if it leaves the process group
    # a method of the newest training run
    advise: WeakMethod[Callable[[BaseException], str]] | None = None


def explain_at_exit(advise: WeakMethod[Callable[[BaseException], str]]) -> None:
    """If this process exits with an error, call `advise` with it, and print what that returns."""
    # The process also leaves its process group if `watch_peers` was called.
    _ExitActions.advise = advise
    _register_exit()


@cache
def _register_exit() -> None:
    atexit.register(_leave_at_exit)


def _leave_at_exit() -> None:
    error = last_error()
    if error is not None:
        explain_failure(error)
        abort_if_lost(error)
    if _ExitActions.leaves:
        leave_group()


def explain_failure(error: BaseException) -> None:
    """Print advice about an error, or say which rank was lost if that is the cause."""
    # in the other case, this rank is at fault, and writes its exit note for the other ranks
    advise = None if _ExitActions.advise is None else _ExitActions.advise()
    advice = "" if advise is None else advise(error)
    if advice:
        print_line(f"evener: {advice}")
    watcher = PeerWatcher.newest
    if watcher is None or not isinstance(error, Exception | KeyboardInterrupt):
        return
    if any(map(_is_lost, _chain(error))):
        print_line(f"evener: {watcher.explain()}")
    else:
        watcher.note(describe_error(error))


def describe_error(error: BaseException | None) -> str:
    """Return the class of an error and the first line of its message.

    The result is "" for None and `sys.exit()`.
    """
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}".rstrip(": .") if isinstance(error, Exception) else ""


def find_error() -> BaseException | None:
    """Return the exception that the main thread is handling, or None."""
    found: Any = sys._current_exceptions().get(main_thread().ident or 0)
    # Python 3.11 has it in a tuple
    error: BaseException | None = found[1] if isinstance(found, tuple) else found
    return error


def is_leaving() -> bool:
    """Return whether the main thread is leaving the default process group at the moment."""
    frame = sys._current_frames().get(main_thread().ident or 0)
    while frame is not None and frame.f_code not in LEAVING:
        frame = frame.f_back
    return frame is not None and frame.f_locals.get("group") in (None, dist.group.WORLD)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_lost(error: BaseException) -> bool:
    """Return whether an error means that the connection to another rank was lost."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(s in text for s in _LOST_SIGNS)
    )
