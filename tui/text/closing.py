"""Lines that stay on the terminal after the app has closed."""

from __future__ import annotations

from evener.balancer.number_format import group_digits
from evener.balancer.result.sentences import write_next_steps
from evener.balancer.store import runs
from evener.errors import EvenerError
from evener.printable import plain

from .summaries import verdict_lines


def closing_lines(run: str, path: str, width: int | None) -> list[str]:
    """Return the result of the search with the id `run`, and the commands that come next.

    `path` is the file to which the plan was written, or "". Lines are wrapped at `width` columns;
    None doesn't wrap them.
    """
    try:
        found = runs.load_run(run)
    except EvenerError as fault:
        return [str(fault)]
    head = plain(f"run {run}: {found.header.workload}", 1000)
    if found.end is None:
        count = len(found.record.observations)
        measured = f"{group_digits(count)} measurement{'s' * (count != 1)}, and no plan yet"
        return [f"{head}, {measured}", f"to go on: evener balance --resume {run}"]
    steps = list(write_next_steps(run, found.end, path, True))
    if not any("--resume" in step for step in steps):
        steps.append(f"to measure more: evener balance --resume {run} --budget +5m")
    end = found.end
    return [head, *verdict_lines(end.plan, end.verdict, width, end.found, steps)]
