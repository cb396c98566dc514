"""The checks behind `evener doctor --devices ray`: each host's own, what differs between hosts, and their network."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import psutil

from evener.devices.cluster.agents import Agent, HostLostError, start_agents
from evener.devices.cluster.connection import Node, connect, list_nodes
from evener.devices.cluster.discovery import assign_terms, describe_versions, discover_cluster, explain_versions
from evener.devices.network import RENDEZVOUS_PORT, VARIABLES, Listener, Place, find_interface, find_unreachable
from evener.devices.terms import parse_request
from evener.errors import EvenerError

from .diagnostics import IMPORT_SECONDS, Check, check_machine
from .probes.script_copy import digest_script

ABSENT = "not there"


class HostReport(msgspec.Struct, frozen=True):
    """The results of one host's checks, and the versions and the script that it would train with."""

    checks: tuple[Check, ...]
    versions: dict[str, str]
    script: str  # a digest of the user's script and the Python files beside it


def check_cluster(spec: str, address: str, script: Path | None = None) -> tuple[Check, ...]:
    """Every check of the hosts that `spec` names, and of `script`, which is to be the same on all; never raises."""
    terms = parse_request(spec)
    try:
        connect(address)
        nodes = list_nodes()
        wanted = assign_terms(terms, nodes)
    except EvenerError as fault:
        return (Check("ray cluster", "problem", fault.message, fault.remedy),)
    agents, lost = _start([node for node in nodes if node.host in wanted])
    hosts = [agent.host for agent in agents]
    path = script.absolute() if script else None
    calls = [agent.begin("call", describe_host, agent.host, hosts, path) for agent in agents]
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
        *(_compare_scripts(path, {host: report.script for host, report in reports.items()}) if path else ()),
        *_check_ports([agent for agent in agents if agent.host in reports]),
        *(() if lost else (_check_devices(spec, address),)),
    )


def _start(nodes: Sequence[Node]) -> tuple[list[Agent], list[Check]]:
    """An agent on each node, and a problem for each that can't have one."""

    def start(node: Node) -> Agent | Check:
        try:
            return start_agents([node], reserve=False)[0]
        except EvenerError as fault:
            return Check("host", "problem", fault.message, fault.remedy)

    with ThreadPoolExecutor(max(1, len(nodes))) as pool:
        found = list(pool.map(start, nodes))
    return [each for each in found if isinstance(each, Agent)], [each for each in found if isinstance(each, Check)]


def describe_host(own: str, hosts: Sequence[str], script: Path | None) -> HostReport:
    """Runs on a host: its checks, and what is to be the same on all hosts."""
    others = [host for host in hosts if host != own]
    network = (_check_interface(others[0]),) if others else ()
    digest = ABSENT if script is None or not script.is_file() else digest_script(script)
    return HostReport((*check_machine(), *network), describe_versions(), digest)


def _check_interface(other: str) -> Check:
    """Check the interface by which gloo and NCCL reach another host."""
    name = "network interface"
    way = find_interface(other)
    if not way:
        return Check(name, "problem", f"no way to {other}", "Check its address and the routes of this host.")
    chosen = [os.environ.get(variable, way) for variable in VARIABLES]
    if chosen[0] not in psutil.net_if_addrs():
        return Check(name, "problem", f"{VARIABLES[0]} is {chosen[0]}, which isn't there", "Correct it, or unset it.")
    return Check(name, "ok", chosen[0] if chosen[0] == chosen[1] else f"{chosen[0]} for gloo, {chosen[1]} for NCCL")


def merge_checks(by_host: Mapping[str, Sequence[Check]]) -> tuple[Check, ...]:
    """Each result once, with the hosts that have it unless all do; in the order of the first host's."""
    hosts: dict[str, dict[Check, list[str]]] = {}  # by the check's name and its result
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
        return tuple(Check("versions", "note", line, "Install the same on every host.") for line in lines)
    first = next(iter(by_host.values()))
    same = ", ".join(f"{name} {version}" for name, version in first.items() if name in ("ray", "evener"))
    return (Check("versions", "ok", f"the same on {len(by_host)} host{'s' * (len(by_host) != 1)}: {same}"),)


def _compare_scripts(script: Path, by_host: Mapping[str, str]) -> tuple[Check, ...]:
    hosts: dict[str, list[str]] = {}
    for host, digest in by_host.items():
        hosts.setdefault(digest, []).append(host)
    remedy = "evener launch --ray and probes send it; for evener launch on each host, copy it there."
    if len(hosts) == 1 and ABSENT not in hosts:
        return (Check("script", "ok", f"{script} is the same on every host, with the Python files beside it"),)
    there = "; ".join(f"{digest} on {', '.join(names)}" for digest, names in hosts.items())
    return (Check("script", "note", f"{script} or a Python file beside it differs: {there}", remedy),)


def _check_ports(agents: Sequence[Agent]) -> tuple[Check, ...]:
    """Check that every host reaches ports of every other."""
    if len(agents) < 2:
        return ()
    remedy = f"Open the ports between the hosts: {RENDEZVOUS_PORT}, and those that the system chooses."
    closed = tuple(
        Check("ports", "problem", f"{host} can't reach {there}:{port}: {why}", remedy)
        for host, (there, port), why in _find_closed_ports(agents)
    )
    return closed or (Check("ports", "ok", "every host reaches every other"),)


def _find_closed_ports(agents: Sequence[Agent]) -> list[tuple[str, Place, str]]:
    """Each host that can't connect to another, where, and why."""
    with ExitStack() as stack:
        doors = {agent: stack.enter_context(closing(agent.keep(Listener, agent.host))) for agent in agents}
        places = {agent: door.ask("places") for agent, door in doors.items()}
        calls = {}
        for agent in agents:
            others = [place for other in agents if other is not agent for place in places[other]]
            calls[agent] = agent.begin("call", find_unreachable, others)
        return [(agent.host, place, why) for agent, call in calls.items() for place, why in agent.finish(call)]


def _check_devices(spec: str, address: str) -> Check:
    try:
        found = discover_cluster(parse_request(spec), address, reserve=False)
    except EvenerError as fault:
        return Check("devices", "problem", fault.message, fault.remedy)
    return Check("devices", "ok", ", ".join(device.label for device in found.devices))
