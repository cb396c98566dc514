"""How a session begins: a new run, or an old one that goes on, with its locks and its journal."""

from __future__ import annotations

import time
from contextlib import ExitStack

import msgspec

from evener import __version__
from evener.balancer import resolve
from evener.balancer.request import Request, ResolvedRequest
from evener.balancer.store import journal, replay, runs
from evener.balancer.store.journal import EndedEntry, Header, Journal, Record
from evener.balancer.store.locks import lock_devices, lock_run
from evener.balancer.types import Failed, Timed
from evener.errors import RequestError
from evener.system.state_folders import new_run_id


class Opened(msgspec.Struct, frozen=True):
    """A run that may go on: its record, what its request means here, and its open journal."""

    record: Record
    resolved: ResolvedRequest
    journal: Journal
    raised_budget: float | None = None  # the budget, if it isn't that with which the run began
    spend_all: bool = False  # it had ended, and was given more time


def begin(request: Request | ResolvedRequest, locks: ExitStack) -> Opened:
    """Make a run; RequestError or DeviceError if it can't begin. `locks` gets what holds it."""
    found = request if isinstance(request, ResolvedRequest) else resolve.resolve_request(request)
    run = new_run_id()
    if not found.request.share:
        locks.enter_context(lock_devices(run, found.devices))
    header = describe_run(run, found)
    replay.make_search(header, ())  # raises for a request that no search can meet, before a run is made
    try:
        locks.enter_context(lock_run(run))
        opened = journal.create(runs.journal_path(run), header)
    except BaseException:
        runs.forget_empty(run)
        raise
    locks.callback(opened.close)
    return Opened(Record(header, (), 0), found, opened)


def describe_run(run: str, found: ResolvedRequest) -> Header:
    """The header of a run that begins now."""
    created = time.strftime(runs.CREATED, time.gmtime())
    return Header(
        run, created, found.request, found.devices, found.workload, found.framework, __version__, found.largest_share,
        found.notes,
    )  # fmt: skip


def reopen(name: str, request: Request | ResolvedRequest, extend_seconds: float | None, locks: ExitStack) -> Opened:
    """Go on with a run; RequestError if it is going on, or was measured on other devices.

    Its own request counts, except for `pace`, `share` and a new budget. `extend_seconds` is a budget from here on.
    """
    request = request.request if isinstance(request, ResolvedRequest) else request
    run = runs.find(name)
    locks.enter_context(lock_run(run))
    opened, record = journal.reopen(runs.journal_path(run))
    locks.callback(opened.close)
    _check_hope(record)
    budget = before = _read_budget(record)
    if extend_seconds is not None:
        budget = replay.read_clock(record) + extend_seconds
    elif request.budget_seconds != Request().budget_seconds:
        budget = request.budget_seconds
    wanted = msgspec.structs.replace(
        record.header.request,
        pace=request.pace,
        share=request.share,
        budget_seconds=budget,
        ray_address=request.ray_address or record.header.request.ray_address,
    )
    found = resolve.resolve_request(wanted)
    _check_devices(record.header, found)
    if not request.share:
        locks.enter_context(lock_devices(run, found.devices))
    header = msgspec.structs.replace(record.header, request=wanted)
    more = before is not None and budget is not None and budget > before
    ended = record.ended is not None and not record.ended.interrupted
    return Opened(
        Record(header, record.entries, record.whole_bytes),
        msgspec.structs.replace(found, devices=header.devices),
        opened,
        raised_budget=None if budget == record.header.request.budget_seconds else budget,
        spend_all=ended and (more or extend_seconds is not None),
    )


def _read_budget(record: Record) -> float | None:
    """The run's budget: that of its last end if it was raised before that, else that of its request."""
    ends = [entry for entry in record.entries if isinstance(entry, EndedEntry)]
    raised = ends[-1].budget_seconds if ends else None
    return record.header.request.budget_seconds if raised is None else raised


def _check_hope(record: Record) -> None:
    """RequestError for a run in which the workload's own code failed before anything ran: it has nothing to keep."""
    seen = [entry.seen for entry in record.seen]
    wrong = next((one for one in seen if isinstance(one, Failed) and one.user_code), None)
    if wrong is not None and not any(isinstance(one, Timed) for one in seen):
        message = f"The run {record.header.run} failed, and nothing was measured: {wrong.detail.rstrip('.')}."
        raise RequestError(message, "Correct that and start a new run.")


def _check_devices(header: Header, found: ResolvedRequest) -> None:
    then, now = ([(each.host, each.id, each.cores) for each in devices] for devices in (header.devices, found.devices))
    if then != now:
        before, here = (", ".join(f"{host}/{name}" if host else name for host, name, _ in each) for each in (then, now))
        where = "the cluster" if found.devices[0].host else "this machine"
        raise RequestError(
            f"The run {header.run} was measured on {before}; {where} has {here}.",
            "Resume it where it began, or start a new run.",
        )
