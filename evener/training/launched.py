"""Environment variables by which evener's launchers pass settings to training processes."""

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


def ask_for_processes(why: str) -> None:
    """Exit with a code that makes `evener launch` start one process per device instead.

    `why` is printed. Returns if the launcher can't do that, or if there is none.
    """
    if os.environ.get(ONE_PROCESS):
        print(f"evener: {why} A process for each device is started.", file=sys.stderr, flush=True)
        raise SystemExit(WANTS_PROCESSES)


def launched_plan(named: str | os.PathLike[str] | None = None) -> str | os.PathLike[str] | None:
    """Return the path of the plan to use: the plan that the script names, or the launcher's.

    If the launcher has replaced the named plan because devices were lost, its own is returned. None
    if there is neither.
    """
    # if evener launch has replaced the script's plan after the loss of devices, the result is the
    # plan for the remaining devices
    launched, replaced = os.environ.get(PLAN) or None, os.environ.get(REPLACED_PLAN)
    if named is None or launched is None or not replaced:
        return launched if named is None else named
    with suppress(OSError):
        return launched if os.path.samefile(named, replaced) else named
    return named


def launched_device() -> str:
    """Return the id of the device that the launcher gave this process, or "" if it gave none."""
    return os.environ.get(DEVICE, "")


def rendezvous_file(address: str) -> str | None:
    """Return the file that replaces a rendezvous at this address, or None if there is none."""
    # another launcher's rendezvous may have the same address
    named, _, path = os.environ.get(RENDEZVOUS, "").partition(" ")
    if is_in_other_run():
        return None
    return path if path and named == address.replace("localhost", "127.0.0.1") else None


def launched_run() -> str:
    """Return the name of the run that the launcher started, or ""."""
    return os.environ.get(RUN, "")


def launched_records() -> Path | None:
    """Return the folder where the launcher reads the last record of each process, or None."""
    folder = os.environ.get(RECORDS, "")
    return Path(folder) if folder else None


def restart_reason() -> str:
    """Return why the launcher restarted training, or "" after the first start."""
    return os.environ.get(RESTART, "")


def find_host(hosts: Iterable[str]) -> str:
    """Return this machine's name among `hosts`, or "" if none or several of them match.

    The variable EVENER_HOST has priority.
    """
    names = set(filter(None, hosts))
    if not names or HOST in os.environ:
        return os.environ.get(HOST, "") if names else ""
    own = socket.gethostname()
    found = names & {own, own.partition(".")[0]} or set(filter(is_here, names))
    return found.pop() if len(found) == 1 else ""


def is_here(name: str) -> bool:
    """Return True if the name or address belongs to this machine."""
    for family, kind, protocol, _, address in resolve(name):
        with suppress(OSError), socket.socket(family, kind, protocol) as door:
            door.bind(address)
            return True
    return False


def resolve(
    name: str, port: int = 0
) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[object, ...]]]:
    """Return the addresses of a host, [] if the name can't be resolved."""
    with suppress(OSError, UnicodeError):
        return list(socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM))
    return []


_FAILED = re.compile(
    r"(CUDA|HIP) (driver )?error|unhandled cuda error|Cuda failure|CUDNN_STATUS_EXECUTION_FAILED"
)
_OF_THE_SCRIPT = re.compile(r"out of memory|device-side assert")


def is_device_error(error: BaseException) -> bool:
    """Return True for a CUDA or HIP error that points to a broken GPU."""
    # running out of memory and device-side asserts are caused by the script
    text = str(error)
    return bool(_FAILED.search(text)) and not _OF_THE_SCRIPT.search(text)


def abort_if_lost(error: BaseException) -> None:
    """Abort this process after an error of a broken GPU, for the launcher to check its devices.

    Other errors are ignored, and so are processes without a launcher.
    """
    if launched_device() and is_device_error(error):
        sys.stdout.flush()
        sys.stderr.flush()
        os.abort()
