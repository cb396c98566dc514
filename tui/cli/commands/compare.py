"""`evener compare`: single-device, split, packed and placed layouts, ranked."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from evener.balancer.events import Finished
from evener.balancer.probes.layout_profile import LayoutProfile
from evener.balancer.request import Request, ResolvedRequest
from evener.balancer.resolve_layouts import resolve_comparison
from evener.balancer.search.search import Search
from evener.balancer.session import Session
from evener.tui.cli.commands.balance import (
    check_target,
    print_next_step,
    result_json,
    run_to_end,
    stopped_by_signals,
)
from evener.tui.text.formatting import plain
from evener.tui.text.parsing import parse_words
from evener.tui.text.profile_tables import profile_ranking, transfer_json, transfer_lines
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
    """Run a comparison; the exit code is 0, or that of the signal that interrupted it."""
    if export is not None:
        check_target(export)
    resolved = resolve_comparison(request, parse_words(layouts), mps, parse_words(knobs) or ())
    session = Session(resolved)
    progress = Progress()

    def conclude(finished: Finished) -> None:
        if export is not None:
            finished.plan.save(export)
        found, labels = session.search, progress.devices
        tables = _profiled(resolved, found, len(labels)) if profile and not finished.interrupted else []
        if as_json:
            profiles = {"profile": transfer_json(tables)} if profile else {}
            print(json_text({**result_json(finished, **ranking_json(found, labels)), **profiles}), flush=True)
        else:
            _print(finished, found, labels, transfer_lines(tables), export)

    return run_to_end(session, progress, conclude, "stopping; the ranking so far is kept", as_json)


def _profiled(resolved: ResolvedRequest, found: Search, devices: int) -> list[LayoutProfile]:
    """Profile the ranking; a signal ends it early and keeps what was profiled."""
    stop = threading.Event()
    with stopped_by_signals(stop.set, "stopping the profile"):
        return profile_ranking(resolved, found, devices, stop)


def _print(
    finished: Finished, found: Search, labels: Sequence[str], profiles: Sequence[str], export: Path | None
) -> None:
    lines = [*ranking_lines(found, labels), "", *scaling_lines(found), *packing_lines(found), *profiles]
    lines += [f"warning: {plain(warning)}" for warning in finished.plan.warnings]
    lines += ["", plain(finished.verdict, 1000)]
    print("\n".join(lines), flush=True)
    print_next_step(finished, export)
