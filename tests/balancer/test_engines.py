"""Which engine synchronizes TensorFlow's splits if the user chooses one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from evener.balancer.jobs import make_job
from evener.balancer.probes.child_prober import make_prober
from evener.balancer.probes.launch_plan import assign_devices, choose_engine
from evener.balancer.request import Job, Request
from evener.balancer.types import Probe, Stage, Timed, layout_of
from evener.devices.types import Device
from evener.errors import RequestError
from tests.support.cores import two_cores

SPLIT = layout_of((6, 2))


def asked(**fields: Any) -> Request:
    """Return a request for the small Keras network with an engine."""
    return Request(**{"devices": "cpu", "workload": "keras_mnist", "engine": "towers", **fields})


@pytest.mark.parametrize(("engine", "children"), [("towers", 1), ("multiworker", 2)])
def test_the_requested_engine_decides_the_number_of_processes(engine: str, children: int) -> None:
    """The choice of `auto` doesn't matter then. A solo layout has no engine."""
    gpus = tuple(Device(f"GPU-{i}", i, "H200", "gpu", 1 << 30) for i in range(2))
    resolved = Job(Request(engine=engine), gpus, "keras_mnist", "tensorflow")
    assert choose_engine(resolved, SPLIT.group_key) == engine
    assert len(assign_devices(resolved, SPLIT.group_key)) == children
    assert choose_engine(resolved, layout_of((8, 0)).group_key) == ""


@two_cores
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"engine": "ddp"}, "--engine 'ddp' is not known"),
        ({"framework": "torch", "workload": "torch_mnist"}, "torch has none"),
        ({"devices": "sim:t4,t4"}, "no effect on simulated devices"),
        (
            {"devices": "cpu:0,cpu:1@60%"},
            "CPU:1 is limited to 60%, which needs its own process; --engine towers",
        ),
        ({"devices": "cpu:0,cpu:1@2GiB"}, "CPU:1 is limited to 2GiB, which needs its own process"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(fields: dict[str, Any], words: str) -> None:
    """The error comes before anything is started."""
    with pytest.raises(RequestError, match=words):
        make_job(asked(**fields))


@two_cores
def test_limits_that_an_engine_can_keep_are_let_through(
    fake_nvml: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process per device keeps any limit; one for all GPUs keeps each of them to its memory."""
    # TensorFlow need not be installed
    monkeypatch.setattr("evener.balancer.jobs.find_spec", lambda _: True)
    fake_nvml(2)
    assert (
        make_job(asked(devices="cpu:0,cpu:1@60%", engine="multiworker")).request.engine
        == "multiworker"
    )
    assert make_job(asked(devices="gpu:0,gpu:1@8GiB")).devices[1].limit.memory_bytes == 8 << 30


@two_cores
@pytest.mark.slow
@pytest.mark.usefixtures("shared_servers")
def test_one_process_trains_on_both_slices_by_the_requested_engine() -> None:
    """Real steps of unequal shares by an engine that isn't the default. The plan would name it."""
    prober = make_prober(make_job(asked()))
    try:
        (seen,) = prober.measure(
            (Probe(SPLIT, Stage.SPLIT, 0.3, 0),), lambda _: None, threading.Event()
        )
        assert isinstance(seen, Timed)
        assert seen.samples_per_second > 0
        assert prober.facts().engine == "towers"
    finally:
        prober.close()
