"""Sessions on GPUs of a scripted driver, with real children that need no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from evener.balancer.events import Finished
from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session
from tests.support.probe_children import list_children


@pytest.mark.usefixtures("quick_probes")
def test_fake_gpus_are_balanced_by_real_children(fake_nvml: Callable[..., Any]) -> None:
    """The plan has UUIDs, driver and layout, and says that one of the GPUs was busy before."""
    fake_nvml(2).gpus[0].utilization = 0
    session = Session(
        open_run(
            Request(devices="gpu", workload="synthetic", budget_seconds=3.0, max_global_batch=128)
        )
    )
    events = list(session.events())
    session.close()
    assert isinstance(events[-1], Finished)
    plan = events[-1].plan
    assert [share.device for share in plan.layout.share] == [
        device.id for device in session._run.job.devices
    ]
    assert plan.fingerprint.driver
    assert [
        warning.partition(" of the time")[0] for warning in plan.warnings if "busy" in warning
    ] == ["GPU:1 was busy 95 %"]
    assert not list_children()
