"""A card with less memory than another of its product tries what that one's memory line allows."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.balancer.search.model.memory import Memory
from evener.balancer.search.search import Search
from evener.balancer.types import OutOfMemory, Problem
from evener.devices.machine import Machine, SimulatedDevice, Sync
from tests.support import recorded_machines
from tests.support.recording_prober import RecordingProber

SAME, UNKNOWN = (0, 0), ()


def card(memory_mib: float, base_mib: float = 1770.0, row_mib: float = 349.0) -> SimulatedDevice:
    """A language model of 150 million parameters on an H200, as recorded."""
    return SimulatedDevice(
        name="H200",
        memory_mib=memory_mib,
        memory_base_mib=base_mib,
        memory_per_sample_mib=row_mib,
        noise=0.003,
        curve=((1, 13.75), (2000, 3512.0)),
        pass_overhead_ms=2.0,
    )


def run_search(
    large: SimulatedDevice, small: SimulatedDevice, batch: int | None, products: tuple[int, ...]
) -> tuple[float, list[int]]:
    """The true samples/s of the plan, and the passes of the small card that ran out of memory."""
    machine = Machine((large, small), Sync(2.0, 1.0))
    memory = tuple(machine.usable_memory_bytes(i) for i in range(2))
    prober, search = RecordingProber(machine, seed=1), Search(Problem(2, memory, batch, products=products))
    search.run(prober.measure)
    best = search.best()
    assert best is not None
    full = [one.probe.layout.pass_rows[1] for one in prober.seen if isinstance(one, OutOfMemory) and 1 in one.devices]
    return machine.samples_per_second(best.layout.shares, best.layout.micro), full


@pytest.mark.parametrize("batch", [96, 192, None])
@pytest.mark.parametrize(("large_mib", "small_mib"), [(40960, 10240), (24576, 6144), (40960, 20480)])
def test_a_small_card_does_not_run_out_where_a_large_one_shows_what_rows_take(
    batch: int | None, large_mib: float, small_mib: float
) -> None:
    """The plan is as good, and children that ran out of memory need not be started again."""
    rate, full = run_search(card(large_mib), card(small_mib), batch, SAME)
    before, _ = run_search(card(large_mib), card(small_mib), batch, UNKNOWN)
    assert not full
    assert rate >= 0.995 * before


def test_a_card_that_is_nearly_full_is_not_tried_at_seven_batches() -> None:
    """Where the line allows no more than what ran, a little more is tried, and that is the end of it."""
    _, full = run_search(card(16384), card(4000), 96, SAME)
    _, before = run_search(card(16384), card(4000), 96, UNKNOWN)
    assert full == [7]
    assert len(before) <= 2, "without the line a smaller batch gives one of its own"


@pytest.mark.parametrize(("base_mib", "row_mib"), [(300.0, 60.0), (1770.0, 120.0), (1770.0, 700.0)])
def test_a_line_that_is_wrong_is_replaced_by_the_card_s_own(base_mib: float, row_mib: float) -> None:
    """Rows that take a sixth, a third or twice of what the large card says: all that fits is found all the same."""
    small = card(10240, base_mib, row_mib)
    for batch in (192, None):
        rate, full = run_search(card(40960), small, batch, SAME)
        before, without = run_search(card(40960), small, batch, UNKNOWN)
        assert rate >= 0.99 * before
        assert len(full) <= len(without)


@settings(max_examples=200, deadline=None)
@given(
    limit=st.integers(1000, 100_000),
    ran=st.integers(0, 500),
    more=st.integers(1, 2000),
    base=st.floats(0.0, 200_000.0),
    slope=st.floats(0.01, 1000.0),
    quantum=st.sampled_from([1, 8]),
)
def test_a_borrowed_line_bounds_the_next_batch_and_never_ends_the_search(
    limit: int, ran: int, more: int, base: float, slope: float, quantum: int
) -> None:
    """Whatever it says, more than what ran is tried; a line of the card's own leaves the batch as it is."""
    ran, batch = ran * quantum, (ran + more) * quantum
    memory = Memory(limit, ran=ran, borrowed=(base, slope))
    bounded = memory.bound(batch, quantum)
    assert ran < bounded <= batch
    assert bounded % quantum == 0
    if bounded > max(1.25 * ran, ran + quantum):
        assert base + slope * bounded <= limit
    own = msgspec.structs.replace(memory, points=((8, 100), (64, 900)))
    assert own.bound(batch, quantum) == batch


def test_devices_of_one_name_are_of_one_product() -> None:
    """As the journal of a run names them."""
    header = recorded_machines.records()["h200x2-torch_mnist"].header
    assert (header.job.problem.products, header.job.problem.limits) == ((0, 0), (0, 0))
    part = recorded_machines.records()["h200x2-torch_llama-60percent-192"].header
    assert (part.job.problem.products, part.job.problem.limits) == ((0, 0), (0, 1))
    other = msgspec.structs.replace(header.devices[1], name="NVIDIA L4")
    assert msgspec.structs.replace(header, devices=(header.devices[0], other)).job.problem.products == (0, 1)
