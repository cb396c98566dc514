"""Checks behind `evener doctor`: drivers, frameworks, folders, links and clusters."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from evener.devices.backend import Backend
from evener.devices.cluster.agents import Agent, HostLostError, start_agents
from evener.devices.cluster.connection import Node, connect, list_nodes
from evener.devices.cluster.discovery import (
    assign_terms,
    describe_versions,
    discover_cluster,
    explain_versions,
)
from evener.devices.network import (
    RENDEZVOUS_PORT,
    VARIABLES,
    Endpoint,
    Listener,
    find_interface,
    find_unreachable,
)
from evener.devices.registry import all_backends
from evener.devices.terms import parse_request
from evener.devices.types import Device
from evener.errors import DeviceError, EvenerError

from .probes.links import (
    TRANSPORTS,
    LinkMeasurement,
    Transport,
    find_transport,
    measure_links,
    switches_of,
    write_variables,
)
from .store.links import save_links

Level = Literal["ok", "note", "problem"]

# timeout of importing a framework, which took 10 to 20 s on two cores shared by ten programs
IMPORT_SECONDS = 120
# factor by which a transport must be faster to be recommended; repeated measurements differ by less
MUCH = 1.15
_QUERIES = {
    "tensorflow": (
        "import tensorflow as m; print(m.__version__, len(m.config.list_physical_devices('GPU')))"
    ),
    "torch": "import torch as m; print(m.__version__, m.cuda.device_count())",
}
FRAMEWORKS = frozenset(_QUERIES)
# run by the child before its import, which takes seconds: the child is killed when its parent
# exits; 1 is PR_SET_PDEATHSIG of prctl.h
_END_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
"""
_INSTALL = {
    "tensorflow": "pip install 'evener[tensorflow]', or evener[tensorflow-cuda] with an NVIDIA GPU",
    "torch": "pip install 'evener[torch]'",
}
EXTRAS = {  # what each extra adds, and its modules
    "app": ("the full-screen app", ("textual",)),
    "web": ("the app in a browser", ("textual_serve",)),
    "metrics": ("monitor --metrics", ("prometheus_client",)),
    "huggingface": ("transformers' trainers", ("transformers", "accelerate")),
    "lightning": ("Lightning's Trainer", ("lightning",)),
    "ray": ("several machines", ("ray",)),
}


class Check(msgspec.Struct, frozen=True):
    """Result of one check; `remedy` says what to do, or is empty."""

    name: str
    level: Level
    found: str  # one line
    remedy: str = ""


def check_machine() -> tuple[Check, ...]:
    """Check the Python installation, drivers, frameworks and folders of this machine.

    Imports each framework in a subprocess, which takes seconds. Problems are returned as checks;
    no exception is raised for them.
    """
    drivers = [_check_driver(backend) for backend in all_backends() if backend.maker]
    return (
        Check("python", "ok", f"{platform.python_version()} at {sys.executable}"),
        *(check for check, _ in drivers),
        *_check_frameworks(sum(count for _, count in drivers)),
        *_check_clashes(),
        _check_extras(),
        _check_state_folder(),
        _check_folder("temporary folder", Path(tempfile.gettempdir()), "TMPDIR"),
    )


def check_links(
    devices: Sequence[Device], driver: str, report: Callable[[LinkMeasurement], None]
) -> tuple[tuple[Check, ...], tuple[LinkMeasurement, ...]]:
    """Measure the links between devices, save the result, and check it.

    `report` is called after each measurement. Returns the checks and all measurements. Without
    PyTorch, or with a single device, nothing is measured, and the only check says why.
    """
    if len(devices) < 2:
        found = f"{devices[0].label} alone has no links"
        return (Check("links", "note", found, "Name more with --devices."),), ()
    if importlib.util.find_spec("torch") is None:
        remedy = f"To measure them: {_INSTALL['torch']}."
        return (Check("links", "note", "are measured by PyTorch, which isn't there", remedy),), ()
    measurements = measure_links(devices, report)
    with suppress(EvenerError):  # an unwritable folder has its own check
        save_links(devices, driver, measurements)
    sets = dict.fromkeys(measurement.devices for measurement in measurements)
    grouped = [[one for one in measurements if one.devices == labels] for labels in sets]
    here = find_transport(devices)
    return tuple(describe_link(each, here) for each in grouped), measurements


def describe_link(
    measurements: Sequence[LinkMeasurement], selected: Transport = "as it is"
) -> Check:
    """Return a check of the link between some devices, measured over several transports.

    The first of `measurements` used NCCL's default transport. `selected` is the transport that the
    user's environment variables select.
    """
    own, *others = measurements
    name = f"link {' – '.join(own.devices)}"
    found = "; ".join(map(write_link, measurements))
    if selected != own.transport:
        return _describe_set_link(name, found, own, others, selected)
    if own.outcome != "ok":
        remedy = "No variable of NCCL cures it: look at the driver, the riser and the BIOS."
        if not own.ranks_met:
            remedy = "Its processes never met, so this isn't the link: look at that device first."
        elif own.remedy:
            remedy = f"With {own.remedy} it works: export it before each training on these devices."
        return Check(name, "problem", found, remedy)
    faster = [one for one in others if one.bytes_per_second > MUCH * own.bytes_per_second]
    if faster:
        best = max(faster, key=lambda one: one.bytes_per_second)
        variables = write_variables(TRANSPORTS[best.transport])
        return Check(name, "note", found, f"It is faster with {variables}: export it.")
    if any(
        one.transport == "no P2P" and one.bytes_per_second * MUCH > own.bytes_per_second
        for one in others
    ):
        return Check(name, "ok", f"{found} (P2P isn't used, or brings nothing)")
    return Check(name, "ok", found)


def _describe_set_link(
    name: str,
    summary: str,
    default: LinkMeasurement,
    others: Sequence[LinkMeasurement],
    selected: Transport,
) -> Check:
    """Check a link on which the user's environment variables replace NCCL's default transport.

    The transport that they select (`selected`) is compared with the default one (`default`), which
    may be faster, or may work where the selected one fails.

    - `name`: the name of the check.
    - `summary`: a description of the measured speeds, which the result begins with.
    - `others`: measurements over all transports other than the default one.
    """
    variables = write_variables(switches_of(selected))
    summary = f"{summary}; here with {variables}: {selected}"
    used = next((measurement for measurement in others if measurement.transport == selected), None)
    if used is None or used.outcome != "ok":
        return Check(name, "problem", summary, f"Unset {_name_variables(selected)}.")
    # `default` was measured over the default transport, without these variables
    if default.outcome != "ok":
        return Check(name, "ok", f"{summary}, with which it works")
    if default.bytes_per_second > MUCH * used.bytes_per_second:
        remedy = f"It is faster without: unset {_name_variables(selected)}."
        return Check(name, "note", summary, remedy)
    return Check(name, "ok", summary)


def _name_variables(transport: Transport) -> str:
    return " and ".join(switches_of(transport))


def write_link(measurement: LinkMeasurement) -> str:
    """Describe a measurement of a link: its bandwidth and latency, or how it failed."""
    if measurement.outcome == "ok":
        speed = f"{measurement.bytes_per_second / 1e9:.3g} GB/s"
        return f"{measurement.transport} {speed}, {measurement.latency_seconds * 1e6:.3g} µs"
    words = {"hangs": "hangs", "wrong": "gives wrong sums", "failed": "fails"}[measurement.outcome]
    return f"{measurement.transport} {words}: {measurement.detail}"


def _check_driver(backend: Backend) -> tuple[Check, int]:
    """Check a vendor's driver, and return the check with the number of its GPUs."""
    name = f"{backend.maker} driver"
    try:
        listing = backend.list_devices()
    except DeviceError as fault:
        return Check(
            name, "note", fault.message, f"{fault.remedy} Without any GPU, CPU slices are used."
        ), 0
    count = len(listing.devices)
    if listing.notes:
        return Check(name, "problem", " ".join(listing.notes), backend.remedy), count
    return Check(name, "ok", f"{listing.driver}, {count} device{'s' * (count != 1)}"), count


def _check_frameworks(gpus: int) -> list[Check]:
    """Check all frameworks in parallel, given the number of GPUs that the driver lists.

    One working framework is enough. If there is one, problems of the others are only notes.
    """
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda name: _check_framework(name, gpus), _QUERIES))
    # one working framework is enough: a problem with the other is then only a note
    if all(check.level == "problem" for check in found):
        return found
    return [
        msgspec.structs.replace(check, level="note") if check.level == "problem" else check
        for check in found
    ]


def _check_framework(name: str, gpus: int) -> Check:
    if importlib.util.find_spec(name) is None:
        return Check(name, "problem", "not installed", f"To use it: {_INSTALL[name]}.")
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
    program = _END_WITH_PARENT + _QUERIES[name]
    command = [sys.executable, "-P", "-c", program, str(os.getpid())]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return Check(
            name,
            "problem",
            f"import took over {IMPORT_SECONDS} s",
            f"Reinstall it: {_INSTALL[name]}.",
        )
    words = answer.stdout.split()
    if answer.returncode != 0 or len(words) != 2:
        lines = answer.stderr.strip().splitlines()
        detail = lines[-1] if lines else f"exit code {answer.returncode}"
        return Check(
            name, "problem", f"can't be imported: {detail}", f"Reinstall it: {_INSTALL[name]}."
        )
    return _compare_gpus(name, words[0], int(words[1]), gpus)


def _compare_gpus(name: str, version: str, visible: int, gpus: int) -> Check:
    """Report a framework's version, with a note if it sees fewer GPUs than the driver lists.

    `visible` is the number of GPUs that the framework sees, and `gpus` is the number that the
    driver lists.
    """
    found = f"{version}, sees {visible} of {gpus} GPUs"
    if visible < gpus:
        variables = " and ".join(
            filter(None, (backend.visible_variable for backend in all_backends()))
        )
        remedy = f"Check {variables}" + (
            "; or install evener[tensorflow-cuda]." if name == "tensorflow" else "."
        )
        return Check(name, "note", found, remedy)
    return Check(name, "ok", found)


def _check_clashes() -> list[Check]:
    """Check for installed packages that conflict with each other."""
    checks = []
    doubles = [pair for backend in all_backends() for pair in backend.double_packages]
    for extra, needed in (*doubles, ("tensorflow-cpu", "tensorflow")):
        version = _version(extra)
        if version and _version(needed):
            remedy = f"Remove it, and install {needed} again: both provide the same module."
            checks.append(
                Check(f"{extra} package", "note", f"{version}, in addition to {needed}", remedy)
            )
    keras = _version("keras")
    if keras and tuple(int(part) for part in keras.split(".")[:2]) < (3, 12):
        checks.append(
            Check(
                "keras",
                "problem",
                f"{keras} with evener's Keras adapter",
                "Install keras 3.12 or newer.",
            )
        )
    return checks


def _check_extras() -> Check:
    """Check which optional dependencies are installed."""
    missing = [
        name
        for name, (_, modules) in EXTRAS.items()
        if not all(map(importlib.util.find_spec, modules))
    ]
    have = ", ".join(name for name in EXTRAS if name not in missing) or "none"
    if not missing:
        return Check("extras", "ok", have)
    without = ", ".join(f"{name} ({EXTRAS[name][0]})" for name in missing)
    remedy = f"Add those that you need: pip install 'evener[{','.join(missing)}]'."
    return Check(
        "extras", "note" if "app" in missing else "ok", f"{have}; not installed: {without}", remedy
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_state_folder() -> Check:
    from evener.system.files import runs_folder

    try:
        folder = runs_folder()
    except EvenerError as fault:
        return Check("runs folder", "problem", fault.message, fault.remedy)
    return _check_folder("runs folder", folder, "XDG_STATE_HOME")


def _check_folder(name: str, folder: Path, variable: str) -> Check:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as stream:
            stream.write(b"evener")
    except OSError as error:
        remedy = f"Set {variable} to a folder that you may write to."
        return Check(name, "problem", f"{folder}: {error.strerror or error}", remedy)
    return Check(name, "ok", str(folder))


class HostReport(msgspec.Struct, frozen=True):
    """Checks and package versions of one host."""

    checks: tuple[Check, ...]
    versions: dict[str, str]


def check_cluster(spec: str, address: str) -> tuple[Check, ...]:
    """Check a Ray cluster: its hosts, their software, the ports between them, and the devices.

    `spec` names the devices, in the format of the option `--devices`. `address` is the address of
    the cluster. The check takes as long as the slowest host needs to import the frameworks.
    """
    terms = parse_request(spec)
    try:
        connect(address)
        nodes = list_nodes()
        wanted = assign_terms(terms, nodes)
    except EvenerError as fault:
        return (Check("ray cluster", "problem", fault.message, fault.remedy),)
    agents, lost = _start_agents([node for node in nodes if node.host in wanted])
    hosts = [agent.host for agent in agents]
    calls = [agent.begin("call", describe_host, agent.host, hosts) for agent in agents]
    reports: dict[str, HostReport] = {}
    for agent, call in zip(agents, calls, strict=True):
        try:
            reports[agent.host] = agent.finish(call, 2 * IMPORT_SECONDS)
        except HostLostError as fault:
            lost.append(Check("host", "problem", f"{fault.host} {fault.why}", fault.remedy))
    return (
        *lost,
        *merge_checks({host: report.checks for host, report in reports.items()}),
        *_compare_versions({host: report.versions for host, report in reports.items()}),
        *_check_ports([agent for agent in agents if agent.host in reports]),
        *(() if lost else (_check_devices(spec, address),)),
    )


def _start_agents(nodes: Sequence[Node]) -> tuple[list[Agent], list[Check]]:
    """Start an agent on each node of the cluster, in parallel.

    Returns the agents, and a failed check for each node on which none could be started.
    """

    def start(node: Node) -> Agent | Check:
        try:
            return start_agents([node], reserve=False)[0]
        except EvenerError as fault:
            return Check("host", "problem", fault.message, fault.remedy)

    with ThreadPoolExecutor(max(1, len(nodes))) as pool:
        found = list(pool.map(start, nodes))
    return [each for each in found if isinstance(each, Agent)], [
        each for each in found if isinstance(each, Check)
    ]


def describe_host(own_host: str, hosts: Sequence[str]) -> HostReport:
    """Check this host of a cluster, including its network interface to the other hosts.

    `own_host` is the name of this host, and `hosts` are the names of all hosts of the cluster.
    """
    others = [host for host in hosts if host != own_host]
    network = (_check_interface(others[0]),) if others else ()
    return HostReport((*check_machine(), *network), describe_versions())


def _check_interface(other_host: str) -> Check:
    """Check that this host has a route to another host, and a usable network interface for it.

    The interface may also be set by the environment variables of gloo and NCCL.
    """
    name = "network interface"
    way = find_interface(other_host)
    if not way:
        return Check(
            name,
            "problem",
            f"no way to {other_host}",
            "Check its address and the routes of this host.",
        )
    chosen = [os.environ.get(variable, way) for variable in VARIABLES]
    if chosen[0] not in psutil.net_if_addrs():
        return Check(
            name,
            "problem",
            f"{VARIABLES[0]} is {chosen[0]}, which isn't there",
            "Correct it, or unset it.",
        )
    return Check(
        name,
        "ok",
        chosen[0] if chosen[0] == chosen[1] else f"{chosen[0]} for gloo, {chosen[1]} for NCCL",
    )


def merge_checks(by_host: Mapping[str, Sequence[Check]]) -> tuple[Check, ...]:
    """Combine the checks of all hosts, so that equal results become one check.

    If a result isn't the same on all hosts, its text begins with the names of the hosts that have
    it.
    """
    hosts: dict[str, dict[Check, list[str]]] = {}  # by the check's name and result
    for host, checks in by_host.items():
        for check in checks:
            hosts.setdefault(check.name, {}).setdefault(check, []).append(host)
    return tuple(
        check
        if len(having) == len(by_host)
        else msgspec.structs.replace(check, found=f"{', '.join(having)}: {check.found}")
        for results in hosts.values()
        for check, having in results.items()
    )


def _compare_versions(by_host: Mapping[str, dict[str, str]]) -> tuple[Check, ...]:
    lines = explain_versions(dict(by_host))
    if lines or not by_host:
        return tuple(
            Check("versions", "note", line, "Install the same on every host.") for line in lines
        )
    first = next(iter(by_host.values()))
    same = ", ".join(
        f"{name} {version}" for name, version in first.items() if name in ("ray", "evener")
    )
    return (
        Check(
            "versions", "ok", f"the same on {len(by_host)} host{'s' * (len(by_host) != 1)}: {same}"
        ),
    )


def _check_ports(agents: Sequence[Agent]) -> tuple[Check, ...]:
    """Check that every host can open connections to every other."""
    if len(agents) < 2:
        return ()
    remedy = (
        f"Open the ports between the hosts: {RENDEZVOUS_PORT}, and those that the system chooses."
    )
    closed = tuple(
        Check("ports", "problem", f"{host} can't reach {there}:{port}: {why}", remedy)
        for host, (there, port), why in _find_closed_ports(agents)
    )
    return closed or (Check("ports", "ok", "every host reaches every other"),)


def _find_closed_ports(agents: Sequence[Agent]) -> list[tuple[str, Endpoint, str]]:
    """Return (host, unreachable endpoint, reason) for each connection that fails."""
    with ExitStack() as stack:
        listeners = {
            agent: stack.enter_context(closing(agent.keep(Listener, agent.host)))
            for agent in agents
        }
        endpoints = {agent: listener.ask("endpoints") for agent, listener in listeners.items()}
        calls = {}
        for agent in agents:
            others = [
                endpoint for other in agents if other is not agent for endpoint in endpoints[other]
            ]
            calls[agent] = agent.begin("call", find_unreachable, others)
        found = []
        for agent, call in calls.items():
            found += [(agent.host, endpoint, why) for endpoint, why in agent.finish(call)]
        return found


def _check_devices(spec: str, address: str) -> Check:
    try:
        found = discover_cluster(parse_request(spec), address, reserve=False)
    except EvenerError as fault:
        return Check("devices", "problem", fault.message, fault.remedy)
    return Check("devices", "ok", ", ".join(device.label for device in found.devices))
