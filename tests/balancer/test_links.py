"""Links between devices, measured by real processes over gloo, some of which go wrong."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from evener.balancer.diagnostics import describe_link
from evener.balancer.probes import links
from evener.balancer.probes.links import LinkMeasurement, measure_links
from evener.balancer.store.links import (
    find_known_link,
    find_links,
    list_links,
    note_link,
    save_links,
)
from evener.balancer.types import KnownLink
from evener.devices.cpu import slices
from evener.devices.discover import discover
from evener.devices.types import Device
from tests.support.cores import two_cores
from tests.support.frameworks import skip_without
from tests.support.python_path import python_path

ROOT = Path(__file__).parents[2]
# seconds after which a rank counts as hung; working ranks answer at once, except for PyTorch's
# imports
SOON, PYTORCH_SECONDS = 3.0, 30.0


def faulty(fault: str, rank: int = 1) -> tuple[str, ...]:
    """Return the program of ranks of which one has this fault."""
    return sys.executable, str(ROOT / "tests" / "support" / "faulty_links.py"), fault, str(rank)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time after which hung ranks are noticed."""
    monkeypatch.setenv("PYTHONPATH", python_path(ROOT))
    for name in ("JOIN_SECONDS", "SUM_SECONDS"):
        monkeypatch.setattr(links, name, SOON)


def measurement(**changes: object) -> LinkMeasurement:
    """Return a link that works."""
    own = LinkMeasurement(("GPU:0", "GPU:1"), "as it is", "ok", 6.1e9, 28e-6)
    return msgspec.structs.replace(own, **changes)


@two_cores
@pytest.mark.slow
def test_a_pair_of_slices_sums_right_and_nothing_is_left_behind() -> None:
    skip_without("torch")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    (found,) = measure_links(slices(2))
    assert (found.outcome, found.devices) == ("ok", ("CPU:0", "CPU:1"))
    assert found.bytes_per_second > 1e6
    assert 0 < found.latency_seconds < 1
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert left == set()


@two_cores
@pytest.mark.slow
def test_a_rank_that_never_joins_is_named(hasty: None) -> None:
    skip_without("torch")
    reported: list[float] = []
    started = time.monotonic()
    program = faulty("silent")
    (found,) = measure_links(
        slices(2), lambda _: reported.append(time.monotonic() - started), program
    )
    assert found.outcome == "hangs"
    assert found.devices == ("CPU:0", "CPU:1")
    assert (found.ranks_met, found.remedy) == (False, "")
    assert found.detail.startswith("CPU:1 didn't join within")
    assert len(reported) == 1


@two_cores
@pytest.mark.slow
def test_a_sum_that_hangs_is_named_with_the_variable_that_cures_it(
    hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable of the environment doesn't count, as the link is measured as the driver has it."""
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    (found,) = measure_links(slices(2), program=faulty("p2p"))
    assert (found.outcome, found.remedy) == ("hangs", "NCCL_P2P_DISABLE=1")
    assert "CPU:1" in found.devices
    check = describe_link([found])
    assert check.level == "problem"
    assert "NCCL_P2P_DISABLE=1" in check.remedy


@two_cores
@pytest.mark.slow
def test_a_corrupted_sum_is_noticed(hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without("torch")
    for name in ("JOIN_SECONDS", "SUM_SECONDS"):
        monkeypatch.setattr(links, name, PYTORCH_SECONDS)
    (found,) = measure_links(slices(2), program=faulty("corrupt"))
    assert (found.outcome, found.remedy) == ("wrong", "")
    assert found.detail.startswith("1 of ")


@two_cores
@pytest.mark.slow
def test_ranks_that_do_not_meet_all_together_are_measured_pair_by_pair(hasty: None) -> None:
    """Three ranks run on two slices."""
    devices = (*slices(2), msgspec.structs.replace(slices(2)[0], index=2, id="cpu-2-of-3"))
    found = {one.devices: one for one in measure_links(devices, program=faulty("crowd"))}
    assert found["CPU:0", "CPU:1"].outcome == "ok"
    together = found["CPU:0", "CPU:1", "CPU:2"]
    assert (together.outcome, together.ranks_met, together.remedy) == ("hangs", False, "")
    assert len(found) == 4


@two_cores
@pytest.mark.slow
def test_each_pair_of_three_devices_and_all_together_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three ranks of PyTorch run on two slices, which are in different numbers of groups."""
    skip_without("torch")
    monkeypatch.setattr(links, "SUM_SECONDS", PYTORCH_SECONDS)
    devices = (*slices(2), msgspec.structs.replace(slices(2)[0], index=2, id="cpu-2-of-3"))
    found = measure_links(devices)
    assert [one.outcome for one in found] == ["ok"] * 4, [one.detail for one in found]
    assert [one.devices for one in found] == [
        ("CPU:0", "CPU:1"),
        ("CPU:0", "CPU:2"),
        ("CPU:1", "CPU:2"),
        ("CPU:0", "CPU:1", "CPU:2"),
    ]


def test_a_link_is_kept_for_its_driver_and_devices_alone() -> None:
    devices = slices(2)
    save_links(devices, "550.54", [measurement()])
    kept = find_links(devices, "550.54")
    assert kept is not None
    assert kept.measurements == (measurement(),)
    assert find_links(devices, "560.1") is None
    assert find_links(devices[:1], "550.54") is None


def test_links_are_listed_for_the_devices_that_are_there() -> None:
    """Of several measurements the newest counts, whichever other devices took part in it."""
    three = tuple(Device(f"GPU-{i}", i, "NVIDIA A", "gpu", None) for i in range(3))
    slow = measurement(path="PCIe, no P2P")
    together = measurement(devices=("GPU:0", "GPU:1", "GPU:2"), bytes_per_second=5e9)
    hanging = measurement(devices=("GPU:1", "GPU:2"), outcome="hangs")
    save_links(
        three,
        "550",
        [slow, measurement(transport="sockets", bytes_per_second=9e9), together, hanging],
    )
    renumbered = msgspec.structs.replace(three[2], index=1)
    assert list_links([three[0], renumbered], "550") == ()
    assert [link.describe() for link in list_links(three[:2], "550")] == [
        "GPU:0 – GPU:1  PCIe, no P2P, 6.1 GB/s"
    ]
    assert len(list_links(three, "550")) == 2
    note_link(three[:2], "550", "PCIe, P2P", 20e9)
    assert [link.bytes_per_second for link in list_links(three, "550")] == [20e9, 5e9]
    assert list_links(three, "560") == ()


def test_a_search_knows_the_slowest_link_between_most_of_its_devices() -> None:
    three = tuple(Device(f"GPU-{i}", i, "NVIDIA A", "gpu", None) for i in range(3))
    assert find_known_link(three, "550") is None
    slow = measurement(devices=("GPU:1", "GPU:2"), bytes_per_second=2e9)
    save_links(three, "550", [measurement(), slow])
    assert find_known_link(three, "550") == KnownLink(2, 2e9, 28e-6)
    assert find_known_link(three[:2], "550") == KnownLink(2, 6.1e9, 28e-6)
    note_link(three, "550", "", 3e9)
    assert find_known_link(three, "550") == KnownLink(3, 3e9)
    assert find_known_link(three[:1], "550") is None


def test_what_a_search_measures_leaves_other_transports_of_the_doctor_s() -> None:
    two = tuple(Device(f"GPU-{i}", i, "NVIDIA A", "gpu", None) for i in range(2))
    sockets = measurement(transport="sockets", bytes_per_second=9e9)
    save_links(two, "550", [measurement(), sockets])
    note_link(two, "550", "NVLink", 150e9)
    kept = find_links(two, "550")
    assert kept is not None
    assert {one.transport: one.bytes_per_second for one in kept.measurements} == {
        "as it is": 150e9,
        "sockets": 9e9,
    }


@pytest.mark.parametrize(
    ("works", "path"), [({2, 0}, "NVLink"), ({0}, "PCIe, P2P"), (set(), "PCIe, no P2P")]
)
def test_the_path_between_gpus_is_what_the_driver_says(
    fake_nvml: Callable[..., Any], works: set[int], path: str
) -> None:
    double = fake_nvml(3)
    gpus = discover("gpu").devices
    double.peers = {frozenset({gpus[0].id, gpus[1].id}): works}
    assert links.name_path(gpus[:2], {}) == path
    assert links.name_path(gpus, {}) == "PCIe, no P2P", "of three, the slowest pair's"
    double.fail("nvmlDeviceGetP2PStatus", 999)
    assert links.name_path(gpus[:2], {}) == ""
    assert links.name_path(slices(2), {}) == ""


@pytest.mark.parametrize(
    ("name", "value", "path"),
    [
        ("NCCL_P2P_DISABLE", "1", "NVLink, off by NCCL_P2P_DISABLE"),
        ("NCCL_P2P_LEVEL", "LOC", "NVLink, off by NCCL_P2P_DISABLE"),
        ("NCCL_P2P_DISABLE", "0", "NVLink"),
        ("NCCL_SHM_DISABLE", "1", "NVLink"),
    ],
)
def test_a_path_that_a_variable_switches_off_says_so(
    name: str, value: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = SimpleNamespace(name_path=lambda *_: "NVLink")
    monkeypatch.setattr(links, "find_backend", lambda _: backend)
    assert links.name_path(slices(2), links.read_switches({name: value})) == path


def test_a_link_is_read_as_the_environment_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    two = tuple(Device(f"GPU-{i}", i, "NVIDIA A", "gpu", None) for i in range(2))
    save_links(two, "550", [measurement(), measurement(transport="no P2P", bytes_per_second=2e9)])

    def speeds() -> list[float]:
        return [link.bytes_per_second for link in list_links(two, "550")]

    assert speeds() == [6.1e9]
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert speeds() == [2e9]
    note_link(two, "550", "", 3e9)
    assert speeds() == [3e9]
    monkeypatch.delenv("NCCL_P2P_DISABLE")
    assert speeds() == [6.1e9]
    for value in ("1", "0"):  # a setting that no transport of the doctor's has
        monkeypatch.setenv("NCCL_SHM_DISABLE", value)
        assert speeds() == ([] if value == "1" else [6.1e9])
        note_link(two, "550", "", 4e9 if value == "1" else 5e9)
    assert speeds() == [5e9]
    monkeypatch.setenv("NCCL_SHM_DISABLE", "1")
    assert speeds() == [4e9]
    monkeypatch.setenv("NCCL_P2P_LEVEL", "NVL")
    assert speeds() == []


def test_a_variable_that_makes_a_link_slow_is_named() -> None:
    fast, slow = measurement(bytes_per_second=210e9), measurement(transport="no P2P")
    check = describe_link([fast, slow], "no P2P")
    assert (check.level, "unset NCCL_P2P_DISABLE" in check.remedy) == ("note", True)
    check = describe_link([measurement(outcome="hangs"), slow], "no P2P")
    assert (check.level, check.remedy) == ("ok", "")
    assert "NCCL_P2P_DISABLE=1" in check.found
    check = describe_link([fast, measurement(transport="no P2P", outcome="hangs")], "no P2P")
    assert check.level == "problem"


def test_a_broken_record_is_ignored() -> None:
    path = save_links(slices(2), "1", [measurement()])
    path.write_text("{")
    assert find_links(slices(2), "1") is None


def test_a_link_that_is_as_fast_without_p2p_says_that_it_brings_nothing() -> None:
    without = measurement(transport="no P2P", bytes_per_second=6.0e9)
    assert "P2P isn't used" in describe_link([measurement(), without]).found
    fast = measurement(bytes_per_second=150e9)
    assert "P2P isn't used" not in describe_link([fast, without]).found


def test_a_link_that_is_faster_by_another_transport_is_reported_with_its_variable() -> None:
    sockets = measurement(transport="sockets", bytes_per_second=9e9)
    check = describe_link([measurement(), sockets])
    assert "NCCL_SHM_DISABLE=1" in check.remedy


def test_links_of_earlier_versions_are_still_read() -> None:
    """Files and `--json` call the transport `way`, its remedy `cure`, and ranks that
    joined `met`.
    """
    stored = {"devices": ["GPU:0"], "way": "sockets", "outcome": "hangs", "met": False, "cure": "X"}
    found = msgspec.convert(stored, LinkMeasurement)
    assert (found.transport, found.ranks_met, found.remedy) == ("sockets", False, "X")
    assert msgspec.to_builtins(found)["way"] == "sockets"
