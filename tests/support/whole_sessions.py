"""Runs sessions from the request to their end, in this process."""

from __future__ import annotations

from contextlib import closing

from evener.balancer.events import Event, Finished
from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session


def drive(request: Request, resume: str | None = None) -> list[Event]:
    """Return every event of a session, and close it."""
    with closing(Session(open_run(request, resume=resume))) as session:
        return list(session.events())


def finish(request: Request, resume: str | None = None) -> tuple[Finished, list[Event]]:
    """Return the result of a session that finishes, and every event."""
    events = drive(request, resume)
    last = events[-1]
    assert isinstance(last, Finished)
    return last, events


def make_runs(count: int) -> None:
    """Make finished runs on two simulated cards, which differ only in their noise."""
    for seed in range(count):
        finish(Request(devices="sim:gtx1080ti,gtx1080", seed=seed))
