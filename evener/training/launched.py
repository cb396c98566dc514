"""Environment variables through which evener's launchers pass settings to training processes."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from .first_rank import is_in_other_run

PLAN, DEVICE, HOST = "EVENER_PLAN", "EVENER_DEVICE", "EVENER_HOST"
# the launched plan, if PLAN is a plan for the remaining devices
REPLACED_PLAN = "EVENER_REPLACED_PLAN"
RUN = "EVENER_RUN"  # the name under which a training may write a journal
# a folder of the launcher to which each process writes its last record
RECORDS = "EVENER_RECORDS"
RESTART = "EVENER_RESTART"  # why the launcher restarted the training
PROGRAM = "EVENER_PROGRAM"  # JSON of the ProgramSettings, in the processes of evener run
# JSON of the command's arguments while evener run --balance measures its trainer
PROGRAM_COMMAND = "EVENER_PROGRAM_COMMAND"

# HOST:PORT of PyTorch's MASTER_ADDR and MASTER_PORT, and the rendezvous file that replaces them
RENDEZVOUS = "EVENER_MEETING"
# number of process groups that have used the file, also in parent processes
GROUPS = "EVENER_GROUPS"

# set if one process trains on all devices, but evener launch can start one per device
ONE_PROCESS = "EVENER_ONE_PROCESS"
WANTS_PROCESSES = 86  # the exit code of a process that can't train on all devices alone


def ask_for_processes(reason: str) -> None:
    """Print `reason`, and exit so that `evener launch` restarts with one process for each device.

    The exit code asks the launcher for this. Returns without doing anything if there is no
    launcher, or if it can't start one process for each device.
    """
    if os.environ.get(ONE_PROCESS):
        print(
            f"evener: {reason} A process for each device is started.", file=sys.stderr, flush=True
        )
        raise SystemExit(WANTS_PROCESSES)


def launched_plan(
    script_plan: str | os.PathLike[str] | None = None,
) -> str | os.PathLike[str] | None:
    """Return the path of the plan to use: the one that the script names, or else the launcher's.

    If devices were lost and the launcher has therefore replaced the plan that the script names, the
    launcher's plan is returned. Returns None if there is no plan.
    """
    launched, replaced = os.environ.get(PLAN) or None, os.environ.get(REPLACED_PLAN)
    if script_plan is None or launched is None or not replaced:
        return launched if script_plan is None else script_plan
    with suppress(OSError):
        return launched if os.path.samefile(script_plan, replaced) else script_plan
    return script_plan


def launched_device() -> str:
    """Return the id of the device that the launcher assigned to this process, or "" if none."""
    return os.environ.get(DEVICE, "")


def rendezvous_file(address: str) -> str | None:
    """Return the file through which ranks meet instead of connecting to `address`.

    Returns None if evener's launcher hasn't created a file for this address, or if another launcher
    started this process.
    """
    # another launcher's rendezvous may have the same address
    named, _, path = os.environ.get(RENDEZVOUS, "").partition(" ")
    if is_in_other_run():
        return None
    return path if path and named == address.replace("localhost", "127.0.0.1") else None


def launched_run() -> str:
    """Return the name of the run that the launcher started, or "" if there is no launcher."""
    return os.environ.get(RUN, "")


def launched_records() -> Path | None:
    """Return the folder in which each process writes its last record for the launcher.

    Returns None if no launcher reads the records.
    """
    folder = os.environ.get(RECORDS, "")
    return Path(folder) if folder else None


def restart_reason() -> str:
    """Return why the launcher has restarted training, or "" if it hasn't."""
    return os.environ.get(RESTART, "")


def find_host(hosts: Iterable[str]) -> str:
    """Return which of `hosts` is this machine's name, or "" if none or several of them are.

    If the variable EVENER_HOST is set, its value is returned instead.
    """
    names = set(filter(None, hosts))
    if not names or HOST in os.environ:
        return os.environ.get(HOST, "") if names else ""
    own = socket.gethostname()
    found = names & {own, own.partition(".")[0]} or set(filter(is_here, names))
    return found.pop() if len(found) == 1 else ""


def is_here(name: str) -> bool:
    """Return True if this machine has this host name or address."""
    for family, kind, protocol, _, address in resolve(name):
        with suppress(OSError), socket.socket(family, kind, protocol) as door:
            door.bind(address)
            return True
    return False


def resolve(
    name: str, port: int = 0
) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[object, ...]]]:
    """Return the addresses of a host, or [] if the name can't be resolved."""
    with suppress(OSError, UnicodeError):
        return list(socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM))
    return []


_FAILED = re.compile(
    r"(CUDA|HIP) (driver )?error|unhandled cuda error|Cuda failure|CUDNN_STATUS_EXECUTION_FAILED"
)
_OF_THE_SCRIPT = re.compile(r"out of memory|device-side assert")


def is_device_error(error: BaseException) -> bool:
    """Return True if an error is a CUDA or HIP error that points to a broken GPU."""
    # running out of memory and device-side asserts are caused by the script
    text = str(error)
    return bool(_FAILED.search(text)) and not _OF_THE_SCRIPT.search(text)


def abort_if_lost(error: BaseException) -> None:
    """Abort this process if its GPU is broken, so that the launcher checks the devices.

    Errors of other kinds are ignored. Without a launcher, the function does nothing.
    """
    if launched_device() and is_device_error(error):
        sys.stdout.flush()
        sys.stderr.flush()
        os.abort()
