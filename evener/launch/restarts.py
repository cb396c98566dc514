"""Run a job, and restart it without its broken devices if some fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, count

import msgspec

from evener.devices.registry import child_environment, find_backend, import_path
from evener.devices.types import Device

from ..errors import DeviceError, PlanError
from ..plan.check import describe
from ..plan.file import Plan, load_plan
from ..plan.solver import leave_out
from ..printable import print_notice
from ..system.signals import caught_signals
from ..training.launched import DEVICE, WANTS_PROCESSES
from ..training.start_rank import STARTS
from .job import HostJob, assign_devices
from .processes import GroupExit, named_output, run_children


def run_job(full_job: HostJob, max_restarts: int) -> int:
    """Run a job, restart it up to `max_restarts` times, and return the exit code.

    Before a restart, every device of the job is checked. Broken devices are left out, and devices
    that work again are used again. After a signal, the exit code is 128 plus the signal's number.
    Raises PlanError if the plan's file has changed. Raises DeviceError if no device is left, or if
    there are several hosts and a device is broken.
    """
    # Training ends when all processes succeed, a script raises an exception, or the restarts are
    # used up. With several hosts, no launcher sees all failures.
    job = full_job
    several = len(full_job.hosts) > 1
    # the agents restart all processes in lockstep
    by_agents = several and full_job.framework == "torch"
    restarts = 0 if by_agents else max_restarts
    for attempt in count(1):
        ended = _start(job, max_restarts if by_agents else 0)
        if ended.signal:
            return 128 + ended.signal
        if not ended.failures:
            return 0
        may_be_loss = ended.is_loss or several
        if attempt > restarts or not may_be_loss:
            return _print_failure(job, ended)
        print_notice(f"{ended.words}; trying the devices")
        with caught_signals() as caught:
            broken = find_broken(
                list(chain.from_iterable(full_job.processes)), job.framework, caught
            )
        if caught:
            return 128 + caught[0]
        full_job = msgspec.structs.replace(full_job, attempt=attempt, reason=ended.words)
        before = job
        job = _make_job_without(full_job, broken)
        _print_changes(before.plan, job.plan)
        print_notice(f"all start again, {attempt} of {max_restarts} times")
    raise AssertionError("count() has no end")


def _print_failure(job: HostJob, group_exit: GroupExit) -> int:
    """Print why a job failed, and return its exit code."""
    if job.executable and not job.has_several:
        code = group_exit.failures.get(0, 1)
        alone = GroupExit(failures={0: code}).words
        print_notice(f"the program {alone.removeprefix('rank 0 ')}")
        return code if code > 0 else 128 - code
    others = "; the others were stopped" if len(job.plan.layout.active) > 1 else ""
    print_notice(f"{group_exit.words}{others}")
    return 1


def _start(job: HostJob, restarts_of_agents: int) -> GroupExit:
    if job.framework == "torch" and len(job.plan.layout.active) > 1:
        from .processes import run_agent

        return run_agent(job, restarts_of_agents)
    ended = run_children(job)
    if set(ended.failures.values()) != {WANTS_PROCESSES}:
        return ended
    job = job.with_process_per_device()
    with named_output(job.names) as output:
        return run_children(msgspec.structs.replace(job, output=output))


def _make_job_without(full_job: HostJob, broken: Sequence[Device]) -> HostJob:
    """Return the job without its broken devices. Their rows go to the other devices.

    `full_job` is the job with all devices. Raises PlanError if the plan's file has changed. Raises
    DeviceError if no device is left, or if there are several hosts and a device is broken.
    """
    if load_plan(full_job.path) != full_job.plan:
        raise PlanError(
            f"{full_job.path} has changed since the training began.",
            "Launch it again with the current plan.",
        )
    if not broken:
        return full_job
    names = {device.id for device in broken}
    if len(full_job.hosts) > 1 or len(names) == len(full_job.own):
        listed = ", ".join(device.label for device in broken)
        raise DeviceError(
            f"{listed} no longer computes.", "Run evener doctor, and make a plan for what is left."
        )
    plan = leave_out(full_job.plan, {(full_job.host, name) for name in names})
    path = full_job.folder / f"plan-{full_job.attempt}.toml"
    plan.save(path)
    left = tuple(
        device for device in chain.from_iterable(full_job.processes) if device.id not in names
    )
    return msgspec.structs.replace(
        full_job,
        plan=plan,
        path=path,
        replaced=full_job.replaced or full_job.path,
        own=tuple(share for share in plan.layout.active if share.host == full_job.host),
        processes=assign_devices(left, one_process=len(full_job.processes) < len(full_job.own)),
    )


def _print_changes(before: Plan, after: Plan) -> None:
    """Print which devices no longer compute, which compute again, and how the rows change."""
    rows = compare_rows(before, after)
    for old, new in zip(before.layout.share, after.layout.share, strict=True):
        if bool(old.batch) != bool(new.batch):
            what = "computes again" if new.batch else "no longer computes"
            what += "" if new.takes_part else " and is left out"
            print_notice(f"{describe(new)} {what}: {rows} rows")


def compare_rows(before: Plan, after: Plan) -> str:
    """Return the rows of two plans as text, such as "300+212 → 512+0"."""
    return " → ".join("+".join(map(str, plan.batches)) for plan in (before, after))


CHECK_SECONDS = 10.0  # timeout of a device's check
POLL_SECONDS = 0.05


def find_broken(
    devices: Sequence[Device], framework: str, signals: Sequence[int]
) -> tuple[Device, ...]:
    """Run a short computation on each device, and return the devices on which it fails.

    A check that takes more than ten seconds counts as failed. A signal in `signals` ends the wait,
    and devices whose check hasn't ended then count as broken.
    """
    checks = [_start_check(device, framework) for device in devices]
    deadline = time.monotonic() + CHECK_SECONDS
    while (
        not signals and None in [check.poll() for check in checks] and time.monotonic() < deadline
    ):
        time.sleep(POLL_SECONDS)
    for check in checks:
        if check.poll() is None:
            check.kill()
            # a process that hangs in a driver can't be killed
            with suppress(subprocess.TimeoutExpired):
                check.wait(1.0)
    return tuple(
        device for device, check in zip(devices, checks, strict=True) if check.returncode != 0
    )


def _start_check(device: Device, framework: str) -> subprocess.Popen[bytes]:
    child = child_environment((device,), framework)
    module = find_backend(device.kind).check_module
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
