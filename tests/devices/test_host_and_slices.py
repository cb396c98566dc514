"""The host line, facts about processes, samples/s from trainings, and the source over
CPU slices.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest

from evener.devices import network
from evener.devices.cpu import CpuSource, slices
from evener.devices.processes import HostMeter, ProcessReading, ProcessTable, clean_text
from evener.devices.snapshot_builder import DeviceUse, SnapshotBuilder, TrainingRates, rate_reading
from evener.devices.types import UNSUPPORTED, Device, DeviceSample, Reading, State
from evener.live.reporter import LiveDevice, Training

SLICE = Device("cpu-0-of-2", 0, "CPU", "cpu", 1 << 30, (0,))
OTHER = Device("cpu-1-of-2", 1, "CPU", "cpu", 1 << 30, (1,))


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a child whose command has control characters."""
    code = "import time; print('up', flush=True); time.sleep(60)"
    child = subprocess.Popen(
        [sys.executable, "-c", code, "\x1b[31mred\u202e"], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()  # before that it may hold almost no memory
    yield child
    child.kill()
    child.communicate()


def training(
    rate: float, pid: int = 1, devices: tuple[LiveDevice, ...] = (), age: float = 0.0
) -> Training:
    """Return a report of this age."""
    return Training("torch", "w", rate, 5, time.time() - age, devices, pid=pid)


def test_the_first_host_line_is_a_real_one() -> None:
    meter = HostMeter()
    host = meter.read()
    assert 0 <= host.cpu_percent <= 100
    assert set(meter.by_cpu) >= os.sched_getaffinity(0)
    assert 0 < host.memory_used_bytes < host.memory_total_bytes
    assert host.hostname


def test_process_facts_are_known_and_cannot_steer_a_terminal(
    sleeper: subprocess.Popen[bytes],
) -> None:
    book = ProcessTable()
    look = book.look(sleeper.pid)
    assert look.cpu_percent is None  # the first reading has nothing to compare with
    assert (look.memory_bytes or 0) > 1 << 20
    assert look.command.endswith("[31mred")
    assert "sleep" in look.command
    assert look.user
    assert abs(look.start_time - time.time()) < 600
    assert book.look(sleeper.pid).cpu_percent is not None


def test_a_dead_process_is_forgotten_and_a_stranger_stays_a_number(
    sleeper: subprocess.Popen[bytes],
) -> None:
    book = ProcessTable()
    assert book.look(sleeper.pid).start_time > 0
    sleeper.kill()
    sleeper.wait()
    for pid in (sleeper.pid, 2**30, -1):
        assert book.look(pid) == ProcessReading(pid)


def test_text_is_cleaned_of_what_is_not_printed() -> None:
    assert clean_text("a\x1b]0;x\x07b\u202ec\n\u200bd é 字") == "a ]0;x b c  d é 字"
    assert len(clean_text("x" * 10_000)) == 4096


def by_process(
    reports: list[Training], devices: list[Device], **pids: list[int]
) -> dict[tuple[int, str], float]:
    """Return rates without their ages. `pids` is by device, with `cpu_0` for cpu-0."""
    seen = {name.replace("_", "-"): there for name, there in pids.items()}
    rates = TrainingRates(lambda: reports).by_process(devices, seen)
    return {key: rate for key, (rate, _) in rates.items()}


def test_rates_are_laid_onto_the_devices_that_are_named() -> None:
    reports = [
        training(
            30.0, 7, (LiveDevice("cpu-0-of-2", 0, 20, 20.0), LiveDevice("cpu-1-of-2", 1, 10, 10.0))
        ),
        training(9.0, 9, (LiveDevice("elsewhere", -1, 9, 9.0),)),
    ]
    assert by_process(reports, [SLICE, OTHER]) == {(7, "cpu-0-of-2"): 20.0, (7, "cpu-1-of-2"): 10.0}


def test_a_bare_index_means_a_gpu_and_never_a_slice_or_a_simulated_device() -> None:
    reports = [training(5.0, 8, (LiveDevice("", 1, 5, 5.0),))]
    gpus = [Device(f"gpu-{i}", i, "X", "gpu", None) for i in range(3)]
    assert by_process(reports, gpus) == {(8, "gpu-1"): 5.0}
    assert by_process(reports, [OTHER, Device("sim-1", 1, "X", "sim", None)]) == {}


def test_an_index_that_cuda_visible_devices_shifted_follows_the_process() -> None:
    """The framework's devices 0 and 1 are the GPUs on which the driver sees the process."""
    reports = [training(30.0, 8, (LiveDevice("", 0, 20, 20.0), LiveDevice("", 1, 10, 10.0)))]
    gpus = [Device(f"gpu-{i}", i, "X", "gpu", None) for i in range(4)]
    assert by_process(reports, gpus, gpu_3=[8], gpu_2=[1, 8]) == {
        (8, "gpu-2"): 20.0,
        (8, "gpu-3"): 10.0,
    }


def test_a_training_that_names_no_device_counts_where_the_driver_sees_it() -> None:
    rates = TrainingRates(lambda: [training(30.0, 7)])
    assert rates.by_process([SLICE, OTHER], {}) == {}
    seen = rates.by_process([SLICE, OTHER], {SLICE.id: [7], OTHER.id: [3, 7]})
    assert {key: rate for key, (rate, _) in seen.items()} == {
        (7, SLICE.id): 15.0,
        (7, OTHER.id): 15.0,
    }


def test_reports_name_the_devices_that_they_are_of() -> None:
    """A report from a device of another machine keeps its name."""
    elsewhere = LiveDevice("elsewhere", -1, 9, 9.0)
    rates = TrainingRates(
        lambda: [training(30.0, 8, (LiveDevice("", 0, 20, 20.0), elsewhere)), training(5.0, 9)]
    )
    gpus = [Device(f"gpu-{i}", i, "X", "gpu", None) for i in range(2)]
    rates.by_process(gpus, {"gpu-1": [8, 9]})
    assert [[live.id for live in each.devices] for each in rates.reports] == [
        ["gpu-1", "elsewhere"],
        ["gpu-1"],
    ]


def test_a_rank_whose_process_has_gone_is_kept_while_the_others_train() -> None:
    ranks = [
        msgspec.structs.replace(training(30.0, 7 + rank, age=rank), training="abc", rank=rank)
        for rank in range(2)
    ]
    alone = training(1.0, 99)
    there = [*ranks, alone]
    now = [0.0]
    rates = TrainingRates(lambda: tuple(there), clock=lambda: now[0])

    def pids_after(*gone: Training) -> list[int]:
        now[0] += 1.0
        for each in gone:
            there.remove(each)
        rates.by_process([], {})
        return [each.pid for each in rates.reports]

    assert pids_after() == [7, 8, 99]
    assert pids_after(ranks[1], alone) == [7, 8]
    assert rates.reports[1] == ranks[1]
    again = msgspec.structs.replace(ranks[1], pid=12)
    there.append(again)
    assert pids_after() == [7, 12], "the rank was started again"
    assert pids_after(ranks[0], again) == []


def test_tokens_are_those_of_the_newest_report_with_any() -> None:
    fresh, old = training(30.0, 7), training(30.0, 8, age=60.0)
    texts = [
        msgspec.structs.replace(each, tokens_per_second=900.0, padding=0.25)
        for each in (fresh, old)
    ]
    rates = TrainingRates(lambda: [*texts, training(1.0, 7), training(1.0, 9)])
    rates.by_process([], {})
    tokens, padding = rates.tokens(7)
    assert (tokens.current, padding.current) == (900.0, 25.0)
    assert rates.tokens(8)[0].state is State.STALE
    assert rates.tokens(9) == (UNSUPPORTED, UNSUPPORTED)


def test_reports_are_read_at_most_twice_a_second() -> None:
    reads: list[float] = []
    now = [0.0]
    rates = TrainingRates(lambda: reads.append(now[0]) or (), clock=lambda: now[0])  # type: ignore[func-returns-value]
    for tick in range(20):
        now[0] = tick * 0.1
        rates.by_process([], {})
    assert len(reads) == 4


def test_an_old_report_is_stale_and_does_not_count_gathered_a_fresh_one() -> None:
    assert rate_reading([]).state is State.UNSUPPORTED
    assert rate_reading([(10.0, 60.0)]) == Reading(State.STALE, 10.0, 60.0)
    assert rate_reading([(10.0, 60.0), (4.0, 1.0)]) == Reading(State.VALUE, 4.0, 1.0)


def test_rows_are_what_the_driver_sees_and_who_reports_itself(
    sleeper: subprocess.Popen[bytes],
) -> None:
    reports = [training(30.0, sleeper.pid, (LiveDevice(SLICE.id, 0, 8, 30.0),))]
    source = CpuSource([SLICE, OTHER], SnapshotBuilder(TrainingRates(lambda: reports)))
    source.sample()
    first, second = source.sample().devices
    assert first.samples_per_second.current == 30.0
    assert second.samples_per_second.state is State.UNSUPPORTED
    (row,) = source.sample().processes
    assert (row.pid, row.device_label, row.samples_per_second.current) == (
        sleeper.pid,
        "CPU:0",
        30.0,
    )
    assert row.cpu_percent.current is not None
    assert (row.memory_bytes.current or 0) > 1 << 20


def test_a_process_on_two_devices_is_measured_once_a_tick() -> None:
    """Its CPU share is the same in both rows: a second reading right after the first would show
    nothing.
    """
    builder = SnapshotBuilder(TrainingRates(lambda: ()))
    samples = [DeviceSample(device=SLICE), DeviceSample(device=OTHER)]
    seen = {SLICE.id: [DeviceUse(os.getpid())], OTHER.id: [DeviceUse(os.getpid())]}
    builder.complete(samples, seen)
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    _, rows = builder.complete(samples, seen)
    assert rows[0].cpu_percent == rows[1].cpu_percent
    assert (rows[0].cpu_percent.current or 0) > 5


def test_slices_of_this_machine_are_sampled() -> None:
    source = CpuSource(slices(), notes=("said",))
    source.sample()
    time.sleep(0.05)
    snapshot = source.sample()
    for sample in snapshot.devices:
        assert (
            0
            <= (
                sample.utilization_percent.current
                if sample.utilization_percent.current is not None
                else -1
            )
            <= 100
        )
        assert sample.memory_used_bytes.current == snapshot.host.memory_used_bytes
        assert sample.sm_percent.state is State.UNSUPPORTED
    assert snapshot.notes == ("said",)
    source.close()


def test_a_host_listens_where_the_others_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """If its name means loopback, as on Debian, it is the address of the route to them."""
    named = {"big": "127.0.1.1", "small": "10.0.0.2", "127.0.0.2": "127.0.0.2"}
    ways = {"10.0.0.2": "10.0.0.1", "127.0.0.3": "127.0.0.1"}
    monkeypatch.setattr(
        network, "resolve", lambda name, **_: [(0, 0, 0, "", (named.get(name, name), 0))]
    )
    monkeypatch.setattr(
        network, "find_source_address", lambda host: ways.get(named.get(host) or host, "")
    )
    assert network.find_own_address("big", ("big", "small")) == "10.0.0.1"
    assert network.find_own_address("small", ("big", "small")) == "10.0.0.2"
    assert network.find_own_address("127.0.0.2", ("127.0.0.2", "127.0.0.3")) == "127.0.0.2"
    assert network.find_own_address("big", ("big",)) == "127.0.1.1"
