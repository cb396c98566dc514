"""Reports of trainings that come from several hosts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from evener.devices.cluster import discovery
from evener.devices.cluster.discovery import ClusterSource
from evener.devices.types import Device, DeviceSample, HostSample, Snapshot
from evener.live.files import Training
from evener.tui.view.trainings import join_trainings
from tests.support.trainings import AT_SECONDS, make_ranks

HOST = HostSample(
    cpu_percent=1.0,
    load_1min=1.0,
    memory_used_bytes=1,
    memory_total_bytes=2,
    cores=1,
    hostname="horse",
)


class Agent:
    """An agent of a host whose source always returns the same."""

    def __init__(self, *reports: Training) -> None:
        self._reports = reports

    def keep(self, _: Any, devices: tuple[Device, ...]) -> Agent:
        self._snapshot = Snapshot(
            at_seconds=AT_SECONDS,
            interval_seconds=1.0,
            devices=tuple(DeviceSample(device=each) for each in devices),
            processes=(),
            host=HOST,
            sampling_seconds=0.0,
            reports=self._reports,
        )
        return self

    def begin(self, method: str) -> str:
        return method

    def finish(self, _: str, __: float) -> Snapshot:
        return self._snapshot


def test_ranks_of_one_training_are_joined_over_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hosts have a GPU:0. Hosts on one machine, or with a shared home folder, read the same
    files.
    """
    first, second = make_ranks(ids=("GPU-7", "GPU-8"))
    elsewhere = msgspec.structs.replace(
        first,
        training="other",
        devices=(msgspec.structs.replace(first.devices[0], host="10.0.0.2", id="GPU-8"),),
    )
    agents = {"10.0.0.1": Agent(first, elsewhere), "10.0.0.2": Agent(second, elsewhere)}
    monkeypatch.setattr(discovery, "find_agent", agents.__getitem__)
    devices = [
        Device(f"GPU-{7 + i}", 0, "H200", "gpu", 1, host=host) for i, host in enumerate(agents)
    ]
    snapshot = ClusterSource(devices, (), lambda _: pytest.fail("it runs on the hosts")).sample()
    rows = {row.training: row for row in join_trainings(snapshot)}
    assert [rank.device for rank in rows["t"].ranks] == ["10.0.0.1/GPU:0", "10.0.0.2/GPU:0"]
    assert rows["t"].missing_ranks == 0
    assert [rank.device for rank in rows["other"].ranks] == ["10.0.0.2/GPU:0"]
