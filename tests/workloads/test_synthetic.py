"""The synthetic workload: its time, its memory, and its failures on request."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from evener.errors import RequestError
from evener.workloads import registry
from evener.workloads.protocol import WorkerSetup

RUN = """
import sys
from evener.workloads import registry
from evener.workloads.protocol import WorkerSetup
workload = registry.build("synthetic", WorkerSetup(("CPU:0",)), dict(pair.split("=") for pair in sys.argv[1:]))
workload.prepare((8,))
for _ in range(3):
    workload.step()
print("survived")
"""  # noqa: E501


def make(setup: WorkerSetup | None = None, **settings: Any) -> Any:
    """Return a synthetic workload on one device."""
    return registry.build("synthetic", setup or WorkerSetup(("CPU:0",)), settings)


def run(*settings: str) -> subprocess.CompletedProcess[str]:
    """Run three steps of 8 samples in a child process."""
    return subprocess.run(
        [sys.executable, "-c", RUN, *settings], capture_output=True, text=True, timeout=60
    )


def test_a_step_takes_at_least_its_time() -> None:
    """A step takes at least base + per sample x share seconds; a busy machine only adds to it."""
    workload = make(base_ms=2.0, per_sample_ms=0.5)
    workload.prepare((16,))
    started = time.perf_counter()
    workload.step()
    assert time.perf_counter() - started >= 0.010


def test_it_holds_the_memory_of_its_shares() -> None:
    """The workload allocates base + per sample x share bytes on each device that has a share."""
    workload = make(WorkerSetup(("CPU:0", "CPU:1")), memory_base_mib=1, memory_per_sample_mib=0.5)
    workload.prepare((4, 0))
    assert workload.max_memory_bytes() == (3 << 20, 0)


def test_over_the_devices_limit_is_a_memory_error() -> None:
    """A share beyond the limit raises MemoryError; a smaller share fits afterwards."""
    workload = make(
        WorkerSetup(("CPU:0",), (4 << 20,)), memory_base_mib=1, memory_per_sample_mib=0.5
    )
    with pytest.raises(MemoryError, match="7 samples"):
        workload.prepare((7,))
    workload.prepare((6,))


def test_it_raises_at_its_share_and_step_only() -> None:
    """The workload works below `at_share` and before `at_step`."""
    workload = make(base_ms=0.1, fail="raise", at_share=8, at_step=1)
    workload.prepare((7,))
    for _ in range(3):
        workload.step()
    workload.prepare((8,))
    workload.step()
    with pytest.raises(ValueError, match="step 1 of 8 samples"):
        workload.step()


@pytest.mark.parametrize(
    ("settings", "code"), [(("fail=exit", "exit_code=7"), 7), (("fail=kill",), -9)]
)
def test_it_dies_on_request(settings: tuple[str, ...], code: int) -> None:
    """An exit or a signal ends the child without further output."""
    done = run(*settings, "at_step=2")
    assert done.returncode == code
    assert "survived" not in done.stdout


def test_it_prints_garbage_on_request() -> None:
    """The workload prints garbage, which is no message, and continues."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, "fail=garbage"], capture_output=True, timeout=60
    )
    assert done.returncode == 0
    assert b"\xff" in done.stdout


def test_it_hangs_on_request() -> None:
    """The step doesn't return."""
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", RUN, "fail=hang"], capture_output=True, timeout=1.5)


def test_an_unknown_failure_is_refused() -> None:
    """The error lists the valid failures."""
    with pytest.raises(RequestError, match="'explode'"):
        make(fail="explode")


def test_ranks_wait_for_each_other_and_see_one_die() -> None:
    """A group steps together; when a rank exits, the other gets a ConnectionError."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    peers = (f"127.0.0.1:{port}", "127.0.0.1:0")
    seen: list[str] = []

    def other() -> None:
        workload = make(WorkerSetup(("CPU:0",), rank=1, peers=peers), base_ms=0.1)
        workload.prepare((2, 6))
        for _ in range(3):
            workload.step()
        seen.append("three steps")
        workload.close()

    thread = threading.Thread(target=other)
    thread.start()
    workload = make(WorkerSetup(("CPU:0",), rank=0, peers=peers), base_ms=0.1)
    workload.prepare((2, 6))
    for _ in range(3):
        workload.step()
    thread.join(60)
    assert seen == ["three steps"]
    with pytest.raises(ConnectionError):
        workload.step()
    workload.close()
