"""Begin or resume a run: its folder, locks and journal."""

from __future__ import annotations

import time
from contextlib import ExitStack

import msgspec

from evener import __version__
from evener.errors import RequestError
from evener.system.files import new_run_id, runs_folder

from . import journal
from .events import Finished
from .jobs import make_job
from .journal import Header, Journal, JournalContents, LaterEntry
from .request import Job, Request
from .store import runs
from .store.locks import lock_job, lock_run
from .types import Failed, Timed

CHANGEABLE = (
    "budget_seconds",
    "pace",
    "share",
    "compare",
    "ray_address",
)  # can change without affecting earlier measurements


class OpenRun(msgspec.Struct):
    """A run with its journal open and its devices locked."""

    job: Job
    began_with: JournalContents
    journal: Journal
    locks: ExitStack  # closing them also closes the journal
    replayed: int = 0  # number of observations from before the run was resumed
    raised_budget: float | None = None  # the budget if it differs from the original one
    spend_all: bool = False  # the run had ended, and was given more time
    _written: list[LaterEntry] = []  # entries written since the run was opened

    @property
    def id(self) -> str:
        """Id of the run, which is also the name of its folder."""
        return self.began_with.header.run

    @property
    def record(self) -> JournalContents:
        """Everything in the journal so far, including entries written since the run was opened."""
        before = self.began_with
        return msgspec.structs.replace(before, entries=(*before.entries, *self._written))

    def write(self, entry: LaterEntry) -> None:
        """Append an entry to the journal.

        Raises UnwrittenError if that fails.
        """
        self.journal.append(entry)
        self._written.append(entry)

    def close(self) -> None:
        """Close the journal and release the locks."""
        self.locks.close()


def open_run(
    request: Request, *, resume: str | None = None, extend_seconds: float | None = None
) -> OpenRun:
    """Begin a run or, if `resume` names one, reopen it. The caller has to close the result.

    `extend_seconds` gives a resumed run this much additional time. Raises RequestError for an
    invalid request, and DeviceError if devices are missing or in use.
    """
    if resume is not None:
        return reopen(resume, request, extend_seconds)
    return begin(make_job(request))


def begin(job: Job) -> OpenRun:
    """Create the folder and journal of a new run, and lock its devices.

    Raises DeviceError if another search uses a device, and RequestError if the journal can't be
    written.
    """
    folder = runs_folder() / new_run_id()
    with ExitStack() as locks:
        locks.enter_context(lock_job(job, run=folder.name))
        header = Header(
            folder.name,
            time.strftime(runs.CREATED, time.gmtime()),
            job.request,
            job.devices,
            job.workload,
            job.framework,
            __version__,
            job.largest_share,
            job.notes,
        )
        try:
            locks.enter_context(lock_run(folder))
            opened = journal.create(folder / runs.JOURNAL, header)
        except BaseException:
            runs.forget_empty(folder)
            raise
        locks.callback(opened.close)
        return OpenRun(job, JournalContents(header, (), 0), opened, locks.pop_all())


def reopen(name: str, request: Request, extend_seconds: float | None = None) -> OpenRun:
    """Open an existing run to continue it.

    `pace` and `share` are taken from `request`, and a budget or a Ray address in it replaces the
    run's own. `extend_seconds` is added to the time already spent. Raises RequestError if other
    options or the devices differ, if the run is in progress, or if it has measured nothing.
    """
    folder = runs.run_folder(runs.find(name))
    with ExitStack() as locks:
        locks.enter_context(lock_run(folder))
        opened, record = journal.reopen(folder / runs.JOURNAL)
        locks.callback(opened.close)
        _check_something_ran(record)
        header = record.header
        _check_request(header, request)
        before = _read_budget(record)
        budget = _choose_budget(record, request, extend_seconds)
        wanted = msgspec.structs.replace(
            header.request,
            pace=request.pace,
            share=request.share,
            budget_seconds=budget,
            ray_address=request.ray_address or header.request.ray_address,
        )
        found = make_job(wanted)
        _check_devices(header, found)
        locks.enter_context(lock_job(found, run=folder.name))
        more = extend_seconds is not None or (
            before is not None and budget is not None and budget > before
        )
        return OpenRun(
            msgspec.structs.replace(
                found, devices=header.devices, largest_share=header.largest_share
            ),
            msgspec.structs.replace(record, header=msgspec.structs.replace(header, request=wanted)),
            opened,
            locks.pop_all(),
            replayed=len(record.seen),
            raised_budget=None if budget == header.request.budget_seconds else budget,
            spend_all=more and record.ended is not None and not record.ended.interrupted,
        )


def _choose_budget(
    record: JournalContents, request: Request, extend_seconds: float | None
) -> float | None:
    """Return the budget in seconds for a resumed run; None means no limit.

    `extend_seconds` is added to the time already spent. Without it, the request's budget is used,
    or the run's own if the request has the default budget.
    """
    if extend_seconds is not None:
        return record.clock_seconds + extend_seconds
    # the default counts as no budget
    given = request.budget_seconds
    return _read_budget(record) if given == Request().budget_seconds else given


def _read_budget(record: JournalContents) -> float | None:
    """Return the run's current budget in seconds; None means no limit.

    This is the original budget, unless a resumed search changed it.
    """
    ends = [entry for entry in record.entries if isinstance(entry, Finished)]
    raised = ends[-1].budget_seconds if ends else None
    return record.header.request.budget_seconds if raised is None else raised


def _check_request(header: Header, request: Request) -> None:
    """Raise RequestError if an option differs from that of the resumed run.

    Options that don't affect earlier measurements may differ. Options with their default values
    aren't compared.
    """
    kept = msgspec.structs.replace(header.request, workload=header.workload)
    unsaid = Request()
    for field in Request.__struct_fields__:
        given = getattr(request, field)
        if field not in CHANGEABLE and given not in (getattr(kept, field), getattr(unsaid, field)):
            option = "--set" if field == "settings" else f"--{field.replace('_', '-')}"
            raise RequestError(
                f"--resume continues the run's own request, and {option} differs from it.",
                f"Leave {option} out, or start a new run.",
            )


def _check_something_ran(record: JournalContents) -> None:
    """Raise RequestError if the run measured nothing because the user's code failed."""
    seen = [entry.seen for entry in record.seen]
    wrong = next((one for one in seen if isinstance(one, Failed) and one.user_code), None)
    if wrong is not None and not any(isinstance(one, Timed) for one in seen):
        why = wrong.detail.rstrip(".")
        # there is no measurement to reuse
        raise RequestError(
            f"The run {record.header.run} failed, and nothing was measured: {why}.",
            "Correct that and start a new run.",
        )


def _check_devices(header: Header, job: Job) -> None:
    then, now = (
        [(device.host, device.id, device.cores) for device in devices]
        for devices in (header.devices, job.devices)
    )
    if then != now:
        before, here = (
            ", ".join(f"{host}/{name}" if host else name for host, name, _ in each)
            for each in (then, now)
        )
        where = "the cluster" if job.devices[0].host else "this machine"
        raise RequestError(
            f"The run {header.run} was measured on {before}; {where} has {here}.",
            "Resume it where it began, or start a new run.",
        )
