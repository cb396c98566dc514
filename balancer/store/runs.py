"""Find, list, load and delete past runs."""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Literal

import msgspec

from evener.devices.registry import is_simulated
from evener.errors import EvenerError, NoLayoutError, RequestError, as_request_error
from evener.live.journal import (
    TRAINING_JOURNAL,
    NoiseEntry,
    RecordedTraining,
    StartEntry,
    TrainingEntry,
)
from evener.plan.file import Plan, parse_plan, to_json
from evener.system.files import runs_folder

from .. import journal
from ..events import Event, EventThread, Finished, Observed, ProbeStarted, Started
from ..jobs import read_job
from ..journal import (
    LONGEST_LINE_BYTES,
    AskedEntry,
    FailedEntry,
    Header,
    JournalContents,
    ObservationEntry,
    read_trusted,
)
from ..request import Job
from ..result.judge import SearchEnd
from ..result.outcome import build_outcome
from ..search.layouts import BALANCE
from ..search.search import Search
from ..types import End, Facts, Failed, Observation, OutOfMemory, Stop
from .locks import is_running, lock_run
from .trained import Trained, find_trained

JOURNAL = "journal.jsonl"
NEVER_BEGAN = "stopped before it began"
_ID = re.compile(r"[0-9a-z][0-9a-z-]{0,40}")
CREATED = "%Y-%m-%dT%H:%M:%SZ"
# stopped: by the user, or cut off
State = Literal["running", "finished", "stopped", "failed", "unreadable"]


class RunSummary(msgspec.Struct, frozen=True):
    """One row in the list of runs: a search or a training run."""

    run: str
    created: str
    devices: tuple[str, ...]  # labels
    workload: str
    state: State
    probes: int
    samples_per_second: float | None
    ratios: tuple[float, ...] = ()
    trouble: str = ""  # why it failed or can't be read
    seconds: float = 0.0  # seconds of measuring, on the session's clock
    budget_seconds: float | None = None
    kind: Literal["search", "training"] = "search"
    trained: Trained | None = None  # the speed of trainings with its plan

    @property
    def simulated(self) -> bool:
        """Whether the run used simulated devices."""
        return is_simulated(self.devices)


class StoredRun(msgspec.Struct, frozen=True):
    """A past search, as read from its journal. `end` is None if it found no plan."""

    record: JournalContents
    end: Finished | None
    state: State = "finished"
    trouble: str = ""  # why it failed

    @property
    def header(self) -> Header:
        """The header of the run's journal."""
        return self.record.header

    @property
    def plan(self) -> Plan | None:
        """The run's plan, or None if it has none."""
        return self.end.plan if self.end is not None else None

    def require_plan(self) -> Plan:
        """Return the run's plan, or raise RequestError if there is none."""
        if self.plan is not None:
            return self.plan
        reasons = {
            "running": ("is going on and has no plan yet.", "Wait for it."),
            "failed": (
                f"failed and has no plan: {self.trouble.rstrip('.')}.",
                "Start a new run, or choose another.",
            ),
        }
        resume = f"Go on with evener balance --resume {self.header.run}, or choose another."
        why, remedy = reasons.get(self.state, ("ended before it had a plan.", resume))
        raise RequestError(f"The run {self.header.run} {why}", remedy)


_training_decoder: msgspec.json.Decoder[TrainingEntry] = msgspec.json.Decoder(TrainingEntry)


def run_folder(run: str) -> Path:
    """Return the folder of a run."""
    return runs_folder() / run


def journal_path(run: str) -> Path:
    """Return the path of a search's journal."""
    return run_folder(run) / JOURNAL


def errors_path(run: str) -> Path:
    """Return the path of the file with tracebacks and output of failed probes."""
    return run_folder(run) / "errors.txt"


def find(name: str) -> str:
    """Return the id of a search, given its id, a unique prefix of the id, or "last".

    Raises RequestError if there is no such search, or if it has measured nothing.
    """
    newest = reversed(_list_ids()) if name == "last" else ()
    searches = (run for run in newest if not _is_training(run) and _has_begun(run))
    run = next(searches, None) or find_any(name)
    if _is_training(run):
        raise RequestError(
            f"The run {run} is a training, and measured nothing.", f"See evener runs show {run}."
        )
    if not _has_begun(run) and not is_running(run):
        raise RequestError(
            f"The run {run} was {NEVER_BEGAN}, and measured nothing.",
            f"Choose another; evener runs delete {run} removes it.",
        )
    return run


def find_any(name: str) -> str:
    """Return the id of a search or training run, given the id, a unique prefix of it, or "last".

    Raises RequestError if there is no such run.
    """
    runs = _list_ids()
    last = next(filter(_has_begun, reversed(runs)), None) if name == "last" else None
    if not runs or (name == "last" and last is None):
        raise RequestError("There are no runs yet.", "Make one with evener balance.")
    if last is not None:
        return last
    if not _ID.fullmatch(name):
        raise RequestError(f"{name!r} is not the name of a run.", "List the runs with evener runs.")
    matches = [name] if name in runs else [run for run in runs if run.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise RequestError(
            f"{len(matches)} runs begin with {name!r}.", f"Write more of it, as in {matches[-1]}."
        )
    raise RequestError(
        f"There is no run {name!r}.", f"The last one is {runs[-1]}; evener runs lists them."
    )


def load_training(run: str) -> RecordedTraining | None:
    """Read the journal of a training run.

    Returns None if this run is a search. Raises RequestError if the journal is broken.
    """
    return _read_training(run, _training_path(run)) if _is_training(run) else None


def load_noise(name: str) -> NoiseEntry:
    """Return the gradient noise scale that a training run measured last.

    `name` is the run's id or a unique prefix of it, or "last" for the newest run that measured one.
    Raises RequestError if there is none.
    """
    for run in reversed(_list_ids()) if name == "last" else [find_any(name)]:
        # for example, a training's journal is broken
        with suppress(RequestError) if name == "last" else nullcontext():
            training = load_training(run)
            for entry in reversed(training.entries) if training is not None else ():
                if isinstance(entry, NoiseEntry):
                    return entry
    where = "here" if name == "last" else f"in {name!r}"
    raise RequestError(
        f"No noise scale was measured {where}.", "Train with evener run --noise, some 400 steps."
    )


def _read_training(run: str, path: Path) -> RecordedTraining:
    """Read the journal of a training run.

    Raises RequestError if it is broken.
    """
    lines = read_trusted(path).split(b"\n")[:-1]
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(_training_decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            remedy = "Delete the file from that line on, or the run."
            raise RequestError(
                f"{path}: line {number} is broken: {str(error)[:200]}.", remedy
            ) from None
    if not entries or not isinstance(entries[0], StartEntry):
        raise RequestError(f"{path} doesn't begin with the start of a training.", "Delete the run.")
    return RecordedTraining(run, tuple(entries))


def _is_training(run: str) -> bool:
    return os.path.lexists(_training_path(run))


def _training_path(run: str) -> Path:
    return run_folder(run) / TRAINING_JOURNAL


def each_run() -> Iterator[RunSummary]:
    """Yield a summary of each run, newest first."""
    # trainings found so far: trainings by a plan are newer than its search
    trainings: Trainings = defaultdict(list)
    for run in reversed(_list_ids()):
        yield _summarize_run(run, trainings)


def find_trained_by(run: str, plan: Plan) -> Trained | None:
    """Return the speed of the training runs that used this search's plan, or None if none did.

    Only runs that are newer than the search are read.
    """
    trainings = []
    for newer in reversed(_list_ids()):
        if newer <= run:
            break
        with suppress(RequestError):  # a training's journal may be broken
            training = load_training(newer) if _has_begun(newer) else None
            if training is not None:
                trainings.append(training)
    return find_trained(plan, trainings)


def list_runs() -> tuple[RunSummary, ...]:
    """Return a summary of each run, newest first."""
    return tuple(each_run())


def have_runs() -> bool:
    """Return whether the user has any past runs."""
    return bool(_list_ids())


def load_run(name: str) -> StoredRun:
    """Read a search, given its id, a unique prefix of the id, or "last".

    If the search was cut off, its plan is built from its measurements. Raises RequestError if there
    is no such run, or its journal is broken.
    """
    path = journal_path(find(name))
    record = journal.read(path)
    return StoredRun(record, _find_end(record, str(path)), *_find_state(record))


def _find_end(record: JournalContents, source: str) -> Finished | None:
    """Return the event that ended a run, with its plan converted to today's format.

    If the run was cut off, the event is computed from its measurements. Returns None if they give
    no plan. `source` names the run in errors.
    """
    if record.ended is not None:
        return msgspec.structs.replace(
            record.ended, plan=parse_plan(to_json(record.ended.plan), source)
        )
    with suppress(NoLayoutError):
        return msgspec.structs.replace(recover(record), interrupted=True)
    return None


def delete_run(name: str) -> str:
    """Delete a run, and return its id.

    Raises RequestError if there is no such run, or if it is still in progress.
    """
    run = find_any(name)
    if _is_training(run) and _summarize_run(run, defaultdict(list)).state == "running":
        raise RequestError(f"The training {run} is going on.", "Wait for its end.")
    folder = run_folder(run)
    with (
        lock_run(folder),
        as_request_error(f"The run {run} can't be deleted", f"Look at {folder}."),
    ):
        shutil.rmtree(folder)
    return run


def forget_empty(folder: Path) -> None:
    """Delete a run's folder if no journal was created in it."""
    with suppress(OSError):
        if not (folder / JOURNAL).exists():
            shutil.rmtree(folder)


def _list_ids() -> list[str]:
    """Return the ids of all runs, oldest first."""
    folder = runs_folder()
    with as_request_error(f"The folder {folder} can't be read", "Check who owns it."):
        return sorted(entry.name for entry in os.scandir(folder) if _ID.fullmatch(entry.name))


def _has_begun(run: str) -> bool:
    """Return whether the first line of a run's journal was written."""
    path = _training_path(run) if _is_training(run) else journal_path(run)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # the reader of the journal reports the error
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return True
        first = stream.readline(LONGEST_LINE_BYTES)
        # a session that is killed at once leaves a run without that line
        return first.endswith(b"\n") or len(first) == LONGEST_LINE_BYTES


Trainings = defaultdict[str, list[RecordedTraining]]  # by the time at which the plan was made


def _summarize_run(run: str, trainings: Trainings) -> RunSummary:
    """Return a summary of a run for the list of runs.

    The summary of a search includes the speed of the training runs that used its plan. These runs
    are always newer than the search. Call this function for the newest run first, and pass the same
    `trainings` each time: it collects the training runs for the summaries of older searches.
    """
    if not _has_begun(run):
        state: State = "running" if is_running(run) else "stopped"
        trouble = "" if state == "running" else f"It was {NEVER_BEGAN}."
        return RunSummary(run, "", (), "", state, 0, None, (), trouble)
    try:
        training = load_training(run)
        if training is not None:
            if training.start.plan_created:
                # the summary of the plan's search shows how fast its trainings were
                trainings[training.start.plan_created].append(training)
            return _summarize_training(training)
        record = journal.read(journal_path(run))
    except EvenerError as fault:
        return RunSummary(run, "", (), "", "unreadable", 0, None, (), fault.message)
    header = record.header
    ended = record.ended
    state, trouble = _find_state(record)
    return RunSummary(
        run=run,
        created=header.created,
        devices=tuple(device.label for device in header.devices),
        workload=header.workload,
        state=state,
        probes=len(record.seen),
        samples_per_second=ended.plan.throughput.samples_per_second if ended else None,
        ratios=ended.plan.ratios if ended else (),
        trouble=trouble,
        seconds=record.clock_seconds,
        budget_seconds=header.request.budget_seconds,
        trained=find_trained(ended.plan, trainings[ended.plan.created]) if ended else None,
    )


def _summarize_training(training: RecordedTraining) -> RunSummary:
    start = training.start
    return RunSummary(
        run=training.run,
        created=time.strftime(CREATED, time.gmtime(training.began_at)),
        devices=start.devices,
        workload=start.workload,
        state=training.state,
        probes=0,
        samples_per_second=training.samples_per_second,
        ratios=tuple(share / max(1, sum(start.shares)) for share in start.shares),
        trouble=training.failure,
        seconds=training.seconds,
        kind="training",
    )


def _find_state(record: JournalContents) -> tuple[State, str]:
    """Return the state of a search, such as "failed", and the error if it failed, else ""."""
    if is_running(record.header.run):
        return "running", ""
    end = record.last_end
    if isinstance(end, FailedEntry):
        return "failed", end.message
    if isinstance(end, Finished):
        return ("stopped" if end.interrupted else "finished"), ""
    seen = [entry.seen for entry in record.seen]
    failures = [one.detail for one in seen if isinstance(one, Failed)]
    return ("stopped", "") if not failures or len(failures) < len(seen) else ("failed", failures[0])


NOTHING = Facts()  # before any child has reported facts


def make_search(
    job: Job,
    facts: Facts = NOTHING,
    observations: Iterable[Observation] = (),
    spend_all: bool = False,
) -> Search:
    """Return a search that already knows the facts and the outcomes of earlier probes.

    With `spend_all`, it goes on measuring until its budget is spent.
    """
    problem = msgspec.structs.replace(job.problem, spend_all=True) if spend_all else job.problem
    search = Search(problem, job.request.compare or BALANCE)
    search.learn_data(facts)
    for observation in observations:
        search.tell(observation)
    return search


def recover(record: JournalContents) -> Finished:
    """Compute the result of an interrupted search from the outcomes in its journal.

    Raises NoLayoutError if nothing was measured.
    """
    search = make_search(read_job(record.header), record.facts, record.observations)
    report = search.report(record.header.request.own_batch)
    if report is None:
        run = record.header.run
        raise NoLayoutError(
            f"The run {run} ended before anything was measured.",
            f"Go on with evener balance --resume {run}.",
        )
    why = search.ended() or End(Stop.CUT_OFF)
    return build_outcome(record, report, SearchEnd(why, record.clock_seconds))


def read_run(name: str) -> JournalContents:
    """Read the journal of a search, given its id, a unique prefix of the id, or "last".

    Raises RequestError if there is no such run, or its journal is broken.
    """
    return journal.read(journal_path(find(name)))


def recorded_events(record: JournalContents) -> Iterator[Event]:
    """Yield the events of a past search, in the order in which they happened.

    Progress reports are missing, because they aren't recorded. Raises NoLayoutError at the end if
    the search failed.
    """
    header = record.header
    request = header.request
    labels = tuple(device.label for device in header.devices)
    yield Started(header.run, labels, header.workload, request.budget_seconds, 0)
    search = make_search(read_job(header), record.facts)
    probes = out_of_memory = 0
    for entry in record.entries:
        if isinstance(entry, AskedEntry):
            for probe in entry.probes:
                yield ProbeStarted(probe, entry.at_seconds)
        elif isinstance(entry, ObservationEntry):
            search.tell(entry.seen)
            probes += 1
            out_of_memory += isinstance(entry.seen, OutOfMemory)
            yield Observed(
                entry.seen, search.belief(), search.best(), probes, out_of_memory, entry.at_seconds
            )
    end = None if record.ended is None else _find_end(record, header.run)
    if end is not None:
        yield end
    if isinstance(record.last_end, FailedEntry):
        raise NoLayoutError(record.last_end.message or "The run failed.")


class EventReplay(EventThread):
    """Thread that replays the events of a past search, `speed` times as fast as they happened.

    Pauses between events last at most `longest_gap_seconds`.
    """

    def __init__(
        self, events: Iterable[Event], *, speed: float = 8.0, longest_gap_seconds: float = 0.7
    ) -> None:
        super().__init__()
        self._recorded = events
        self._speed = speed
        self._longest_gap_seconds = longest_gap_seconds

    def _work(self) -> None:
        before = 0.0
        for event in self._recorded:
            at_seconds = float(getattr(event, "at_seconds", before))
            gap = min(self._longest_gap_seconds, max(0.0, at_seconds - before) / self._speed)
            before = at_seconds
            if self._halt.wait(gap):
                return
            self._going.wait()
            self._emit(event)
