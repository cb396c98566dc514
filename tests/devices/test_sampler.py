"""The polling thread: its period, its history, and its behaviour when the source hangs or fails."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.devices.sampler import History, Sampler, Subscriber, mark_stale
from evener.devices.types import (
    Device,
    DeviceSample,
    HostSample,
    ProcessSample,
    Snapshot,
    State,
    value,
)
from tests.support.waiting import wait_for

DEVICE = Device("sim-0-a", 0, "A", "sim", None)
HOST = HostSample(
    cpu_percent=1.0, load_1min=0.1, memory_used_bytes=1, memory_total_bytes=2, cores=1, hostname="h"
)


def snapshot(celsius: float = 50.0) -> Snapshot:
    """Return one device and one process."""
    return Snapshot(
        at_seconds=time.time(),
        interval_seconds=1.0,
        devices=(
            DeviceSample(device=DEVICE, temperature_celsius=value(celsius), clock_mhz=value(5)),
        ),
        processes=(
            ProcessSample(
                pid=1,
                start_time=1.0,
                user="u",
                device_id=DEVICE.id,
                device_label="SIM:0",
                cpu_percent=value(3),
            ),
        ),
        host=HOST,
        sampling_seconds=0.0,
    )


class Scripted:
    """A source that calls `act` at each sample."""

    def __init__(self, act: Callable[[int], object] = lambda _: None) -> None:
        self.act, self.count, self.closed = act, 0, 0
        self.at: list[float] = []

    def devices(self) -> tuple[Device, ...]:
        return (DEVICE,)

    def sample(self) -> Snapshot:
        self.count += 1
        self.at.append(time.monotonic())
        self.act(self.count)
        return snapshot(float(self.count))

    def close(self) -> None:
        self.closed += 1


@contextmanager
def sampling(
    source: Scripted, seconds: float, subscriber: Subscriber | None = None
) -> Iterator[Sampler]:
    """Yield a running sampler."""
    with closing(Sampler(source, seconds)) as sampler:
        sampler.start(subscriber)
        yield sampler


def sampler_threads() -> list[threading.Thread]:
    """Return the threads that a sampler left running."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("evener-sampler")]


def test_the_subscriber_gets_every_snapshot_and_the_source_is_closed_once() -> None:
    source, got = Scripted(), list[Snapshot]()
    with sampling(source, 0.1, got.append):
        wait_for(lambda: len(got) >= 3)
    kept = len(got)
    assert kept in (source.count, source.count - 1), "one more may have come while it closed"
    assert source.closed == 1
    assert not sampler_threads()
    values = [each.devices[0].temperature_celsius.value or 0 for each in got]
    assert values == sorted(values)


def test_a_subscriber_that_comes_later_gets_what_follows() -> None:
    """The app is such a subscriber: it is imported while the first reading is taken."""
    source, got = Scripted(), list[Snapshot]()
    with sampling(source, 0.1) as sampler:
        wait_for(lambda: sampler.latest() is not None)
        sampler.start(got.append)
        wait_for(lambda: len(got) >= 2)
        assert len(sampler_threads()) == 2
    assert source.closed == 1


def test_the_period_is_kept_though_sampling_takes_time() -> None:
    """A quarter of the period spent in the source doesn't prolong it: ticks stay on the grid."""
    source = Scripted(lambda _: time.sleep(0.05))
    with sampling(source, 0.2):
        wait_for(lambda: source.count >= 8)
    offsets = sorted((at - source.at[0]) / 0.2 % 1.0 for at in source.at)
    # a drift of 25 ms per tick would spread them evenly, beyond a period
    assert offsets[len(offsets) // 2] < 0.5
    assert (source.at[7] - source.at[0]) / 0.2 >= 6.9


def test_ticks_that_a_slow_source_missed_are_left_out() -> None:
    source = Scripted(lambda count: time.sleep(0.55) if count == 1 else None)
    with sampling(source, 0.2):
        wait_for(lambda: source.count >= 3)
    assert source.at[1] - source.at[0] >= 0.55
    # on the grid at 0.6 and 0.8 s: missed ticks aren't repeated
    assert source.at[2] - source.at[0] >= 0.75


def test_a_source_that_hangs_blocks_no_reader_and_its_readings_turn_stale() -> None:
    free = threading.Event()
    source, got = Scripted(lambda count: free.wait(30) if count == 3 else None), list[Snapshot]()
    sampler = Sampler(source, 0.1)
    sampler.start(got.append)
    wait_for(lambda: source.count == 3)
    wait_for(lambda: got and got[-1].devices[0].temperature_celsius.state is State.STALE)
    started = time.monotonic()
    latest = sampler.latest()
    assert time.monotonic() - started < 10, "it hangs for 30 s"
    assert latest is not None
    assert latest.devices[0].temperature_celsius.value == 2.0
    assert latest.devices[0].temperature_celsius.age_seconds > 0
    assert "does not answer" in latest.devices[0].note
    assert sampler.close(wait_seconds=0.1) is False
    free.set()
    wait_for(lambda: source.closed == 1)
    wait_for(lambda: not sampler_threads())


def test_a_source_that_recovers_is_current_again() -> None:
    free = threading.Event()
    source = Scripted(lambda count: free.wait(60) if count == 2 else None)
    with sampling(source, 0.1) as sampler:
        wait_for(
            lambda: (
                (latest := sampler.latest())
                and latest.devices[0].temperature_celsius.state is State.STALE
            )
        )
        free.set()
        wait_for(
            lambda: (latest := sampler.latest()) and latest.devices[0].temperature_celsius.current
        )


def test_a_source_or_subscriber_that_raises_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def act(count: int) -> None:
        if count == 2:
            raise RuntimeError("a bug")

    def fail(snapshot: Snapshot) -> None:
        got.append(snapshot)
        raise RuntimeError("another")

    source, got = Scripted(act), list[Snapshot]()
    with sampling(source, 0.1, fail):
        wait_for(lambda: len(got) >= 3)
    assert {record.message.split(";")[0] for record in caplog.records} == {
        "the source failed",
        "the subscriber failed",
    }


def test_a_sampler_that_never_started_closes_its_source() -> None:
    source = Scripted()
    assert Sampler(source).close()
    assert source.closed == 1


@pytest.mark.parametrize("interval", [0.0, -1.0, 0.01, math.nan])
def test_an_interval_too_short_to_sample_is_refused(interval: float) -> None:
    with pytest.raises(ValueError, match="interval"):
        Sampler(Scripted(), interval)


@given(
    st.integers(1, 20), st.lists(st.none() | st.floats(-1e6, 1e6), max_size=50), st.integers(0, 30)
)
def test_history_is_the_last_values_oldest_first(
    size: int, numbers: list[float | None], newest: int
) -> None:
    history = History(size)
    for number in numbers:
        sample = DeviceSample(device=DEVICE) if number is None else snapshot(number).devices[0]
        history.add(
            Snapshot(
                at_seconds=0,
                interval_seconds=1,
                devices=(sample,),
                processes=(),
                host=HOST,
                sampling_seconds=0,
            )
        )
    kept = history.values(DEVICE.id, "temperature_celsius")
    assert kept == tuple(numbers[-size:])
    assert (
        history.values(DEVICE.id, "temperature_celsius", newest)
        == kept[max(0, len(kept) - newest) :]
    )
    assert history.values("another", "temperature_celsius") == (None,) * min(size, len(numbers))


def test_a_stale_snapshot_keeps_its_values_and_says_their_age() -> None:
    old = mark_stale(snapshot(), 7.0)
    assert (
        old.devices[0].temperature_celsius
        == mark_stale(snapshot(), 7.0).devices[0].temperature_celsius
    )
    assert (old.devices[0].clock_mhz.state, old.devices[0].clock_mhz.value) == (State.STALE, 5.0)
    assert old.devices[0].power_watts.state is State.UNSUPPORTED
    assert old.processes[0].cpu_percent.age_seconds == 7.0
    assert "7 s" in old.notes[0]


def test_a_history_forgets_what_is_no_longer_reported() -> None:
    """Its memory stays constant once it is full, however many trainings come and go."""
    history = History(10)
    for tick in range(200):
        device = Device(f"gpu-{tick // 40}", 0, "GPU", "gpu", None)
        sample = DeviceSample(device=device, utilization_percent=value(tick))
        seen = msgspec.structs.replace(snapshot(), at_seconds=float(tick), devices=(sample,))
        history.add(seen)
    assert history.count == 200
    assert history.times(3) == (197.0, 198.0, 199.0)
    assert history.values("gpu-4", "utilization_percent", 2) == (198.0, 199.0)
    assert history.values("gpu-0", "utilization_percent", 2) == (None, None)
    kept = [len(column) for column in history._columns.values()]
    assert len(kept) == 1
    assert kept[0] < 20
