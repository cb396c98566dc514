"""Find and read devices on the hosts of a Ray cluster."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from importlib import metadata
from pathlib import Path

import msgspec

import evener
from evener.errors import DeviceError, PlanError, RequestError
from evener.live.files import LiveDevice, Training
from evener.plan.file import Plan

from ..backend import Discovery
from ..registry import BACKENDS, all_backends, find_here
from ..terms import EVERY_HOST
from ..types import LOST, Device, DeviceSample, HostSample, Snapshot, Source, Term, group_by_host
from .agents import (
    Agent,
    HostLostError,
    RemoteObject,
    ask_each,
    find_agent,
    start_actor,
    start_agents,
)
from .connection import Node, connect, list_nodes

Devices = tuple[Device, ...]
PACKAGES = ("ray", "tensorflow", "keras", "torch", "numpy")


class HostDevices(msgspec.Struct, frozen=True):
    """The devices found on one host, and the package versions installed there."""

    found: Discovery
    versions: dict[str, str]
    fault: str = ""  # why none of the requested devices is available
    taken: tuple[str, ...] = ()  # labels of GPUs that other jobs of the cluster hold


def discover_cluster(terms: Sequence[Term], address: str = "", reserve: bool = True) -> Discovery:
    """Find the devices that a request selects on the hosts of a Ray cluster.

    If `reserve` is True, free GPUs and the CPUs of CPU slices are reserved in Ray, so that no other
    job of the cluster uses them. GPUs that other jobs have reserved are left out. Raises
    `RequestError` for an unknown host, and `DeviceError` if the cluster can't be joined or a named
    host lacks a requested device.
    """
    connect(address)
    nodes = list_nodes()
    wanted = assign_terms(terms, nodes)
    by_host = {node.host: node for node in nodes}
    agents = start_agents((by_host[host] for host in wanted), reserve)
    answers: dict[Agent, HostDevices] = ask_each(agents, find_on_host, wanted, reserve)
    found = _merge(terms, answers)
    held = _hold_cpus(agents, found.devices) if reserve else ()
    return msgspec.structs.replace(found, notes=(*found.notes, *held))


def _hold_cpus(agents: Sequence[Agent], devices: Sequence[Device]) -> tuple[str, ...]:
    """Reserve the CPUs of CPU slices in Ray.

    Returns messages about CPUs that other jobs have reserved.
    """
    notes = []
    for agent in agents:
        slices = [device for device in devices if device.on_cpu]
        cores = sum(len(device.cores) for device in slices if device.host == agent.host)
        lacking = agent.hold_cpus(cores)
        if lacking:
            notes.append(
                f"{agent.host}: other jobs of the cluster hold {lacking:g} of the {cores} "
                f"CPUs to be measured."
            )
    return tuple(notes)


def assign_terms(terms: Sequence[Term], nodes: Sequence[Node]) -> dict[str, list[Term]]:
    """Return the parts of a request for each host, keyed by the host's address.

    A term for all hosts, such as `ray/gpu:0`, is assigned to each node. Raises `RequestError` if a
    term names a host that isn't in the cluster.
    """
    wanted: dict[str, list[Term]] = {}
    for term in terms:
        for node in nodes if term.host == EVERY_HOST else (find_node(term.host or "", nodes),):
            wanted.setdefault(node.host, []).append(term)
    return wanted


def find_node(host: str, nodes: Sequence[Node]) -> Node:
    """Return the node with this address or host name.

    Raises `RequestError` if there is no such node, or if several nodes have the name.
    """
    found = [node for node in nodes if host in (node.host, node.name)]
    there = ", ".join(
        node.host if node.host == node.name else f"{node.host} ({node.name})" for node in nodes
    )
    if not found:
        raise RequestError(f"The Ray cluster has no host {host!r}.", f"It has {there}.")
    if len(found) > 1:
        raise RequestError(
            f"{host!r} is the name of {len(found)} hosts.", f"Write an address: {there}."
        )
    return found[0]


def find_on_host(terms: Sequence[Term], gpu_ids: Sequence[str] | None) -> HostDevices:
    """Find the requested devices on this host. It is called in the actor of each host.

    `gpu_ids` are the GPUs that Ray has assigned to the actor, or None to allow all GPUs.
    """
    versions = describe_versions()
    every, usable, held = _list_accelerators(terms[0].kind, gpu_ids)
    taken = {device.id: device.label for device in every if device not in usable}
    if every and not usable:
        fault = f"Ray gives this process none of its GPUs ({', '.join(taken.values())})."
        return HostDevices(Discovery(()), versions, fault)
    try:
        found = find_here(terms, held)
    except DeviceError as error:
        return HostDevices(Discovery(()), versions, error.message)
    kept = tuple(each for each in found.devices if each.id not in taken)
    return HostDevices(
        msgspec.structs.replace(found, devices=kept), versions, taken=tuple(taken.values())
    )


def name_gpus(gpu_ids: Sequence[str]) -> tuple[str, ...]:
    """Convert Ray's ids of GPUs, which are indices or UUIDs, to the ids that the driver uses."""
    return tuple(device.id for device in _list_accelerators("auto", gpu_ids)[1])


def _list_accelerators(
    kind: str, usable: Sequence[str] | None
) -> tuple[Devices, Devices, dict[str, str]]:
    """Return all accelerators of this host, the usable ones, and environment variables.

    The variables make only the usable devices visible. `kind` is the kind of devices, or "auto" for
    the first kind that is found on this host. `usable` lists Ray's names of the usable devices, or
    is None if all are usable.
    """
    for backend in all_backends():
        if backend.visible_variable and kind in ("auto", backend.kind):
            with suppress(DeviceError):
                every = backend.list_devices().devices
                variables = {} if usable is None else {backend.visible_variable: ",".join(usable)}
                return every, backend.visible(every, variables), variables
    return (), (), {}


def _merge(terms: Sequence[Term], answers: Mapping[Agent, HostDevices]) -> Discovery:
    """Combine the devices that were found on the hosts. Hosts without usable devices are left out.

    Raises `DeviceError` if there are no devices, or if a host that the request names lacks a
    requested device.
    """
    kind = _choose_kind(answers.values())
    devices: list[Device] = []
    notes: list[str] = []
    for agent, answer in answers.items():
        own = [
            msgspec.structs.replace(device, host=agent.host)
            for device in answer.found.devices
            if device.kind == kind
        ]
        _check_named(agent, terms, len(own), answer)
        if not own:
            notes.append(f"{agent.host} is left out: {answer.fault or 'it has no GPU.'}")
            continue
        devices += own
        if answer.taken:
            notes.append(
                f"{agent.host}: {', '.join(answer.taken)} left out, as other jobs of the "
                f"cluster hold them."
            )
    if not devices:
        raise DeviceError(
            f"No host of the Ray cluster has a device that can be used. {' '.join(notes)}"
        )
    by_host = {agent.host: answer for agent, answer in answers.items()}
    used = dict.fromkeys(device.host for device in devices)
    notes += _join_notes({host: by_host[host].found for host in used})
    notes += explain_versions({host: answer.versions for host, answer in by_host.items()})
    drivers = {answer.found.driver: None for answer in answers.values()}  # in order, once each
    return Discovery(tuple(devices), tuple(notes), driver=", ".join(filter(None, drivers)))


def _join_notes(found: Mapping[str, Discovery]) -> list[str]:
    """Return each message once, preceded by the names of all hosts that reported it."""
    hosts_by_note: dict[str, list[str]] = {}
    for host, discovery in found.items():
        for note in discovery.notes:
            hosts_by_note.setdefault(note, []).append(host)
    return [f"{', '.join(hosts)}: {note}" for note, hosts in hosts_by_note.items()]


def _choose_kind(answers: Iterable[HostDevices]) -> str:
    """Return the kind of devices to use on all hosts.

    It is "cpu" only if no host has an accelerator.
    """
    kinds = {device.kind for answer in answers for device in answer.found.devices}
    return next((kind for kind in BACKENDS if kind in kinds), "cpu")


def _check_named(
    agent: Agent, terms: Sequence[Term], device_count: int, answer: HostDevices
) -> None:
    """Raise `DeviceError` if a host that the request names lacks a requested device.

    `device_count` is the number of devices that were found on the agent's host. `answer` says why
    others are missing.
    """
    named = [term for term in terms if term.host in (agent.node.host, agent.node.name)]
    if not named:
        return
    # one for each device picked by index or id, and at least one
    picked = sum(bool(term.pick) for term in named)
    if device_count >= max(1, picked):
        return
    if answer.fault:
        why = answer.fault
    elif answer.taken:
        why = f"other jobs of the cluster hold {', '.join(answer.taken)}."
    else:
        why = "it has no GPU."
    raise DeviceError(f"{agent.host}: {why}", "Choose other --devices, or wait for those jobs.")


@cache
def describe_versions() -> dict[str, str]:
    """Return the versions of Python, evener and the machine-learning packages on this host.

    The version of evener includes a digest of its code.
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {**found, "evener": f"{evener.__version__} (code {digest_code()})"}


def digest_code() -> str:
    """Return a digest of evener's Python files, to find hosts whose code differs."""
    home = evener.__path__[0]
    digest = blake2b(digest_size=4)
    # in a checkout, some directories are symbolic links
    for folder, folders, files in os.walk(home, followlinks=True):
        folders.sort()
        for file in sorted(file for file in files if file.endswith(".py")):
            path = Path(folder, file)
            digest.update(str(path.relative_to(home)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def explain_versions(by_host: dict[str, dict[str, str]]) -> tuple[str, ...]:
    """Return a message for each package whose versions differ between hosts.

    `by_host` maps each host to its versions by package name.
    """
    names = dict.fromkeys(name for versions in by_host.values() for name in versions)
    lines = []
    for name in names:
        hosts: dict[str, list[str]] = {}
        for host, versions in by_host.items():
            hosts.setdefault(versions.get(name, "not installed"), []).append(host)
        if len(hosts) > 1:
            there = "; ".join(
                f"{version} on {', '.join(names)}" for version, names in hosts.items()
            )
            lines.append(f"The hosts have different versions of {name}: {there}.")
    return tuple(lines)


def find_plan_nodes(plan: Plan, address: str) -> dict[str, Node]:
    """Return the cluster's node for each host of a plan, keyed by the host's name in the plan.

    Raises `PlanError` if the plan is for a single machine, and `RequestError` if a host isn't in
    the cluster.
    """
    hosts = list(dict.fromkeys(share.host for share in plan.layout.active))
    if not hosts[0]:
        raise PlanError(
            "The plan is for one machine, and names no hosts.",
            "Start it with evener launch, without Ray.",
        )
    connect(address)
    nodes = list_nodes()
    return {host: find_node(host, nodes) for host in hosts}


def hold_other_gpus(node: Node, wanted_gpus: Collection[str]) -> list[Agent]:
    """Reserve all free GPUs of a node except the wanted ones, so that Ray can assign only those.

    Returns the agents that hold the reserved GPUs. The caller has to end them once the wanted GPUs
    are assigned. Raises `DeviceError` if a wanted GPU isn't free.
    """
    if node.gpus == node.free_gpus == len(wanted_gpus):
        return []
    agents = [Agent(node, start_actor(node, 1)) for _ in range(node.free_gpus)]
    held = {
        ",".join(agent.call(name_gpus, agent.finish(agent.begin("gpu_ids")))): agent
        for agent in agents
    }
    missing = [name for name in wanted_gpus if name not in held]
    if missing:
        raise DeviceError(
            f"The host {node.host} has no free GPU {', '.join(missing)}: another job of the "
            f"cluster holds it.",
            "Wait for those jobs, or make a plan for what is there.",
        )
    for name in wanted_gpus:
        held.pop(name).end()
    return list(held.values())


SAMPLE_SECONDS = 3.0  # a host that takes longer is shown as lost until it answers again
# runs on a host, with the host's own devices
OpenHost = Callable[[tuple[Device, ...]], Source]


class ClusterSource:
    """Reads the devices of several hosts. An actor on each host reads the host's devices.

    `open_host` runs on each host, and opens the source of its devices. Raises `HostLostError` if a
    host doesn't answer when this object is created. If a host stops answering later, its devices
    are shown as lost.
    """

    def __init__(
        self, devices: Sequence[Device], notes: tuple[str, ...], open_host: OpenHost
    ) -> None:
        self._devices = tuple(devices)
        self._notes = notes
        self._hosts: dict[str, RemoteObject] = {}
        for host, own in group_by_host(devices).items():
            local = tuple(msgspec.structs.replace(device, host="") for device in own)
            self._hosts[host] = find_agent(host).keep(open_host, local)

    def devices(self) -> tuple[Device, ...]:
        """Return the devices of all hosts."""
        return self._devices

    def sample(self) -> Snapshot:
        """Read all hosts at the same time, and return their readings as one snapshot.

        If a host doesn't answer within 3 seconds, its devices are shown as lost.
        """
        started = time.monotonic()
        found, lost = self._ask_hosts()
        seen = list(found.values())
        devices = [sample for each in seen for sample in each.devices]
        processes = [process for each in seen for process in each.processes]
        drivers = [each.driver for each in seen if each.driver]
        return Snapshot(
            at_seconds=time.time(),
            interval_seconds=max((each.interval_seconds for each in seen), default=0.0),
            devices=(*devices, *self._show_lost(lost)),
            processes=tuple(processes),
            host=_add_hosts([each.host for each in seen]),
            sampling_seconds=time.monotonic() - started,
            driver=", ".join(dict.fromkeys(drivers)),
            notes=self._notes,
            reports=_merge_reports(seen),
        )

    def _ask_hosts(self) -> tuple[dict[str, Snapshot], dict[str, str]]:
        """Return the snapshots of the hosts that answered, and the errors of the others."""
        calls = {host: kept.begin("sample") for host, kept in self._hosts.items()}
        found: dict[str, Snapshot] = {}
        lost: dict[str, str] = {}
        for host, call in calls.items():
            try:
                found[host] = _name_host(self._hosts[host].finish(call, SAMPLE_SECONDS), host)
            except HostLostError as error:
                lost[host] = error.message
        return found, lost

    def _show_lost(self, errors: Mapping[str, str]) -> list[DeviceSample]:
        """Return samples that mark the devices of lost hosts as lost.

        `errors` maps each lost host to its error.
        """
        return [
            DeviceSample(
                device=device,
                utilization_percent=LOST,
                memory_used_bytes=LOST,
                note=errors[device.host],
            )
            for device in self._devices
            if device.host in errors
        ]

    def close(self) -> None:
        """Close the sources on all hosts."""
        for kept in self._hosts.values():
            kept.close()


def _merge_reports(snapshots: Sequence[Snapshot]) -> tuple[Training, ...]:
    """Return the reports of training runs on all hosts, without duplicates."""
    # hosts that are on one machine read the same files
    every = [report for each in snapshots for report in each.reports]
    keys = [(each.training, each.rank, each.pid, each.updated_at) for each in every]
    return tuple(dict(zip(keys, every, strict=True)).values())


def _name_host(snapshot: Snapshot, host: str) -> Snapshot:
    devices = tuple(
        msgspec.structs.replace(sample, device=msgspec.structs.replace(sample.device, host=host))
        for sample in snapshot.devices
    )
    processes = tuple(
        msgspec.structs.replace(process, device_label=f"{host}/{process.device_label}", host=host)
        for process in snapshot.processes
    )
    reports = tuple(
        msgspec.structs.replace(
            report, devices=tuple(_place(live, host) for live in report.devices)
        )
        for report in snapshot.reports
    )
    return msgspec.structs.replace(snapshot, devices=devices, processes=processes, reports=reports)


def _place(live: LiveDevice, host: str) -> LiveDevice:
    return live if live.host else msgspec.structs.replace(live, host=host)


def _add_hosts(hosts: Sequence[HostSample]) -> HostSample:
    """Combine the samples of several hosts into one.

    Memory is added up, and the CPU load is averaged over all cores.
    """
    cores = sum(host.cores for host in hosts)
    return HostSample(
        cpu_percent=sum(host.cpu_percent * host.cores for host in hosts) / max(1, cores),
        load_1min=sum(host.load_1min for host in hosts),
        memory_used_bytes=sum(host.memory_used_bytes for host in hosts),
        memory_total_bytes=sum(host.memory_total_bytes for host in hosts),
        cores=cores,
        hostname=", ".join(dict.fromkeys(host.hostname for host in hosts)),
    )
