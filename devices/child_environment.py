"""What a child process needs so that it trains on its devices and on nothing else: variables, cores, memory.

Affinity and thread counts confine it to CPU slices, CUDA_VISIBLE_DEVICES to GPUs; the allocator, the address space or
MPS enforce limits. A slice's percentage isn't set here: the child spins after each step.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

import evener
from evener.devices.types import Device
from evener.errors import DeviceError
from evener.system.cpu_topology import core_groups

MIB = 1 << 20
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR"}
# Without these, glibc maps and unmaps the large buffers of every step: 15 % of the speed and half of the noise.
STEADY_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_ARENA_MAX": "1",
}
MPS_FOLDER = "/tmp/nvidia-mps"  # NVIDIA's own default


class ChildEnvironment(msgspec.Struct, frozen=True):
    """How to start a child on its devices; the child applies `address_space_bytes` itself, by `cap_address_space`."""

    variables: dict[str, str]  # to set; the rest of the environment is inherited
    cores: tuple[int, ...] = ()  # for os.sched_setaffinity; empty: leave it
    address_space_bytes: int | None = None  # room to grow, counted from when the framework is imported; None: no cap
    threads: int | None = None  # compute threads; None: the framework's own choice


def child_environment(devices: Sequence[Device], framework: str) -> ChildEnvironment:
    """The environment of one child that trains on `devices` with "tensorflow", "torch" or "none".

    DeviceError if a GPU is held to a percentage and no MPS daemon runs that could hold it.
    """
    kinds = {device.kind for device in devices}
    if len(kinds) > 1:
        raise ValueError(f"one child can't train on devices of {len(kinds)} kinds")
    if kinds == {"gpu"}:
        return _on_gpus(devices)
    if kinds == {"cpu"}:
        return _on_cores(devices, framework)
    return ChildEnvironment({})


def import_path(inherited: str) -> str:
    """PYTHONPATH for a child that must import this same evener.

    Where `evener` was found through a folder on `sys.path`, that folder leads. An editable install needs no folder: the
    checkout's would offer its other packages too, and a user's `workloads` folder may have the name of one.
    """
    home = Path(evener.__file__).resolve().parent.parent
    known = {Path(entry or os.curdir).resolve() for entry in sys.path}
    return os.pathsep.join(filter(None, (str(home) if home in known else "", inherited)))


def cap_address_space(room_bytes: int) -> None:
    """Let this process grow by so much from here on; more ends in a failed allocation, which torch can catch."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft = pages * resource.getpagesize() + room_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def mps_runs() -> bool:
    """Whether an MPS control daemon listens where CUDA programs look for one."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or MPS_FOLDER)
    with suppress(OSError, ValueError, OverflowError):
        pid = int((folder / "nvidia-cuda-mps-control.pid").read_text().strip("\0 \n"))
        return pid > 0 and psutil.pid_exists(pid)
    return False


def _on_cores(devices: Sequence[Device], framework: str) -> ChildEnvironment:
    cores = tuple(sorted(core for device in devices for core in device.cores))
    threads = max(1, len(core_groups(cores)))
    variables = {**QUIET, **STEADY_MALLOC, "CUDA_VISIBLE_DEVICES": ""}
    variables |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    sizes = [device.usable_memory_bytes for device in devices]
    memory_bytes = sum(size for size in sizes if size is not None) if None not in sizes else None
    if framework == "tensorflow":
        # Two threads between operations: a collective that waits must not hold the only one.
        variables |= {"TF_NUM_INTRAOP_THREADS": str(threads), "TF_NUM_INTEROP_THREADS": "2"}
        if memory_bytes is not None:
            variables["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
            variables["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(max(1, memory_bytes // MIB))
        if any(device.limit.memory_bytes is not None for device in devices):
            # With oneDNN on, a step that meets the cap ends in a signal; off, it raises ResourceExhaustedError but
            # takes twice the time. So only a limit that was asked for turns it off.
            variables["TF_ENABLE_ONEDNN_OPTS"] = "0"
    return ChildEnvironment(variables, cores, memory_bytes if framework == "torch" else None, threads)


def _on_gpus(devices: Sequence[Device]) -> ChildEnvironment:
    variables = {
        **QUIET,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(device.id for device in devices),
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }
    percentages = {device.limit.percent or 100.0 for device in devices}
    if len(percentages) > 1:
        raise ValueError("MPS holds a whole process to one percentage: unequal GPUs need a child each")
    (percent,) = percentages
    if percent < 100:
        if not mps_runs():
            limited = ", ".join(device.label for device in devices)
            raise DeviceError(
                f"{limited} can't be held to {percent:g} %: no MPS daemon runs.",
                "Start one with nvidia-cuda-mps-control -d, or omit the percentage.",
            )
        variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{percent:g}"
    return ChildEnvironment(variables)
