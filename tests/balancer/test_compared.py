"""Two trainings are compared by the windows of their steps, as a gate for CI."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import msgspec
import pytest

from evener.balancer.store.compared import compare_trainings
from evener.balancer.store.quick_steps import (
    SLOPE_DEVIATION,
    SLOPE_MEAN,
    QuickWindow,
    compare_quick_steps,
    find_slope,
)
from evener.balancer.store.runs import run_folder
from evener.errors import RequestError
from evener.live.journal import TRAINING_JOURNAL, RecordedTraining, StartEntry, StepsEntry
from evener.system.files import make_private
from evener.training.step_sums import StepSums
from evener.tui.cli.main import run

pytestmark = pytest.mark.usefixtures("own_folder")

MOST = 0.05
START = StartEntry(1e9, "train.py", "torch", ("a", "b"), (40, 24), 0.0, "host", 1, 1)


def make_training(
    seed: int,
    slowdown: float = 0.0,
    windows: int = 40,
    phase: str = "own_work_s",
    disturbed: float = 0.0,
    rare: bool = False,
    shared: float = 0.0,
) -> RecordedTraining:
    """Return a training whose steps differ by 4 %, on a machine whose speed varies.

    The speed varies by 2 % and drifts by up to 2 %, and the first windows take longer. Other
    programs slow most steps by up to `disturbed`, differently in each window. A `rare` slowdown
    isn't in its quick steps. `shared` is the fraction of windows in which the core is slow, for
    about five of them in a row, and each time by another factor. In some windows only the product
    that measures the core is slow. Both are as measured on a machine of 44 busy CPUs.
    """
    draw, product = random.Random(seed), random.Random(-seed)
    load = draw.uniform(0, disturbed)
    start = draw.gauss(0, 0.01) if disturbed else 0.0
    wander, drift, at = 0.0, draw.uniform(-0.02, 0.02), 1e9
    slow, busy = draw.random() < shared, draw.uniform(1.3, 1.65)
    entries: list[StartEntry | StepsEntry] = [START]
    for window in range(windows):
        wander = 0.8 * wander + draw.gauss(0, 0.02 * math.sqrt(1 - 0.8**2))
        warm = 0.3 * math.exp(-window)
        pace = (1 + wander) * (1 + drift * (window / windows - 0.5)) * (1 + warm)
        steps = 50
        pace *= 1 + start
        own_s = 0.02 * pace * (1 + draw.gauss(0, 0.04 / math.sqrt(steps)))
        own_s *= 1 + load * draw.uniform(0.5, 1.5)
        parts = {"own_work_s": own_s, "meeting_s": 0.002}
        parts[phase] = parts.get(phase, 0.0) + slowdown * 0.022
        if draw.random() < 0.2:
            slow, busy = draw.random() < shared, draw.uniform(1.3, 1.65)
        pace *= busy if slow else 1.0
        core_s = 7e-6 * (busy ** draw.uniform(0.7, 1.2) if slow else 1.0) * draw.uniform(0.96, 1.04)
        core_s *= product.uniform(1.2, 1.6) if product.random() < 0.11 else 1.0
        quick_s = 0.0
        if disturbed:
            quick_s = 0.021 * pace * draw.uniform(0.99, 1.01) * (1 + slowdown * (not rare))
        seconds = steps * sum(parts.values())
        at += seconds
        sums = StepSums(steps, **{name: steps * each for name, each in parts.items()})
        entries.append(StepsEntry(at, steps, seconds, 64 * steps, sums, quick_s, core_s))
    return RecordedTraining(f"run-{seed}", tuple(entries))


def test_equal_trainings_pass_and_slower_ones_are_found() -> None:
    equal = [
        compare_trainings(make_training(2 * seed), make_training(2 * seed + 1)).is_beyond(MOST)
        for seed in range(40)
    ]
    assert sum(equal) <= 2
    slower = [
        compare_trainings(make_training(2 * seed), make_training(2 * seed + 1, 0.1)).is_beyond(MOST)
        for seed in range(100, 120)
    ]
    assert sum(slower) >= 18


def count_beyond(slowdown: float, seeds: range, **options: Any) -> int:
    """Return how many of some pairs of trainings the gate stops."""
    pairs = (
        (make_training(2 * seed, **options), make_training(2 * seed + 1, slowdown, **options))
        for seed in seeds
    )
    return sum(compare_trainings(*pair).is_beyond(MOST) for pair in pairs)


def test_what_disturbs_a_training_makes_it_no_slower() -> None:
    """Other programs slow equal trainings differently, by up to 40 %."""
    found = compare_trainings(*(make_training(seed, windows=20, disturbed=0.4) for seed in (2, 3)))
    assert abs(found.mean_slowdown) > 0.15
    assert count_beyond(0.0, range(40), windows=20, disturbed=0.4) <= 2
    assert count_beyond(0.1, range(40, 60), windows=20, disturbed=0.4) >= 18


def test_a_window_in_which_no_step_was_timed_is_left_out() -> None:
    before, after = (make_training(seed, windows=20, disturbed=0.4) for seed in (2, 3))
    *most, last = after.entries
    untimed = msgspec.structs.replace(last, quick_s=0.0)
    found = compare_trainings(before, RecordedTraining("run-3", (*most, untimed)))
    timed = compare_trainings(before, after)
    assert found.slowdown == pytest.approx(timed.slowdown, abs=0.02)


@pytest.mark.parametrize(("shared", "found"), [(0.1, 180), (0.5, 180), (0.8, 90)])
def test_a_core_that_others_slow_makes_a_training_no_slower(shared: float, found: int) -> None:
    """In some seconds the core's other thread is busy, and steps take 30 to 65 % longer."""
    options: dict[str, Any] = {"windows": 60, "disturbed": 0.1, "shared": shared}
    assert count_beyond(0.0, range(400), **options) <= 20
    assert count_beyond(0.1, range(400, 600), **options) >= found


def test_a_core_s_clock_counts_as_much_as_it_slows_the_steps() -> None:
    """Steps on a CPU follow the core's clock; those that wait for a GPU don't."""
    draw = random.Random(0)
    for follows, same in ((1.0, True), (0.0, False)):
        windows = []
        for clock in (1.0, 1.08):
            speeds = [clock * draw.choice([1.0, 1.4]) for _ in range(60)]
            windows.append(
                [
                    QuickWindow(0.02 * speed**follows * draw.uniform(0.99, 1.01), 6e-6 * speed)
                    for speed in speeds
                ]
            )
        slope = find_slope(windows)
        assert slope.mean == pytest.approx(follows, abs=0.15)
        assert slope.deviation < 0.2
        steps, _ = compare_quick_steps(windows, same_product=True)
        assert steps[1].seconds == pytest.approx(steps[0].seconds, rel=0.03)
        steps, _ = compare_quick_steps(windows, same_product=False)
        assert (steps[1].seconds > 1.05 * steps[0].seconds) == same


def test_a_core_that_never_changes_tells_nothing_of_how_steps_follow_it() -> None:
    draw = random.Random(0)
    windows = [
        [QuickWindow(0.02, 6e-6 * draw.uniform(0.97, 1.03)) for _ in range(60)] for _ in range(2)
    ]
    assert find_slope(windows) == (SLOPE_MEAN, SLOPE_DEVIATION)


def test_a_core_that_is_never_free_leaves_the_answer_open() -> None:
    free = make_training(1, windows=30, disturbed=0.1, shared=0.0)
    busy = make_training(2, windows=30, disturbed=0.1, shared=1.0)
    found = compare_trainings(free, busy)
    assert not found.is_beyond(MOST)
    assert found.low < 0 < found.high
    assert found.high - found.low > 0.1
    unlike = (msgspec.structs.replace(START, product="numpy 3"), *busy.entries[1:])
    other = compare_trainings(free, msgspec.structs.replace(busy, entries=unlike))
    assert other.slowdown == pytest.approx(0.3, abs=0.06), "the products can't be compared"


def test_what_only_some_steps_have_more_of_counts_by_its_mean() -> None:
    """Late rows and checkpoints count, though the quick steps of both trainings are equal."""
    before = make_training(1, disturbed=0.01)
    for phase in ("input_s", "files_s"):
        late = make_training(2, 0.3, phase=phase, disturbed=0.01, rare=True)
        found = compare_trainings(before, late)
        assert found.is_beyond(MOST)
        assert found.slowdown == pytest.approx(0.3, abs=0.06)
    every = compare_trainings(before, make_training(2, 0.3, phase="input_s", disturbed=0.01))
    assert every.slowdown == pytest.approx(0.3, abs=0.06), "counted once"


def test_the_interval_holds_what_is_true() -> None:
    """It does in about 19 of 20 pairs: the machine's drift is part of each training's mean."""
    held = 0
    for seed in range(200):
        found = compare_trainings(make_training(2 * seed), make_training(2 * seed + 1, 0.1))
        held += found.low <= 0.1 <= found.high
    assert held >= 180


def test_the_phase_that_takes_longer_is_known() -> None:
    found = compare_trainings(make_training(1), make_training(2, 0.3, phase="input_s"))
    surely = [each.name for each in found.phases if each.low_s > 0]
    assert surely == ["input"]
    assert found.slowdown == pytest.approx(0.3, abs=0.04)


def test_a_faster_training_is_never_beyond() -> None:
    found = compare_trainings(make_training(1, 0.5), make_training(2))
    assert found.slowdown == pytest.approx(-1 / 3, abs=0.05)
    assert not found.is_beyond(0.0)


def test_only_the_last_start_counts_and_a_short_training_says_so() -> None:
    slow, quick = make_training(1, 2.0), make_training(2)
    both = RecordedTraining("both", (*slow.entries, *quick.entries))
    assert abs(compare_trainings(quick, both).slowdown) < 1e-9
    with pytest.raises(RequestError, match="too short"):
        compare_trainings(quick, make_training(3, windows=5))


def keep(training: RecordedTraining) -> str:
    """Write a training's journal to disk and return its run."""
    run_id = f"20261129-01{training.run.removeprefix('run-'):0>4}-abcd"
    folder = run_folder(run_id)
    make_private(folder)
    lines = [msgspec.json.encode(entry) + b"\n" for entry in training.entries]
    (folder / TRAINING_JOURNAL).write_bytes(b"".join(lines))
    (folder / TRAINING_JOURNAL).chmod(0o600)
    return run_id


def test_the_command_is_a_gate_by_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    quick, same, slow = (
        keep(each) for each in (make_training(1), make_training(2), make_training(3, 0.3))
    )
    assert run(["runs", "compare", quick, same]) == 0
    assert "not slower by more than 5.0 %" in capsys.readouterr().out
    assert run(["runs", "compare", quick, slow]) == 1
    assert "own work" in capsys.readouterr().out
    assert run(["runs", "compare", quick, slow, "--max-slowdown", "50%"]) == 0
    capsys.readouterr()
    assert run(["runs", "compare", quick, slow, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["beyond"] is True
    assert found["difference"]["low"] <= 0.3 <= found["difference"]["high"]
    free = keep(make_training(5, windows=30, disturbed=0.1))
    busy = keep(make_training(6, windows=30, disturbed=0.1, shared=1.0))
    assert run(["runs", "compare", busy, free]) == 0
    assert "not slower" not in capsys.readouterr().out, "a core that is never free shows nothing"
    for wrong in (["nothing"], [slow, "--max-slowdown", "much"], [slow, "--max-slowdown", "-1"]):
        assert run(["runs", "compare", quick, *wrong]) == 2


def test_searches_are_compared_by_their_plans_and_not_with_trainings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    searches = []
    for devices in ("sim:gtx1080ti,gtx1080", "sim:gtx1080,gtx1080"):
        capsys.readouterr()
        assert run(["balance", "-d", devices, "--json"]) == 0
        searches.append(str(json.loads(capsys.readouterr().out)["run"]))
    assert run(["runs", "compare", *searches]) == 1
    assert run(["runs", "compare", *reversed(searches)]) == 0
    assert run(["runs", "compare", searches[0], keep(make_training(1))]) == 2
