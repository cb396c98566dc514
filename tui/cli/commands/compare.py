"""`evener compare`: every way to lay the job on the devices, ranked, in one verdict."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from evener.balancer.events import Finished
from evener.balancer.request import Request
from evener.balancer.resolve_layouts import to_compare
from evener.balancer.search.comparison import Comparison
from evener.balancer.session import Session
from evener.errors import RequestError
from evener.tui.cli.commands.balance import check_target, see_through, stopped_by_signals
from evener.tui.text.formatting import plain
from evener.tui.text.profile_tables import Table, profile_layouts, transfer_json, transfer_lines
from evener.tui.text.progress import Progress
from evener.tui.text.ranking_tables import packing_lines, ranking_json, ranking_lines, scaling_lines
from evener.tui.text.safe_documents import json_text


def run_compare(
    request: Request,
    *,
    layouts: str | None,
    mps: bool,
    knobs: str | None,
    profile: bool,
    export: Path | None,
    as_json: bool,
) -> int:
    """Run a comparison to its verdict; the exit code says whether it was interrupted, and how."""
    if export is not None:
        check_target(export)
    wanted = to_compare(request, words_of(layouts), mps, words_of(knobs) or ())
    session = Session(wanted)
    progress = Progress()

    def conclude(finished: Finished) -> None:
        if export is not None:
            finished.plan.save(export)
        assert isinstance(session.search, Comparison), "a comparison was asked for"
        found, labels = session.search, progress.devices
        tables = _profiled(wanted, found, len(labels)) if profile and not finished.interrupted else []
        if as_json:
            profiles = {"profile": transfer_json(tables)} if profile else {}
            print(json_text({**_as_json(finished, found, labels), **profiles}), flush=True)
        else:
            _print(finished, found, labels, transfer_lines(tables), export)

    return see_through(session, progress, conclude, "stopping; the ranking so far is kept", as_json)


def _profiled(request: Request, found: Comparison, devices: int) -> list[Table]:
    """The profiler's tables; a signal ends them early, and what was measured is told all the same."""
    stop = threading.Event()
    with stopped_by_signals(stop.set, "stopping the profile"):
        return profile_layouts(request, found, devices, stop)


def words_of(text: str | None) -> list[str] | None:
    """`solo,even` as words; RequestError for an empty one; None if not given."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise RequestError(f"{text!r} is not a list of words.", "Write it like solo,even,pack.")
    return words


def _as_json(finished: Finished, found: Comparison, labels: Sequence[str]) -> dict[str, object]:
    head = {"run": finished.run, "verdict": finished.verdict, "interrupted": finished.interrupted}
    return {**head, **ranking_json(found, labels), **msgspec.to_builtins(finished.plan)}


def _print(
    finished: Finished, found: Comparison, labels: Sequence[str], profiles: Sequence[str], export: Path | None
) -> None:
    lines = [*ranking_lines(found, labels), "", *scaling_lines(found), *packing_lines(found), *profiles]
    lines += [f"warning: {plain(warning)}" for warning in finished.plan.warnings]
    lines += ["", plain(finished.verdict, 1000)]
    print("\n".join(lines), flush=True)
    done = (
        f"plan written to {plain(str(export))}"
        if export
        else f"to write the plan: evener export {finished.run} -o plan.toml"
    )
    print(f"evener: {done}", file=sys.stderr)
