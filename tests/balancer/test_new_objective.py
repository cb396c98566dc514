"""An objective that evener doesn't have: samples per dollar, for devices that cost money while
used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from evener.balancer import journal, objectives
from evener.balancer.objectives import Objective
from evener.balancer.store import runs
from evener.balancer.store.runs import find, journal_path
from evener.balancer.types import Timed
from evener.tui.cli.main import run

DOLLARS_AN_HOUR = (0.40, 2.00)  # of the first device, and of the second, which is slightly faster
MACHINE = "".join(
    f'[[device]]\nname = "{name}"\nmemory_mib = 8000\nmemory_base_mib = '
    f"100\nmemory_per_sample_mib = 1\n"
    f"curve = [[1, {step_ms / 10}], [1000, {step_ms}], [4000, {step_ms * 4}]]\n"
    for name, step_ms in (("Cheap", 50.0), ("Dear", 40.0))
)


class Dollars(Objective, frozen=True):
    """Samples/s divided by the price per second of the devices that train. Idle devices cost
    nothing.
    """

    def value(self, samples_per_second: float, turns: Iterable[Timed]) -> float:
        used = next((one.probe.layout.active for one in turns), ())
        return samples_per_second / sum(DOLLARS_AN_HOUR[i] / 3600 for i in used) if used else 0.0

    def costs(self, seen: Sequence[Timed], devices: int) -> list[tuple[float, float]]:
        return [(dollars / 3600, 0.0) for dollars in DOLLARS_AN_HOUR]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    objectives.add(
        Dollars("samples-per-dollar", "most for the money", "samples per dollar", trades_speed=True)
    )
    yield
    del objectives.OBJECTIVES["samples-per-dollar"]


def test_one_more_objective_decides_and_is_reported(
    own_folder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    own_folder.joinpath("machine.toml").write_text(MACHINE)
    words = ["balance", "-d", "sim:machine.toml", "--global-batch", "1000", "--json"]
    assert run([*words, "--objective", "samples-per-dollar", "--max-slowdown", "70%"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [share["batch"] for share in said["layout"]["share"]] == [1000, 0]
    text = "\n".join(said["text"])
    assert "samples per dollar, the most among the layouts at most 70 % slower" in text
    assert said["verdict"]["objective"]["objective"] == "samples-per-dollar"
    assert runs.recover(journal.read(journal_path(find("last")))).verdict == text
    assert run([*words, "--objective", "samples-per-dollar", "--max-slowdown", "5%"]) == 0
    fast = json.loads(capsys.readouterr().out)
    assert all(share["batch"] for share in fast["layout"]["share"]), (
        "alone, the cheap one is too slow"
    )
