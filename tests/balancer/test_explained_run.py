"""The search does what docs/architecture.md explains probe by probe."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

from evener.balancer.events import Observed
from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.balancer.types import Stage, Timed

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
ROW = re.compile(
    r"^\| (solo|rest|split|race|check) (\d+), (\d+) \| ([\d.]+)(?: and ([\d.]+))? ms \|",
    re.MULTILINE,
)


def test_the_explained_run_is_what_the_search_does(own_folder: Path) -> None:
    """Each row of the table has the stage, the rows of both devices, and the measured
    milliseconds.
    """
    steps: dict[tuple[str, int], list[tuple[tuple[int, ...], float]]] = {}
    with closing(Session(open_run(Request("sim:gtx1080ti,gtx1080", global_batch=256)))) as session:
        for event in session.events():
            if isinstance(event, Observed) and isinstance(event.seen, Timed):
                probe = event.seen.probe
                shares = (
                    probe.layout.shares
                    if probe.stage != Stage.SOLO
                    else (max(probe.layout.shares),)
                )
                found = steps.setdefault((probe.stage, probe.turn), [])
                found.append((shares, round(1000 * event.seen.step_seconds, 1)))
    seen = [
        (stage, tuple(rows for shares, _ in found for rows in shares), [ms for _, ms in found])
        for (stage, _), found in steps.items()
    ]
    rows = [
        (stage, (int(one), int(other)), [float(ms) for ms in times if ms])
        for stage, one, other, *times in ROW.findall(PAGE.read_text(encoding="utf-8"))
    ]
    assert rows == seen
