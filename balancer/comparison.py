"""The layouts that a comparison can measure on this machine, and why not the others."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import cast

import msgspec

from evener.devices.registry import find_backend
from evener.devices.types import group_by_host
from evener.errors import RequestError
from evener.workloads import registry

from .families import FAMILIES, Family, PackMode, Placement, find_families
from .intake import take_in
from .request import Job, Request
from .search.layouts import Knob, LayoutOptions

SINGLE = "single"  # a placement that is a solo layout
KNOBS: tuple[Knob, ...] = ("xla", "mixed")


def take_in_comparison(
    request: Request, layouts: Sequence[str] | None = None, mps: bool = False, knobs: Sequence[str] = ()
) -> Job:
    """The request as `take_in` has it, with the layouts that can be compared here.

    What was named and isn't possible is explained in `request.compare.left_out`; RequestError for unknown words, or if
    nothing is left.
    """
    families = find_families(_choose("--layouts", layouts or tuple(FAMILIES), tuple(FAMILIES)))
    knobs = _choose("--try", knobs, KNOBS)
    resolved = take_in(request)
    notes: list[str] = []
    placements = _find_placements(resolved)
    reasons = {family: _why_impossible(resolved, family, placements) for family in families}
    possible = [family for family in families if not reasons[family]]
    if layouts is not None:
        notes += [f"Left out: {reason}." for reason in reasons.values() if reason]
    if not possible:
        raise RequestError(notes[0] if notes else "No layout can be compared here.", "Choose other layouts or devices.")
    packs = any(family.traits.side_by_side for family in possible)
    modes = _pack_modes(resolved, mps and packs, notes)
    if packs and find_backend(resolved.devices[0].kind).daemon_runs():
        notes.append("An MPS daemon is already running and left alone; plain processes share GPUs through it too.")
    if resolved.machine is not None and knobs:
        notes.append("Simulated devices have neither XLA nor other precisions; --try was left out.")
        knobs = []
    wanted = LayoutOptions(
        families=tuple(family.name for family in possible),
        placements=placements if any(family.traits.placed for family in possible) else (),
        pack_modes=modes,
        knobs=tuple(cast(list[Knob], knobs)),
        left_out=tuple(notes),
    )
    return msgspec.structs.replace(resolved, request=msgspec.structs.replace(request, compare=wanted))


def _choose(option: str, words: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """The words without repeats, in the order of `allowed`."""
    for word in words:
        if word not in allowed:
            raise RequestError(f"{option} {word!r} is not known.", f"Choose from {', '.join(allowed)}.")
    return [word for word in allowed if word in words]


def _find_placements(resolved: Job) -> tuple[Placement, ...]:
    if resolved.machine is not None:
        return tuple(Placement(one.name, one.devices) for one in resolved.machine.placements)
    entry = registry.find(resolved.workload, resolved.framework if resolved.framework != "none" else "")
    return tuple(Placement(name, entry.placement_devices) for name in entry.placements if name != SINGLE)


def _why_impossible(resolved: Job, family: Family, placements: Sequence[Placement]) -> str:
    """Why a family of layouts can't be measured; empty if it can."""
    if len(resolved.devices) < family.fewest_devices:
        return f"{family.name} needs two devices, and there is one ({resolved.devices[0].label})"
    if family.traits.placed and len(group_by_host(resolved.devices)) > 1:
        return f"{family.name} needs its devices on one host"
    if not family.traits.placed or placements:
        return ""
    if resolved.machine is not None:
        return "the simulated machine has no placements"
    *names, last = [name for name in registry.names() if registry.find(name).placements]
    return f"{resolved.workload} has no placements; {', '.join(names)} and {last} have some"


def _pack_modes(resolved: Job, mps: bool, notes: list[str]) -> tuple[PackMode, ...]:
    """Plain processes; on GPUs also logical devices in TensorFlow, and MPS if it was asked for and is installed."""
    modes: list[PackMode] = [""]
    backend = find_backend(resolved.devices[0].kind)
    if backend.own_memory and resolved.framework == "tensorflow":
        modes.append("logical")
    program = backend.daemon_program
    if mps and not program:
        notes.append("--mps was left out: it shares GPUs, and there are none.")
    elif mps and shutil.which(program) is None:
        notes.append(f"--mps was left out: {program} is not installed. Packing is measured with plain processes.")
    elif mps:
        modes.append("mps")
    return tuple(modes)
