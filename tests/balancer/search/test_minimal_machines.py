"""Minimal machines on which searches once went wrong: a user's run is near the best on all of them.

`machines/*.toml` are machine files. The comments at their top are the commands that are run here;
`starts 5 s` is how long each group of children takes to start. Events happen when the file says,
and at other times.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.devices.machine import Machine
from tests.support import search_trials as trials
from tests.support.search_trials import Ask

FOLDER = Path(__file__).parent / "machines"
SEEDS = 3
NEAR = 0.03  # regret in addition to the tolerance, if the batch is free
LATE = 0.1  # fraction of the budget
FAILURES = 2  # out-of-memory failures on one device
# seconds at which an event begins, besides the file's own
MOMENTS = (2.0, 4.0, 6.0, 8.0, 12.0, 16.0)

# known failures, with their cause; a change that fixes a cause removes its lines
TODAY: dict[str, str] = {}


def _name(path: Path, ask: Ask, moment: float | None) -> str:
    return " ".join([path.stem, *ask.words().split(), *([f"from {moment:g} s"] if moment else [])])


def _cases() -> list[Any]:
    found = []
    for path in sorted(FOLDER.glob("*.toml")):
        machine, asks = trials.load(path)
        for ask in asks:
            for moment in (None, *(MOMENTS if machine.events else ())):
                name, seeds = _name(path, ask, moment), range(SEEDS)
                if moment is not None:
                    # the next one at each moment
                    seeds = seeds[MOMENTS.index(moment) % SEEDS :][:1]
                marks = (
                    (pytest.mark.xfail(strict=True, reason=TODAY[name]),) if name in TODAY else ()
                )
                found.append(
                    pytest.param(_moved(machine, moment), ask, seeds, id=name, marks=marks)
                )
    return found


def _moved(machine: Machine, moment: float | None) -> Machine:
    """Return the machine with its events beginning at that moment, with the same duration."""
    if moment is None:
        return machine
    events = tuple(
        msgspec.structs.replace(
            one, at_seconds=moment, until_seconds=one.until_seconds - one.at_seconds + moment
        )
        for one in machine.events
    )
    return msgspec.structs.replace(machine, events=events)


@pytest.mark.parametrize(("machine", "ask", "seeds"), _cases())
def test_a_run_comes_near_the_best(machine: Machine, ask: Ask, seeds: range) -> None:
    """It ends in time, and rarely runs out of memory."""
    for seed in seeds:
        found = trials.run(machine, ask, seed)
        said = (
            f"seed {seed}: {found.layout and found.layout.shares}, {found.rate:.1f} of "
            f"{found.best:.1f} samples/s"
        )
        assert found.regret <= NEAR, said
        assert found.out_of_memory <= FAILURES, said
        assert found.late <= LATE, f"{said}, {found.seconds:.0f} s"
