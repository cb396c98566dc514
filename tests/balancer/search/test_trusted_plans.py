"""Plans that can be trusted: the best single device races, and nothing measured is faster than the
plan.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.balancer.events import Observed
from evener.balancer.request import Request
from evener.balancer.search.layouts import TIE
from evener.balancer.search.search import Search
from evener.balancer.types import Observation, Problem, Result, Stop, Timed, solo
from evener.devices.machine import Machine, SimulatedDevice, Sync
from evener.plan.file import BEST_SINGLE
from tests.support import machine_families, search_oracle
from tests.support.machines import crawling_machine, samples_per_second
from tests.support.recording_prober import RecordingProber, run_search
from tests.support.search_machines import Bench, benches
from tests.support.whole_sessions import finish

TOLERANCE = 0.02
SLACK = 0.006  # a difference that a measurement can't show
CRAWLING = crawling_machine()
ROWS = 4096


def searched(machine: Machine, seed: int = 0, **options: object) -> tuple[Search, list[Timed]]:
    """Return a whole search on a simulated machine, and everything that ran."""
    memory = tuple(machine.usable_memory_bytes(i) for i in range(len(machine.devices)))
    search = Search(Problem(len(machine.devices), memory, **options))  # type: ignore[arg-type]
    prober = RecordingProber(machine, seed)
    run_search(search, prober.measure)
    return search, [one for one in prober.seen if isinstance(one, Timed)]


def fastest(ran: list[Timed], batch: int | None) -> Timed:
    """Return the fastest of everything that ran at the requested batch."""
    return max(
        (one for one in ran if batch in (None, one.probe.layout.global_batch)),
        key=lambda o: o.samples_per_second,
    )


def true_rate(machine: Machine, seen: Timed | Result) -> float:
    """Return the samples/s without noise."""
    layout = seen.layout if isinstance(seen, Result) else seen.probe.layout
    return samples_per_second(machine, layout.shares, layout.micro)


def test_the_best_single_device_is_measured_at_a_fixed_batch() -> None:
    """Two cards share 300 samples.

    The faster one was measured at 178 and at 300 samples, and 300 counts.
    """
    finished, events = finish(Request(devices="sim:gtx1080ti,gtx1080", global_batch=300))
    layouts = [event.seen.probe.layout for event in events if isinstance(event, Observed)]
    assert solo(2, 0, 300) in layouts
    single = next(one for one in finished.plan.evidence if one.name == BEST_SINGLE)
    assert single.layout.batches == (300, 0)
    assert single.throughput.samples_per_second == pytest.approx(1165, rel=0.01)
    assert (
        finished.plan.throughput.samples_per_second / single.throughput.samples_per_second
        == pytest.approx(1.32, abs=0.01)
    )
    assert "+32 % over SIM:0 alone" in finished.verdict


def falling(name: str, top: int, rate: float, past: float) -> SimulatedDevice:
    """Return a device with its most samples/s at batch `top`.

    Beyond twice that batch it has the fraction `past` of them; 60,000 samples fit.
    """
    step = 1000 * top / rate
    curve = (
        (1, 0.3 * step),
        (top, step),
        (2 * top, 2 * step / past),
        (200_000, 100_000 * step / past / top * 2),
    )
    return SimulatedDevice(
        name=name,
        memory_mib=16_000.0,
        memory_base_mib=500.0,
        memory_per_sample_mib=0.25,
        curve=curve,
        noise=0.01,
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_best_single_device_is_the_fastest_at_any_batch(seed: int) -> None:
    """The first is fastest at 2,048 rows and slower than the second at large batches.

    A split costs too much.
    """
    machine = Machine(
        (falling("A", 2048, 9700, 0.8), falling("B", 16_384, 9000, 0.98)), Sync(60_000.0)
    )
    search, ran = searched(machine, seed, tolerance=0.0)
    single, best = search.evaluation.best_single(), search.best()
    assert single is not None
    assert best is not None
    top = fastest([one for one in ran if one.probe.layout.kind == "solo"], None)
    assert top.probe.layout.active == (0,)
    assert single.layout.active == (0,)
    assert true_rate(machine, single) >= true_rate(machine, top) * (1 - SLACK)
    assert single.layout in {one.candidate.layout for one in search.evaluation.ranking()}
    assert true_rate(machine, best) >= true_rate(machine, top) * (1 - SLACK)


@pytest.mark.parametrize("budget", [5.0, 20.0, 30.0, 50.0, 120.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_device_that_crawls_is_given_what_it_can_do(budget: float, seed: int) -> None:
    """Two equal cards share 4,096 rows, and one takes eight times as long above 1,400."""
    search, ran = searched(CRAWLING, seed, global_batch=ROWS, budget_seconds=budget)
    best = search.best()
    assert best is not None
    rate = true_rate(CRAWLING, best)
    assert rate >= true_rate(CRAWLING, fastest(ran, ROWS)) * (1 - SLACK)
    assert rate >= samples_per_second(CRAWLING, (0, ROWS)) * 0.98
    if budget >= 20:  # 0.77 in one pass: two passes are faster than one above 1,400 rows
        assert rate >= search_oracle.fixed(CRAWLING, ROWS).samples_per_second * 0.8
    if budget >= 30:
        assert rate >= 0.95 * search_oracle.fixed(CRAWLING, ROWS, micro=False).samples_per_second
        assert search.why_stopped() == Stop.SETTLED
    elif budget < 20:
        assert search.why_stopped() == Stop.BUDGET


def test_devices_whose_time_does_not_rise_yet_are_hoped_for_together() -> None:
    """Eight devices are level up to 36 to 865 rows.

    Eight times what ran gains nothing, all that fits gains 15 %.
    """
    machine = machine_families.machine("flat, then linear", 8, 0.002, 1001)
    best = searched(machine, 1001, tolerance=0.0)[0].best()
    assert best is not None
    assert true_rate(machine, best) >= search_oracle.free(machine, 0.0).samples_per_second * 0.97


@pytest.mark.parametrize("budget", [5.0, 20.0, 30.0, 50.0, 120.0])
@pytest.mark.parametrize("seed", range(2))
def test_a_device_that_crawls_bounds_a_free_batch(budget: float, seed: int) -> None:
    """Two thirds of 2,800 rows would suffice.

    A plan that reaches the slow part has a fifth of the samples/s.
    """
    search, ran = searched(CRAWLING, seed, budget_seconds=budget)
    best = search.best()
    assert best is not None
    rate = true_rate(CRAWLING, best)
    assert rate >= true_rate(CRAWLING, fastest(ran, None)) * (1 - TOLERANCE - SLACK)
    if budget >= 30:
        assert rate >= 0.95 * search_oracle.free(CRAWLING, 0.0).samples_per_second
        assert search.why_stopped() == Stop.SETTLED
    elif budget < 20:
        assert search.why_stopped() == Stop.BUDGET


@settings(max_examples=12, deadline=None)
@given(
    benches(fewest=2, most=3),
    st.sampled_from([3.0, 6.0, 12.0]),
    st.sampled_from([None, 5.0, 30.0]),
    st.booleans(),
)
def test_a_resumed_search_is_not_slower_than_what_it_had_measured(
    bench: Bench, first: float, then: float | None, fixed: bool
) -> None:
    """This holds for any budget, before and after."""
    batch = 24 * len(bench.devices) if fixed else None
    seen: list[Observation] = []
    for budget in (first, then):
        search = Search(bench.problem(budget_seconds=budget, global_batch=batch))
        for one in seen:
            search.tell(one)
        while probes := search.ask():
            for one in bench.measure(probes):
                seen.append(one)
                search.tell(one)
        ran = [one for one in seen if isinstance(one, Timed)]
        if any(batch in (None, one.probe.layout.global_batch) for one in ran):
            best = search.best()
            assert best is not None
            # of equals, the simpler or the smaller batch
            within = TIE if fixed else TOLERANCE + SLACK
            least = fastest(ran, batch).samples_per_second * (1 - within)
            assert best.throughput.value >= least


# ---------------------------------------------------------------------- times that fall as the
# batch grows

GRU = (
    (1, 6.6),
    (8, 6.9),
    (64, 7.3),
    (128, 7.39),
    (256, 7.08),
    (512, 9.1),
    (1024, 15.2),
    (2048, 28.4),
    (4096, 55.1),
)


def recorded(slower: float = 1.0) -> SimulatedDevice:
    """Return the recorded step times of a GRU, in which 256 rows take less time than 128."""
    curve = tuple((batch, slower * step) for batch, step in GRU)
    return SimulatedDevice(
        name="GRU",
        memory_mib=5200.0,
        memory_base_mib=1000.0,
        memory_per_sample_mib=1.0,
        curve=curve,
        noise=0.004,
    )


def best_of_falling(machine: Machine, batch: int) -> float:
    """Return the most samples/s of a fixed batch on one device or two, by trying every split."""
    shares = [(share, batch - share) for share in range(batch + 1)]
    return max(samples_per_second(machine, one) for one in shares)


@pytest.mark.parametrize("batch", [200, 320, 512, 900, 3000])
@pytest.mark.parametrize("slower", [1.0, 1.6])
def test_times_that_fall_end_near_the_best(batch: int, slower: float) -> None:
    """256 rows take 7.08 ms and 128 rows 7.39 ms.

    Curves stay level there, and measurements decide.
    """
    machine = Machine((recorded(), recorded(slower)), Sync(1.0))
    search, ran = searched(machine, global_batch=batch)
    best = search.best()
    assert best is not None
    assert true_rate(machine, best) >= true_rate(machine, fastest(ran, batch)) * (1 - SLACK)
    assert samples_per_second(machine, best.layout.shares) >= 0.93 * best_of_falling(machine, batch)


def test_times_that_fall_are_no_matter_for_a_free_batch() -> None:
    """Large batches have the most samples/s, and the plan is within the tolerance of them."""
    machine = Machine((recorded(), recorded(1.6)), Sync(1.0))
    search, _ = searched(machine)
    best = search.best()
    assert best is not None
    top = samples_per_second(machine, (4096, 2600))
    assert samples_per_second(machine, best.layout.shares) >= top * (1 - TOLERANCE - 0.015)


# ---------------------------------------------------------------------- searches that end early


@pytest.mark.parametrize("batch", [64, 512])
@pytest.mark.parametrize("micro", [True, False])
def test_an_interrupted_search_has_no_split_that_is_surely_slower_than_one_device(
    batch: int, micro: bool
) -> None:
    """Gradients take 50 ms over the network, a step of 64 rows alone 6 ms.

    The device alone is measured first.
    """
    devices = tuple(
        SimulatedDevice(
            name=name,
            memory_mib=4000.0,
            memory_base_mib=500.0,
            memory_per_sample_mib=1.0,
            curve=curve,
            noise=0.01,
        )
        for name, curve in (("A", ((1, 2.0), (4000, 250.0))), ("B", ((1, 2.0), (4000, 300.0))))
    )
    machine = Machine(devices, Sync(50.0))
    whole, ran = searched(machine, global_batch=batch, micro=micro)
    alone = samples_per_second(machine, (batch, 0))
    interrupted = Search(whole.problem)
    for one in ran:
        interrupted.tell(one)
        best = interrupted.best()
        if best is not None:
            assert true_rate(machine, best) >= 0.8 * alone  # the other device has 88 % of it
    assert interrupted.best() is not None


@pytest.mark.parametrize("seed", range(12))
def test_no_share_of_the_plan_is_faster_than_its_device_was_alone(seed: int) -> None:
    """Otherwise a gain over one device alone, or a fraction of the sum, is relative to less than
    the best.
    """
    search, _ = searched(machine_families.machine("bent memory", 2, 0.005, seed), seed)
    best, solos = search.best(), search.evaluation.solos()
    assert best is not None
    for i in best.layout.active:
        alone = solos[i]
        assert alone is not None
        own = best.layout.shares[i] / best.layout.global_batch * best.throughput.value
        assert own <= 1.02 * alone.throughput.value
