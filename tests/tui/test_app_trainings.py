"""The Trainings screen: which rank waits for which, for each training, live, paused and
replayed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot

from evener.devices.types import Snapshot
from evener.live.files import Training
from evener.tui.cli.monitor import snapshot_document, snapshot_text
from evener.tui.screens.dialogs import DetailsDialog
from evener.tui.screens.trainings import TrainingPanel
from evener.tui.text.formatting import json_text
from evener.tui.view.step_bars import INPUT, OWN_WORK, WAITING
from evener.tui.view.trainings import KEPT_SECONDS
from tests.support.pilots import text, until
from tests.support.trainings import AT_SECONDS, make_ranks

OTHER = Training("keras", "mnist", 1234.0, 50, AT_SECONDS, (), pid=77)


async def _open(pilot: Pilot[Any]) -> None:
    await until(pilot, lambda: "node7" in text(pilot.app, "#top"), "the first snapshot")
    await pilot.press("4")
    await until(pilot, lambda: "train.py" in text(pilot.app, "#trainings"), "the trainings")


@pytest.mark.parametrize("size", [(80, 24), (160, 48)], ids=("80x24", "160x48"))
async def test_ranks_and_causes_are_those_of_the_training_under_the_cursor(
    app_of: Any, script: Any, size: tuple[int, int]
) -> None:
    app = app_of(script.snapshot(reports=(*make_ranks(plan_samples_per_second=21_000.0), OTHER)))
    async with app.run_test(size=size) as pilot:
        await _open(pilot)
        _, quick, slow, legend = text(app, "#ranks").splitlines()
        assert "8.0 ms  150 ms" in quick
        assert "158 ms    0 ms" in slow
        assert quick.count(WAITING.sign) > quick.count(OWN_WORK.sign) > 0
        assert f"{INPUT.sign * 2} input" in legend
        causes = " ".join(text(app, "#causes").split())
        assert "39 % of the plan's 21 000" in causes
        assert "GPU:1 takes 158 ms for its share; others wait up to 150 ms for it." in causes
        assert "if own work follows the rows" in causes
        graphs = text(app, "#training-graphs")
        assert "all devices 8 165 samples/s" in graphs
        assert "GPU:1" in graphs, "each device where there is room for all"
        await pilot.press("down")
        await until(pilot, lambda: "1 234 samples/s" in text(app, "#causes"), "the other training")
        assert "reports no own work" in text(app, "#ranks")


async def test_the_cursor_stays_on_its_training_and_a_rank_turns_silent(
    app_of: Any, script: Any
) -> None:
    app = app_of(script.snapshot(reports=(OTHER, *make_ranks())))
    async with app.run_test(size=(120, 40)) as pilot:
        await _open(pilot)
        await pilot.press("down")
        first, second = make_ranks()
        gone = msgspec.structs.replace(second, updated_at=AT_SECONDS - 60)
        app.publisher.push(script.snapshot(reports=(first, gone, OTHER)))
        await until(pilot, lambda: "silent for 1 min" in text(app, "#ranks"), "the silence")
        assert app.screen.query_one(TrainingPanel).cursor == 0
        app.publisher.push(script.snapshot())
        await until(pilot, lambda: "ended" in text(app, "#trainings"), "the end")
        assert "Ended" in text(app, "#causes")
        assert "158 ms" in text(app, "#ranks"), "the last figures stay"
        later = script.snapshot(at_seconds=script.snapshot().at_seconds + KEPT_SECONDS + 1)
        app.publisher.push(later)
        await until(pilot, lambda: "No training reports here" in text(app, "#trainings"), "nothing")
        assert text(app, "#ranks") == text(app, "#causes") == text(app, "#training-graphs") == ""


async def test_a_paused_picture_stays_and_details_follow(app_of: Any, script: Any) -> None:
    app = app_of(script.snapshot(reports=make_ranks()))
    async with app.run_test(size=(80, 24)) as pilot:
        await _open(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, DetailsDialog), "the details")
        await until(
            pilot, lambda: "GPU:1 takes 158 ms" in app.screen.query_one("Text").text, "their lines"
        )
        app.publisher.push(script.snapshot(reports=make_ranks(own=(0.1, 0.2))))
        await until(
            pilot, lambda: "GPU:1 takes 200 ms" in app.screen.query_one("Text").text, "the newest"
        )
        await pilot.press("escape", "p")
        await until(pilot, lambda: "paused" in text(app, "#trainings"), "the pause")
        app.publisher.push(script.snapshot(reports=make_ranks(own=(0.1, 0.3))))
        await pilot.pause()
        assert "200 ms" in text(app, "#ranks")
        await pilot.press("p")
        await until(pilot, lambda: "300 ms" in text(app, "#ranks"), "the newest")


def test_text_and_json_have_the_trainings(script: Any) -> None:
    snapshot = script.snapshot(at_seconds=AT_SECONDS, reports=make_ranks())
    assert "GPU:1 takes 158 ms for its share" in snapshot_text(snapshot, 132, colour=False)
    (training,) = json.loads(json_text(snapshot_document(snapshot)))["trainings"]
    assert [(rank["own_work_s"], rank["waiting_s"]) for rank in training["ranks"]] == [
        (0.008, 0.152),
        (0.158, 0.002),
    ]


@pytest.mark.slow
async def test_a_rank_that_is_held_up_for_150_ms_is_seen_in_json_and_in_the_app(
    app_of: Any, trainer_ranks: Callable[..., list[Any]]
) -> None:
    """Two ranks of real PyTorch: one works for 150 ms longer, the other waits as long."""
    said, _ = trainer_ranks("tests.support.torch_slow_rank.watched", 0.15, world=2)
    (training,) = json.loads(said["json"])["trainings"]
    quick, slow = training["ranks"]
    assert slow["own_work_s"] >= 0.15
    assert quick["own_work_s"] < 0.5 * slow["own_work_s"]
    assert quick["waiting_s"] > 0.075 > slow["waiting_s"]
    assert slow["own_work_s"] + slow["waiting_s"] == pytest.approx(
        quick["own_work_s"] + quick["waiting_s"], rel=0.2
    )
    kinds = {cause["kind"] for cause in training["causes"]}
    assert "unequal" in kinds, "the other rank waits"
    assert kinds & {"own_code", "host_starved"}, "it sleeps, or a busy machine hides that"
    app = app_of(msgspec.json.decode(said["snapshot"], type=Snapshot))
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: app.snapshot is not None, "the snapshot")
        await pilot.press("4")
        await until(pilot, lambda: "rank_server.py" in text(app, "#trainings"), "the training")
        _, first, second, _ = text(app, "#ranks").splitlines()
        (waited,) = re.findall("others wait up to (.*?) for it", text(app, "#causes"))
        assert f" {waited} " in first, "the table and the sentence have one figure"
        assert f"{1000 * slow['own_work_s']:.0f} ms" in second
        assert first.count(WAITING.sign) > first.count(OWN_WORK.sign)
        assert second.count(OWN_WORK.sign) > second.count(WAITING.sign)
        assert "Rank 1 takes" in text(app, "#causes")
