"""Prepare each process for the process group that the user's script creates.

The group consists of the ranks that `evener run` started, or of processes that the script itself
started. Some scripts never create a group. Therefore, at first, only evener's first rank runs the
script; the others run it once the script creates a group with them. A process that evener didn't
start gets the plan's device for its rank.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
import psutil

from ..errors import RequestError
from ..plan.file import load_plan
from ..system.cores import allowed_cpus, pin_threads, slice_cores
from ..training.first_rank import (
    RANK_VARIABLES,
    STARTED_AS,
    is_eveners_rank,
    is_first_process,
    is_in_other_run,
    is_released,
    release_others,
)
from ..training.launched import DEVICE, PLAN, RENDEZVOUS, RUN, launched_device

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


class GroupRank(msgspec.Struct, frozen=True):
    """Rank and world size of a process in its process group."""

    rank: int
    world: int
    is_given: bool  # True if the rank was passed to the call instead of set in the environment


_member: GroupRank | None = None


def current_rank() -> int:
    """Return this process's rank in its group, or else the environment's RANK; 0 if unset."""
    if _member is not None:
        return _member.rank
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0


def begin(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Hook of `init_process_group`: find out this process's rank, and choose its device.

    If the group is that of `evener run`, the waiting ranks begin to run the script. Raises
    RequestError if the group would wait for ranks that never start.
    """
    global _member
    call_arguments = _signature(wrapped).bind(*arguments, **keywords).arguments
    member = _read_group_rank(call_arguments)
    if member is not None and os.environ.get(STARTED_AS):
        if _is_eveners_group(member, call_arguments.get("init_method")):
            release_others()
            _pin_to(launched_device())
        else:
            _refuse_missing_ranks(member, call_arguments)
            _set_own_device(member)
        _member = member
    return wrapped(*arguments, **keywords)


@cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def _read_group_rank(call_arguments: dict[str, Any]) -> GroupRank | None:
    """Return rank and world size from the call or the environment, or None if both lack them.

    `call_arguments` are the arguments of `init_process_group`.
    """
    # Numbers that aren't in the call are taken from the environment. With MPI, only the backend
    # knows them.
    query = dict(parse_qsl(urlsplit(call_arguments.get("init_method") or "").query))
    rank = query.get("rank", call_arguments.get("rank", -1))
    world = query.get("world_size", call_arguments.get("world_size", -1))
    is_given = int(rank) >= 0
    numbers = [
        value if int(value) >= 0 else os.environ.get(name, "")
        for value, name in ((rank, "RANK"), (world, "WORLD_SIZE"))
    ]
    if not all(str(number).isdecimal() for number in numbers):
        return None
    return GroupRank(int(numbers[0]), int(numbers[1]), is_given)


def _is_eveners_group(member: GroupRank, method: str | None) -> bool:
    """Return whether the script's process group consists of the ranks that `evener run` started.

    `method` is the script's `init_method`.
    """
    # A script may choose its own rendezvous address. So another address means another group only if
    # a launcher in the program has started sibling ranks.
    known = (os.environ.get("RANK"), os.environ.get("WORLD_SIZE"))
    if not is_eveners_rank() or known != (str(member.rank), str(member.world)):
        return False
    if multiprocessing.parent_process() is not None:
        return not member.is_given and _find_address(method, dict(os.environ)) == _eveners_address()
    variables = _read_start_environment("self")
    return _find_address(None, variables) == _eveners_address() or not _has_sibling(variables)


def _refuse_missing_ranks(member: GroupRank, call_arguments: dict[str, Any]) -> None:
    """Raise RequestError if the script's group would wait for ranks that never start."""
    # for example, the program's options list fewer GPUs than evener has devices
    world = os.environ.get("WORLD_SIZE")
    if not is_first_process() or is_released() or member.world < 2 or str(member.world) == world:
        return
    if not _is_local(call_arguments) or psutil.Process().children():
        return
    raise RequestError(
        f"The program makes a group of {member.world} processes, and evener run has one for each "
        f"of {world} devices.",
        "Name as many devices as the program takes, such as --devices gpu:0,gpu:1.",
    )


def _is_local(call_arguments: dict[str, Any]) -> bool:
    """Return whether the group's rendezvous is at 127.0.0.1."""
    method = call_arguments.get("init_method")
    if call_arguments.get("store") is not None or urlsplit(method or "env:").scheme not in (
        "env",
        "tcp",
    ):
        return False
    return _find_address(method, dict(os.environ)).startswith("127.0.0.1:")


def _eveners_address() -> str:
    return os.environ.get(RENDEZVOUS, "").partition(" ")[0]


def _find_address(method: str | None, variables: dict[str, str]) -> str:
    """Return the group's rendezvous as host and port, such as "127.0.0.1:29500"."""
    # a tcp:// URL is preferred to the environment
    if method and urlsplit(method).scheme == "tcp":
        return urlsplit(method).netloc.replace("localhost", "127.0.0.1")
    host, port = (variables.get(name, "") for name in _ADDRESS)
    return f"{host.replace('localhost', '127.0.0.1')}:{port}"


def _read_start_environment(process: str) -> dict[str, str]:
    """Return the environment variables that a process was started with, or {} if unreadable.

    `process` is a process id or "self".
    """
    # they can't be read if the process has exited or belongs to another user
    with suppress(OSError):
        text = Path(f"/proc/{process}/environ").read_bytes().decode(errors="surrogateescape")
        pairs = (each.partition("=") for each in text.split("\0") if each)
        return {name: value for name, _, value in pairs}
    return {}


def _has_sibling(own: dict[str, str]) -> bool:
    """Return whether another rank of this process's group is running on this machine.

    `own` is the environment that this process was started with. It is compared with the
    environments of all other processes.
    """
    # a sibling has the same run, rendezvous address and number of ranks, but another rank
    alike = (RUN, "WORLD_SIZE", *_ADDRESS)
    for process in filter(str.isdecimal, os.listdir("/proc")):
        other = _read_start_environment(process)
        is_beside = all(other.get(name) == own.get(name) for name in alike)
        if is_beside and other.get("RANK", own.get("RANK")) != own.get("RANK"):
            return True
    return False


def _set_own_device(member: GroupRank) -> None:
    """Assign one of the plan's devices to a process that the user's script has started itself."""
    # This is the plan's device for the process's rank. If there are more processes than shares,
    # some use the same device. If the numbers differ, shares are equal.
    if member.is_given and is_eveners_rank():  # the variables are those of the parent process
        for name in RANK_VARIABLES:
            os.environ.pop(name, None)
    _free_interfaces(member)
    path = os.environ.get(PLAN)
    if not path:
        return
    shares = load_plan(path).layout.active
    local = os.environ.get("LOCAL_RANK", str(member.rank))
    os.environ[DEVICE] = shares[int(local) % len(shares)].device
    if member.world <= len(shares):
        _pin_to(launched_device())
    if member.world != len(shares):
        del os.environ[PLAN]


def _free_interfaces(member: GroupRank) -> None:
    """Let gloo and NCCL use interfaces other than loopback if the group spans several machines."""
    here = os.environ.get("LOCAL_WORLD_SIZE", str(member.world))
    if is_in_other_run() and here != str(member.world):
        for name in _INTERFACES:
            if os.environ.get(name) == "lo":
                del os.environ[name]


def _pin_to(device: str) -> None:
    """Pin this process to the device's CPU cores, if the device is a slice of the CPU."""
    cores = slice_cores(device, allowed_cpus())
    if cores:
        pin_threads(cores)


def begin_processes(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Hook of `torch.multiprocessing.start_processes` that hides evener's rank from the children.

    The rank stays visible if other ranks already run the script.
    """
    with _without_rank():
        return wrapped(*arguments, **keywords)


@contextmanager
def _without_rank() -> Iterator[None]:
    """Context manager that hides RANK and similar variables from processes that are started in it.

    Nothing is hidden if evener didn't start this process, or if other ranks already run the script.
    """
    # With these variables, child processes would act as ranks that evener started. They stay if
    # evener didn't start this process, or if other ranks run the program by now.
    alone = is_eveners_rank() and (os.environ.get("WORLD_SIZE") == "1" or not is_released())
    kept = {name: os.environ.pop(name) for name in RANK_VARIABLES if alone and name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
