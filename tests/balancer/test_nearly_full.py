"""A faster layout whose memory was nearly full: why it isn't the plan, in results and screens."""

from __future__ import annotations

import msgspec
import pytest

from evener.balancer.events import Finished, Observed, Started
from evener.balancer.journal import Header, JournalContents, ObservationEntry
from evener.balancer.request import Request
from evener.balancer.result.judge import SearchEnd
from evener.balancer.result.outcome import build_outcome
from evener.balancer.result.sentences import write_verdict
from evener.balancer.search.layouts import LayoutOptions
from evener.balancer.search.search import Search
from evener.balancer.session_state import SessionState, advance
from evener.balancer.types import (
    Belief,
    End,
    Layout,
    MeasurementDoubt,
    ModelState,
    Probe,
    Problem,
    Result,
    Stage,
    Stop,
    Timed,
)
from evener.balancer.verdict import Verdict
from evener.devices.types import Device
from evener.tui.view.balance_lines import format_fastest
from tests.support.verdicts import candidate, judged, result, standing

GIB = 1 << 30
PROBLEM = Problem(
    2, (5 * GIB, 3 * GIB), state=ModelState(1 << 32, 1 << 30), shards=True, max_global_batch=64
)
WARNING = (MeasurementDoubt("short_of_memory", 1.5, 0),)


def run_in_shards(shares: tuple[int, int], rate: float, *, is_full: bool) -> Timed:
    """Return a measured step of a model in shards, with this many samples/s."""
    step = sum(shares) / rate
    return Timed(
        Probe(Layout("shard", shares, state=(0.6, 0.4)), Stage.SHARD, 1.0),
        *(step, 0.999 * step, 1.001 * step, 9),
        (GIB, GIB),
        *((0.1, 0.1), 0.2, 10.0),
        WARNING if is_full else (),
    )


SLOWER = run_in_shards((3, 3), 9.91, is_full=False)
FASTER = run_in_shards((11, 0), 14.77, is_full=True)


def finish(*seen: Timed, problem: Problem = PROBLEM) -> Finished:
    """Return the result of a search that measured these steps."""
    search = Search(problem, LayoutOptions(shards=True))
    for one in seen:
        search.tell(one)
    report = search.report()
    assert report is not None
    devices = tuple(Device(f"gpu-{i}", i, "made up", "gpu", None) for i in range(2))
    header = Header("r", "2026-01-01T00:00:00Z", Request(), devices, "train.py:build", "torch", "0")
    entries = tuple(ObservationEntry(one, 60.0) for one in seen)
    return build_outcome(JournalContents(header, entries, 0), report, SearchEnd(End(Stop.LATE), 60))


def find_verdict(*seen: Timed, problem: Problem = PROBLEM) -> Verdict:
    found = finish(*seen, problem=problem).found
    assert found is not None
    return found


def test_memory_is_the_reason_and_not_the_size_of_the_batch() -> None:
    found = find_verdict(SLOWER, FASTER)
    assert found.chosen.batches == (3, 3)
    (rival,) = found.rivals
    assert (rival.batches, rival.why_not) == ((11, 0), "memory")
    remarks = " ".join(write_verdict(found).remarks)
    assert "11 + 0 on GPU:0 + GPU:1" in remarks
    assert "14.77 samples/s, 49.0 % more" in remarks
    assert "memory" in remarks
    assert "tolerance" not in remarks


def test_samples_per_joule_are_compared_with_a_layout_that_has_room() -> None:
    """The plan is the fastest of these, so it gives up no speed for its samples per joule."""
    problem = msgspec.structs.replace(PROBLEM, objective="samples-per-joule")
    seen = [msgspec.structs.replace(one, watts=(300.0, 200.0)) for one in (SLOWER, FASTER)]
    found = find_verdict(*seen, problem=problem)
    assert found.chosen.batches == (3, 3)
    assert found.objective is not None
    assert found.objective.gain is None


def test_where_every_layout_in_shards_was_nearly_full_the_fastest_is_the_plan() -> None:
    found = find_verdict(msgspec.structs.replace(SLOWER, warnings=WARNING), FASTER)
    assert found.chosen.batches == (11, 0)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_plan_names_no_larger_batch_that_would_run_out_of_memory(is_full: bool) -> None:
    """It names others: a smaller batch within the tolerance was chosen then."""
    larger = run_in_shards((11, 0), 10.0, is_full=is_full)
    finished = finish(SLOWER, larger)
    kinds = [one.kind for one in finished.plan.evidence]
    assert finished.plan.layout.batches == (3, 3)
    assert kinds.count("larger_batch") == (not is_full)


def test_the_screen_of_a_running_search_does_not_call_it_a_larger_batch() -> None:
    best = Result(SLOWER.probe.layout, SLOWER.throughput, 1)
    state = advance(SessionState(), Started("r", ("GPU:0", "GPU:1"), "train.py:build", 60.0, 0))
    for one in (SLOWER, FASTER):
        state = advance(state, Observed(one, Belief((), ""), best, 1, 0, 6.0))
    said = format_fastest(state)
    assert said.startswith("14.77 at 11: ")
    assert "memory" in said
    assert "larger batch" not in said


def test_it_is_said_beside_its_speed_too_where_the_plan_s_own_is_uncertain() -> None:
    full = candidate("shard", FASTER.probe.layout)
    found = judged(
        result(candidate("shard", SLOWER.probe.layout), 9.91, 0.3),
        [standing(full, 14.77, 0.49)],
        nearly_full=frozenset({full.layout}),
    )
    (line,) = [one for one in write_verdict(found).remarks if "14.77" in one]
    assert "memory" in line
