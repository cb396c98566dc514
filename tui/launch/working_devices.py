"""The devices of this host that compute: a fresh child tries each, as a dead process isn't a dead device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from evener.devices.child_environment import child_environment, import_path
from evener.devices.registry import find_backend
from evener.devices.types import Device
from evener.training.launched import DEVICE
from evener.training.start_rank import STARTS

CHECK_SECONDS = 10.0  # in which a device has to compute
POLL_SECONDS = 0.05


def find_broken(devices: Sequence[Device], framework: str, caught: Sequence[int]) -> tuple[Device, ...]:
    """The devices that compute nothing in 10 s; all are tried at the same time. A caught signal ends the search."""
    checks = [_start_check(device, framework) for device in devices]
    deadline = time.monotonic() + CHECK_SECONDS
    while not caught and None in [check.poll() for check in checks] and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for check in checks:
        if check.poll() is None:
            check.kill()
            with suppress(subprocess.TimeoutExpired):  # one that hangs in a driver can't be ended
                check.wait(1.0)
    return tuple(device for device, check in zip(devices, checks, strict=True) if check.returncode != 0)


def _start_check(device: Device, framework: str) -> subprocess.Popen[bytes]:
    child, module = child_environment((device,), framework), find_backend(device.kind).check_module
    start = {
        "variables": {**child.variables, DEVICE: device.id},
        "cores": child.cores,
        "launcher": os.getpid(),
        "folder": "",
    }
    own = {STARTS: json.dumps([start]), "PYTHONPATH": import_path(os.environ.get("PYTHONPATH", ""))}
    return subprocess.Popen(
        [sys.executable, "-m", "evener.training.start_rank", "-m", module],
        env={**os.environ, **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
