"""The summary of a training run that `evener launch` prints at its end and keeps in the run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evener.balancer.result.sentences import write_verdict
from evener.launch.program import compare_shares
from evener.launch.summary import (
    FEWEST_STEPS,
    LONG_SECONDS,
    describe_summary,
    load_summary,
    read_records,
    summarize_training,
)
from evener.live.files import LiveDevice, LiveRecord
from evener.program.notes import RankNote
from evener.system.files import runs_folder
from evener.training.limits import LimitKind, StepPart, find_limits
from evener.training.step_record import ShareTimes
from evener.training.step_sums import StepSums
from evener.tui.cli.main import run
from tests.support.launched_plan import plan
from tests.support.verdicts import SPLIT, judged, result

SECONDS = 120
SCRIPT = """
import sys, time
from pathlib import Path
from evener.live.reporter import report
for step in range(int(sys.argv[1])):
    time.sleep(0.01)
    report(8, devices=["cpu-0-of-1"], batches=[8])
    if step == 40:
        Path("begun").touch()
if sys.argv[2:] == ["fails"]:
    raise ValueError("the loss is NaN")
"""


def make_record(rank: int, **changed: Any) -> LiveRecord:
    """Return a rank's record: 100 steps of 100 ms, 30 ms of them for input."""
    live = LiveDevice(f"gpu-{rank}", rank, 64 - 16 * rank, 640.0, 32, 0.06, 0.01)
    whole = StepSums(100, input_s=3.0, own_work_s=6.0, meeting_s=1.0, idle_input_s=3.0)
    facts: dict[str, Any] = {
        "training": "t",
        "rank": rank,
        "world": 2,
        "whole": whole,
        "recent": whole,
        "counted_steps": 100,
        "counted_samples": 100 * live.batch,
        "counted_seconds": 10.0,
        "plan_samples_per_second": 2000.0,
        "memory_bytes": 6 << 30,
        "memory_of_bytes": 24 << 30,
    }
    facts |= changed
    return LiveRecord("torch", "train.py", 640.0, 103, 1e9 + rank, (live,), **facts)


LABELS = {"gpu-0": "GPU:0", "gpu-1": "GPU:1"}


def test_a_training_is_summarized_in_six_lines() -> None:
    summary = summarize_training([make_record(0), make_record(1)], "run", "finished", LABELS)
    assert summary is not None
    assert summary.samples_per_second == 64 * 10 + 48 * 10
    assert summary.of_plan == pytest.approx(0.56)
    assert summary.limits[0].kind == LimitKind.INPUT
    assert summary.limits[0].gain == pytest.approx(1 / 0.7 - 1)
    speed, limits, remedy, shares, memory = describe_summary(summary)
    assert "1 120 samples/s, 56 % of the plan's 2 000" in speed
    assert "input, 30 ms of a step (30 %)" in limits
    assert "the rest, 60 %" in limits, "of 30 % input and 10 % exchange"
    assert "num_workers" in remedy
    assert "+43 %" in remedy
    assert "64 = 2 × 32 on GPU:0" in shares
    assert "6 GiB of 24 GiB (25 %) on GPU:1" in memory


def test_a_device_that_only_holds_state_has_no_work_of_its_own() -> None:
    first, second = make_record(0), make_record(1)
    idle = msgspec.structs.replace(second.devices[0], batch=0, micro=0)
    records = [first, msgspec.structs.replace(second, devices=(idle,))]
    summary = summarize_training(records, "run", "finished", LABELS)
    assert summary is not None
    (line,) = (each for each in describe_summary(summary) if each.startswith("shares: "))
    assert line.endswith(", none on GPU:1, which holds a part of the state")


@pytest.mark.parametrize(
    ("last", "steps", "said"),
    [
        ((6, 2), (0.4, 0.3), "equal at first, 20.00 samples/s; changed 4 times: 33 % more"),
        ((6, 2), (0.4, 0.395), "changed 4 times: no clear difference"),
        ((4, 4), (0.4, 0.2), "not comparable, as the devices' speed changed"),
        ((4, 4), (0.4, 0.4), "the same shares again"),
    ],
)
@pytest.mark.parametrize("are_newest", [True, False])
def test_a_gain_is_claimed_where_shares_made_it(
    last: tuple[int, int], steps: tuple[float, float], said: str, are_newest: bool
) -> None:
    """No gain is claimed if the shares are the same again and only the devices got faster."""
    moved = last != (4, 4)
    own = [(0.1, steps[1]), (steps[0], steps[0] / 2 if moved else steps[1])]
    notes = [
        RankNote(
            rank,
            f"cpu-{rank}-of-2",
            "",
            first=ShareTimes((4, 4), own[rank][0], steps[0], 0.004),
            last=ShareTimes(last, own[rank][1], steps[1], 0.003),
            changes=4,
        )
        for rank in (0, 1)
    ]
    first = compare_shares(notes)
    assert first is not None
    assert first.last_own_work_s == tuple(each for _, each in own)
    # the newest shares may be others that had too few steps
    rows = last if are_newest else (7, 1)
    records = [make_record(rank) for rank in range(2)]
    records = [
        msgspec.structs.replace(
            record, devices=(msgspec.structs.replace(record.devices[0], batch=batch, micro=batch),)
        )
        for record, batch in zip(records, rows, strict=True)
    ]
    if not are_newest and said == "the same shares again":
        said = "too few steps since to compare"
    summary = summarize_training(records, "run", "finished", LABELS, first=first)
    assert summary is not None
    (line,) = (each for each in describe_summary(summary) if each.startswith("shares: "))
    assert said in line
    assert compare_shares([notes[0], msgspec.structs.replace(notes[1], last=None)]) is None
    assert msgspec.json.decode(msgspec.json.encode(summary), type=type(summary)) == summary


def test_of_few_steps_nothing_is_concluded() -> None:
    """Fewer steps suffice if they took long, as those of a slow loader do."""

    def describe(seconds: float) -> list[str]:
        few = {"counted_steps": FEWEST_STEPS - 1, "counted_seconds": seconds}
        records = [make_record(rank, **few) for rank in range(2)]
        summary = summarize_training(records, "run", "finished", LABELS)
        assert summary is not None
        return describe_summary(summary)

    few, shares, _ = describe(LONG_SECONDS - 1)
    assert "too few" in few
    assert "64 = 2 × 32 on GPU:0" in shares
    assert any(line.startswith("limited by: input") for line in describe(LONG_SECONDS))


def test_a_rank_that_left_no_record_is_missing_and_so_is_the_plan_s_part() -> None:
    summary = summarize_training([make_record(1)], "run", "failed", LABELS)
    assert summary is not None
    assert (summary.missing_ranks, summary.of_plan) == (1, 0.0)


def test_the_newest_records_of_the_last_start_count(tmp_path: Path) -> None:
    old = msgspec.structs.replace(make_record(0), training="before", updated_at=1.0)
    same = msgspec.structs.replace(make_record(0), updated_at=2.0)
    for number, each in enumerate((make_record(0), old, same, make_record(1))):
        (tmp_path / f"{number}.json").write_bytes(msgspec.json.encode(each))
    (tmp_path / "broken.json").write_bytes(b"{")
    assert read_records(tmp_path) == [make_record(0), make_record(1)]


def launch(folder: Path, *words: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(SCRIPT)
    plan(["cpu-0-of-1"]).save(folder / "plan.toml")
    command = [sys.executable, "-m", "evener", "launch", "--no-plan-check"]
    return subprocess.Popen(
        [*command, *words],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "EVENER_LIVE_DIR": str(folder / "live")},
    )


@pytest.mark.parametrize(
    ("words", "code", "end"),
    [(("60",), 0, "finished"), (("60", "fails"), 1, "failed"), (("100000",), 130, "interrupted")],
)
def test_a_launched_training_says_its_figures_however_it_ends(
    tmp_path: Path,
    words: tuple[str, ...],
    code: int,
    end: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    running = launch(tmp_path, "plan.toml", "train.py", *words)
    if code == 130:
        until = time.monotonic() + SECONDS
        while not (tmp_path / "begun").exists() and time.monotonic() < until:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=SECONDS)
    assert running.returncode == code, errors
    said = [line.removeprefix("evener: ") for line in errors.splitlines()]
    assert any(line.startswith("speed: ") and "samples/s" in line for line in said), errors
    (name,) = (path.name for path in runs_folder().iterdir())
    assert f"record: evener runs show {name}" in said
    summary = load_summary(name)
    assert summary is not None
    assert summary.end == end
    assert summary.steps >= 40 - 3
    assert run(["runs", "show", name, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["summary"]["samples_per_second"] == pytest.approx(summary.samples_per_second)


def test_the_figures_are_one_object_with_json(tmp_path: Path) -> None:
    running = launch(tmp_path, "--json", "plan.toml", "train.py", "60")
    output, errors = running.communicate(timeout=SECONDS)
    assert running.returncode == 0, errors
    assert json.loads(output)["steps"] == 57
    assert "speed:" not in errors


SECONDS_OF_A_PART = st.floats(0.005, 0.05)


@given(st.dictionaries(st.sampled_from(LimitKind), SECONDS_OF_A_PART, min_size=1, max_size=3))
def test_a_limit_has_one_name_and_its_figures_agree(seconds: dict[LimitKind, float]) -> None:
    """A verdict and a training's last lines name the same limits with the same parts of a step."""
    step_s = 0.1
    limits = find_limits(step_s, [StepPart(kind=kind, seconds=s) for kind, s in seconds.items()])
    assume(limits)
    summary = summarize_training([make_record(0), make_record(1)], "run", "finished", LABELS)
    assert summary is not None
    lines = describe_summary(msgspec.structs.replace(summary, limits=limits, step_s=step_s))
    named = next(line for line in lines if line.startswith("limited by: "))
    verdict = write_verdict(msgspec.structs.replace(judged(result(SPLIT, 1000)), limits=limits))
    parts = [int(part) for part in re.findall(r"(\d+) %", named)]
    assert abs(sum(parts) - 100) <= len(parts) / 2
    for limit, part in zip(limits, parts, strict=False):
        assert limit.kind.noun in named
        (sentence,) = [
            line for line in verdict.remarks if line.startswith(f"Limited by {limit.kind.noun}: ")
        ]
        assert f"of a step, {part} %." in sentence
    helps = next(line for line in lines if line.startswith("would help: "))
    gain, low, high = (int(found) for found in re.findall(r"\+(\d+) %", helps))
    assert low <= gain <= high
    left = 1 - limits[0].share
    assert gain == pytest.approx(100 * (1 / left - 1), abs=1) or gain == 900
