"""Trainings as rows: ranks joined over processes, devices and hosts, what slows them, and lines
that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.devices.types import LOST, Device, DeviceSample, HostSample, Snapshot, value
from evener.live.files import LastStep, LiveDevice, PendingShares, ShareChange, Training
from evener.training.noise_scale import ENDLESS, NoiseScale
from evener.training.step_sums import RankStep
from evener.tui.cli.monitor import snapshot_document, snapshot_text
from evener.tui.view.cells import Line, cells, to_ascii
from evener.tui.view.charts import work_bar
from evener.tui.view.devices import DeviceRow
from evener.tui.view.ranks import work_by_device
from evener.tui.view.share_history import share_lines
from evener.tui.view.step_bars import (
    INPUT,
    OWN_WORK,
    PARTS,
    WAITING,
    lane_lines,
    legend_line,
    part_bar,
)
from evener.tui.view.training_graphs import training_graph_lines
from evener.tui.view.training_lines import (
    PanelRows,
    arrange_trainings,
    training_lines,
)
from evener.tui.view.trainings import EndedTrainings, TrainingRow, join_trainings
from tests.support.tables import device_lines, rank_table, training_table
from tests.support.trainings import AT_SECONDS, make_ranks

OTHER = Training("keras", "mnist", 1234.0, 50, AT_SECONDS, (), pid=77)


def _snapshot(script: Any, reports: Sequence[Training], **changed: Any) -> Snapshot:
    snapshot: Snapshot = script.snapshot(
        processes=(), at_seconds=AT_SECONDS, reports=tuple(reports)
    )
    quiet = [msgspec.structs.replace(each, throttled_percent=value(0)) for each in snapshot.devices]
    return msgspec.structs.replace(snapshot, **({"devices": tuple(quiet)} | changed))


def _only(script: Any, reports: Sequence[Training], **changed: Any) -> TrainingRow:
    (row,) = join_trainings(_snapshot(script, reports, **changed))
    return row


def _kinds(row: TrainingRow) -> list[str]:
    return [cause.kind for cause in row.causes]


def test_ranks_are_joined_over_processes_and_compared_with_the_plan(script: Any) -> None:
    row = _only(script, make_ranks(plan_samples_per_second=21_000.0))
    assert [rank.device for rank in row.ranks] == ["GPU:0", "GPU:1"]
    assert [(rank.share, rank.micro) for rank in row.ranks] == [(820, 410), (568, 568)]
    assert row.samples_per_second == pytest.approx(820 / 0.17 + 568 / 0.17)
    assert row.of_plan == pytest.approx(0.3888, abs=1e-3)
    assert (row.missing_ranks, row.step, row.step_s) == (0, 12_345, 0.17)


def test_samples_per_joule_count_each_device_once_and_need_every_one(script: Any) -> None:
    row = _only(script, make_ranks())
    assert row.watts == 640 + 631
    assert row.samples_per_joule == pytest.approx(row.samples_per_second / 1271)
    assert "6.42 samples per joule, at 1271 W." in " ".join(
        line.text for line in training_lines(row, AT_SECONDS, 300)
    )
    dark = (script.sample(0), script.sample(1, power_watts=LOST))
    assert _only(script, make_ranks(), devices=dark).samples_per_joule == 0.0


def test_ranks_on_other_hosts_have_their_names_and_make_no_plan_s_share(script: Any) -> None:
    """A monitor sees one host, and missing ranks can't be compared."""
    here, there = make_ranks(plan_samples_per_second=21_000.0, world=3)
    (live,) = there.devices
    there = msgspec.structs.replace(
        there, devices=(msgspec.structs.replace(live, id="GPU-77", host="node8"),)
    )
    row = _only(script, (here, there))
    assert [rank.device for rank in row.ranks] == ["GPU:0", "node8/GPU:1"]
    assert (row.missing_ranks, row.of_plan, row.advice) == (1, 0.0, None)
    text = "\n".join(line.text for line in training_lines(row, AT_SECONDS, 120))
    assert "against the plan's 21 000. 1 rank isn't seen here" in text
    assert "2 of 3" in training_table([row], 100, 5)[0][1].text


def test_the_same_gpu_of_two_hosts_is_two_devices(script: Any) -> None:
    samples = []
    for host in ("node7", "node8"):
        sample = script.sample(0)
        samples.append(
            msgspec.structs.replace(
                sample, device=msgspec.structs.replace(sample.device, host=host)
            )
        )
    ranks = [
        msgspec.structs.replace(
            each, devices=(msgspec.structs.replace(each.devices[0], id="gpu-0", host=host),)
        )
        for each, host in zip(make_ranks(), ("node7", "node8"), strict=True)
    ]
    snapshot = _snapshot(script, ranks, devices=tuple(samples))
    assert [rank.device for rank in join_trainings(snapshot)[0].ranks] == [
        "node7/GPU:0",
        "node8/GPU:0",
    ]
    assert work_by_device(snapshot) == {
        ("node7", "gpu-0"): (0.008, 0.152),
        ("node8", "gpu-0"): (0.158, 0.002),
    }


def test_processes_without_a_training_s_id_are_trainings_of_their_own(script: Any) -> None:
    reports = [Training("keras", "mnist", 50.0, 3, AT_SECONDS, (), pid=pid) for pid in (7, 8)]
    rows = join_trainings(_snapshot(script, reports))
    assert [row.key for row in rows] == [("", 7), ("", 8)]
    assert rows[0].causes == ()


def test_a_slow_rank_is_named_and_better_shares_with_their_gain(script: Any) -> None:
    row = _only(script, make_ranks(own=(0.1, 0.15), waiting=(0.052, 0.002), step_s=0.155))
    assert [cause.text for cause in row.causes] == [
        "GPU:1 takes 150 ms for its share; others wait up to 50 ms for it."
    ]
    assert row.advice is not None
    assert sum(row.advice.shares) == 820 + 568
    # proportional: 820 rows in 0.1 s and 568 in 0.15 s end together after 1388 / (8200 + 3787) s
    assert row.advice.gain == pytest.approx(
        0.155 / (0.155 - 0.15 + 1388 / (8200 + 3786.7)) - 1, abs=0.01
    )
    text = "\n".join(line.text for line in training_lines(row, AT_SECONDS, 120))
    assert f"{' + '.join(map(str, row.advice.shares))} would give +" in text


def test_advice_follows_the_plan_s_curves_where_every_rank_has_one(script: Any) -> None:
    """A tenth of a step depends on the rows, so fewer rows save no more than that."""
    times: dict[str, Any] = {"own": (0.1, 0.15), "waiting": (0.052, 0.002), "step_s": 0.155}
    fixed = ((0.0, 0.18), (820.0, 0.2)), ((0.0, 0.135), (568.0, 0.15))
    row = _only(script, make_ranks(**times, curves=fixed))
    assert row.advice is not None
    assert 0.02 <= row.advice.gain <= 0.155 / (0.155 - 0.1 * 0.15) - 1
    text = "\n".join(line.text for line in training_lines(row, AT_SECONDS, 120))
    assert "if own work follows the plan's curves" in text
    by_rows = _only(script, make_ranks(**times)).advice
    assert by_rows is not None
    assert by_rows.gain > 2 * row.advice.gain
    for broken in (((5.0, 2.0), (4.0, 1.0)), ((0.0, 0.0), (1e18, 1e-9))):
        assert _only(script, make_ranks(**times, curves=(fixed[0], broken))).advice == by_rows
    assert _only(script, make_ranks(**times, curves=fixed, most=(2000, 568))).advice == row.advice
    full = make_ranks(**times, curves=fixed, most=(820, 568))
    assert _only(script, full).advice is None, (
        "a second pass on the faster device would take longer"
    )


def test_equal_work_and_little_waiting_is_nothing_to_mend(script: Any) -> None:
    row = _only(
        script,
        make_ranks(own=(0.16, 0.158), waiting=(0.001, 0.003), plan_samples_per_second=8_200.0),
    )
    assert (row.causes, row.advice) == ((), None)


def test_exchange_is_what_the_slowest_rank_waits_too(script: Any) -> None:
    row = _only(script, make_ranks(own=(0.1, 0.1), waiting=(0.06, 0.06)))
    assert _kinds(row) == ["exchange"]


def test_input_throttling_and_a_neighbour_are_seen(script: Any) -> None:
    even: dict[str, Any] = {"own": (0.1, 0.1), "waiting": (0.0, 0.0)}
    assert _kinds(_only(script, make_ranks(**even, input_s=0.06))) == ["input"]
    hot = script.sample(1, throttled_percent=value(45), throttle_reasons=("power cap",))
    row = _only(script, make_ranks(**even), devices=(script.sample(0), hot))
    assert [cause.text for cause in row.causes] == [
        "GPU:1 is throttled 45 % of the time: power cap."
    ]
    (cause,) = msgspec.to_builtins(row.causes)
    figures = {"rank": "GPU:1", "seconds": 0.0, "part": 0.45, "others_wait": False}
    assert cause == {"kind": "power", "text": row.causes[0].text, **figures}, "as --json has it"
    own, other = script.process(4000, 0), script.process(99, 1, samples_per_second=LOST)
    row = _only(script, make_ranks(**even), processes=(own, other))
    assert [cause.text for cause in row.causes] == [
        "Process 99 of ada also computes on GPU:1 (87 % of it)."
    ]
    idle = msgspec.structs.replace(other, sm_percent=value(0))
    assert _kinds(_only(script, make_ranks(**even), processes=(idle,))) == []
    server = msgspec.structs.replace(other, serves_others=True)
    assert _kinds(_only(script, make_ranks(**even), processes=(server,))) == []


def test_a_silent_rank_says_since_when_and_its_figures_are_old(script: Any) -> None:
    quick, hung = make_ranks()
    row = _only(script, (quick, msgspec.structs.replace(hung, updated_at=AT_SECONDS - 42)))
    assert [cause.text for cause in row.causes] == ["GPU:1 has been silent for 42 s."]
    assert row.samples_per_second == quick.samples_per_second
    assert row.advice is None
    shown = rank_table(row, 80, 5)[0][2].text
    assert "silent for 42 s" in shown
    assert "~158 ms" in shown
    slow_steps = msgspec.structs.replace(hung, updated_at=AT_SECONDS - 42, step_s=20.0)
    assert "silent" not in _kinds(_only(script, (quick, slow_steps)))


def test_changes_of_shares_stand_with_their_reasons_newest_first(script: Any) -> None:
    changes = (
        ShareChange(
            880, AT_SECONDS - 7200, (768, 560), (820, 568), "SIM:1 slower by 9 % since step 860"
        ),
        ShareChange(
            12_040,
            AT_SECONDS - 190,
            (820, 568),
            (904, 484),
            "GPU:1 slower by 38 % since step 12 020",
        ),
    )
    lines = training_lines(_only(script, make_ranks(changes=changes)), AT_SECONDS, 160)
    newest, oldest = (line.text.strip() for line in lines[-2:])
    assert newest == (
        "2 Step 12 040, 3 min 10 s ago: GPU:1 slower by 38 % since step 12 020; 820 + 568 to "
        "904 + 484."
    )
    assert oldest.startswith("1 Step 880, 2 h ago: SIM:1 slower by 9 %")


def test_a_rank_that_ran_out_of_memory_is_named(script: Any) -> None:
    said = "GPU:1 ran out of memory at step 1,204: passes of 48 -> 24 rows, 0.3 s"
    lines = training_lines(_only(script, make_ranks(retreats=1, retreat=said)), AT_SECONDS, 160)
    assert any(said in line.text for line in lines)


def test_a_training_below_its_plan_without_a_cause_says_so(script: Any) -> None:
    row = _only(
        script,
        make_ranks(own=(0.15, 0.15), waiting=(0.001, 0.001), plan_samples_per_second=10_000.0),
    )
    text = "\n".join(line.text for line in training_lines(row, AT_SECONDS, 100))
    assert "82 % of the plan's 10 000" in text
    said = " ".join(text.split())
    assert "No cause was found. Of a step, input takes at most 1 %, waiting 0 %" in said
    assert "Threads wait for cores 0 % of the time" in said


def test_a_crowded_host_is_a_cause_where_the_kernel_does_not_count_delays(script: Any) -> None:
    """A load of 16 on 2 cores, and no measurement of any rank that shows it."""
    slow = make_ranks(own=(0.15, 0.15), waiting=(0.001, 0.001), plan_samples_per_second=10_000.0)
    host = msgspec.structs.replace(script.snapshot().host, load_1min=16.0, cores=2)
    row = _only(script, slow, host=host)
    assert _kinds(row) == ["host_starved"]
    text = " ".join(line.text.strip() for line in training_lines(row, AT_SECONDS, 160))
    assert "load is 16 on 2 cores" in text
    assert "No cause was found" not in text
    as_planned = make_ranks(own=(0.15, 0.15), waiting=(0.001, 0.001))
    assert _kinds(_only(script, as_planned, host=host)) == []


def snapshot_with(*reports: Training) -> Snapshot:
    """Return a snapshot of only these reports."""
    host = HostSample(
        cpu_percent=0.0,
        load_1min=0.0,
        memory_used_bytes=0,
        memory_total_bytes=1,
        cores=1,
        hostname="",
    )
    return Snapshot(
        at_seconds=AT_SECONDS,
        interval_seconds=1.0,
        devices=(),
        processes=(),
        host=host,
        sampling_seconds=0.0,
        reports=reports,
    )


@given(st.permutations(range(6)), st.lists(st.floats(0, 100), min_size=6, max_size=6))
def test_the_order_of_reports_changes_nothing_and_only_ranks_that_report_count(
    order: list[int], ages: list[float]
) -> None:
    reports = [
        msgspec.structs.replace(
            make_ranks()[rank % 2], rank=rank, pid=rank, world=6, updated_at=AT_SECONDS - age
        )
        for rank, age in enumerate(ages)
    ]
    snapshot = snapshot_with(*reports)
    (row,) = join_trainings(snapshot)
    shuffled = msgspec.structs.replace(snapshot, reports=tuple(reports[place] for place in order))
    (again,) = join_trainings(shuffled)
    assert [again.ranks, again.samples_per_second] == [
        row.ranks,
        pytest.approx(row.samples_per_second),
    ]
    fresh = [each.samples_per_second for each, age in zip(reports, ages, strict=True) if age <= 5]
    assert row.samples_per_second == pytest.approx(sum(fresh))
    assert sum(cause.kind == "silent" for cause in row.causes) == 6 - len(fresh)


@given(st.integers(40, 200), st.floats(0, 30), st.floats(0, 30), st.booleans())
def test_every_line_fits_at_every_width(
    width: int, own: float, waiting: float, silent: bool
) -> None:
    first, second = make_ranks(own=(own, 0.01), waiting=(waiting, 0.0), plan_samples_per_second=1e5)
    second = msgspec.structs.replace(
        second, updated_at=AT_SECONDS - 999 * silent, tokens_per_second=1e6
    )
    snapshot = snapshot_with(first, second)
    (row,) = join_trainings(snapshot)
    lines = [*training_table([row], width, 9)[0], *rank_table(row, width, 9)[0]]
    columns_need = 79  # with tokens/s
    assert all(cells(line.text) <= max(width, columns_need) for line in lines)
    assert all(cells(line.text) <= width for line in training_lines(row, AT_SECONDS, width))


_RATES = st.sampled_from([0.0, 1e-320, 1e-9, 0.1, 60.0, 1e18])
_COUNTS = st.sampled_from([0, 1, 64, 1 << 40, (1 << 62) - 1])
_CURVES = st.lists(st.tuples(_RATES, _RATES), max_size=4).map(tuple)


@given(
    st.lists(st.tuples(_RATES, _RATES, _COUNTS, _COUNTS), min_size=1, max_size=4), _RATES, _CURVES
)
def test_any_figures_that_a_file_may_hold_are_shown_at_once(
    figures: list[tuple[float, float, int, int]],
    step_s: float,
    curve: tuple[tuple[float, float], ...],
) -> None:
    reports = [
        Training(
            "t",
            "w",
            own,
            share,
            AT_SECONDS,
            (LiveDevice("x", 0, share, own, micro, own, waiting, "", curve, micro),),
            training="t",
            rank=rank,
            world=len(figures),
            step_s=step_s,
            input_s=own,
            pid=rank,
        )
        for rank, (own, waiting, share, micro) in enumerate(figures)
    ]
    snapshot = snapshot_with(*reports)
    (row,) = join_trainings(snapshot)
    assert len(rank_table(row, 100, 9)[0]) == 1 + len(figures)
    assert training_table([row], 100, 9)[0]
    assert training_lines(row, AT_SECONDS, 100)


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0.001, 20), st.integers(1, 100))
def test_a_work_bar_fills_its_width_and_shows_any_work(
    own: float, waiting: float, longest: float, width: int
) -> None:
    done, waits, rest = work_bar(own, waiting, longest, width)
    assert len(done.text + waits.text + rest.text) == width
    assert bool(done.text) == (own > 0)


def test_panels_fill_the_height_and_every_rank_has_a_row_where_it_can() -> None:
    for height, frame, has_graphs in ((22, 0, False), (38, 2, True), (46, 2, True), (68, 2, True)):
        rows = arrange_trainings(height, frame, 3, PanelRows(8, 5))
        assert sum(rows.values()) == height
        assert (rows["#trainings"], rows["#ranks"]) == (4 + frame, 10 + frame)
        assert bool(rows["#training-graphs"]) == has_graphs
    crowded = arrange_trainings(22, 0, 40, PanelRows(40))
    assert crowded["#causes"] >= 4
    assert sum(crowded.values()) == 22
    both = arrange_trainings(38, 2, 1, PanelRows(2, 5, lanes=2, shares=2))
    assert min(both.values()) > 0
    assert sum(both.values()) == 38


SECONDS = st.floats(0, 10)


@given(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS), SECONDS, st.integers(1, 100))
def test_a_step_s_bar_fills_its_width_in_the_order_of_its_parts(
    parts: tuple[float, ...], more: float, width: int
) -> None:
    step = RankStep(*parts)
    spans = part_bar(step, step.step_s + more, width)
    drawn = "".join(span.text for span in spans)
    assert len(drawn) == width
    signs = [part.sign for part in PARTS]
    places = [signs.index(sign) for sign in drawn if sign in signs]
    assert places == sorted(places)
    assert (OWN_WORK.sign in drawn) == (step.own_work_s > 0)
    for part, seconds in zip(PARTS, parts, strict=True):
        share = seconds / (step.step_s + more) if step.step_s + more else 0.0
        assert abs(drawn.count(part.sign) - share * width) <= 2


def test_input_is_most_of_the_bar_where_it_is_most_of_the_step(script: Any) -> None:
    """The rest of the bar is waiting."""
    ranks = make_ranks(own=(0.01, 0.008), waiting=(0.001, 0.003), input_s=0.293, step_s=0.304)
    row = _only(script, ranks)
    for line in rank_table(row, 120, 5)[0][1:]:
        assert line.text.count(INPUT.sign) > 15 * line.text.count(WAITING.sign)
        assert line.text.count(INPUT.sign) > 15 * line.text.count(OWN_WORK.sign)
    assert _kinds(row) == ["input"]


@pytest.mark.parametrize("width", range(40, 121, 8))
def test_the_legend_has_every_part_and_fits(width: int) -> None:
    drawn = legend_line(width)
    assert cells(drawn.text) <= width
    for part in PARTS:
        tones = [span.tone for span in drawn.spans if part.sign in span.text]
        assert tones == [part.tone]
        assert part.name.split()[0] in drawn.text
    ascii_signs = {to_ascii(part.sign) for part in PARTS}
    assert len(ascii_signs) == len({part.tone for part in PARTS}) == len(PARTS)


def _with_steps(reports: Sequence[Training]) -> list[Training]:
    """Return reports with the last steps of each rank. The second began to report them later."""
    return [
        msgspec.structs.replace(
            each,
            last_steps=tuple(
                LastStep(number, 0.01, each.devices[0].own_work_s, each.devices[0].waiting_s, 0.0)
                for number in range(100 + 2 * each.rank, 110)
            ),
        )
        for each in reports
    ]


def test_lanes_show_the_steps_that_all_ranks_tell_of_on_one_scale(script: Any) -> None:
    row = _only(script, _with_steps(make_ranks()))
    quick, slow, scale = (line.text for line in lane_lines(row.ranks, 150, 5))
    assert "steps 102 to 109" in scale
    own, waiting = OWN_WORK.sign, WAITING.sign
    assert quick.count(waiting) > 4 * quick.count(own)
    assert slow.count(own) > 4 * slow.count(waiting)
    assert len(quick[7:].split()) == 8, "a blank ends each step"
    assert quick.startswith(" GPU:0 ")
    early, late = _with_steps(make_ranks())
    apart = [early, msgspec.structs.replace(late, last_steps=late.last_steps[-1:])]
    *_, below = lane_lines(_only(script, apart).ranks, 150, 5)
    assert "the last step of each rank" in below.text, "reports of other moments"
    assert lane_lines(_only(script, make_ranks()).ranks, 150, 5) == ()


CHANGES = (
    ShareChange(50, AT_SECONDS - 100, (694, 694), (780, 608), "GPU:1 slower by 10 %"),
    ShareChange(90, AT_SECONDS - 50, (780, 608), (820, 568), "GPU:1 slower by 9 %"),
)


def test_shares_over_time_have_the_number_of_the_change_where_it_was(script: Any) -> None:
    row = _only(script, make_ranks(changes=CHANGES))
    first, second, marks = (
        line.text for line in share_lines(row.ranks, row.changes, AT_SECONDS, 100, 4)
    )
    places = [marks.index(number) for number in "12"]
    assert [first.index(f" {share} ") for share in (780, 820)] == places
    assert [second.index(f" {share} ") for share in (608, 568)] == places
    assert " GPU:0 694 " in first
    levels = [first[place + 6] for place in places]
    assert levels == sorted(levels), "a larger share is higher"
    assert levels[-1] > second[places[-1] + 6]
    said = "\n".join(line.text for line in training_lines(row, AT_SECONDS, 160))
    assert "2 Step 90, 50 s ago: GPU:1 slower by 9 %" in said
    assert share_lines(row.ranks[:1], row.changes, AT_SECONDS, 100, 4) == (), "other ranks"


def test_a_training_that_will_change_its_shares_by_itself_says_so(script: Any) -> None:
    pending = PendingShares(1, 2)
    row = _only(script, make_ranks(own=(0.1, 0.15), waiting=(0.052, 0.002), pending=pending))
    said = " ".join(line.text for line in training_lines(row, AT_SECONDS, 300))
    assert "about to change its shares by itself" in said
    assert "1 of 2 windows" in said
    assert "would give" not in said


def test_a_training_that_ends_keeps_its_last_figures_and_its_summary(script: Any) -> None:
    told: list[str] = []

    def find_summary(run: str) -> list[str]:
        told.append(run)
        return ["speed: 8 165 samples/s"] if len(told) > 1 else []

    ended = EndedTrainings(find_summary)
    row = _only(script, make_ranks(run="20261129-120000-abcd"))
    assert ended.add_ended([row], AT_SECONDS) == (row,)
    (early,) = ended.add_ended([], AT_SECONDS + 1)
    assert early.summary == (), "it isn't written yet"
    other = _only(script, [OTHER])
    shown, kept = ended.add_ended([other], AT_SECONDS + 12)
    assert shown == other
    assert kept.samples_per_second == row.samples_per_second
    said = "\n".join(line.text for line in training_lines(kept, AT_SECONDS + 12, 100))
    assert "Ended 12 s ago." in said
    assert "speed: 8 165 samples/s" in said
    assert "others wait up to 150 ms" in said
    assert "would have given" in said
    assert "wasn't asked to change them" in said
    (table, *_), _ = training_table([kept], 100, 5), None
    assert "ended 12 s ago" in table[1].text
    assert {span.tone for span in table[1].spans if span.text.strip()} <= {"dim", "text"}
    narrow = training_table([kept], 72, 5)[0][1].text
    assert "ended" in narrow
    assert "…" not in narrow
    assert kept not in ended.add_ended([other], AT_SECONDS + 700)


@pytest.mark.parametrize(("seen", "words"), [(1, "after 1 of the 3"), (5, "gain wasn't there")])
def test_a_training_that_has_ended_says_why_its_shares_stayed(
    script: Any, seen: int, words: str
) -> None:
    pending = PendingShares(seen, 3)
    row = _only(script, make_ranks(own=(0.1, 0.15), waiting=(0.052, 0.002), pending=pending))
    ended = EndedTrainings(lambda _: ())
    ended.add_ended([row], AT_SECONDS)
    (kept,) = ended.add_ended([], AT_SECONDS + 12)
    said = "\n".join(line.text for line in training_lines(kept, AT_SECONDS + 12, 200))
    assert words in said
    assert "about to change" not in said


class _Past:
    """The last ticks of every device, a second apart."""

    def __init__(self, read: Callable[[str, str], tuple[float | None, ...]], ticks: int) -> None:
        self.ticks = ticks
        self._read = read

    def history(self, key: str, metric: str, newest: int) -> tuple[float | None, ...]:
        return self._read(key, metric)[-newest:]

    def times(self, newest: int) -> tuple[float, ...]:
        return tuple(AT_SECONDS + tick for tick in range(self.ticks))[-newest:]


def _graph_lines(
    row: TrainingRow, samples: Sequence[DeviceSample], past: _Past, width: int, height: int
) -> tuple[Line, ...]:
    return training_graph_lines(row, samples, past, (width, height), 120.0, 1.0)


def test_graphs_sum_the_devices_and_compare_them_with_the_plan(script: Any) -> None:
    """The plan's samples/s are marked at their height. With ranks elsewhere there is no sum."""
    values = {"gpu-0": (4000.0, None, 4800.0), "gpu-1": (3000.0, 3200.0, 3300.0)}

    def read(key: str, metric: str) -> tuple[float | None, ...]:
        return values[key] if metric == "samples_per_second" else (300.0, 310.0, 320.0)

    samples = script.sample(0), script.sample(1)

    def graphs(row: TrainingRow, height: int = 32) -> list[str]:
        lines = _graph_lines(row, samples, _Past(read, 3), 70, height)
        assert len(lines) == height
        return [line.text for line in lines]

    planned = graphs(_only(script, make_ranks(plan_samples_per_second=9_000.0)))
    heads = [row for row in planned if "samples/s" in row]
    whole, first, second = heads
    assert whole.startswith(" all devices 8 165 samples/s")
    assert whole.endswith("plan 9 000")
    assert first.startswith(" GPU:0 4 800 samples/s")
    assert second.startswith(" GPU:1 3 300 samples/s")
    below = [planned[planned.index(head) + 1].split()[0] for head in heads]
    assert below == ["10k", "5000", "5000"], "one scale for all devices"
    assert planned[1][6:].startswith("─────")
    slower = graphs(_only(script, make_ranks(plan_samples_per_second=1_000.0)))
    assert slower[6][6:].startswith("─────"), "near the lower end"
    assert len([row for row in graphs(_only(script, make_ranks(world=3))) if "/s" in row]) == 2
    beside = graphs(_only(script, make_ranks()), 12)
    assert not any("GPU" in row for row in beside), "there is no room for all devices"
    assert any("power 640 W" in row for row in beside)


@pytest.mark.parametrize(
    ("high", "said"), [(6000.0, "2,700 rows"), (ENDLESS, "at least 2,700 rows")]
)
def test_a_bound_of_the_noise_scale_is_drawn_as_one(high: float, said: str, script: Any) -> None:
    noise = NoiseScale(2700.0, 2700.0, high, 400)
    row = msgspec.structs.replace(_only(script, make_ranks()), noise=noise)
    samples = script.sample(0), script.sample(1)
    lines = _graph_lines(row, samples, _Past(lambda *_: (2600.0, 2700.0), 2), 100, 32)
    assert any(f"noise scale {said}" in line.text for line in lines)


@given(st.integers(1, 12), st.integers(20, 250), st.integers(1, 60), st.integers(1, 400))
def test_graphs_fill_their_panel_at_every_size(
    devices: int, width: int, height: int, ticks: int
) -> None:
    samples = [
        DeviceSample(device=Device(f"gpu-{index}", index, "", "gpu", None))
        for index in range(devices)
    ]
    ranks = [
        msgspec.structs.replace(make_ranks(ids=(f"gpu-{index}", ""))[0], rank=index, world=devices)
        for index in range(devices)
    ]
    (row,) = join_trainings(msgspec.structs.replace(snapshot_with(*ranks), devices=tuple(samples)))
    past = _Past(lambda *_: ((1.0, None, 3.0) * ticks)[:ticks], ticks)
    lines = _graph_lines(row, samples, past, width, height)
    assert len(lines) == (height if height >= 5 else 0)
    assert all(cells(line.text) <= width for line in lines)
    (why,) = _graph_lines(row, (), past, max(width, 50), height)
    assert why.text.strip() == "The monitor sees none of its devices."


def test_the_monitor_has_a_column_for_own_work_if_it_is_known(script: Any) -> None:
    row = DeviceRow(script.sample(0), work=(0.03, 0.07))
    for width in (80, 120, 160):
        (head, first, second), _ = device_lines([row, DeviceRow(script.sample(1))], width, 3)
        assert "work" in head.text
        assert "30 %" in first.text
        assert "–" in second.text
        assert cells(first.text) <= width
    assert "work" not in device_lines([DeviceRow(script.sample(0))], 120, 3)[0][0].text


def test_text_and_json_have_trainings(script: Any) -> None:
    snapshot = _snapshot(script, make_ranks())
    text = snapshot_text(snapshot, 100, colour=False)
    assert "GPU:1 takes 158 ms for its share; others wait up to 150 ms for it." in text
    document = msgspec.to_builtins(snapshot_document(snapshot))
    assert "reports" not in document
    (training,) = document["trainings"]
    assert [(rank["own_work_s"], rank["waiting_s"]) for rank in training["ranks"]] == [
        (0.008, 0.152),
        (0.158, 0.002),
    ]
    assert training["causes"][0]["kind"] == "unequal"
    assert sum(training["advice"]["shares"]) == 1388


def test_a_process_that_names_no_device_is_a_row(script: Any) -> None:
    row = _only(
        script,
        [Training("torch", "w", 9.0, 1, AT_SECONDS, (), pid=7, training="x", rank=0, world=1)],
    )
    assert [(rank.rank, rank.device, rank.samples_per_second) for rank in row.ranks] == [
        (0, "", 9.0)
    ]


def test_a_training_whose_rows_are_unknown_has_steps_and_holds_no_state(script: Any) -> None:
    device = LiveDevice("gpu-0", 0, 0, 0.0)
    facts: dict[str, Any] = {"rank": 0, "world": 1, "step_s": 0.02, "without_loader": True}
    report = Training("torch", "w", 0.0, 50, AT_SECONDS, (device,), pid=7, training="x", **facts)
    said = "\n".join(line.text for line in training_lines(_only(script, [report]), AT_SECONDS, 160))
    assert "50.00 steps/s" in said
    assert "state" not in said


def test_ranks_on_one_device_are_distinguished_by_their_numbers(script: Any) -> None:
    row = _only(script, make_ranks(ids=("cpu", "cpu")))
    assert row.causes[0].text.startswith("Rank 1 takes 158 ms for its share")


def test_of_a_file_that_trains_the_name_is_shown(script: Any) -> None:
    """The name is at the end of its path, which would be cut."""
    reports = [
        msgspec.structs.replace(each, workload="/home/ada/work/models/train.py")
        for each in make_ranks()
    ]
    rows = join_trainings(_snapshot(script, reports))
    for width in (60, 80, 120):
        assert "train.py" in training_table(rows, width, 5)[0][1].text
