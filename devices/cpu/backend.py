"""Slices of the CPU as evener asks for them: cores, threads and memory confine a child."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from evener.errors import RequestError
from evener.system.cpu_topology import allowed_cpus, core_groups

from ..backend import QUIET, Backend, ChildEnvironment
from ..listing import Discovery
from ..types import Device, Source, Term, limited
from .slices import slices
from .source import CpuSource

MIB = 1 << 20
# Without these, glibc maps and unmaps the large buffers of every step: 15 % of the speed and half of the noise.
STEADY_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_ARENA_MAX": "1",
}


class CpuSlices(Backend):
    """Disjoint sets of cores. A percentage is held by the child, which spins before each step."""

    kind = "cpu"
    own_memory = False
    torch_name = "cpu"
    tensorflow_name = "CPU"

    def find(self, terms: Sequence[Term], variables: Mapping[str, str]) -> Discovery:
        """The slices that the terms name; RequestError if they cut the CPU in two ways."""
        counts = {term.slices for term in terms}
        if len(counts) > 1:
            raise RequestError("One request cuts the CPU in two ways.", "Use the same cpu/N everywhere.")
        every = slices(counts.pop())
        chosen: list[Device] = []
        for term in terms:
            picked = (_find_slice(every, term.pick),) if term.pick else every
            chosen += [limited(device, term.limit) for device in picked]
        spare = len(allowed_cpus()) - sum(len(device.cores) for device in every)
        note = f"{len(every)} equal slices leave {spare} of {len(allowed_cpus())} logical CPUs unused."
        return Discovery(tuple(chosen), (note,) if spare else ())

    def open_source(self, found: Discovery) -> Source:
        """A source that reads /proc and /sys."""
        return CpuSource(found.devices, notes=found.notes)

    def child_environment(self, devices: Sequence[Device], framework: str) -> ChildEnvironment:
        """The slices' cores, a thread for each physical core, and a cap on memory."""
        cores = tuple(sorted(core for device in devices for core in device.cores))
        threads = max(1, len(core_groups(cores)))
        variables = {**QUIET, **STEADY_MALLOC}
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


def _find_slice(every: Sequence[Device], pick: str) -> Device:
    if re.fullmatch(r"\d{1,6}", pick, re.ASCII) and int(pick) < len(every):
        return every[int(pick)]
    raise RequestError(
        f"There is no slice {pick!r} of the CPU: it is cut into {len(every)}, from 0 to {len(every) - 1}.",
        "Pick one of them, or cut it finer with cpu/N:I.",
    )
