"""What a comparison that was asked for means on this machine: which layouts can be measured, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from evener.balancer.request import Request
from evener.balancer.resolve import Bench, understand
from evener.balancer.search.layouts import FAMILIES, Family, Knob, PackMode, Placement, Wanted
from evener.devices.child_environment import mps_runs
from evener.devices.nvidia.mps import PROGRAM, find_program
from evener.errors import RequestError
from evener.workloads import registry

SINGLE = "single"  # a placement that is a solo layout
KNOBS: tuple[Knob, ...] = ("xla", "mixed")


def to_compare(
    request: Request, layouts: Sequence[str] | None = None, mps: bool = False, knobs: Sequence[str] = ()
) -> Request:
    """The request with the layouts that can be compared here.

    What was named and can't be had is told in `compare.left_out`; RequestError for unknown words, or for nothing left.
    """
    families = _chosen("--layouts", layouts or FAMILIES, FAMILIES)
    turned = _chosen("--try", knobs, KNOBS)
    bench = understand(request)
    named = layouts is not None
    notes: list[str] = []
    placements = _placements(bench)
    left = [family for family in families if _can(bench, family, placements, named, notes)]
    if not left:
        raise RequestError(notes[0] if notes else "No layout can be compared here.", "Choose other layouts or devices.")
    modes = _modes(bench, mps and "pack" in left, notes)
    if "pack" in left and bench.devices[0].kind == "gpu" and mps_runs():
        notes.append(
            "An MPS daemon runs here already: it is left alone, and plain processes share GPUs through it too."
        )
    if bench.machine is not None and turned:
        notes.append("Simulated devices know neither XLA nor another precision; --try was left out.")
        turned = []
    wanted = Wanted(
        families=tuple(cast(list[Family], left)),
        placements=placements if "place" in left else (),
        pack_modes=modes,
        knobs=tuple(cast(list[Knob], turned)),
        left_out=tuple(notes),
    )
    return msgspec.structs.replace(request, compare=wanted)


def _chosen(option: str, words: Sequence[str], known: Sequence[str]) -> list[str]:
    """The words without repeats, in the order in which they are known."""
    for word in words:
        if word not in known:
            raise RequestError(f"{option} {word!r} is not known.", f"Choose from {', '.join(known)}.")
    return [word for word in known if word in words]


def _placements(bench: Bench) -> tuple[Placement, ...]:
    if bench.machine is not None:
        return tuple(Placement(one.name, one.devices) for one in bench.machine.placements)
    entry = registry.find(bench.workload, bench.framework if bench.framework != "none" else "")
    return tuple(Placement(name, entry.placement_devices) for name in entry.placements if name != SINGLE)


def _can(bench: Bench, family: str, placements: Sequence[Placement], named: bool, notes: list[str]) -> bool:
    """Whether a layout can be measured; why not is noted where it was asked for by name."""
    why = ""
    if family in ("even", "split", "place") and len(bench.devices) < 2:
        why = f"{family} needs two devices, and there is one ({bench.devices[0].label})"
    elif family == "place" and not placements:
        of = "the simulated machine" if bench.machine is not None else bench.workload
        have = "" if bench.machine is not None else f"; {_with_placements()} have some"
        why = f"{of} has no placements{have}"
    if why and named:
        notes.append(f"Left out: {why}.")
    return not why


def _with_placements() -> str:
    names = [name for name in registry.names() if registry.find(name).placements]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _modes(bench: Bench, mps: bool, notes: list[str]) -> tuple[PackMode, ...]:
    """Plain processes; on GPUs also logical devices in TensorFlow, and MPS where it was asked for and is installed."""
    modes: list[PackMode] = [""]
    gpus = bench.devices[0].kind == "gpu"
    if gpus and bench.framework == "tensorflow":
        modes.append("logical")
    if mps and not gpus:
        notes.append("--mps was left out: it shares GPUs, and there are none.")
    elif mps and find_program() is None:
        notes.append(f"--mps was left out: {PROGRAM} is not installed. Packing is measured with plain processes.")
    elif mps:
        modes.append("mps")
    return tuple(modes)
