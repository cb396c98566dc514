"""A family that evener doesn't have: one device trains and another is a spare. Only this file knows
it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from evener.balancer import families, journal
from evener.balancer.families import Family, SearchView
from evener.balancer.store import runs
from evener.balancer.store.runs import find, journal_path
from evener.balancer.types import Layout
from evener.plan.file import load_plan
from evener.plan.layout import KINDS, Traits
from evener.tui.cli.main import run


class SpareFamily(Family):
    """One training on one device, and another device that waits for the first to fail."""

    name = kind = "spare"
    fewest_devices = 2
    simplicity = 5

    def layouts(self, view: SearchView) -> Sequence[Layout]:
        return [Layout(self.kind, single.shares) for single in view.singles[:1]]

    def title(self, layout: Layout, devices: int, another: bool = False) -> str:
        return "one device and a spare"

    def describe(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        return f"{layout.global_batch} on {labels[layout.active[0]]}, with a spare"


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    families.add(SpareFamily(), Traits(alone=True, devices=(1, 1)))
    yield
    del families.FAMILIES["spare"], KINDS["spare"]


def test_a_family_more_is_compared_planned_and_replayed(
    own_folder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "compare",
        "-d",
        "sim:gtx1080ti,gtx1080",
        "--layouts",
        "spare",
        "--export",
        "plan.toml",
        "--json",
    ]
    assert run(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in said["layouts"]] == ["one device and a spare"]
    assert " on SIM:0, with a spare" in said["text"][0]
    plan = load_plan("plan.toml")
    assert (plan.layout.kind, plan.layout.batches[1]) == ("spare", 0)
    assert runs.recover(journal.read(journal_path(find("last")))).plan.layout == plan.layout
    assert run(["compare", "-d", "sim:gtx1080ti", "--layouts", "solo,spare"]) == 0
    assert "spare needs two devices" in capsys.readouterr().out
