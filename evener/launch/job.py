"""Find out which processes a host has to start for a plan, on which devices."""

from __future__ import annotations

import ast
import json
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

import evener.program
from evener.devices.discover import discover
from evener.devices.network import RENDEZVOUS_PORT, choose_interface, loopback_interface
from evener.devices.registry import BACKENDS, child_environment, find_backend, import_path, kind_of
from evener.devices.types import Device
from evener.workloads.user_code import list_imports, package_of, script_framework

from ..errors import DeviceError, PlanError, RequestError
from ..plan.file import Plan, Share, load_plan, to_json
from ..plan.use import PLAN_USED
from ..system.memory_files import make_memory_file
from ..training.launched import (
    DEVICE,
    HOST,
    ONE_PROCESS,
    PLAN,
    RECORDS,
    REPLACED_PLAN,
    RESTART,
    RUN,
    find_host,
    resolve,
)
from ..training.start_rank import STARTS

HOOKS = Path(evener.program.__file__).parent / "site"
WAIT_SECONDS = 60.0
GRACE_SECONDS = 30.0
FRAMEWORKS = {"torch": "PyTorch", "tensorflow": "TensorFlow"}


class HostJob(msgspec.Struct, frozen=True):
    """One host's part of a training run: its processes, their devices and options."""

    plan: Plan
    framework: str  # the plan's framework, or the script's if the plan names none
    path: Path
    command: tuple[str, ...]  # the script's name, or -m and a module; then its arguments
    host: str  # this host's name in the plan; empty if all shares are on one host
    rendezvous: tuple[str, int]  # host and port of the rendezvous of all hosts
    own: tuple[Share, ...]  # the shares of this host
    processes: tuple[tuple[Device, ...], ...]  # the devices of each process of this host
    wait_seconds: float = WAIT_SECONDS  # timeout for all hosts to join
    grace_seconds: float = GRACE_SECONDS  # seconds from SIGTERM until processes are killed
    attempt: int = 0  # number of starts before this one
    # the plan file given to `evener launch`, if devices have been left out since
    replaced: Path | None = None
    # the name of the training's journal; all its processes have it in their environment
    run: str = ""
    folder: Path = Path()  # temporary files of this launch; removed at its end
    records: Path | None = None  # folder for the last record of each process
    reason: str = ""  # why training was started again; empty at the first start
    # the files that each process has for standard output and error
    output: tuple[tuple[str, str], ...] = ()
    use_file: str = ""  # written by processes that read the plan; empty: not checked
    executable: str = ""  # the program to run with the command as arguments; empty: Python

    @property
    def release(self) -> Path | None:
        """The path of a file that is created to let the other ranks start after the first rank.

        None if all ranks start at once.
        """
        # the first rank creates the file when its program creates a process group together with the
        # other ranks
        several = self.executable and len(self.processes) > 1
        return self.folder / f"released-{self.attempt}" if several else None

    @property
    def has_several(self) -> bool:
        """True if more than one process of this host takes part in training."""
        # ranks that still wait for the first one (see `release`) don't count
        if self.release is None:
            return len(self.processes) > 1
        return any(self.folder.glob("released-*[0-9]"))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts that take part, in the plan's order."""
        return tuple(dict.fromkeys(share.host for share in self.plan.layout.active))

    @property
    def names(self) -> tuple[str, ...]:
        """The prefix for the output lines of each process, or () for a single process.

        A prefix is the process's rank or, if there are several hosts, its device.
        """
        # with several hosts, a host doesn't know the ranks of its processes
        if len(self.processes) < 2:
            return ()
        alone = len(self.hosts) == 1
        return tuple(
            f"rank {i}" if alone else devices[0].label for i, devices in enumerate(self.processes)
        )

    @property
    def identity(self) -> str:
        """The name under which the hosts meet: it contains a checksum of the plan.

        It is the same on all hosts.
        """
        return f"evener-{zlib.crc32(to_json(self.plan)):08x}"

    def with_process_per_device(self) -> HostJob:
        """Return the same job, but with a separate TensorFlow worker process for each device."""
        layout = msgspec.structs.replace(self.plan.layout, engine="multiworker")
        processes = assign_devices(
            [device for process in self.processes for device in process], one_process=False
        )
        plan = msgspec.structs.replace(self.plan, layout=layout)
        return msgspec.structs.replace(self, plan=plan, processes=processes)

    def environment(self, own_variables: Sequence[dict[str, str]] = ()) -> dict[str, str]:
        """Return the environment variables for this host's processes.

        `own_variables` has additional variables for each process, in the order of the processes. If
        it has fewer items than there are processes, the remaining processes get none.
        """
        # settings that differ between processes are in the variable STARTS, which `start_rank`
        # reads
        hooks = str(HOOKS)
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        others = import_path(os.pathsep.join(each for each in inherited if each != hooks))
        variables = {
            **os.environ,
            PLAN: str(self.path),
            "PYTHONPATH": os.pathsep.join(filter(None, (hooks, others))),
        }
        variables |= {REPLACED_PLAN: str(self.replaced or ""), RUN: self.run, RESTART: self.reason}
        alone = not self.plan.layout.engine and len(self.processes) < len(self.own)
        variables |= {ONE_PROCESS: "1" if alone else ""}
        variables[PLAN_USED] = self.use_file
        variables[RECORDS] = str(self.records or "")
        if self.host:
            variables |= {HOST: self.host, **choose_interface(self.host, self.hosts)}
        if len(self.hosts) == 1:
            variables |= loopback_interface()
        starts = [self._make_start_settings(devices) for devices in self.processes]
        for start, own in zip(starts, own_variables, strict=False):
            start["variables"].update(own)
        for start, files in zip(starts, self.output, strict=False):
            start["output"] = files
        return {**variables, STARTS: json.dumps(starts)}

    def _make_start_settings(self, devices: tuple[Device, ...]) -> dict[str, Any]:
        """Return the settings of the process that uses these devices.

        They are its environment variables, CPU cores and files.
        """
        # a PyTorch process sees all GPUs with a share, and uses the one with the index LOCAL_RANK
        child = child_environment(devices, self.framework)
        variables = {**child.variables, DEVICE: devices[0].id if len(devices) == 1 else ""}
        if self.framework == "torch":
            known = {device.id: device for own in self.processes for device in own}
            shown = [known[share.device] for share in self.own]
            variables |= find_backend(devices[0].kind).show_by_number(shown)
        launcher = {"launcher": os.getpid(), "folder": str(self.folder)}
        return {
            "variables": variables,
            "cores": child.cores,
            "executable": self.executable,
            "release": str(self.release or ""),
            **launcher,
        }


def make_job(
    path: Path,
    command: Sequence[str],
    host: str | None,
    rendezvous: str | None,
    wait_seconds: float = WAIT_SECONDS,
    grace_seconds: float = GRACE_SECONDS,
    executable: str = "",
    check_use: bool = False,
) -> HostJob:
    """Read a plan, and return the part of the training run that this host has to start.

    - `path`: the plan's file.
    - `command`: the script or `-m` and a module, then its arguments.
    - `host`: this host's name in the plan; None to find it out.
    - `rendezvous`: HOST:PORT at which the hosts meet; None for the plan's first host.
    - `wait_seconds`, `grace_seconds`: how long the hosts have to join, and processes to exit after
      SIGTERM.
    - `executable`: the program to run instead of Python.
    - `check_use`: create a file that later shows whether the processes have read the plan.

    Raises PlanError, RequestError or DeviceError if the plan, the command and the devices don't fit
    together.
    """
    if path.exists() and not path.is_file():
        raise PlanError(
            f"{path} isn't a file, and each process reads the plan.", "Write the plan to a file."
        )
    plan = load_plan(path)
    check_plan(plan, ["-m", executable] if executable else command)
    here = _choose_host(plan, host)
    own = tuple(share for share in plan.layout.active if share.host == here)
    devices = _find_devices(own)
    framework = "torch" if executable else _choose_framework(plan, command[0])
    one_process = _is_one_process(plan, framework, own)
    replaced = os.environ.get(REPLACED_PLAN)
    return HostJob(
        plan=plan,
        framework=framework,
        path=path.absolute(),
        command=tuple(command),
        host=here,
        rendezvous=_choose_rendezvous(plan, rendezvous),
        own=own,
        processes=assign_devices(devices, one_process),
        wait_seconds=wait_seconds,
        grace_seconds=grace_seconds,
        replaced=Path(replaced) if replaced else None,
        executable=executable,
        use_file=make_memory_file() if check_use else "",
    )


def _is_one_process(plan: Plan, framework: str, host_shares: Sequence[Share]) -> bool:
    """Return True if a single TensorFlow process has to use all devices of the plan.

    `host_shares` are the shares of this host. Raises PlanError if a single process would have to
    use all devices, but some are on other hosts.
    """
    if framework == "torch" or plan.layout.engine == "multiworker":
        return False
    if len(host_shares) < len(plan.layout.active):
        raise PlanError(
            f"The plan's engine is {plan.layout.engine}, one process, but its devices are on "
            f"several hosts.",
            "Make it with evener balance --engine multiworker.",
        )
    return True


def _choose_rendezvous(plan: Plan, rendezvous: str | None) -> tuple[str, int]:
    """Return the host and port at which the processes of all hosts meet.

    Without `rendezvous`, these are the plan's first host and the default port. Raises DeviceError
    if the host's name can't be resolved.
    """
    if rendezvous:
        host, port = _parse_rendezvous(rendezvous)
    else:
        host = plan.layout.active[0].host
        port = RENDEZVOUS_PORT
    if host and not resolve(host):
        raise DeviceError(
            f"The host {host} can't be found.", "Give its address: --rendezvous ADDRESS:PORT."
        )
    return host, port


def assign_devices(devices: Sequence[Device], one_process: bool) -> tuple[tuple[Device, ...], ...]:
    """Return the devices of each process.

    Either one process uses all devices, or there is one process for each device.
    """
    return (tuple(devices),) if one_process else tuple((device,) for device in devices)


def check_plan(plan: Plan, command: Sequence[str]) -> None:
    """Check that `evener launch` can run this command with this plan.

    Raises PlanError if it can't start the plan's layout, such as several training runs on one
    device, and RequestError if the script doesn't exist or no module is named.
    """
    if plan.layout.traits.placed:
        raise PlanError(
            f"The plan places a model's parts ({plan.layout.placement}) in one process.",
            "Start the script with python.",
        )
    if plan.layout.traits.side_by_side:
        raise PlanError(
            f"The plan packs {plan.layout.processes} trainings of their own onto one device.",
            "Start each with python.",
        )
    script = command[0]
    if script != "-m" and not Path(script).is_file():
        remedy = (
            "Options of launch stand before the plan."
            if script.startswith("-")
            else "Correct its name."
        )
        raise RequestError(f"There is no script {script}.", remedy)
    if command == ["-m"]:
        raise RequestError("-m names no module.", "Write evener launch PLAN -m MODULE.")


def _choose_framework(plan: Plan, script: str) -> str:
    """Return the framework that the plan names, or else the one that the script imports.

    If the plan names none and the script imports none, the result is "torch". Raises PlanError if
    the plan names one framework and the script imports another.
    """
    imported = script_framework(Path(script)) if script != "-m" else ""
    if plan.framework not in FRAMEWORKS:
        return imported or "torch"
    if imported and imported != plan.framework:
        raise PlanError(
            f"The plan is for {FRAMEWORKS[plan.framework]}, and {script} trains with "
            f"{FRAMEWORKS[imported]}.",
            (
                f"Make one with evener balance --framework {imported}, or launch a script for "
                f"this one."
            ),
        )
    return plan.framework


def _choose_host(plan: Plan, named: str | None) -> str:
    hosts = list(dict.fromkeys(share.host for share in plan.layout.active))
    found = find_host(hosts) if named is None else named
    if found in hosts:
        return found
    listed = ", ".join(filter(None, hosts)) or "this one alone"
    if named is None:
        raise RequestError(
            f"It isn't clear which of the plan's hosts this machine is: {listed}.",
            "Say it with --host.",
        )
    raise RequestError(f"{named!r} is none of the plan's hosts: {listed}.", "Correct --host.")


def _find_devices(shares: Sequence[Share]) -> tuple[Device, ...]:
    request = ",".join(map(_request, shares))
    try:
        return discover(request, only_visible=False).devices
    except RequestError as fault:
        raise DeviceError(
            fault.message, "Make a plan for what is here, or launch this one where it was made."
        ) from None


def _request(share: Share) -> str:
    """Return a device request, as in `--devices`, for the device of a share."""
    kind = kind_of(share.device)
    return find_backend(kind).write_term(share.device) if kind in BACKENDS else share.device


def _parse_rendezvous(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise RequestError(
            f"--rendezvous {text} isn't an address.",
            f"Write HOST:PORT, as in node1:{RENDEZVOUS_PORT}.",
        )
    return host, int(port)


def find_imports(job: HostJob) -> frozenset[str]:
    """Return the framework and the top-level packages that the script imports.

    If the script can't be read or parsed, the result is only the framework.
    """
    script = Path(job.command[0])
    with suppress(OSError, SyntaxError, ValueError):
        names = chain.from_iterable(map(list_imports, ast.walk(ast.parse(script.read_bytes()))))
        return frozenset([job.framework, *map(package_of, names)])
    return frozenset([job.framework])
