"""What is observed on some devices, as if there were no others, and back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evener.balancer.search.subset import DeviceSubset, find_devices_with_room
from evener.balancer.types import (
    Layout,
    MeasurementDoubt,
    OutOfMemory,
    Probe,
    Problem,
    Stage,
    Timed,
)


@st.composite
def subsets(draw: st.DrawFn) -> tuple[int, tuple[int, ...]]:
    """Draw a number of devices, and the positions of at least two of them."""
    devices = draw(st.integers(2, 8))
    kept = draw(st.sets(st.integers(0, devices - 1), min_size=2))
    return devices, tuple(sorted(kept))


@given(subsets(), st.data())
def test_a_layout_of_some_devices_comes_back_from_all(
    drawn: tuple[int, tuple[int, ...]], data: st.DataObject
) -> None:
    devices, kept = drawn
    rows = st.lists(st.integers(1, 50), min_size=len(kept), max_size=len(kept)).map(tuple)
    state = tuple(1 / len(kept) for _ in kept)
    micro = data.draw(st.just(()) | rows)
    layout = Layout("shard", data.draw(rows), micro=micro, state=state)
    subset = DeviceSubset(devices, kept)
    expanded = subset.expand(layout)
    assert subset.select_layout(expanded) == layout
    assert expanded.active == kept
    assert expanded.global_batch == layout.global_batch


@given(subsets())
def test_figures_stay_with_their_devices(drawn: tuple[int, tuple[int, ...]]) -> None:
    devices, kept = drawn
    last = kept[-1]
    shares = tuple(int(i in kept) for i in range(devices))
    state = tuple(share / len(kept) for share in shares)
    memory = tuple(100 + i if i in kept else None for i in range(devices))
    probe = Probe(Layout("shard", shares, state=state), Stage.SHARD, 1.0)
    ran = Timed(
        probe,
        *(0.1, 0.1, 0.1, 9),
        memory,
        (None,) * devices,
        *(0.1, 1.0),
        (MeasurementDoubt("short_of_memory", 1.0, last),),
    )
    others = [i for i in range(devices) if i not in kept]
    elsewhere = [
        OutOfMemory(Probe(_alone(i, devices), Stage.PART, 0.2), (i,), "", 1.0) for i in others
    ]
    subset = DeviceSubset(devices, kept)
    (found,) = subset.select([ran, *elsewhere])
    assert isinstance(found, Timed)
    assert found.memory_bytes == tuple(100 + i for i in kept)
    assert found.is_short_of_memory(len(kept) - 1)
    problem = subset.select_problem(Problem(devices, tuple(range(devices))))
    assert (problem.devices, problem.memory_bytes) == (len(kept), kept)


def _alone(position: int, devices: int) -> Layout:
    return Layout("part", tuple(int(i == position) for i in range(devices)))


def test_only_a_device_that_never_ran_a_row_has_no_room() -> None:
    problem = Problem(3, (None,) * 3)
    first = Probe(_alone(0, 3), Stage.PART, 0.2)
    larger = Probe(Layout("part", (0, 8, 0)), Stage.PART, 0.2)
    seen = [OutOfMemory(first, (0,), "", 1.0), OutOfMemory(larger, (1,), "", 1.0)]
    assert find_devices_with_room(problem, seen) == (1, 2)
    ran = Timed(
        measure_again(first), *(0.1, 0.1, 0.1, 9), (1, None, None), (None,) * 3, *(0.1, 1.0)
    )
    assert find_devices_with_room(problem, [*seen, ran]) == (0, 1, 2), "memory was taken before"
    built = OutOfMemory(Probe(Layout("part", (0, 0, 8)), Stage.PART, 0.2), (2,), "", 1.0)
    assert find_devices_with_room(problem, [built]) == (0, 1, 2)
    nothing = OutOfMemory(built.probe, (2,), "", 1.0, fits_no_rows=True)
    assert find_devices_with_room(problem, [nothing]) == (0, 1)


def measure_again(probe: Probe) -> Probe:
    """Return a later probe of the same layout."""
    return Probe(probe.layout, probe.stage, probe.seconds, probe.turn + 1)
