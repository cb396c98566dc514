"""A model that no device can hold is planned in shards: state by memory, rows by speed.

If it doesn't fit, a message says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.balancer.events import Finished, Observed
from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.search.layouts import BALANCE, LayoutOptions
from evener.balancer.search.model.memory import UNBOUNDED
from evener.balancer.search.search import Search
from evener.balancer.search.sharding import (
    DIGITS,
    RowDemand,
    Sharding,
    divide_state,
    measure_headroom,
    propose,
    state_bytes_at_peak,
)
from evener.balancer.session import Session
from evener.balancer.types import (
    MEASURED_PART,
    Layout,
    MeasurementDoubt,
    ModelState,
    Observation,
    OutOfMemory,
    Probe,
    Problem,
    Result,
    Stage,
    Timed,
)
from evener.devices.simulated import load_machine
from evener.plan.file import load_plan
from evener.tui.cli.main import run

MACHINE = Path(__file__).parents[3] / "docs" / "howto" / "shards.toml"
GIB = 1 << 30


def need(base: float, row: float, fixed: float, row_seconds: float) -> RowDemand:
    """Return a device's demand whose memory is a line: `base` bytes, and `row` bytes a row."""
    return RowDemand(((1, base + row),), row, fixed, row_seconds)


@st.composite
def demands(draw: st.DrawFn) -> RowDemand:
    """Return a demand whose memory was measured with one to four batches."""
    base, rows, used = draw(st.floats(0, GIB)), 0, 0.0
    points = []
    for _ in range(draw(st.integers(1, 4))):
        more = draw(st.integers(1, 16))
        rows += more
        used += more * draw(st.floats(0, GIB / 8))
        points.append((rows, base + used))
    row = draw(st.floats(0, GIB / 8))
    if len(points) == 1:
        row = min(row, used / rows)  # so that no rows take at least the base
    return RowDemand(tuple(points), row, draw(st.floats(0, 1)), draw(st.floats(0.001, 10)))


NEEDS = demands()


@given(NEEDS, st.floats(0, 100), st.floats(0, 100))
def test_memory_by_rows_rises_through_the_measured_points(
    needed: RowDemand, rows: float, more: float
) -> None:
    """The rows that take a number of bytes are where the curve reaches it."""
    for batch, used in needed.points:
        assert needed.bytes(batch) == pytest.approx(used)
    assert needed.bytes(rows) <= needed.bytes(rows + more) * (1 + 1e-9) + 1
    size = needed.bytes(rows)
    found = needed.rows_within(size)
    assert found == UNBOUNDED or needed.bytes(found) == pytest.approx(size, rel=1e-6, abs=64)


@given(
    st.lists(st.tuples(st.floats(1, 100), NEEDS), min_size=2, max_size=5),
    st.floats(0.1, 200),
    st.floats(0, 50),
    st.floats(0, 0.5),
    st.none() | st.integers(1, 300),
    st.sets(st.integers(0, 3)),
)
def test_state_and_rows_fit_each_device_whenever_a_division_is_returned(
    devices: list[tuple[float, RowDemand]],
    state: float,
    step: float,
    gradients: float,
    batch: int | None,
    without: set[int],
) -> None:
    """The state fills the memory that rows leave. With a row on each device, no part is too large.

    Devices without rows compute one at first, which doesn't count.
    """
    limits, needs = [size * GIB for size, _ in devices], [own for _, own in devices]
    whole = int(state * GIB)
    sizes = ModelState(whole, GIB, int(step * GIB), gradient_bytes=int(gradients * whole))
    problem = Problem(
        len(limits), tuple(map(int, limits)), global_batch=batch, state=sizes, shards=True
    )
    holders = frozenset(without & set(range(len(limits) - 1)))
    division = divide_state(limits, needs, problem, holders)
    pairs = zip(limits, needs, strict=True)
    left = sum(max(0.0, limit - device.bytes(0)) for limit, device in pairs)
    if division is None:
        return
    assert sum(division.parts) == pytest.approx(1.0)
    assert whole <= left
    for part, limit, device in zip(division.parts, limits, needs, strict=True):
        own = part - 1e-3  # parts are rounded
        at_peak = own * state_bytes_at_peak(sizes, division.in_passes)
        assert at_peak + device.bytes(1) <= limit * (1 + 1e-9)
        assert own * whole + device.bytes(0) <= limit * (1 + 1e-9)
        assert own * (whole + step * GIB) <= limit * (1 + 1e-9)
    assert {i for i, rows in enumerate(division.rows) if not rows} == holders
    proposal = propose(division, needs, problem)
    if proposal is None:  # less than a whole row on each device
        return
    layout = proposal.layout
    assert layout.active == tuple(range(len(limits)))
    assert not holders.intersection(layout.computing)
    assert batch in (None, layout.global_batch)
    assert proposal.rate(1.0) < proposal.rate()


CARD = st.tuples(st.integers(4, 40), st.floats(0.1, 0.3), st.floats(0.01, 0.1))


@given(st.lists(CARD, min_size=2, max_size=8))
def test_rounded_parts_leave_the_memory_of_the_rows_for_which_they_were_chosen(
    cards: list[tuple[int, float, float]],
) -> None:
    """On two cards as on eight, no part is larger by more than its last decimal."""
    limits = [size * GIB for size, _, _ in cards]
    needs = [need(GIB, row * GIB, 0.01, seconds) for _, row, seconds in cards]
    state = ModelState(int(0.6 * sum(limits)), GIB)
    division = divide_state(limits, needs, Problem(len(cards), tuple(limits), state=state))
    assert division is not None
    assert sum(division.parts) == pytest.approx(1.0, abs=1e-9)
    for part, rows, limit, own in zip(division.parts, division.rows, limits, needs, strict=True):
        least = max(0.0, part - 10.0**-DIGITS) * state.state_bytes
        assert least + own.bytes(rows) <= limit + 1


def test_more_memory_never_makes_it_not_fit() -> None:
    needs = [need(GIB, GIB / 16, 0.0, 1 / rate) for rate in (10.0, 5.0)]
    state = ModelState(20 * GIB, GIB)
    fits = [
        divide_state([size * GIB, 8 * GIB], needs, Problem(2, (0, 0), state=state)) is not None
        for size in range(8, 33)
    ]
    assert fits == sorted(fits)
    assert {False, True} == set(fits)


def test_the_larger_card_takes_the_rows_that_the_smaller_has_no_memory_for() -> None:
    """Their steps take equally long with any number of rows."""
    needs = [need(GIB / 2, GIB / 2, 0.1, 1e-4)] * 2
    problem = Problem(2, (0, 0), max_global_batch=64, state=ModelState(12 * GIB, GIB))
    division = divide_state([24 * GIB, 8 * GIB], needs, problem)
    assert division is not None
    rows = [
        own.rows_within(limit * GIB - part * 12 * GIB)
        for limit, own, part in zip((24, 8), needs, division.parts, strict=True)
    ]
    assert sum(rows) == pytest.approx(2 * (24 + 8 - 12 - 1), rel=0.02), "all of the memory"
    assert min(rows) > 1


LLAMA_TABLE = """
[[device]]
name = "H200 under {} GiB"
memory_mib = {}
memory_base_mib = 17450
memory_per_sample_mib = 640
curve = [[1, 88.0], [12, 96.0], [48, 250.0]]
noise = 0.01
"""
LLAMA_SHARDS = """
[shards]
state_mib = 17439
gathered_mib = 450
gradients_mib = {}
gather_ms = 25.0
fragments = 0.03
"""
# samples/s of the one that holds the model by itself, which has room for 12 rows
FASTEST_ALONE = 12 / 0.096


def balance_llama(
    path: Path, gradients: int, gpus: tuple[int, ...] = (24, 8)
) -> tuple[Any, list[Any]]:
    """Return the plan for a Llama of 1.1 billion parameters on H200s with these GiB, and its whole
    steps.

    The measured values are those of bf16 autocast, fused AdamW and rows of 256 tokens. The whole
    steps are the outcomes of steps in shards.
    """
    tables = [LLAMA_TABLE.format(size, size * 1024) for size in gpus]
    path.write_text(LLAMA_SHARDS.format(gradients) + "".join(tables))
    request = Request(devices=f"sim:{path}", max_global_batch=64, budget_seconds=120.0)
    session, seen, plan = Session(open_run(request)), [], None
    for event in session.events():
        if isinstance(event, Observed) and event.seen.probe.layout.kind == "shard":
            seen.append(event.seen)
        elif isinstance(event, Finished):
            plan = event.plan
    session.close()
    return plan, seen


@pytest.mark.parametrize("gradients", [4360, 0])
def test_no_whole_step_of_a_llama_runs_out_of_memory_although_fragments_stay_free(
    own_folder: Path, gradients: int
) -> None:
    """Rows don't use the memory that is kept free for fragments beside the state."""
    plan, seen = balance_llama(own_folder / "llama.toml", gradients)
    assert {type(one) for one in seen} == {Timed}
    assert plan.layout.kind == "shard"
    rate = plan.throughput.samples_per_second
    least = 1.5 if gradients else 1.2
    assert rate >= least * FASTEST_ALONE, "gradients leave their memory to activations"


LORA_TABLE = """
[[device]]
name = "H200 under {} GiB"
memory_mib = {}
memory_base_mib = 6300
memory_per_sample_mib = 250
curve = [[1, 290.0], [6, 330.0], [48, 2500.0]]
noise = 0.15
"""
LORA_SHARDS = """
[shards]
state_mib = 6200
gathered_mib = 900
gradients_mib = 100
gather_ms = 25.0
"""


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_fit_exactly_get_a_plan_whose_error_the_budget_reduces(
    own_folder: Path, seed: int
) -> None:
    """Each card has room for one row, and steps of 0.3 s vary by 15 %.

    The part of a card, rounded to four decimals, is larger by up to 0.3 MB than its rows leave.
    """
    path = own_folder / "lora.toml"
    tables = [LORA_TABLE.format(size, size * 1024) for size in (6, 3)]
    path.write_text(LORA_SHARDS + "".join(tables))
    request = Request(devices=f"sim:{path}", max_global_batch=64, budget_seconds=95.0, seed=seed)
    session = Session(open_run(request))
    plan = next(event.plan for event in session.events() if isinstance(event, Finished))
    session.close()
    assert plan is not None
    assert plan.layout.kind == "shard"
    assert plan.throughput is not None
    width = (plan.throughput.high - plan.throughput.low) / 2 / plan.throughput.samples_per_second
    assert width <= 0.08


SLOWER = "curve = [[1, 900.0], [12, 960.0], [48, 2500.0]]"


@pytest.mark.parametrize(
    ("gpus", "batch", "least"),
    [
        ((24, 8), None, 1.05),  # the large card holds the model itself, with room for fewer rows
        ((12, 9), None, 0.3),  # neither holds it: with rows on both, less than a tenth
        ((12, 9), 64, 0.12),  # in passes: with rows on both, each would last 0.9 s
    ],
)
def test_a_card_that_only_delays_holds_state_without_rows(
    own_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[int, int],
    batch: int | None,
    least: float,
) -> None:
    """The second card takes 0.9 s for a row, for which the first takes 0.09 s."""
    large, small = (LLAMA_TABLE.format(size, size * 1024) for size in gpus)
    curve = next(line for line in small.splitlines() if line.startswith("curve"))
    path = own_folder / "slow.toml"
    path.write_text(LLAMA_SHARDS.format(4360) + large + small.replace(curve, SLOWER))
    asked = ("--global-batch", str(batch)) if batch else ("--max-global-batch", "64")
    words = ("-d", f"sim:{path}", *asked, "--budget", "120s")
    code, said = balance(capsys, *words, "--export", "plan.toml")
    assert code == 0, said
    plan = load_plan("plan.toml")
    first, second = plan.layout.share
    assert second.batch == 0
    assert second.state > 0.3
    assert second.held_bytes
    assert first.state + second.state == pytest.approx(1)
    assert plan.throughput is not None
    assert plan.throughput.samples_per_second >= least * FASTEST_ALONE
    machine = load_machine(path)
    for position, share in enumerate(plan.layout.share):
        used = machine.part_bytes(position, max(1, share.micro), share.state, batch is not None)
        assert used <= 0.97 * machine.usable_memory_bytes(position)
    assert f"{first.batch}" in said
    assert "on SIM:0, the model in shards" in said
    monkeypatch.setattr(Sharding, "without_rows", None)
    code, _ = balance(capsys, *words, "--export", "before.toml")
    before = load_plan("before.toml").throughput if code == 0 else None
    assert before is None or before.samples_per_second < plan.throughput.samples_per_second


def balance(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = run(["balance", *words])
    seen = capsys.readouterr()
    return code, seen.out or seen.err


def test_a_model_that_no_device_holds_gets_a_plan_in_shards(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = balance(capsys, "-d", f"sim:{MACHINE}", "--export", "plan.toml", "--json")
    assert code == 0, said
    plan, machine = load_plan("plan.toml"), load_machine(MACHINE)
    assert (plan.layout.kind, plan.schema) == ("shard", 3)
    large, small = plan.layout.share
    assert large.batch > 1.5 * small.batch, "rows by speed"
    assert large.state > 2 * small.state, "state by memory"
    for position, share in enumerate(plan.layout.share):
        used = machine.part_bytes(position, share.micro, share.state)
        assert used <= machine.usable_memory_bytes(position)
        assert used <= share.peak_bytes <= 1.003 * used
        assert 0 < share.held_bytes < used, "without activations"
        assert machine.memory_bytes(position, 1) > machine.usable_memory_bytes(position), (
            "no device holds it all"
        )
    assert "the model in shards" in json.loads(said)["text"][0]
    assert large.curve


def test_a_fixed_batch_is_taken_in_passes_where_shards_leave_too_little(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = balance(
        capsys, "-d", f"sim:{MACHINE}", "--global-batch", "300", "--export", "plan.toml"
    )
    assert code == 0, said
    layout = load_plan("plan.toml").layout
    assert layout.global_batch == 300
    assert any(share.micro < share.batch for share in layout.share)


def smaller(state: str, tmp_path: Path) -> Path:
    path = tmp_path / "machine.toml"
    path.write_text(
        MACHINE.read_text()
        .replace("state_mib = 24400", f"state_mib = {state}")
        .replace("25100", state)
    )
    return path


def test_where_one_device_holds_the_model_it_is_compared_with_shards(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """24 GB can hold the 12 GB of the model, 8 GB can't: one device alone, or both in shards."""
    code, said = balance(capsys, "-d", f"sim:{smaller('12000', own_folder)}", "--json")
    assert code == 0, said
    names = [one["name"] for one in json.loads(said)["evidence"]]
    assert "the model in shards" in json.loads(said)["text"][0]
    assert any("single" in name or "solo" in name for name in names)


def test_if_each_device_holds_the_model_shards_are_tried_only_on_request(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = smaller("4000", own_folder)
    assert balance(capsys, "-d", f"sim:{path}", "--export", "plan.toml")[0] == 0
    assert load_plan("plan.toml").layout.kind == "split"
    assert run(["compare", "-d", f"sim:{path}", "--layouts", "split,shard", "--json"]) == 0
    names = [one["name"] for one in json.loads(capsys.readouterr().out)["layouts"]]
    assert "shards of the model" in names, "unless they are asked for"


def test_a_model_that_does_not_fit_in_shards_either_is_reported(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = balance(capsys, "-d", f"sim:{smaller('40000', own_folder)}")
    assert code == 1
    assert "in shards" in said
    for label in ("SIM:0", "SIM:1"):
        assert re.search(rf"[GM]iB on {label} for \d+ rows?\b", said), "beside the state"


def test_time_that_ran_out_is_not_called_a_lack_of_memory(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each card ran alone with a part of the state, and there was no time for both together."""
    machine = f"sim:{smaller('24400', own_folder)}"
    code, said = balance(capsys, "-d", machine, "--budget", "0.5s")
    assert code == 1
    assert "doesn't fit" not in said
    assert "--budget 1s" in said
    assert balance(capsys, "-d", machine, "--budget", "1s")[0] == 0


def test_a_dry_run_says_how_large_a_model_could_be(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = smaller("4000", own_folder)
    code, said = balance(capsys, "-d", f"sim:{path}", "--dry-run")
    assert code == 0
    assert (
        "at most 537 million parameters where each device holds the model, and 2.1 billion in "
        "shards"
    ) in said
    code, said = balance(capsys, "-d", f"sim:{MACHINE}", "--dry-run")
    assert code == 1
    assert "Not even one sample fits on SIM:0. AdamW in float32 trains at most" in said


def test_a_machine_whose_devices_need_less_than_the_state_is_refused(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = own_folder / "wrong.toml"
    path.write_text(MACHINE.read_text().replace("25100", "100"))
    code, said = balance(capsys, "-d", f"sim:{path}")
    assert code == 2
    assert "needs less memory for a sample than `shards.state_mib`, 24400" in said


def test_a_plan_in_shards_comes_again_from_its_journal(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert balance(capsys, "-d", f"sim:{MACHINE}", "--export", "plan.toml")[0] == 0
    first = load_plan("plan.toml")
    assert run(["export", "last", "-o", "again.toml"]) == 0
    assert msgspec.structs.replace(load_plan("again.toml"), created="") == msgspec.structs.replace(
        first, created=""
    )


def part_ran(position: int, rows: int, used: float, turn: int) -> Timed:
    """Return a device's measurement alone on its rows, with a 64th of the state."""
    shares = tuple(rows * (i == position) for i in range(2))
    memory = tuple(int(used * GIB) if i == position else None for i in range(2))
    layout = Layout("part", shares)
    return Timed(
        Probe(layout, Stage.PART, 0.2, turn), 0.1, 0.1, 0.1, 9, memory, (None, None), 0.1, 1.0
    )


def ran_out(state: tuple[float, ...], position: int) -> OutOfMemory:
    """Return a whole step of 10 + 6 rows in which a device ran out of memory."""
    layout = Layout("shard", (10, 6), state=state)
    return OutOfMemory(Probe(layout, Stage.SHARD, 0.2), (position,), "", 1.0)


# of two H200s under 24 and 8 GiB: a Llama of 1.1 billion parameters
MEASURED = (
    part_ran(0, 4, 5.36, 0),
    part_ran(1, 4, 5.36, 0),
    part_ran(0, 6, 6.46, 1),
    part_ran(1, 6, 6.46, 1),
    part_ran(0, 10, 9.0, 2),
)
LLAMA = Problem(
    2,
    (24 * GIB, 8 * GIB),
    state=ModelState(round(16.4 * GIB), GIB),
    shards=True,
    max_global_batch=64,
)


# the same measurements, and a budget, if children take 10 s to start
STARTED = tuple(
    msgspec.structs.replace(one, start_seconds=10.0, elapsed_seconds=11.0)
    if one.probe.turn == 0
    else one
    for one in MEASURED
)
LLAMA_IN_90_S = msgspec.structs.replace(LLAMA, budget_seconds=90.0)


def test_where_starts_are_slow_the_first_whole_step_comes_after_two_sizes_of_each_card() -> None:
    """Other rows are measured sooner in whole steps, by a group that runs already."""
    both = STARTED[:4]
    (probe,) = Sharding(LLAMA_IN_90_S, both).next_probes()
    assert probe.stage == Stage.SHARD
    assert {one.stage for one in Sharding(LLAMA_IN_90_S, both[:3]).next_probes()} == {Stage.PART}
    quick = Sharding(LLAMA_IN_90_S, MEASURED[:4]).next_probes()
    assert {one.stage for one in quick} == {Stage.PART}


def test_many_more_rows_than_ran_are_measured_alone_before_the_first_whole_step() -> None:
    """Memory per row may grow with the rows, and a whole step without memory costs a start."""
    four, five = STARTED[:2], [part_ran(i, 5, 5.91, 1) for i in range(2)]
    seen: list[Observation] = [*four, *five]
    alone = Sharding(LLAMA_IN_90_S, seen).next_probes()
    assert {probe.stage for probe in alone} == {Stage.PART}
    rows = {probe.layout.active[0]: max(probe.layout.shares) for probe in alone}
    assert min(rows.values()) > 6
    # twice as much memory for each further row
    measured = [
        msgspec.structs.replace(part_ran(i, rows[i], 5.91 + 1.1 * (rows[i] - 5), 2), probe=probe)
        for i, probe in zip(rows, alone, strict=True)
    ]
    (whole,) = Sharding(LLAMA_IN_90_S, [*seen, *measured]).next_probes()
    assert whole.stage == Stage.SHARD
    assert any(whole.layout.shares[i] < own for i, own in rows.items())
    short = msgspec.structs.replace(LLAMA_IN_90_S, budget_seconds=27.0)
    (probe,) = Sharding(short, seen).next_probes()
    assert probe.stage == Stage.SHARD, "there is no time for it"


def test_rows_between_two_that_ran_need_no_probe_before_a_step_that_is_urgent() -> None:
    """The larger ones don't fit beside the state, and show the memory of those between."""
    seen = [
        *STARTED[:2],
        *(part_ran(i, 20, 5.36 + 16 * 0.64, 1) for i in range(2)),
    ]
    urgent = msgspec.structs.replace(LLAMA_IN_90_S, budget_seconds=40.0)
    (probe,) = Sharding(urgent, seen).next_probes()
    assert probe.stage == Stage.SHARD
    assert min(probe.layout.shares) > 4
    assert max(probe.layout.shares) <= 20


def run_solo(rows: int, step: float, used: int) -> Timed:
    """Return a measurement of the first card alone, which holds a model of 8 billion in 4 bits."""
    probe = Probe(Layout("solo", (rows, 0)), Stage.SOLO, 3.0, rows)
    times = (step, 0.95 * step, 1.05 * step, 5)
    return Timed(probe, *times, (used, None), (step, None), 0.6, 4.5)


def test_after_the_first_whole_step_its_group_runs_more_rows_and_no_slow_card_starts() -> None:
    """One card alone trains a third of the samples/s, and its processes have ended."""
    ran, best = search_small_cards(BALANCE, 120.0)
    assert {probe.layout.kind for probe in ran} == {"shard"}
    assert len({probe.layout.state for probe in ran}) == 1
    assert ran[0].layout.global_batch > 8
    assert best.layout.global_batch > 8


def test_a_comparison_of_requested_layouts_measures_the_slow_card_too() -> None:
    ran, _ = search_small_cards(LayoutOptions(("solo", "shard")), 300.0)
    assert {probe.layout.kind for probe in ran} == {"solo", "shard"}


def search_small_cards(options: LayoutOptions, budget: float) -> tuple[list[Probe], Result]:
    """Return the probes after the first whole step on two small cards, and the best layout.

    The first card holds the model, but its processes take 40 s to start.
    """
    search = Search(
        Problem(
            2,
            (round(5.3 * GIB), round(3.3 * GIB)),
            state=ModelState(4_014_481_408, 1_306_385_280),
            shards=True,
            max_global_batch=64,
            budget_seconds=budget,
        ),
        options,
    )
    first, second = (Probe(Layout("solo", own), Stage.SOLO, 3.0) for own in ((4, 0), (0, 4)))
    search.tell(OutOfMemory(first, (0,), "", 43.8, goes_on=True))
    search.tell(OutOfMemory(second, (1,), "", 40.5, fits_no_rows=True))
    search.tell(run_solo(1, 0.384, 5_044_112_896))
    search.tell(run_solo(2, 0.447, 5_102_396_928))
    for position in range(2):
        one = part_ran(position, 4, 1_745_410_048 / GIB, 0)
        search.tell(msgspec.structs.replace(one, start_seconds=20.0, elapsed_seconds=23.0))
    sharding = search.evaluation.sharding
    assert sharding is not None
    state = sharding.parts or ()
    probe = Probe(Layout("shard", (4, 4), state=state), Stage.SHARD, 1.0, 1)
    started = msgspec.structs.replace(run_whole(probe), start_seconds=21.0, elapsed_seconds=25.0)
    search.tell(started)
    asked: list[Probe] = []
    while probes := search.ask():
        (probe,) = probes
        asked.append(probe)
        alone = msgspec.structs.replace(run_solo(2, 0.447, 5_102_396_928), probe=probe)
        search.tell(run_whole(probe) if probe.layout.state else alone)
    best = search.best()
    assert best is not None
    return asked, best


def run_whole(probe: Probe) -> Timed:
    """Return the measurement of a step of this model in shards, whose rows take 0.13 GiB each."""
    layout = probe.layout
    pairs = zip(layout.shares, layout.state, strict=True)
    memory = tuple(round(part * 4_014_481_408 + (1.16 + 0.13 * rows) * GIB) for rows, part in pairs)
    step = 0.5 + 0.01 * layout.global_batch
    times = (step, 0.98 * step, 1.02 * step, 5)
    return Timed(probe, *times, memory, (None, None), 1.0, 7 * step)


def search_after_parts(problem: Problem) -> tuple[Search, tuple[float, ...]]:
    """Return a search after its measurements of single cards, and each card's part of the state."""
    search = Search(problem)
    for position in range(2):
        layout = Layout("solo", tuple(int(i == position) for i in range(2)))
        search.tell(OutOfMemory(Probe(layout, Stage.SOLO, 3.0), (position,), "", 1.0))
    for seen in STARTED:
        search.tell(seen)
    sharding = search.evaluation.sharding
    assert sharding is not None
    assert sharding.parts
    return search, sharding.parts


def test_a_step_whose_memory_was_nearly_full_is_followed_by_a_smaller_one() -> None:
    """Memory may run out in a training by it, so a layout with more free memory is chosen."""
    search, state = search_after_parts(msgspec.structs.replace(LLAMA_IN_90_S, budget_seconds=200.0))
    probe = Probe(Layout("shard", (10, 6), state=state), Stage.SHARD, 0.2, 3)
    full = Timed(
        probe,
        *(0.2, 0.199, 0.201, 9),
        (23 * GIB, 8 * GIB - (64 << 20)),
        *((0.1, 0.1), 0.2, 10.0),
        (MeasurementDoubt("short_of_memory", 1.5, 1),),
    )
    search.tell(full)
    best = search.best()
    assert best is not None
    assert best.layout == probe.layout, "there is no other plan yet"
    (smaller,) = search.ask()
    assert smaller.stage == Stage.SHARD
    assert smaller.layout.state[1] < state[1]
    ran = msgspec.structs.replace(
        full, probe=smaller, warnings=(), step_seconds=0.3, low_seconds=0.299, high_seconds=0.301
    )
    search.tell(ran)
    best = search.best()
    assert best is not None
    assert best.layout == smaller.layout


@given(st.floats(64e6, 1e12), st.integers(-4, 4))
def test_headroom_is_a_twentieth_of_the_memory_and_more_of_small_memories(
    limit: float, doublings: int
) -> None:
    usual = measure_headroom(limit, 0)
    assert 0.05 * limit <= usual <= 0.1 * limit
    assert usual >= min(0.1 * limit, 320 << 20)
    factor = measure_headroom(limit, doublings) / usual
    assert factor == pytest.approx(2.0 ** max(doublings, -2))


def test_after_a_whole_step_without_memory_the_next_probe_is_a_smaller_whole_step() -> None:
    """The children of single cards ended for it, and would have to start again."""
    parts = Sharding(LLAMA_IN_90_S, STARTED).parts
    assert parts is not None
    seen: list[Observation] = [*STARTED, ran_out(parts, 1)]
    (probe,) = Sharding(LLAMA_IN_90_S, seen).next_probes()
    smaller = Sharding(LLAMA_IN_90_S, seen).parts
    assert (probe.stage, probe.layout.kind, probe.layout.state) == (Stage.SHARD, "shard", smaller)
    assert min(probe.layout.shares) > 0
    layout = probe.layout
    ran = Timed(probe, 0.2, 0.2, 0.2, 9, (20 * GIB, 7 * GIB), (0.1, 0.1), 0.2, 10.0)
    assert all(one.layout != layout for one in Sharding(LLAMA_IN_90_S, [*seen, ran]).next_probes())


def test_where_a_check_runs_out_of_memory_the_card_gets_a_smaller_part() -> None:
    """More of the card stays free, and the layout's samples/s no longer count."""
    search, state = search_after_parts(LLAMA_IN_90_S)
    probe = Probe(Layout("shard", (10, 6), state=state), Stage.SHARD, 0.2)
    ran = Timed(probe, 0.2, 0.2, 0.2, 9, (20 * GIB, 7 * GIB), (0.1, 0.1), 0.2, 10.0)
    check = msgspec.structs.replace(probe, stage=Stage.CHECK, turn=1)
    for last in (ran, OutOfMemory(check, (1,), "", 3.0)):
        search.tell(last)
    (smaller,) = search.ask()
    assert smaller.stage == Stage.SHARD
    assert smaller.layout != probe.layout
    assert smaller.layout.state[1] < probe.layout.state[1]


# 8 billion parameters in 4 bits under 5 and 3 GiB, whose children start in 18 s: position, rows,
# bytes, turn and seconds of a step
SLOW_STARTS = (
    (0, 4, 2_029_353_984, 0, 0.615),
    (1, 4, 2_029_353_984, 0, 0.602),
    (0, 5, 2_160_548_864, 1, 0.591),
    (1, 5, 2_160_548_864, 1, 0.502),
    (1, 9, 2_755_722_240, 2, 0.756),
)


def measure_parts(
    measured: Sequence[tuple[int, int, int, int, float]], start: float, seconds: float
) -> list[Timed]:
    """Return these measurements of single cards.

    Each takes some seconds, and the first of a card `start` seconds more.
    """
    return [
        msgspec.structs.replace(
            part_ran(position, rows, used / GIB, turn),
            step_seconds=step,
            low_seconds=step,
            high_seconds=step,
            first_step_seconds=step,
            elapsed_seconds=seconds + start * (turn == 0),
            start_seconds=start * (turn == 0),
        )
        for position, rows, used, turn, step in measured
    ]


def make_problem(state: int, gathered: int, budget: float) -> Problem:
    """Return the problem of a model in 4 bits on cards of 5 and 3 GiB, with a budget in s."""
    return Problem(
        2,
        (5 * GIB, 3 * GIB),
        state=ModelState(state, gathered),
        shards=True,
        max_global_batch=64,
        budget_seconds=budget,
    )


def probe_next(count: int, budget: float) -> tuple[Probe, ...]:
    """Return the next probes after the first `count` of these measurements, with a budget in s."""
    problem = make_problem(3_947_372_544, 1_295_866_752, budget)
    return Sharding(problem, measure_parts(SLOW_STARTS[:count], 18.0, 4.0)).next_probes()


# the same model on a host whose processes start in 6 s; steps wait for the host
SLOW_HOST = (
    (0, 4, 1_745_896_448, 0, 0.547),
    (1, 4, 1_745_896_448, 0, 0.606),
    (0, 5, 1_869_385_728, 1, 0.549),
    (1, 5, 1_869_385_728, 1, 0.528),
    (1, 8, 2_363_305_984, 2, 0.553),
)


def test_far_more_rows_on_one_card_are_measured_alone_before_a_step_over_both() -> None:
    """13 + 0 rows, predicted to be 0.5 % faster than 5 + 7, ran out of memory on GPUs."""
    problem = make_problem(4_014_481_408, 1_306_385_280, 83.0)
    seen = measure_parts(SLOW_HOST, 6.0, 5.0)
    for probe in Sharding(problem, seen).next_probes():
        assert probe.stage == Stage.PART or all(probe.layout.shares)


def test_fewer_rows_beside_a_larger_part_of_the_state_cost_no_start() -> None:
    """The part of a card leaves it less than the 4 rows that it ran.

    Its child still runs, so a probe of fewer rows takes seconds.
    """
    probes = probe_next(5, 70.0)
    assert {probe.stage for probe in probes} == {Stage.PART}
    assert all(max(probe.layout.shares) < 4 for probe in probes)


def test_a_whole_step_is_measured_while_there_is_time_to_start_it() -> None:
    """Otherwise the search ends without a plan: another size of single cards takes 5 s."""
    (probe,) = probe_next(2, 50.0)
    assert (probe.stage, probe.layout.shares) == (Stage.SHARD, (4, 4))
    assert {probe.stage for probe in probe_next(2, 120.0)} == {Stage.PART}, "there is more time"


@pytest.mark.parametrize(("budget", "seconds"), [(60.0, 0.6), (10.0, 0.2), (None, 3.0)])
def test_the_first_probe_of_a_single_card_takes_a_hundredth_of_the_time_left(
    budget: float | None, seconds: float
) -> None:
    """One step shows its memory; groups, which may run out of memory, need time to start."""
    problem = msgspec.structs.replace(LLAMA, budget_seconds=budget)
    first = Sharding(problem, ()).next_probes()
    assert [(probe.stage, probe.seconds) for probe in first] == [(Stage.PART, seconds)] * 2
    later = Sharding(problem, MEASURED[:2]).next_probes()
    assert budget == 10.0 or {probe.seconds for probe in later} == {3.0}


def test_a_device_that_ran_out_of_memory_gets_a_smaller_part_and_the_other_a_larger_one() -> None:
    first = Sharding(LLAMA, MEASURED).parts
    assert first is not None
    second = Sharding(LLAMA, [*MEASURED, ran_out(first, 1)]).parts
    assert second is not None
    assert second[1] < first[1]
    both = Sharding(LLAMA, [*MEASURED, ran_out(first, 0), ran_out(first, 0)]).parts
    assert both is not None
    assert both[0] < first[0]


def test_what_a_process_needs_outside_of_its_allocator_stays_free_too() -> None:
    """On cards without a memory limit, this model then doesn't fit."""
    state = ModelState(24 * GIB, GIB)
    beside = msgspec.structs.replace(state, beside_bytes=3 * GIB // 2)
    fits, full = (msgspec.structs.replace(LLAMA, state=each) for each in (state, beside))
    assert Sharding(fits, MEASURED).parts
    assert Sharding(full, MEASURED).parts is None


@given(st.integers(0, 2), st.integers(0, 2))
def test_rows_that_ran_beside_a_small_part_do_not_surely_fit_beside_a_larger_one(
    large: int, small: int
) -> None:
    seen: list[Observation] = [*MEASURED]
    for position, count in ((0, large), (1, small)):
        for _ in range(count):
            seen.append(ran_out(Sharding(LLAMA, seen).parts or (), position))
    sharding = Sharding(LLAMA, seen)
    parts = sharding.parts
    assert parts
    _, surely = sharding.curves(Layout("shard", (1, 60), state=parts))[0]
    held = (parts[0] - MEASURED_PART) * 16.4 * GIB
    if held + 9.0 * GIB > 24 * GIB:  # ten rows took 9 GiB
        assert surely < 10


SMALL_TABLE = """
[[device]]
name = "card of {0} GiB"
memory_mib = {1}
memory_base_mib = 17450
memory_per_sample_mib = 640
curve = [[1, 88.0], [12, 96.0], [48, 250.0]]
noise = 0.01
"""


@pytest.mark.parametrize("small", [0, 1, 2])
def test_a_card_without_memory_for_a_row_is_left_out_of_shards(
    own_folder: Path, small: int
) -> None:
    """The others hold the model. Its position doesn't matter."""
    sizes = [16, 12]
    sizes.insert(small, 1)
    tables = [SMALL_TABLE.format(size, size * 1024) for size in sizes]
    path = own_folder / "cards.toml"
    path.write_text(LLAMA_SHARDS.format(0) + "".join(tables))
    request = Request(devices=f"sim:{path}", max_global_batch=64, budget_seconds=120.0)
    session = Session(open_run(request))
    plan = next(event.plan for event in session.events() if isinstance(event, Finished))
    session.close()
    assert plan is not None
    shares = plan.layout.share
    assert plan.layout.kind == "shard"
    assert [bool(share.state) for share in shares] == [size > 1 for size in sizes]
    assert [share.batch > 0 for share in shares] == [size > 1 for size in sizes]
    assert sum(share.state for share in shares) == pytest.approx(1.0)
    large = [share for share in shares if share.state]
    assert large[0].state > large[1].state, "16 GiB hold more than 12"
    assert all(share.curve for share in large)
