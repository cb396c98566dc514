"""Whole sessions on simulated devices: completed, stopped, paused, cut off at any line, and
resumed.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.balancer import jobs, journal
from evener.balancer.events import (
    Event,
    Finished,
    Observed,
    Paused,
    ProbeProgress,
    ProbeStarted,
    Started,
)
from evener.balancer.jobs import make_comparison_job
from evener.balancer.journal import JournalContents, ObservationEntry
from evener.balancer.probes.simulated import SimulatedProber
from evener.balancer.request import Request
from evener.balancer.result.sentences import write_next_steps, write_verdict
from evener.balancer.run import OpenRun, begin, open_run
from evener.balancer.session import Session
from evener.balancer.store import runs
from evener.balancer.types import Facts, Probe, Stage
from evener.devices.backend import Discovery
from evener.devices.discover import discover
from evener.errors import DeviceError, NoLayoutError, RequestError
from evener.plan.file import Plan, load_plan, parse_plan, to_json, to_toml
from evener.plan.solver import read_curves, solve_shares
from tests.support.whole_sessions import drive

PAIR = Request(devices="sim:gtx1080ti,gtx1080")

COSTLY = """
[sync]
base_ms = 400.0
[[device]]
name = "fast"
memory_mib = 1000
memory_base_mib = 100.0
memory_per_sample_mib = 8.0
noise = 0.002
curve = [[16, 40.0], [64, 100.0]]
[[device]]
name = "slow"
memory_mib = 1000
memory_base_mib = 100.0
memory_per_sample_mib = 8.0
contention = 0.1
noise = 0.002
curve = [[16, 80.0], [64, 200.0]]
"""


class Ended(Finished, frozen=True):
    """The end of a run, with its name."""

    run: str = ""


def ended(events: list[Event]) -> Ended:
    """Return the last event, with the run that the first one names."""
    begun, end = events[0], events[-1]
    assert isinstance(begun, Started)
    assert isinstance(end, Finished)
    return Ended(**{name: getattr(end, name) for name in end.__struct_fields__}, run=begun.run)


def observed(events: list[Event]) -> list[Probe]:
    """Return the probes that were measured, in order."""
    return [event.seen.probe for event in events if isinstance(event, Observed)]


def test_evidence_says_which_device_alone_was_measured_while_the_others_worked() -> None:
    """Contention slows it then. Raced devices, and devices measured alone, had the machine to
    themselves.
    """
    request = msgspec.structs.replace(PAIR, global_batch=256)
    events = drive(request)
    alone = {
        event.seen.probe.layout.shares
        for event in events
        if isinstance(event, Observed) and event.seen.probe.stage in (Stage.REST, Stage.RACE)
    }
    found = [one for one in ended(events).plan.evidence if one.name.startswith("solo ")]
    assert found
    for one in found:
        shares = tuple(share.batch for share in one.layout.share)
        assert one.busy == (shares not in alone)
    assert any(one.busy for one in found)


def test_the_seed_s_pair_of_cards_is_balanced_in_few_probes() -> None:
    """It reaches at least 2120 samples/s in at most 16 probes, of which two run out of memory.

    The faster card gets three fifths.
    """
    plan = ended(drive(PAIR)).plan
    assert plan.throughput.samples_per_second >= 2120
    assert 0.58 <= plan.ratios[0] <= 0.62
    assert plan.search.probes <= 16
    assert plan.search.out_of_memory <= 2
    assert {"equal shares", "best single device", "solo SIM:0", "solo SIM:1"} <= {
        one.name for one in plan.evidence
    }
    assert parse_plan(to_toml(plan)) == parse_plan(to_json(plan)) == plan


def test_shares_that_nothing_was_compared_with_are_not_recommended() -> None:
    """A budget of 3 s leaves no time for equal shares or one device; a budget of 30 s does."""
    hasty = ended(drive(msgspec.structs.replace(PAIR, budget_seconds=3.0)))
    assert hasty.found is not None
    assert hasty.found.recommendation is not None
    assert (hasty.found.recommendation.action, hasty.found.recommendation.reason) == (
        "measure_again",
        "uncompared",
    )
    assert any("--resume" in step for step in write_next_steps("run", hasty, "", has_measured=True))
    calm = ended(drive(msgspec.structs.replace(PAIR, budget_seconds=30.0)))
    assert calm.found is not None
    assert calm.found.recommendation is not None
    assert calm.found.recommendation.action == "plan"


def test_a_device_that_is_held_back_explains_what_is_missing_of_the_sum() -> None:
    """The warning says for how long the shares are valid, besides the recommendation to
    use them.
    """
    machine = Path(__file__).parent / "search/machines/throttled_in_splits.toml"
    found = ended(drive(Request(devices=f"sim:{machine}", budget_seconds=60.0))).found
    assert found is not None
    (held,) = [one.device for one in found.doubts if one.code == "throttled"]
    words = write_verdict(found)
    assert any("sum of all devices" in line and held in line for line in words.remarks)


@pytest.mark.parametrize("batch", [1400, 4096])
def test_the_shares_of_a_plan_follow_from_its_own_curves_and_walls(batch: int) -> None:
    """This is checked at a batch that fits in one pass, and at one that needs several."""
    plan = ended(drive(msgspec.structs.replace(PAIR, global_batch=batch))).plan
    active = plan.layout.active
    assert all(share.micro <= share.most <= batch for share in active)
    limits = [share.most for share in active]
    solved = solve_shares(read_curves(active), batch, limits, passes=True)
    assert solved
    assert [share.batch for share in active] == pytest.approx(solved, rel=0.03)
    assert not any(share.curve for rival in plan.evidence for share in rival.layout.share)


def test_a_search_keeps_to_the_rows_of_the_data_and_so_does_its_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An epoch keeps 20 steps from the moment when a child has reported the rows.

    The verdict has the number of steps.
    """
    monkeypatch.setattr(
        SimulatedProber, "facts", lambda _self: Facts(engine="simulated", rows=14000)
    )
    events = drive(PAIR)
    assert max(probe.layout.global_batch for probe in observed(events)) <= 700
    assert "An epoch is only 2" in ended(events).verdict
    assert not observed(drive(Request(), resume="last"))


def test_events_come_in_order_and_every_observation_is_journalled_first() -> None:
    """Started, then each probe's start before its end, then the plan, which the journal has too."""
    events = drive(PAIR)
    assert isinstance(events[0], Started)
    begun = [event.probe for event in events if isinstance(event, ProbeStarted)]
    assert sorted(begun, key=repr) == sorted(observed(events), key=repr)
    times = [event.at_seconds for event in events if isinstance(event, Observed)]
    assert times == sorted(times)
    run = runs.load_run("last")
    assert [seen.probe for seen in run.record.observations] == observed(events)
    assert run.end == events[-1]


def test_what_a_run_has_recorded_is_not_copied_for_each_observation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search of hours has thousands of them."""
    copies: list[int] = []
    whole = OpenRun.record

    def count(run: OpenRun) -> JournalContents:
        copies.append(1)
        found: JournalContents = whole.__get__(run)
        return found

    monkeypatch.setattr(OpenRun, "record", property(count))
    events = drive(PAIR)
    assert len(observed(events)) > 8
    assert len(copies) <= 3


class LateReport:
    """The report of a probe. As soon as it is read, other probes report too."""

    def __init__(self, probe: Probe, running: dict[Probe, ProbeProgress]) -> None:
        self._probe, self._running = probe, running

    @property
    def phase_seconds(self) -> float:
        """Return None, because there is no duration yet."""
        for number in range(9):
            probe = msgspec.structs.replace(self._probe, turn=100 + number)
            self._running[probe] = ProbeProgress(probe, "starting", None, None, 0.0)
        return 0.0


def test_a_probe_that_reports_while_the_session_ends_costs_no_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = Session(open_run(PAIR))
    running, finish = session._running, session._finish

    def finish_late() -> Finished:
        (probe,) = session._search.ask() or [session._seen[0].probe]
        late: Any = LateReport(probe, running)
        running[probe] = late
        return finish()

    monkeypatch.setattr(session, "_finish", finish_late)
    try:
        *_, last = session.events()
    finally:
        session.close()
    assert isinstance(last, Finished)
    assert len(running) == 10


def test_one_seed_is_one_run_and_another_is_another() -> None:
    """Only the run's name and date differ."""
    first, second = ended(drive(PAIR)).plan, ended(drive(PAIR)).plan
    assert same(first) == same(second)
    other = ended(drive(msgspec.structs.replace(PAIR, seed=1))).plan
    assert other.throughput != first.throughput


def same(plan: Plan) -> Plan:
    """Return the plan without its date."""
    return msgspec.structs.replace(plan, created="")


def test_where_keeping_in_step_costs_too_much_the_advice_is_one_device_and_why(
    tmp_path: Path,
) -> None:
    """`solo`, and the sentence names the cost."""
    machine = tmp_path / "costly.toml"
    machine.write_text(COSTLY)
    finished = ended(drive(Request(devices=f"sim:{machine}")))
    assert finished.plan.layout.kind == "solo"
    assert finished.plan.ratios == (1.0, 0.0)
    assert re.search(
        r"on SIM:0 alone.*\n.*slower because synchronizing the devices costs \d+ ms",
        finished.verdict,
    )


def test_a_run_cut_off_behind_any_line_resumes_to_the_plan_of_the_undisturbed_run(
    tmp_path: Path,
) -> None:
    """No journalled probe is measured again, and the plan is the same to the last digit."""
    machine = tmp_path / "machine.toml"
    machine.write_text(COSTLY.replace("400.0", "20.0"))
    request = Request(devices=f"sim:{machine}", budget_seconds=60.0)
    whole = ended(drive(request))
    path = runs.journal_path(whole.run)
    lines = path.read_bytes().splitlines(keepends=True)
    for cut in range(1, len(lines)):
        path.write_bytes(b"".join(lines[:cut]) + b'{"entry":"seen","se')
        before = [entry.seen.probe for entry in journal.read(path).seen]
        events = drive(Request(), resume=whole.run[:-1])
        assert isinstance(events[0], Started)
        assert events[0].replayed == len(before), cut
        assert not set(before) & set(observed(events)), cut
        assert ended(events).plan == whole.plan, cut
        assert ended(events).verdict == whole.verdict, cut


def test_a_complete_run_resumed_measures_nothing_and_writes_nothing() -> None:
    """The plan is available at once."""
    whole = ended(drive(PAIR))
    content = runs.journal_path(whole.run).read_bytes()
    again = drive(Request(), resume="last")
    assert not observed(again)
    assert ended(again).plan == whole.plan
    assert runs.journal_path(whole.run).read_bytes() == content


def test_a_finished_run_goes_on_with_what_was_measured_when_it_gets_more_time() -> None:
    """It gets a larger budget, or more seconds. A plain resume then has the last plan."""
    first = ended(drive(PAIR))
    larger = drive(Request(budget_seconds=160.0), resume=first.run)
    assert observed(larger)
    assert ended(larger).at_seconds > 130
    assert ended(larger).plan.search.probes == first.plan.search.probes + len(observed(larger))
    assert relative_half_width(ended(larger)) < relative_half_width(first)
    chosen = ended(larger).plan.layout.batches
    assert (
        sum(probe.layout.shares == chosen for probe in observed(larger))
        >= len(observed(larger)) // 2 - 1
    )
    assert not observed(drive(Request(), resume=first.run))
    assert runs.load_run(first.run).plan == ended(larger).plan
    session = Session(open_run(Request(), resume=first.run, extend_seconds=30.0))
    more = list(session.events())
    session.close()
    assert 0 < ended(more).at_seconds - ended(larger).at_seconds <= 30


def relative_half_width(finished: Finished) -> float:
    """Return the relative half-width of the plan's samples/s."""
    figure = finished.plan.throughput
    return (figure.high - figure.low) / 2 / figure.samples_per_second


def test_a_stop_keeps_the_best_plan_so_far_and_resuming_goes_on() -> None:
    """Interrupted after some probes, it has their plan; resumed, the plan of the
    undisturbed run.
    """
    session = Session(open_run(msgspec.structs.replace(PAIR, pace=0.02)))
    seen = 0
    events: list[Event] = []
    for event in session.events():
        events.append(event)
        seen += isinstance(event, Observed)
        if seen == 6:
            session.stop()
    session.close()
    stopped = ended(events)
    assert stopped.interrupted
    assert 6 <= stopped.plan.search.probes < 12
    assert "interrupted" in stopped.plan.search.why_stopped
    resumed = ended(drive(Request(), resume="last"))
    assert not resumed.interrupted
    undisturbed = ended(drive(PAIR))
    assert msgspec.structs.replace(same(resumed.plan), search=undisturbed.plan.search) == same(
        undisturbed.plan
    )
    assert resumed.plan.search.probes == undisturbed.plan.search.probes


def test_a_stop_before_anything_is_measured_is_reported_and_can_be_resumed() -> None:
    """There is no plan."""
    session = Session(open_run(msgspec.structs.replace(PAIR, pace=1.0)))
    threading.Timer(0.2, session.stop).start()
    with pytest.raises(NoLayoutError, match="stopped before anything was measured") as fault:
        list(session.events())
    session.close()
    assert session.run_id in fault.value.remedy
    assert ended(drive(Request(), resume=session.run_id)).plan.search.probes > 6


def test_a_pause_starts_no_probe_until_it_is_over() -> None:
    """The event says so. Then the run continues to its plan."""
    session = Session(open_run(PAIR))
    session.pause()
    events = session.events()
    assert isinstance(next(events), Started)
    assert isinstance(next(events), Paused)
    session.unpause()
    assert isinstance(list(events)[-1], Finished)
    session.close()


def test_a_pause_takes_none_of_the_runs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later measurements, the budget and the search use one clock.

    It stands still even if the prober's clock goes on.
    """
    waited = [0.0]
    own_clock = SimulatedProber.now
    monkeypatch.setattr(SimulatedProber, "now", lambda self: own_clock(self) + waited[0])
    session = Session(open_run(PAIR))
    session.pause()
    events = session.events()
    while not isinstance(next(events), Paused):
        pass
    waited[0] = 5000.0
    session.unpause()
    rest = list(events)
    session.close()
    end = rest[-1]
    assert isinstance(end, Finished)
    observed = [event.at_seconds for event in rest if isinstance(event, Observed)]
    assert 0 < max(observed) <= end.at_seconds < 200
    assert end.plan.search.seconds == pytest.approx(end.at_seconds, abs=1.0)


def test_an_interrupt_while_waiting_for_events_leaves_the_session_whole() -> None:
    """The reader of the events may be interrupted and continue."""
    session = Session(open_run(PAIR))
    first = session.events()
    next(first)
    assert isinstance(list(session.events())[-1], Finished)
    session.close()
    session.close()


def test_a_larger_budget_goes_on_where_a_smaller_one_ended() -> None:
    """The run's own request counts, except for the new budget."""
    small = ended(drive(msgspec.structs.replace(PAIR, budget_seconds=5.0)))
    assert "budget" in small.plan.search.why_stopped.lower()
    large = ended(drive(Request(budget_seconds=300.0), resume=small.run))
    assert large.plan.search.probes > small.plan.search.probes
    assert large.plan.throughput.samples_per_second >= 2120


def test_a_run_is_not_resumed_on_other_devices(tmp_path: Path) -> None:
    """The machine file changed meanwhile."""
    machine = tmp_path / "machine.toml"
    machine.write_text(COSTLY)
    run = ended(drive(Request(devices=f"sim:{machine}"))).run
    machine.write_text(COSTLY.replace("slow", "other"))
    with pytest.raises(RequestError, match="was measured on"):
        Session(open_run(Request(), resume=run))


def test_a_run_that_is_going_on_is_neither_resumed_nor_deleted() -> None:
    """The lock says which process has it."""
    session = Session(open_run(PAIR))
    with pytest.raises(RequestError, match=r"is going on \(process \d+\)"):
        Session(open_run(Request(), resume=session.run_id))
    with pytest.raises(RequestError, match="is going on"):
        runs.delete_run(session.run_id)
    session.close()
    runs.delete_run(session.run_id)
    assert not runs.list_runs()


def test_two_sessions_on_the_same_cores_are_refused_unless_shared() -> None:
    """It doesn't matter how the CPU is cut. The error names the session that holds the cores.

    Simulated devices aren't locked.
    """
    one = Session(open_run(Request(devices="cpu:0", workload="synthetic")))
    with pytest.raises(
        DeviceError, match=r"CPU:0 is being measured by another evener \(process \d+, run "
    ):
        Session(open_run(Request(devices="cpu/1", workload="synthetic")))
    beside = Session(open_run(Request(devices="cpu/1", workload="synthetic", share=True)))
    beside.close()
    one.close()
    Session(open_run(Request(devices="cpu:0", workload="synthetic"))).close()
    first, second = Session(open_run(PAIR)), Session(open_run(PAIR))
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (Request(devices="sim:nothing"), "nothing"),
        (Request(devices="gpu:77"), "gpu|GPU|NVIDIA"),
        (Request(devices="cpu:9"), "9"),
        (Request(devices="sim:t4", workload="nothing"), "nothing"),
        (Request(devices="sim:t4", workload="/no/such/file.py:build"), "/no/such/file.py"),
        (Request(devices="sim:t4", framework="jax"), "jax"),
        (Request(devices="sim:t4", global_batch=0), "--global-batch is 0"),
        (Request(devices="sim:t4", global_batch=10, multiple_of=4), "multiple"),
        (Request(devices="sim:t4", global_batch=64, max_global_batch=32), "--max-global-batch"),
        (Request(devices="sim:t4", max_global_batch=4, multiple_of=8), "--max-global-batch"),
        (Request(devices="sim:t4", multiple_of=0), "--multiple-of"),
        (Request(devices="sim:t4", budget_seconds=0), "--budget"),
        (Request(devices="sim:t4", budget_seconds=float("nan")), "--budget"),
        (Request(devices="sim:t4", tolerance=1.5), "--tolerance"),
        (Request(devices="sim:t4", objective="speed"), "speed"),
        (Request(devices="sim:t4", precision="int3"), "int3"),
        (Request(devices="sim:t4", pace=-1.0), "--pace"),
        (Request(devices="cpu", workload="synthetic", settings={"nosuch": 1}), "nosuch"),
    ],
)
def test_a_wrong_request_is_a_one_line_error_that_names_the_fault_and_leaves_no_run(
    wrong: Request, named: str
) -> None:
    """The error has a remedy, and comes before anything is started."""
    with pytest.raises((RequestError, DeviceError), match=named) as fault:
        Session(open_run(wrong))
    assert fault.value.remedy
    assert not runs.list_runs()


@pytest.mark.parametrize("name", ["nope", "../../etc", "last", ""])
def test_a_run_that_is_not_there_is_named(name: str) -> None:
    """It is named even if there are other runs, and whatever path the name would make."""
    drive(PAIR)
    runs.delete_run("last")
    with pytest.raises(RequestError):
        Session(open_run(Request(), resume=name))
    drive(PAIR)
    if name != "last":
        with pytest.raises(RequestError):
            runs.load_run(name)


def test_a_state_folder_that_can_t_be_written_is_a_one_line_error(own_state: Path) -> None:
    """It names the variable that moves the folder."""
    own_state.write_text("a file")
    with pytest.raises(RequestError, match=str(own_state)) as fault:
        Session(open_run(PAIR))
    assert "XDG_STATE_HOME" in fault.value.remedy


def test_runs_are_listed_newest_first_with_their_state() -> None:
    """Runs may be finished, cut off or unreadable.

    One that was cut off still has the plan that follows from its measurements.
    """
    first = ended(drive(PAIR))
    second = ended(drive(PAIR))
    third = ended(drive(PAIR))
    path = runs.journal_path(second.run)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:8]))
    broken = runs.journal_path(third.run)
    broken.write_bytes(b"{\n{\n")
    listed = {one.run: one for one in runs.list_runs()}
    assert listed[first.run].state == "finished"
    assert listed[first.run].samples_per_second == first.plan.throughput.samples_per_second
    assert listed[second.run].state == "stopped"
    assert listed[third.run].state == "unreadable"
    assert "line 1" in listed[third.run].trouble
    cut_off = runs.load_run(second.run)
    assert cut_off.plan is not None
    assert cut_off.end is not None
    assert cut_off.end.interrupted
    assert "run was cut off" in cut_off.plan.search.why_stopped


def test_a_run_s_state_says_whether_it_runs_and_why_it_failed(tmp_path: Path) -> None:
    """Running while any process holds its lock; failed with its reason.

    No state suggests an action that isn't possible.
    """
    session = Session(open_run(msgspec.structs.replace(PAIR, pace=0.02)))
    events = session.events()
    next(event for event in events if isinstance(event, Observed))
    (running,) = runs.list_runs()
    assert running.state == "running"
    assert running.probes >= 1
    session.stop()
    list(events)
    session.close()
    assert [one.state for one in runs.list_runs()] == ["stopped"]
    machine = tmp_path / "small.toml"
    machine.write_text(COSTLY.replace("memory_mib = 1000", "memory_mib = 90"))
    with pytest.raises(NoLayoutError) as fault:
        drive(Request(devices=f"sim:{machine}"))
    (failed,) = (one for one in runs.list_runs() if one.state == "failed")
    assert failed.trouble == runs.load_run(failed.run).trouble == fault.value.message


def test_a_plan_travels_through_its_file_unchanged(tmp_path: Path) -> None:
    """Saved, loaded and saved again, it has the same bytes."""
    plan = ended(drive(PAIR)).plan
    plan.save(tmp_path / "plan.toml")
    load_plan(tmp_path / "plan.toml").save(tmp_path / "again.toml")
    assert (tmp_path / "plan.toml").read_bytes() == (tmp_path / "again.toml").read_bytes()


def test_every_line_of_a_journal_is_one_of_the_known_entries() -> None:
    """The last is the plan."""
    run = ended(drive(PAIR)).run
    record = journal.read(runs.journal_path(run))
    assert isinstance(record.entries[-1], Finished)
    assert sum(isinstance(entry, ObservationEntry) for entry in record.entries) >= 8


def test_a_comparison_discovers_its_devices_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session measures the devices that were found to choose its layouts."""
    asked: list[str] = []

    def count(spec: str, ray_address: str = "") -> Discovery:
        asked.append(spec)
        return discover(spec, ray_address=ray_address)

    monkeypatch.setattr(jobs, "discover", count)
    session = Session(begin(make_comparison_job(Request(devices="sim:t4,t4"), ["solo", "even"])))
    session.close()
    assert asked == ["sim:t4,t4"]
    assert session._run.job.request.compare is not None
    assert session._run.job.request.compare.families == ("solo", "even")
