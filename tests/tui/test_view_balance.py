"""A session's events combine into one state, whose numbers are the measured ones."""

from __future__ import annotations

import re
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.balancer import journal
from evener.balancer.events import Observed, Paused, ProbeProgress, ProbeStarted
from evener.balancer.journal import ObservationEntry
from evener.balancer.number_format import rate, write_share
from evener.balancer.session_state import (
    RatedLayout,
    SessionState,
    advance,
    best_solo,
    chosen_layout,
    curves,
    first_state,
    largest_pass_run,
    own_speed,
    rivals,
    seconds_left,
    smallest_out_of_memory,
)
from evener.balancer.store import runs
from evener.balancer.types import (
    Belief,
    Failed,
    Interval,
    Layout,
    OutOfMemory,
    PredictedCurve,
    Probe,
    Result,
    Stage,
    layout_of,
    solo,
)
from evener.tui.text.summaries import event_line, gain_text, layout_text
from evener.tui.view import balance_lines
from evener.tui.view.balance_lines import (
    format_fastest,
    rival_lines,
    search_lines,
    share_legend,
    share_lines,
    warning_lines,
)
from evener.tui.view.cells import span_cells
from evener.tui.view.search_story import name_layout
from tests.support.tables import lane_lines

RECORDED = Path(__file__).parents[1] / "recorded"
GAINS = (
    "plan +18.1 %",
    "plan +58.0 %",
    "94 % of it",
)  # gains of the scripted plan over other measurements


def _after(events: Any, count: int | None = None) -> SessionState:
    state = SessionState()
    for event in events[:count]:
        state = advance(state, event)
    return state


def _text(lines: Any) -> str:
    return "\n".join(line.text for line in lines)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_a_share_is_written_as_the_sum_of_its_passes(batch: int, micro: int) -> None:
    """Both sides of = are equal: 820, 820 = 2 × 410, 820 = 2 × 273 + 274."""
    whole, *passes = write_share(batch, micro).split(" = ")
    assert int(whole) == batch
    terms = [
        [int(figure) for figure in term.split(" × ")]
        for term in "".join(passes).split(" + ")
        if term
    ]
    assert sum(prod(term) for term in terms) == (batch if passes else 0)
    assert all(term[-1] <= micro for term in terms)
    assert bool(passes) == (batch > micro)


def test_passes_are_shown_with_shares_and_beside_the_wall() -> None:
    """Device rows show them if they are wide enough. Narrow ones have only the batch
    that failed.
    """
    split = layout_of((820, 568), (410, 568))
    ran_out = OutOfMemory(Probe(solo(2, 0, 512), Stage.SOLO, 1.0), (0,), "full", 1.0)
    belief = Belief((PredictedCurve(0, (), 410, 512),), "")
    running = (
        ProbeProgress(
            Probe(layout_of((700, 568), (350, 568)), Stage.SPLIT, 1.0), "measuring", None, None, 0.0
        ),
    )
    state = SessionState(
        devices=("GPU:0", "GPU:1"),
        seen=(ObservationEntry(ran_out, 1.0),),
        belief=belief,
        running=running,
    )
    state = msgspec.structs.replace(state, best=Result(split, Interval(100.0, 99.0, 101.0), 2))
    assert smallest_out_of_memory(state, 0) == 512
    shares = _text(share_lines(state, 80, 9))
    assert "GPU:0 820 = 2 × 410 (59 %)" in shares
    assert "now (700 = 2 × 350) + 568 = 1268" in shares
    wide, narrow = (_text(lane_lines(state, width, 9)[0]) for width in (118, 70))
    assert "820 in 2 passes" in wide
    assert "2×350" in wide
    assert "512" in narrow
    assert layout_text(split, state.devices) == "GPU:0[820 = 2 × 410] GPU:1[568]"
    held = Layout("shard", (820, 0), state=(0.6, 0.4))
    assert layout_text(held, state.devices) == "GPU:0[820] GPU:1[state only]"
    legend = "".join(line.text for line in share_legend(state, held, 80))
    assert "GPU:1 state only" in legend
    assert "left out" not in legend
    assert name_layout(held, state.devices) == "820 rows on GPU:0, state also on GPU:1"


def test_progress_replaces_progress_and_an_observation_ends_it(events: Any) -> None:
    running = _after(events, 3).running
    assert [(each.phase, each.samples_per_second) for each in running] == [("measuring", 683.0)]
    assert own_speed(running[0], 0) == 683.0
    assert _after(events, 4).running == ()


def test_rivals_are_layouts_that_ran(events: Any) -> None:
    before_end = _after(events, -1)
    assert [(each.name, round(each.rate.value)) for each in rivals(before_end)] == [
        ("best so far", 2127),
        ("equal shares", 1801),
        ("SIM:0 alone", 1346),
        ("sum of each alone", 2271),
    ]
    at_end = _after(events)
    assert [(each.name, round(each.rate.value)) for each in rivals(at_end)] == [
        ("the plan", 2127),
        ("equal shares", 1801),
        ("SIM:0 alone", 1346),
        ("sum of each alone", 2271),
    ]


def test_nothing_is_claimed_before_it_ran(events: Any) -> None:
    start = _after(events, 1)
    assert rivals(start) == ()
    assert curves(start) == ()
    assert chosen_layout(start) is None
    assert "Nothing has been measured yet." in _text(rival_lines(start, 80, 10))
    assert "No split was measured yet" in _text(share_lines(start, 80, 9))


def test_the_best_solo_and_the_memory_wall_are_seen(events: Any) -> None:
    state = _after(events)
    fastest = best_solo(state, 0)
    assert fastest is not None
    assert fastest.probe.layout.shares == (1024, 0)
    assert smallest_out_of_memory(state, 0) == 1310
    assert smallest_out_of_memory(state, 1) is None
    assert [(curve.device, curve.failed_batch, len(curve.measured)) for curve in curves(state)] == [
        (0, 1310, 2),
        (1, None, 1),
    ]
    lanes = _text(lane_lines(state, 118, 9)[0])
    assert "1 346 at 1024" in lanes
    assert "fits ~1179, 1310 not" in lanes, "1179 is a prediction: 1024 was the largest that ran"


ALONE = re.compile(r"(GPU:\d)\[(\d+)[^\]]*\]: ([\d .]+) samples/s")


def test_the_points_of_the_chart_are_the_figures_of_the_list() -> None:
    """There is one, as printed, for each measurement of a device alone, in any stage."""
    record = journal.read(RECORDED / "h200x2-keras_maxer-60percent-256.jsonl")
    state, listed, stages = SessionState(), [], set()
    for event in runs.recorded_events(record):
        state = advance(state, event)
        found = ALONE.findall(event_line(event, state.devices) or "")
        if isinstance(event, Observed) and event.seen.probe.layout.traits.alone:
            listed += found
            stages.add(event.seen.probe.stage)
    drawn = [
        (state.devices[curve.device], str(batch), rate(speed))
        for curve in curves(state)
        for batch, speed in curve.measured
    ]
    assert sorted(drawn) == sorted(listed)
    assert {"solo", "race"} <= stages


def test_a_largest_batch_that_ran_is_no_prediction(events: Any) -> None:
    """It ran alone or in a split. A curve is measured up to the largest batch alone."""
    state = _after(events)
    assert state.belief is not None
    sketch = msgspec.structs.replace(state.belief.curves[0], largest_batch=1024)
    known = msgspec.structs.replace(
        state, belief=msgspec.structs.replace(state.belief, curves=(sketch,))
    )
    assert " fits 1024, 1310 not" in _text(lane_lines(known, 118, 9)[0])
    assert [
        (largest_pass_run(state, device), curves(state)[device].largest_tested) for device in (0, 1)
    ] == [
        (1024, 1024),
        (710, 710),
    ]


def test_time_left_ends_with_the_session(events: Any) -> None:
    assert seconds_left(_after(events, 4)) == 116.0
    assert seconds_left(_after(events)) is None


def test_pausing_shows_and_a_new_probe_ends_it(events: Any) -> None:
    paused = advance(_after(events, 4), Paused(5.0))
    assert paused.paused
    assert "Paused" in _text(search_lines(paused, 80, 10))
    assert not advance(paused, events[1]).paused


def test_the_shares_bar_is_split_by_shares_in_whole_cells(events: Any) -> None:
    bar = share_lines(_after(events), 80, 9)[0]
    assert span_cells(bar.spans) == 79
    assert [len(span.text) for span in bar.spans[1:]] == [46, 32]
    assert bar.text[46:48] == "▌█", "the ends of parts are seen without colours"
    legend = _text(share_lines(_after(events), 80, 9))
    assert "SIM:0 820 (59 %)" in legend
    assert "global batch 1388" in legend


def test_a_device_that_is_left_out_is_named(events: Any) -> None:
    state = _after(events, -1)
    alone = msgspec.structs.replace(state, best=Result(solo(2, 0, 1024), state.best.throughput, 1))  # type: ignore[union-attr]
    assert "SIM:1 left out" in _text(share_lines(alone, 80, 9))


def test_the_search_says_what_it_does_then_its_verdict(events: Any) -> None:
    running = _text(search_lines(_after(events, -1), 100, 12))
    assert "Measures the split that the curves say is fastest." in running
    assert "at most 1 min 36 s of simulated time left" in running
    assert "out of memory on SIM:0" in running
    ended = _text(search_lines(_after(events), 100, 12))
    assert "Split 820 and 568: 18 % faster than equal shares." in ended


def test_a_failed_probe_is_shown_harmlessly(events: Any) -> None:
    failed = Failed(Probe(solo(2, 0, 8), Stage.SOLO, 1.0), "raised", "boom\x1b[31m", (0,), 1.0)
    state = advance(_after(events, 1), msgspec.structs.replace(events[3], seen=failed))
    text = _text(search_lines(state, 100, 8))
    assert "failed: boom" in text
    assert "\x1b" not in text


def test_a_running_split_over_many_devices_is_shown_by_its_sum(events: Any) -> None:
    devices = tuple(f"SIM:{place}" for place in range(16))
    best = Result(layout_of((700,) * 16), Interval(100.0, 99.0, 101.0), 1)
    trying = advance(
        SessionState(devices=devices, best=best),
        ProbeStarted(Probe(layout_of((694,) * 16), Stage.RACE, 1.0), 1.0),
    )
    assert "now 11104 over 16 devices" in _text(share_lines(trying, 60, 9))
    assert "694 + 694 = 11104" in _text(share_lines(trying, 200, 9))


def test_of_many_devices_as_many_are_named_as_fit_with_the_figure(events: Any) -> None:
    devices = tuple(f"SIM:{place}" for place in range(16))
    wide = Probe(layout_of((1000,) * 16), Stage.SPLIT, 1.0)
    seen = msgspec.structs.replace(events[3].seen, probe=wide, step_seconds=16_000 / 28_488)
    state = advance(
        SessionState(devices=devices, names=devices), msgspec.structs.replace(events[3], seen=seen)
    )
    for width, named in ((64, 1), (80, 2), (120, 5), (200, 5)):
        row = next(line.text for line in search_lines(state, width, 8) if "] and" in line.text)
        assert f" and {16 - named} more: 28 488 samples/s" in row


def test_a_measurement_s_words_that_are_cut_say_so(events: Any) -> None:
    failed = Failed(Probe(solo(2, 0, 8), Stage.SOLO, 1.0), "raised", "a long story " * 9, (0,), 1.0)
    state = advance(_after(events, 1), msgspec.structs.replace(events[3], seen=failed))
    for width in (60, 100):
        row = next(line for line in search_lines(state, width, 8) if "failed:" in line.text)
        assert row.text.endswith("…")
        assert span_cells(row.spans) == width
    assert "…" not in _text(search_lines(state, 200, 8))


def test_a_fault_stands_in_place_of_the_verdict(events: Any) -> None:
    state = msgspec.structs.replace(
        _after(events, 4), ended=True, fault="No layout ran.", remedy="Free memory."
    )
    assert "No layout ran. Free memory." in _text(search_lines(state, 100, 8))
    long = msgspec.structs.replace(
        state, fault="CPU:0 failed with 8 samples, building: train.py:2: no such model. " * 4
    )
    assert "Free memory." in _text(search_lines(long, 80, 6)), (
        "the remedy is the last of a long story"
    )


def test_the_verdict_on_many_devices_is_shown_whole(events: Any) -> None:
    state = _after(events, len(events))
    assert state.finished is not None
    verdict = (
        f"Split over {', '.join(f'SIM:{place}' for place in range(40))}: 28 % faster than "
        f"equal shares."
    )
    state = msgspec.structs.replace(
        state, finished=msgspec.structs.replace(state.finished, verdict=verdict)
    )
    assert "28 % faster than equal shares." in " ".join(_text(search_lines(state, 78, 9)).split())


@pytest.mark.parametrize("width", [1, 20, 60, 100, 220])
@pytest.mark.parametrize("height", [0, 4, 30])
def test_every_panel_keeps_to_its_width(events: Any, width: int, height: int) -> None:
    for state in accumulate(events, advance, initial=SessionState()):
        for lines in (
            rival_lines(state, width, height),
            search_lines(state, width, height),
            share_lines(state, max(40, width), 9),
        ):
            for line in lines:
                assert span_cells(line.spans) <= max(width, 50), line.text


@pytest.mark.parametrize("width", [30, 39, 40, 46, 47, 48, 60, 80, 120])
def test_no_figure_of_a_rival_is_cut(events: Any, width: int) -> None:
    """If there isn't room for all numbers, some are left out whole."""
    best, *others = [line.text for line in rival_lines(_after(events, len(events)), width, 0)]
    assert "2 127 ±0.4 %" in best
    assert all(gain in row for row, gain in zip(others, GAINS, strict=True))


def test_a_faster_measurement_than_the_best_is_explained(events: Any) -> None:
    """One had a larger batch, and one is the best layout itself. Without one, there is no text."""
    state = _after(events, -1)
    measured = state.best
    assert measured is not None
    assert format_fastest(state) == ""

    def best_of(shares: tuple[int, ...], part: float) -> SessionState:
        speed = measured.throughput.value * part
        slower = msgspec.structs.replace(measured.throughput, value=speed)
        best = msgspec.structs.replace(measured, layout=layout_of(shares), throughput=slower)
        return msgspec.structs.replace(state, best=best)

    larger = format_fastest(best_of((700, 500), 1 / 1.02))
    assert larger == "2 127 at 820+568: a larger batch for 2.0 % more"
    assert larger in _text(rival_lines(best_of((700, 500), 1 / 1.02), 58, 5))
    assert "in its fastest turn" in format_fastest(best_of((820, 568), 1 / 1.02))
    assert format_fastest(best_of((820, 568), 1.01)) == ""


def test_a_wide_interval_leaves_a_blank_before_the_bar(events: Any) -> None:
    """An interval of 10 % or more has no decimals."""
    state = _after(events, len(events))
    assert state.finished is not None
    wide = msgspec.structs.replace(state.finished.plan.throughput, low=1700.0, high=2554.0)
    plan = msgspec.structs.replace(state.finished.plan, throughput=wide)
    state = msgspec.structs.replace(
        state, finished=msgspec.structs.replace(state.finished, plan=plan)
    )
    assert "±20 %  ━" in rival_lines(state, 120, 0)[0].text


def test_a_warning_that_is_cut_says_so(events: Any) -> None:
    long = ("Measured on simulated devices, whose speeds are read from a file, not on hardware.",)
    assert _text(warning_lines(long, 40, 1)).endswith("…")
    assert "…" not in _text(warning_lines(long, 40, 3))
    assert warning_lines(long, 40, 0) == ()


def test_the_newest_measurements_stand_before_warnings(events: Any) -> None:
    state = msgspec.structs.replace(_after(events, -1), notes=("a warning", "another", "a third"))
    text = _text(search_lines(state, 100, 5))
    assert text.count("samples/s") == 2


def test_a_running_split_is_shown_with_the_best(events: Any) -> None:
    state = _after(events, -1)
    probe = Probe(layout_of((700, 300)), Stage.SPLIT, 1.0)
    trying = advance(state, ProbeStarted(probe, 30.0))
    narrow, wide = share_lines(trying, 80, 3), share_lines(trying, 80, 4)
    assert "now 700 + 300 = 1000" in _text(narrow)
    assert len(wide) == len(narrow) + 1
    assert [len(span.text) for span in wide[1].spans[1:]] == [55, 23]
    assert "now" not in _text(share_lines(state, 80, 4))


def test_a_search_took_as_long_here_as_in_the_list_of_runs(events: Any) -> None:
    """Pauses don't count, as in the plan, and unlike on the session's clock."""
    state = msgspec.structs.replace(_after(events), at_seconds=50.0)
    assert "6 probes, 1 out of memory, 47 s." in _text(search_lines(state, 100, 10))


def test_while_models_are_built_their_devices_and_durations_are_shown(events: Any) -> None:
    """The search's own text says it, and so do device rows that are wide enough."""
    running = tuple(
        ProbeProgress(
            Probe(solo(2, device, 8), Stage.SOLO, 10.0), "building", None, None, 0.0, seconds
        )
        for device, seconds in ((0, 12.4), (1, 11.0))
    )
    state = msgspec.structs.replace(_after(events, 1), running=running)
    assert "The model is being built on SIM:0, SIM:1: 12 s." in _text(search_lines(state, 80, 5))
    assert "alone: building 12 s" in _text(lane_lines(state, 160, 4)[0])
    assert "building 11 s" in _text(lane_lines(state, 120, 4)[0])


def test_a_search_that_failed_has_done_nothing(events: Any) -> None:
    state = msgspec.structs.replace(
        _after(events, 1), ended=True, fault="No layout could be measured."
    )
    shown = _text(lane_lines(state, 120, 4)[0])
    assert "done" not in shown
    assert shown.count("✗ failed") == 2


def test_a_run_that_goes_on_shows_what_is_kept_before_anything_new(
    events: Any, script: Any
) -> None:
    before = _after(events, 9)
    state = first_state([script.device(0), script.device(1)], "keras_maxer", previous=before.seen)
    assert "6 probes, 1 out of memory" in _text(search_lines(state, 100, 10))
    assert "GPU:0 alone" in _text(rival_lines(state, 100, 8))


def test_a_rival_that_ties_with_the_plan_shows_no_gain() -> None:
    """A rival whose samples/s aren't known shows none either."""
    figure = Interval(100.0, 99.0, 101.0)
    rival = RatedLayout("best_device", "CPU:0 alone", figure, (64, 0), "CPU:0")
    plan = RatedLayout("plan", "the plan", Interval(129.3, 128.0, 130.0), (64, 64))
    assert gain_text(plan, rival) == "+29.3 %"
    assert gain_text(plan, rival._replace(tie=True)) == "tie"
    rough = rival._replace(rate=Interval(100.0, 99.0, 140.0))
    assert gain_text(plan, rough) == "unclear"


@pytest.mark.parametrize("width", [*range(51, 70), 80])
def test_where_a_rival_ran_is_not_cut_without_a_mark(width: int) -> None:
    """A gain with three digits is wider than most: 1734 samples must not become 173."""
    figure = Interval(2314.0, 2294.0, 2334.0)
    rival = RatedLayout("best_device", "SIM:0 alone", figure, (1734, 0, 0, 0), "SIM:0")
    fastest = Interval(5613.0, 5591.0, 5635.0)
    best = RatedLayout("plan", "best so far", fastest, (1472, 1193, 617, 590))
    row = balance_lines._rival_line(rival, best, width, ()).text.rstrip()
    assert "best +142.6 %" in row
    assert row.endswith((rival.where, "…"))


def test_long_names_of_rivals_are_whole_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figure = Interval(2314.0, 2294.0, 2334.0)
    named = RatedLayout("best_device", "the other device alone, CPU:1", figure, (64, 0), "CPU:1")
    best = RatedLayout("plan", "the plan", Interval(5613.0, 5591.0, 5635.0), (0, 64))
    monkeypatch.setattr(balance_lines, "rivals", lambda _: (best, named))
    wide = rival_lines(SessionState(), 100, 2)
    assert named.name in wide[1].text
    assert all(span_cells(row.spans) == 100 for row in wide)
    assert "the other device …" in rival_lines(SessionState(), 80, 2)[1].text
