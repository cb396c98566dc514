"""Notes on a cluster's hosts: versions that differ, devices that others hold, missing hosts."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import evener
from evener.devices.backend import Discovery
from evener.devices.cluster import agents, connection, discovery
from evener.devices.cluster.agents import Agent
from evener.devices.cluster.connection import Node
from evener.devices.cluster.discovery import HostDevices, explain_versions, find_on_host
from evener.devices.discover import discover
from evener.devices.network import Listener, find_unreachable
from evener.devices.terms import parse_request
from evener.devices.types import Device
from evener.errors import DeviceError, RequestError

NODES = [
    Node("1", "10.0.0.1", "big", 2, 2),
    Node("2", "10.0.0.2", "small", 1, 1),
    Node("3", "10.0.0.3", "small", 1, 1),
]


def answers(*found: HostDevices) -> dict[Agent, HostDevices]:
    return {Agent(node, None): each for node, each in zip(NODES, found, strict=False)}


def gpus(*indices: int, taken: Sequence[str] = (), torch: str = "2.13.0") -> HostDevices:
    devices = tuple(Device(f"GPU-{i}", i, "H200", "gpu", 1 << 30) for i in indices)
    fault = "" if devices else "Ray gives this process none of its GPUs (GPU:0)."
    return HostDevices(Discovery(devices, driver="570"), {"torch": torch}, fault, tuple(taken))


def merge(spec: str, *found: HostDevices) -> Discovery:
    return discovery._merge(parse_request(spec), answers(*found))


def test_devices_have_their_host_and_what_others_hold_is_named() -> None:
    found = merge("ray", gpus(0, 2, taken=["GPU:1"]), gpus(0, torch="2.12.0"), gpus())
    assert [device.label for device in found.devices] == [
        "10.0.0.1/GPU:0",
        "10.0.0.1/GPU:2",
        "10.0.0.2/GPU:0",
    ]
    notes = " ".join(found.notes)
    assert "10.0.0.1: GPU:1 left out, as other jobs of the cluster hold them" in notes
    assert "10.0.0.3 is left out: Ray gives this process none of its GPUs (GPU:0)." in notes
    assert "different versions of torch: 2.13.0 on 10.0.0.1, 10.0.0.3; 2.12.0 on 10.0.0.2" in notes
    assert found.driver == "570"


def test_a_host_without_gpus_is_left_out_if_another_has_some() -> None:
    slices = HostDevices(
        Discovery((Device("cpu-0-of-1", 0, "EPYC", "cpu", 1, (0,)),), ("So the CPU is used.",)), {}
    )
    found = merge("ray", gpus(0), slices)
    assert [device.label for device in found.devices] == ["10.0.0.1/GPU:0"]
    assert "10.0.0.2 is left out: it has no GPU." in found.notes
    alone = merge("ray", slices, slices)
    assert [device.label for device in alone.devices] == ["10.0.0.1/CPU:0", "10.0.0.2/CPU:0"]
    assert "10.0.0.1, 10.0.0.2: So the CPU is used." in alone.notes


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ("ray:big/gpu:0,1", [gpus(0, taken=["GPU:1"])]),
        ("ray:big", [gpus(taken=["GPU:0", "GPU:1"])]),
        ("ray", [gpus(), gpus()]),
    ],
)
def test_what_was_named_and_is_held_by_others_is_an_error(
    spec: str, found: list[HostDevices]
) -> None:
    with pytest.raises(DeviceError, match="GPU:"):
        merge(spec, *found)


def test_gpus_that_ray_gave_to_others_are_left_out(fake_nvml: Callable[..., Any]) -> None:
    fake_nvml(gpus=3)
    found = find_on_host(parse_request("gpu"), ["0", "2"])
    assert [device.label for device in found.found.devices] == ["GPU:0", "GPU:2"]
    assert found.taken == ("GPU:1",)
    named = find_on_host(parse_request("gpu:1,2"), ["0", "2"])
    assert [device.label for device in named.found.devices] == ["GPU:2"]
    nothing = find_on_host(parse_request("auto"), [])
    assert not nothing.found.devices
    assert "none of its GPUs (GPU:0, GPU:1, GPU:2)" in nothing.fault


def test_a_host_is_found_by_its_address_or_its_only_name() -> None:
    assert discovery.find_node("big", NODES) is discovery.find_node("10.0.0.1", NODES)
    with pytest.raises(RequestError, match=r"no host 'tiny'\. It has 10\.0\.0\.1 \(big\)"):
        discovery.find_node("tiny", NODES)
    with pytest.raises(RequestError, match="the name of 2 hosts"):
        discovery.find_node("small", NODES)


def test_versions_that_differ_or_are_missing_are_reported() -> None:
    lines = explain_versions({"a": {"python": "3.11", "keras": "3.15"}, "b": {"python": "3.11"}})
    assert lines == ("The hosts have different versions of keras: 3.15 on a; not installed on b.",)
    assert re.search(r" \(code [0-9a-f]{8}\)$", discovery.describe_versions()["evener"])


def test_the_digest_is_of_all_code_also_behind_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evener").mkdir()
    (tmp_path / "devices").mkdir()
    (tmp_path / "evener" / "devices").symlink_to("../devices")
    code = tmp_path / "devices" / "one.py"
    code.write_text("1")
    monkeypatch.setattr(evener, "__path__", [str(tmp_path / "evener")])
    before = discovery.digest_code()
    assert before == discovery.digest_code()
    code.write_text("2")
    assert before != discovery.digest_code()


@pytest.mark.parametrize(
    "address", ["ray://host:10001", "host", "host:", ":6379", "host:x", "host:99999"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(RequestError, match="not the address"):
        connection._check_listener(address)


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400\r\n"])
def test_what_else_listens_at_an_address_is_no_cluster(
    monkeypatch: pytest.MonkeyPatch, greeting: bytes
) -> None:
    monkeypatch.setattr(connection, "LISTEN_SECONDS", 1.0)

    def answer() -> None:
        link, _ = server.accept()
        with link, contextlib.suppress(OSError):
            link.sendall(greeting)
            while link.recv(100):
                pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        address = "{}:{}".format(*server.getsockname())
        with pytest.raises(DeviceError, match="is not a Ray cluster"):
            connection._check_listener(address)
        thread.join()
    with pytest.raises(DeviceError, match="Nothing listens"):
        connection._check_listener(address)


def test_a_host_without_evener_is_reported() -> None:
    pytest.importorskip("ray")
    text = (
        "The actor died because of an error raised in its creation "
        "task\nModuleNotFoundError: No module named 'evener'"
    )
    assert (
        agents._explain_failure(Exception(text))
        == "can't run evener: ModuleNotFoundError: No module named 'evener'"
    )
    assert (
        agents._explain_failure(Exception("The actor is dead because its node has died."))
        == "has left the cluster"
    )


def test_without_ray_it_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(connection, "find_spec", lambda name: None if name == "ray" else find(name))
    with pytest.raises(RequestError, match=r"Ray is not installed\. Install it"):
        discover("ray")


def test_ports_are_reached_while_somebody_listens() -> None:
    listener = Listener("127.0.0.1")
    endpoints = listener.endpoints()
    assert find_unreachable(endpoints) == []
    listener.close()
    assert find_unreachable(endpoints[:1]) == [(endpoints[0], "Connection refused")]
