"""A plan's run has the speed of its trainings, and the causes of a shortfall in their journals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.balancer.store import runs
from evener.balancer.store.runs import StoredRun
from evener.live.files import LiveDevice, LiveRecord, ShareChange
from evener.live.journal import TrainingJournal
from evener.tui.cli.main import run

PAIR = "sim:gtx1080ti,gtx1080"


@pytest.fixture
def searched(own_state: Path) -> StoredRun:
    session = Session(open_run(Request(devices=PAIR, global_batch=256)))
    try:
        list(session.events())
    finally:
        session.close()
    return runs.load_run("last")


def train(
    searched: StoredRun,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    part: float,
    created: str | None = None,
    **figures: Any,
) -> None:
    """Write a training of 300 s by the plan of a search, at this fraction of its samples/s."""
    plan = searched.require_plan()
    promised = plan.throughput.samples_per_second
    monkeypatch.setenv("EVENER_RUN", name)
    journal = TrainingJournal(
        ["a", "b"], plan.batches, plan.created if created is None else created
    )
    waiting = figures.pop("waiting_s", 0.0)
    record = LiveRecord(
        "torch",
        "train.py",
        promised,
        0,
        1.9e9,
        (LiveDevice("a", 0, plan.batches[0], 1.0, waiting_s=waiting),),
        plan_samples_per_second=promised,
        **figures,
    )
    for second in range(0, 301, 31):
        steps = round(second * part * promised / sum(plan.batches))
        journal.note_record(msgspec.structs.replace(record, step=steps, updated_at=1.9e9 + second))
    journal.close()


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_runs_says_what_a_plan_has_reached_and_how_often(
    searched: StoredRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = searched.header.run
    assert ask(capsys, "runs", "show", own)["trained"] is None
    train(searched, monkeypatch, "29990101-000000-0001", 0.8, input_s=0.1, step_s=1.0)
    train(searched, monkeypatch, "29990101-000000-0002", 0.99, input_s=0.1, step_s=1.0)
    train(searched, monkeypatch, "29990101-000000-0003", 0.5, created="2020-01-01T00:00:00Z")
    train(searched, monkeypatch, "29990101-000000-0004", 0.5, created="")
    *_, listed = ask(capsys, "runs")["runs"]
    assert listed["run"] == own
    found = ask(capsys, "runs", "show", own)["trained"]
    assert listed["trained"] == found
    assert found["trainings"] == 2
    assert found["part"] == pytest.approx(0.99, rel=0.02)
    promised = searched.require_plan().throughput.samples_per_second
    assert found["samples_per_second"] == pytest.approx(0.99 * promised, rel=0.02)
    assert run(["runs", "show", own]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("2 trainings with this plan so far; the last reached ")
    assert said.endswith("% of the plan's")
    assert run(["runs"]) == 0
    assert "(2 x)" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("figures", "why"),
    [
        ({"input_s": 0.3, "step_s": 1.0}, "waited for input in 30 % of a step"),
        ({"waiting_s": 0.2, "step_s": 1.0}, "waited for the others in 20 % of a step"),
        ({"between_s": 0.5, "step_s": 1.0}, "busy between steps for 50 % of a step"),
        (
            {"changes": (ShareChange(9, 1.9e9, (150, 106), (128, 128), "a is slower"),)},
            "its shares became 128+128, as a is slower",
        ),
        ({"input_s": 0.02, "step_s": 1.0}, "why isn't known"),
        ({}, "why isn't known"),
    ],
)
def test_a_training_that_falls_short_says_why_or_that_it_is_not_known(
    searched: StoredRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    figures: dict[str, Any],
    why: str,
) -> None:
    train(searched, monkeypatch, "29990101-000000-0001", 0.7, **figures)
    for words, shortfall in (
        (("runs", "show", searched.header.run), "70 % of the plan's: "),
        (("runs",), "30 % slower: "),
    ):
        capsys.readouterr()
        assert run([*words]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert shortfall in said
        assert why in said


def test_a_start_without_a_lost_device_is_not_the_plans(
    searched: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher then writes a plan for the devices that are left, with other samples/s."""
    plan = searched.require_plan()
    train(searched, monkeypatch, "29990101-000000-0001", 1.0)
    half = msgspec.structs.replace(
        plan,
        throughput=msgspec.structs.replace(
            plan.throughput, samples_per_second=plan.throughput.samples_per_second / 2
        ),
    )
    lost = msgspec.structs.replace(
        searched, end=msgspec.structs.replace(searched.end, plan=half) if searched.end else None
    )
    train(lost, monkeypatch, "29990101-000000-0001", 0.9)
    found = runs.find_trained_by(searched.header.run, plan)
    assert found is not None
    assert found.trainings == 1
    assert found.part == pytest.approx(1.0, rel=0.02)
