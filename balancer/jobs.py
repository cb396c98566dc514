"""Validate requests and resolve them to jobs on discovered devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import chain

import msgspec

from evener.devices.cluster.agents import find_agent
from evener.devices.discover import discover, find_others
from evener.devices.machine import Machine
from evener.devices.registry import child_environment, find_backend
from evener.devices.terms import write_limit
from evener.devices.types import Device, group_by_host
from evener.errors import DeviceError, EvenerError, RequestError
from evener.plan.layout import Traits
from evener.workloads import registry

from .families import FAMILIES, Family, PackMode, Placement, find_families
from .journal import Header
from .number_format import join_words
from .objectives import OBJECTIVES, find_objective
from .probes.launch_plan import ONE_PROCESS, OPEN_SERVERS, choose_group_engine
from .request import ENGINES, INPUTS, MICROS, PRECISIONS, Job, Request
from .search.layouts import BALANCE, Knob, LayoutOptions
from .types import Problem

SIMULATED = "Measured on simulated devices, whose speeds are read from a file, not on hardware."
NOT_RUN = "simulated devices have the speeds of a model of their own."
REAL_ALONE = {"precision": "--precision", "xla": "--xla", "input": "--input", "engine": "--engine"}
LARGEST_BATCH = 1 << 30  # rows: no training has as many, and sums of shares stay exact
LARGEST_SEED = (1 << 63) - 1  # the largest seed that a plan can store
MOST_DEVICES = 1024  # half a million pairs of devices are compared per decision


def make_job(request: Request) -> Job:
    """Validate a request, discover its devices and resolve its workload.

    Raises RequestError if the request is invalid, and DeviceError if its devices can't be used.
    """
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
    check_problem(job.problem)
    _check_supported_options(job, settings)
    return msgspec.structs.replace(job, notes=_find_notes(job))


def read_job(header: Header) -> Job:
    """Return the job in a journal's header, after validating it again.

    Raises RequestError if it is invalid, because the file may have been edited.
    """
    check_request(header.request)
    check_problem(header.job.problem)
    return header.job


def _check_supported_options(job: Job, settings: object) -> None:
    """Raise RequestError if an option doesn't work with these devices or this framework.

    It is also raised if the workload's `settings` can't be written as JSON.
    """
    request = job.request
    devices = job.devices
    if job.machine is not None:
        for name, option in REAL_ALONE.items():
            if getattr(request, name) != getattr(Request(), name):
                raise RequestError(
                    f"{option} has no effect on simulated devices, whose speeds are read from a "
                    "file.",
                    f"Leave {option} out.",
                )
    if request.engine != "auto":
        _check_engine(request.engine, job.framework, devices)
    if find_objective(request.objective).needs_energy:
        _check_energy_meters(devices, job.machine)
    _check_writable(settings)


def _check_engine(engine: str, framework: str, devices: Sequence[Device]) -> None:
    """Raise RequestError if the requested `--engine` can't train on these devices."""
    if framework != "tensorflow":
        raise RequestError(
            f"--engine {engine} is TensorFlow's; {framework} has none.", "Leave --engine out."
        )
    if engine not in ONE_PROCESS:
        return
    if len({device.host for device in devices}) > 1:
        raise RequestError(
            f"--engine {engine} has one process for all devices.",
            "Use multiworker on several hosts.",
        )
    for device in devices:
        if device.limit and (device.limit.percent or device.on_cpu):
            raise RequestError(
                f"{device.label} is limited to {write_limit(device.limit)}, which needs its own "
                f"process; --engine {engine} has one process for all devices.",
                "Use --engine multiworker, or leave the limit out.",
            )


def _check_writable(settings: object) -> None:
    """Raise RequestError if the workload's settings can't be written as JSON."""
    try:
        msgspec.json.encode(settings)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(
            f"A setting can't be written to the journal: {error}.", "Use numbers, text and lists."
        ) from None


def _check_energy_meters(devices: Sequence[Device], machine: Machine | None) -> None:
    """Raise RequestError if the power of a device is unknown."""
    for position, device in enumerate(devices):
        if device.on_cpu:
            raise RequestError(
                "CPU slices report no energy, so samples per joule can't be compared.",
                "Leave --objective out, or choose GPUs.",
            )
        if machine is not None and machine.devices[position].power_watts is None:
            raise RequestError(
                f"The power of {device.label} isn't written down, so samples per joule can't be "
                f"compared.",
                "Leave --objective out, or give `power_watts` in a machine file.",
            )


def _find_notes(job: Job) -> tuple[str, ...]:
    """Return messages about the devices for the user, such as other programs on them.

    Raises RequestError or DeviceError if a host can't train on its devices.
    """
    if job.machine is None:
        hosts = check_hosts(group_by_host(job.devices), job.framework)
        return (*job.notes, *hosts, *_find_open_servers(job))
    own = (f"{job.workload} was not run: {NOT_RUN}",) if ":" in job.workload else ()
    return (*own, *job.notes, SIMULATED)


def _find_open_servers(job: Job) -> tuple[str, ...]:
    """Return a warning if TensorFlow will open network servers, else an empty tuple.

    Such servers run code for anyone who can reach them.
    """
    if job.framework != "tensorflow" or len({device.host for device in job.devices}) > 1:
        return ()
    if len(job.devices) < 2 or choose_group_engine(job, job.devices) in ONE_PROCESS:
        return ()
    return (OPEN_SERVERS,)


def check_hosts(hosts: Mapping[str, tuple[Device, ...]], framework: str) -> tuple[str, ...]:
    """Check that each host can train on its devices now; other hosts are asked over the network.

    The keys are host names; "" is this machine. Returns messages about devices that other programs
    use. Raises RequestError or DeviceError, with the name of the host.
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
    """Check that these local devices can train with the framework now.

    Returns messages about devices that other programs use. Raises RequestError if the framework
    isn't installed, and DeviceError if other programs fill the memory of every device.
    """
    if framework != "none" and find_spec(framework) is None:
        raise RequestError(
            f"{framework} is not installed.", f"Install it: pip install 'evener[{framework}]'."
        )
    for device in devices:
        child_environment([device], framework)
    full, busy = find_others(devices)
    if len(full) == len(devices):
        raise DeviceError(
            " ".join(full), "Stop those processes, wait for them, or choose other --devices."
        )
    return (*full, *busy)


def check_request(request: Request) -> None:
    """Raise RequestError if an option is unknown or out of range.

    No device is needed for these checks.
    """
    _check_batches(request)
    _check_numbers(request)
    for option, word, words in (
        ("--objective", request.objective, tuple(OBJECTIVES)),
        ("--precision", request.precision, PRECISIONS),
        ("--input", request.input, INPUTS),
        ("--engine", request.engine, ENGINES),
        ("--micro", request.micro, MICROS),
    ):
        if word not in words:
            raise RequestError(
                f"{option} {word!r} is not known.", f"Choose {join_words(words, 'or')}."
            )


def _check_batches(request: Request) -> None:
    unit = request.multiple_of
    batch = request.global_batch
    largest = request.max_global_batch
    sizes = {
        "--multiple-of": unit,
        "--global-batch": batch,
        "--max-global-batch": largest,
        "--own-batch": request.own_batch,
    }
    for option, number in sizes.items():
        if number is not None and not 1 <= number <= LARGEST_BATCH:
            raise RequestError(
                f"{option} is {number}.", f"Give a whole number from 1 to {LARGEST_BATCH}."
            )
    if largest is not None and largest < unit:
        raise RequestError(
            f"--max-global-batch {largest} is below one share of {unit} samples.",
            "Raise it, or lower --multiple-of.",
        )
    if batch is not None and batch % unit:
        raise RequestError(
            f"--global-batch {batch} is not a multiple of {unit}.", "Change it, or --multiple-of."
        )
    if batch is not None and largest is not None and batch > largest:
        raise RequestError(
            f"--global-batch {batch} is above --max-global-batch {largest}.", "Give one of them."
        )


def _check_numbers(request: Request) -> None:
    if not -LARGEST_SEED <= request.seed <= LARGEST_SEED:
        raise RequestError(
            f"--seed {str(request.seed)[:40]} has more than 63 bits.", "Give a smaller number."
        )
    budget = request.budget_seconds
    if budget is not None and not (math.isfinite(budget) and budget > 0):
        raise RequestError(
            f"--budget is {budget} seconds.", "Give a time above 0, like 120s or 5m."
        )
    if not (math.isfinite(request.tolerance) and 0 <= request.tolerance < 1):
        raise RequestError(
            f"--tolerance is {request.tolerance}.", "Use a value of at least 0 and less than 1."
        )
    if not 0 <= request.max_slowdown < 1:
        raise RequestError(
            f"--max-slowdown is {100 * request.max_slowdown:g}%.", "Give 0% or more and below 100%."
        )
    if not (math.isfinite(request.pace) and request.pace >= 0):
        raise RequestError(f"--pace is {request.pace}.", "Give 0 for no waiting, 1 for real time.")


def check_problem(problem: Problem) -> None:
    """Raise RequestError if no layout is possible with these devices and batch limits."""
    quantum = problem.multiple_of
    batch = problem.global_batch
    largest = problem.largest_share
    if not 1 <= problem.devices <= MOST_DEVICES:
        raise RequestError(
            f"{problem.devices} devices can't be balanced.",
            f"Name between 1 and {MOST_DEVICES} devices.",
        )
    for position, size in enumerate(problem.memory_bytes):
        if size is not None and size <= 0:
            raise RequestError(
                f"{problem.label(position)} has {size} bytes of memory.",
                "Give a size above 0, or none.",
            )
    if largest is not None and largest < quantum:
        raise RequestError(
            f"A largest share of {largest} is below {quantum}.", f"Give {quantum} samples or more."
        )
    if batch is not None and batch < problem.devices * quantum:
        raise RequestError(
            f"A global batch of {batch} can't give each of {problem.devices} devices {quantum} or "
            f"more.",
            "Make it larger, or name fewer devices.",
        )


SINGLE = "single"  # a placement that is a solo layout
WORKERS = "workers"  # the name for trying several numbers of loader worker processes
KNOBS: Mapping[str, tuple[Knob, ...]] = {  # by their names in --try
    "xla": ("xla",),
    "mixed": ("mixed",),
    WORKERS: ("workers0", "workers2", "workers4", "workers8"),
}


def make_comparison_job(
    request: Request, layouts: Sequence[str] | None = None, knobs: Sequence[str] = ()
) -> Job:
    """Resolve a request to compare several kinds of layouts, and options such as XLA.

    - `layouts`: names of the kinds to compare; None means all that are possible here.
    - `knobs`: names of the options (from KNOBS) to try on the best layout.

    Layouts and options that can't be used here are left out; `request.compare.left_out` of the job
    lists the reasons. Raises RequestError if no kind of layout remains, or a name is unknown.
    """
    families = find_families(_choose("--layouts", layouts or tuple(FAMILIES), tuple(FAMILIES)))
    tried = _choose("--try", knobs, tuple(KNOBS))
    resolved = make_job(request)
    placements = _find_placements(resolved)
    possible, impossible = _sort_families(resolved, families, placements)
    notes = impossible if layouts is not None else []
    if not possible:
        raise RequestError(
            notes[0] if notes else "No layout can be compared here.",
            "Choose other layouts or devices.",
        )
    kinds = [family.traits for family in possible]
    notes += _find_daemon_notes(resolved, kinds)
    able, why = _find_knobs(resolved, tried)
    wanted = LayoutOptions(
        families=tuple(family.name for family in possible),
        placements=placements if any(kind.placed for kind in kinds) else (),
        pack_modes=_pack_modes(resolved),
        knobs=able,
        left_out=(*notes, *why),
        shards=layouts is not None and any(kind.sharded for kind in kinds),
    )
    return msgspec.structs.replace(
        resolved, request=msgspec.structs.replace(request, compare=wanted)
    )


def _find_daemon_notes(job: Job, kinds: Sequence[Traits]) -> list[str]:
    """Return a warning if processes on one GPU would share it through a running MPS daemon.

    Returns an empty list otherwise.
    """
    has_packs = any(kind.side_by_side for kind in kinds)
    if has_packs and find_backend(job.devices[0].kind).daemon_runs():
        return ["An MPS daemon runs: processes share GPUs through it."]
    return []


def _sort_families(
    job: Job, families: Sequence[Family], placements: Sequence[Placement]
) -> tuple[list[Family], list[str]]:
    """Separate the possible kinds of layouts from the impossible ones.

    Returns the possible ones, and a message about each impossible one.
    """
    possible = []
    notes = []
    for family in families:
        reason = _why_family_impossible(job, family, placements)
        if reason:
            notes.append(f"Left out: {reason}.")
        else:
            possible.append(family)
    return possible, notes


def make_job_with_knobs(request: Request, knobs: Sequence[str]) -> Job:
    """Resolve a request for a search that can also try several numbers of data loader workers.

    `knobs` are the names of the options to try. Only "workers" is allowed; RequestError is raised
    for other names. If this workload's number of workers can't be changed,
    `request.compare.left_out` of the job has the reason.
    """
    tried = _choose("--try", knobs, (WORKERS,))
    resolved = make_job(request)
    able, why = _find_knobs(resolved, tried)
    wanted = msgspec.structs.replace(BALANCE, knobs=able, left_out=why)
    return msgspec.structs.replace(
        resolved, request=msgspec.structs.replace(request, compare=wanted)
    )


def _find_knobs(job: Job, names: Sequence[str]) -> tuple[tuple[Knob, ...], tuple[str, ...]]:
    """Return the options that can be tried with this job, and messages about those that can't."""
    if not names:
        return (), ()
    if job.machine is not None:
        why = "Simulated devices have no XLA, other precisions or loaders; --try was left out."
        return (), (why,)
    notes: list[str] = []
    if WORKERS in names and job.framework == "tensorflow":
        notes.append(
            "--try workers was left out: tf.data fetches rows by threads of its own; give "
            "dataset.map num_parallel_calls=tf.data.AUTOTUNE, and end with "
            "prefetch(tf.data.AUTOTUNE)."
        )
    elif WORKERS in names and ":" not in job.workload:
        notes.append(
            "--try workers was left out: the rows of a built-in workload are in memory already."
        )
    able = [word for word in names if not (notes and word == WORKERS)]
    return tuple(chain.from_iterable(KNOBS[word] for word in able)), tuple(notes)


def _choose(option: str, values: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """Return the values that the user gave for a command-line option, in the order of `allowed`.

    Raises RequestError for a value that isn't allowed.
    """
    for word in values:
        if word not in allowed:
            raise RequestError(
                f"{option} {word!r} is not known.", f"Choose from {', '.join(allowed)}."
            )
    return [word for word in allowed if word in values]


def _find_placements(job: Job) -> tuple[Placement, ...]:
    if job.machine is not None:
        return tuple(
            Placement(placement.name, placement.devices) for placement in job.machine.placements
        )
    framework = "" if job.framework == "none" else job.framework
    entry = registry.find(job.workload, framework)
    return tuple(
        Placement(name, entry.placement_devices) for name in entry.placements if name != SINGLE
    )


def _why_family_impossible(job: Job, family: Family, placements: Sequence[Placement]) -> str:
    """Return why this kind of layout is impossible here, or "" if it is possible."""
    traits = family.traits
    machine = job.machine
    if len(job.devices) < family.fewest_devices:
        return f"{family.name} needs two devices, and there is one ({job.devices[0].label})"
    if traits.sharded and not _can_shard(job):
        whose = "of a machine file with [shards]" if machine else "PyTorch's"
        return f"{family.name} is {whose}"
    if not traits.placed:
        return ""
    if len(group_by_host(job.devices)) > 1:
        return f"{family.name} needs its devices on one host"
    if placements:
        return ""
    if machine is not None:
        return "the simulated machine has no placements"
    *names, last = [name for name in registry.names() if registry.find(name).placements]
    return f"{job.workload} has no placements; {', '.join(names)} and {last} have some"


def _can_shard(job: Job) -> bool:
    simulated = job.machine is not None and bool(job.machine.shards)
    return bool(job.problem.shards) or simulated


def _pack_modes(job: Job) -> tuple[PackMode, ...]:
    """Return the ways in which several processes can share the first device.

    "" stands for plain processes, "logical" for logical devices of TensorFlow.
    """
    parts = find_backend(job.devices[0].kind).own_memory and job.framework == "tensorflow"
    return ("", "logical") if parts else ("",)
