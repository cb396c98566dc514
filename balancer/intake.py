"""The way in: a request, the devices and the workload become a job that is checked, once, before
anything starts.

Everything that can be wrong with a request is found here, before a run is made or a child is
started; for a comparison also which layouts can be measured on these devices, and why not the
others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from typing import cast

import msgspec

from evener.devices.cluster.agents import find_agent
from evener.devices.discover import discover, find_others
from evener.devices.machine import Machine
from evener.devices.registry import child_environment, find_backend
from evener.devices.types import Device, group_by_host
from evener.errors import DeviceError, EvenerError, RequestError
from evener.workloads import registry

from .families import FAMILIES, Family, PackMode, Placement, find_families
from .journal import Header
from .objectives import OBJECTIVES, find_objective
from .probes.launch_plan import ONE_PROCESS, OPEN_SERVERS, choose_group_engine
from .request import ENGINES, INPUTS, MICROS, PRECISIONS, Job, Request
from .result.words import refuse
from .search.layouts import Knob, LayoutOptions
from .types import Finding, Problem

SIMULATED = "Measured on simulated devices, whose speeds are written down, not on hardware."
NOT_RUN = "simulated devices have the speeds of a model of their own."
REAL_ALONE = {"precision": "--precision", "xla": "--xla", "input": "--input", "engine": "--engine"}
LARGEST_BATCH = 1 << 30
MOST_DEVICES = 1024


def take_in(request: Request) -> Job:
    """Find devices and workload; RequestError or DeviceError says what is wrong or missing."""
    check_request(request)
    found = discover(request.devices, ray_address=request.ray_address)
    name = request.workload or registry.default_name(request.framework, found.devices[0].on_cpu)
    entry = registry.find(name, request.framework)
    settings = registry.resolve_settings(entry, request.settings)
    largest = entry.largest_share if found.machine is None else None
    job = Job(
        request,
        found.devices,
        name,
        entry.framework,
        largest,
        found.notes,
        found.machine,
        found.driver,
    )
    for fault in chain(_find_wrong_sizes(job.problem), _find_misfits(job, settings)):
        raise refuse(fault)
    return msgspec.structs.replace(job, notes=_find_notes(job))


def read_job(header: Header) -> Job:
    """The job of a journal; RequestError if no search can do it, as somebody may have changed the
    file.
    """
    check_request(header.request)
    check_problem(header.job.problem)
    return header.job


def _find_misfits(job: Job, settings: object) -> Iterator[Finding]:
    """Options and settings that the devices or the framework can't follow."""
    request, devices = job.request, job.devices
    if job.machine is not None:
        for name, option in REAL_ALONE.items():
            if getattr(request, name) != getattr(Request(), name):
                yield Finding("request.simulated", {"option": option})
    if request.engine != "auto":
        yield from _find_engine_misfits(request.engine, job.framework, devices)
    if find_objective(request.objective).needs_energy:
        yield from _find_silent_meters(devices, job.machine)
    yield from _find_unwritable(settings)


def _find_engine_misfits(
    engine: str, framework: str, devices: Sequence[Device]
) -> Iterator[Finding]:
    """What keeps the engine from training in this framework on these devices."""
    if framework != "tensorflow":
        yield Finding("request.engine_framework", {"engine": engine, "framework": framework})
    if engine in ONE_PROCESS and len({device.host for device in devices}) > 1:
        yield Finding("request.engine_hosts", {"engine": engine})
    if engine in ONE_PROCESS:
        for device in devices:
            if device.limit and (device.limit.percent or device.on_cpu):
                limit = {"device": device.label, "limit": msgspec.to_builtins(device.limit)}
                yield Finding("request.engine_limit", {"engine": engine, **limit})


def _find_unwritable(settings: object) -> Iterator[Finding]:
    """Settings that a journal can't hold."""
    try:
        msgspec.json.encode(settings)
    except (TypeError, ValueError, OverflowError) as error:
        yield Finding("request.setting", {"why": str(error)})


def _find_silent_meters(devices: Sequence[Device], machine: Machine | None) -> Iterator[Finding]:
    """Devices that can't report their energy."""
    for position, device in enumerate(devices):
        if device.on_cpu:
            yield Finding("request.no_energy")
        if machine is not None and machine.devices[position].power_watts is None:
            yield Finding("request.no_watts", {"device": device.label})


def _find_notes(job: Job) -> tuple[str, ...]:
    """Notes on the devices and what runs on them; RequestError or DeviceError if a host can't train
    on its own.
    """
    if job.machine is None:
        hosts = check_hosts(group_by_host(job.devices), job.framework)
        return (*job.notes, *hosts, *_find_open_servers(job))
    own = (f"{job.workload} was not run: {NOT_RUN}",) if ":" in job.workload else ()
    return (*own, *job.notes, SIMULATED)


def _find_open_servers(job: Job) -> tuple[str, ...]:
    """A note where a split on one host is measured with TensorFlow's servers, which have no
    password.
    """
    if job.framework != "tensorflow" or len({device.host for device in job.devices}) > 1:
        return ()
    if len(job.devices) < 2 or choose_group_engine(job, job.devices) in ONE_PROCESS:
        return ()
    return (OPEN_SERVERS,)


def check_hosts(hosts: Mapping[str, tuple[Device, ...]], framework: str) -> tuple[str, ...]:
    """Notes on GPUs that others use; RequestError or DeviceError if a host can't train on its
    devices.
    """
    notes: list[str] = []
    for host, own in hosts.items():
        try:
            notes += (
                find_agent(host).call(check_here, own, framework)
                if host
                else check_here(own, framework)
            )
        except EvenerError as fault:
            if host and host not in fault.message:
                raise type(fault)(f"{host}: {fault.message}", fault.remedy) from None
            raise
    return tuple(notes)


def check_here(devices: tuple[Device, ...], framework: str) -> tuple[str, ...]:
    """Notes on devices of this machine that others use; an error if the framework can't train on
    them.

    DeviceError if others hold the memory of all of them.
    """
    if framework != "none" and find_spec(framework) is None:
        raise refuse(Finding("request.not_installed", {"framework": framework}))
    for device in devices:
        child_environment([device], framework)
    full, busy = find_others(devices)
    if len(full) == len(devices):
        raise DeviceError(
            " ".join(full), "Stop those processes, wait for them, or choose other --devices."
        )
    return (*full, *busy)


def check_request(request: Request) -> None:
    """Raise RequestError for the first number or word that is out of range."""
    for fault in _find_wrong_words(request):
        raise refuse(fault)


def _find_wrong_words(request: Request) -> Iterator[Finding]:
    unit, batch, largest = request.multiple_of, request.global_batch, request.max_global_batch
    sizes = {"--multiple-of": unit, "--global-batch": batch, "--max-global-batch": largest}
    for option, number in (sizes | {"--own-batch": request.own_batch}).items():
        if number is not None and not 1 <= number <= LARGEST_BATCH:
            yield Finding(
                "request.number", {"option": option, "number": number, "largest": LARGEST_BATCH}
            )
    if largest is not None and largest < unit:
        yield Finding("request.below_a_share", {"largest": largest, "unit": unit})
    if batch is not None and batch % unit:
        yield Finding("request.no_multiple", {"batch": batch, "unit": unit})
    if batch is not None and largest is not None and batch > largest:
        yield Finding("request.above_largest", {"batch": batch, "largest": largest})
    budget = request.budget_seconds
    if budget is not None and not (math.isfinite(budget) and budget > 0):
        yield Finding("request.budget", {"seconds": budget})
    if not (math.isfinite(request.tolerance) and 0 <= request.tolerance < 1):
        yield Finding("request.tolerance", {"tolerance": request.tolerance})
    if not 0 <= request.max_slowdown < 1:
        yield Finding("request.max_slowdown", {"percent": 100 * request.max_slowdown})
    if not (math.isfinite(request.pace) and request.pace >= 0):
        yield Finding("request.pace", {"pace": request.pace})
    for option, word, words in (
        ("--objective", request.objective, tuple(OBJECTIVES)),
        ("--precision", request.precision, PRECISIONS),
        ("--input", request.input, INPUTS),
        ("--engine", request.engine, ENGINES),
        ("--micro", request.micro, MICROS),
    ):
        if word not in words:
            yield Finding("request.word", {"option": option, "word": word, "words": words})


def check_problem(problem: Problem) -> None:
    """Raise RequestError for a problem that has no answer."""
    for fault in _find_wrong_sizes(problem):
        raise refuse(fault)


def _find_wrong_sizes(problem: Problem) -> Iterator[Finding]:
    quantum, batch, largest = problem.multiple_of, problem.global_batch, problem.largest_share
    if not 1 <= problem.devices <= MOST_DEVICES:
        yield Finding("request.devices", {"devices": problem.devices, "most": MOST_DEVICES})
    for position, size in enumerate(problem.memory_bytes):
        if size is not None and size <= 0:
            yield Finding("request.memory", {"position": position, "size_bytes": size})
    if largest is not None and largest < quantum:
        yield Finding("request.largest_share", {"largest": largest, "unit": quantum})
    if batch is not None and batch < problem.devices * quantum:
        yield Finding(
            "request.too_few_samples", {"batch": batch, "devices": problem.devices, "unit": quantum}
        )


SINGLE = "single"  # a placement that is a solo layout
KNOBS: tuple[Knob, ...] = ("xla", "mixed")


def take_in_comparison(
    request: Request, layouts: Sequence[str] | None = None, knobs: Sequence[str] = ()
) -> Job:
    """The request as `take_in` has it, with the layouts that can be compared here.

    What was named and isn't possible is explained in `request.compare.left_out`; RequestError for
    unknown words, or if nothing is left.
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
        raise RequestError(
            notes[0] if notes else "No layout can be compared here.",
            "Choose other layouts or devices.",
        )
    packs = any(family.traits.side_by_side for family in possible)
    if packs and find_backend(resolved.devices[0].kind).daemon_runs():
        notes.append("An MPS daemon runs: processes share GPUs through it.")
    if resolved.machine is not None and knobs:
        notes.append("Simulated devices have neither XLA nor other precisions; --try was left out.")
        knobs = []
    wanted = LayoutOptions(
        families=tuple(family.name for family in possible),
        placements=placements if any(family.traits.placed for family in possible) else (),
        pack_modes=_pack_modes(resolved),
        knobs=tuple(cast(list[Knob], knobs)),
        left_out=tuple(notes),
        shards=any(family.traits.sharded for family in possible) and layouts is not None,
    )
    return msgspec.structs.replace(
        resolved, request=msgspec.structs.replace(request, compare=wanted)
    )


def _choose(option: str, words: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """The words without repeats, in the order of `allowed`."""
    for word in words:
        if word not in allowed:
            raise RequestError(
                f"{option} {word!r} is not known.", f"Choose from {', '.join(allowed)}."
            )
    return [word for word in allowed if word in words]


def _find_placements(resolved: Job) -> tuple[Placement, ...]:
    if resolved.machine is not None:
        return tuple(Placement(one.name, one.devices) for one in resolved.machine.placements)
    entry = registry.find(
        resolved.workload, resolved.framework if resolved.framework != "none" else ""
    )
    return tuple(
        Placement(name, entry.placement_devices) for name in entry.placements if name != SINGLE
    )


def _why_impossible(resolved: Job, family: Family, placements: Sequence[Placement]) -> str:
    """Why a family of layouts can't be measured; empty if it can."""
    if len(resolved.devices) < family.fewest_devices:
        return f"{family.name} needs two devices, and there is one ({resolved.devices[0].label})"
    if family.traits.placed and len(group_by_host(resolved.devices)) > 1:
        return f"{family.name} needs its devices on one host"
    if family.traits.sharded and not (
        resolved.problem.shards or (resolved.machine and resolved.machine.shards)
    ):
        whose = "of a machine file with [shards]" if resolved.machine else "PyTorch's"
        return f"{family.name} is {whose}"
    if not family.traits.placed or placements:
        return ""
    if resolved.machine is not None:
        return "the simulated machine has no placements"
    *names, last = [name for name in registry.names() if registry.find(name).placements]
    return f"{resolved.workload} has no placements; {', '.join(names)} and {last} have some"


def _pack_modes(resolved: Job) -> tuple[PackMode, ...]:
    """Plain processes; on GPUs also logical devices in TensorFlow."""
    parts = find_backend(resolved.devices[0].kind).own_memory and resolved.framework == "tensorflow"
    return ("", "logical") if parts else ("",)
