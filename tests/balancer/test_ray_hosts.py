"""Probes on the hosts of a Ray cluster: two nodes on loopback, of which each test uses a core of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from evener.balancer.events import ProbeProgress
from evener.balancer.probes.child_prober import ChildProber
from evener.balancer.request import Request
from evener.balancer.session import Session
from evener.balancer.store.locks import lock_devices
from evener.balancer.types import Failed, Layout, Observation, OutOfMemory, Probe, Stage, Timed, layout_of, solo
from evener.devices.cluster.agents import find_agent
from evener.devices.cluster.connection import list_nodes
from evener.devices.cluster.discovery import describe_versions
from evener.devices.discover import discover, open_source
from evener.devices.types import Device, State
from evener.errors import DeviceError, RequestError
from evener.plan import Fingerprint, Plan, SearchSummary, Share, Throughput, load_plan, make_layout, to_toml
from evener.tui.cli.main import run
from evener.tui.launch.cluster import launch_on_cluster
from tests.support.frameworks import skip_without
from tests.support.launched_checks import check_ranks
from tests.support.probers import child_prober
from tests.support.ray_cluster import FIRST, NODE, SECOND, kill_raylet, running_cluster

skip_without("ray")
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.usefixtures("cores_of_one_user"),
]
BOTH = f"ray:{FIRST}/cpu:0,ray:{SECOND}/cpu:1"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The cluster, to which this process is connected."""
    with running_cluster(tmp_path_factory.mktemp("state")) as cluster:
        discover("ray", ray_address=cluster.address)
        yield cluster


@pytest.fixture
def devices(cluster: Any) -> tuple[Device, ...]:
    """A slice of the CPU on each of two hosts."""
    return discover(BOTH).devices


def measure(prober: ChildProber, *layouts: Layout, seconds: float = 0.2) -> list[Observation]:
    """What comes of these layouts, measured at once."""
    stages: list[Stage] = ["solo" if layout.kind == "solo" else "split" for layout in layouts]
    probes = tuple(Probe(layout, stage, seconds) for layout, stage in zip(layouts, stages, strict=True))
    return sorted(prober.measure(probes, lambda _: None, threading.Event()), key=lambda seen: probes.index(seen.probe))


def list_processes(word: str) -> list[psutil.Process]:
    """Every process with this in its command."""
    processes = [(process, process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [process for process, command in processes if any(word in part for part in command)]


def children() -> list[psutil.Process]:
    """The children of probes that the cluster's actors started; other tests may run some of their own meanwhile."""
    actors = {process.pid for process in list_processes("ray::Servant")}
    found = []
    for process in list_processes("evener.balancer.probes.worker"):
        with contextlib.suppress(psutil.Error):
            found += [process] if process.ppid() in actors else []
    return found


def until_gone(processes: Sequence[psutil.Process]) -> None:
    """Wait until none of them runs."""
    until(lambda: not any(process.is_running() for process in processes), f"the end of {processes}")


def until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it never came: {what}"
        time.sleep(0.05)


def test_devices_of_every_host_or_of_those_that_are_named(cluster: Any) -> None:
    every = discover("ray/cpu/1")
    assert [device.label for device in every.devices] == [f"{FIRST}/CPU:0", f"{SECOND}/CPU:0"]
    assert not any("versions" in note for note in every.notes), "both run this very code"
    assert "evener" in describe_versions()
    limited = discover(f"ray:{SECOND}/cpu:1@50%+1GiB").devices
    assert [(device.host, device.id, device.limit.percent) for device in limited] == [(SECOND, "cpu-1-of-2", 50.0)]
    for spec, words in (
        ("ray:10.9.9.9", "no host"),
        (f"ray:{SECOND}/cpu:99", f"{SECOND}: There is no slice"),
        (f"ray:{FIRST}/cpu:0,ray:{FIRST}/cpu:0", "named twice"),
    ):
        with pytest.raises(RequestError, match=words):
            discover(spec)
    with pytest.raises(DeviceError, match=SECOND):
        discover(f"ray:{SECOND}/gpu:0")


def test_the_monitor_reads_every_host(cluster: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["monitor", "--devices", f"ray:{FIRST}/cpu:0,ray:{SECOND}/cpu", "--json", "--once"]) == 0
    snapshot = json.loads(capsys.readouterr().out)
    shown = [(each["device"]["host"], each["device"]["id"]) for each in snapshot["devices"]]
    assert shown == [(FIRST, "cpu-0-of-2"), (SECOND, "cpu-0-of-2"), (SECOND, "cpu-1-of-2")]
    assert all(each["utilization_percent"]["state"] == "value" for each in snapshot["devices"])
    assert run(["monitor", "--devices", f"ray:{FIRST}/cpu:0,ray:{SECOND}/cpu", "--once"]) == 0
    assert f"{SECOND} " in capsys.readouterr().out
    source = open_source(discover("ray/cpu/1", only_visible=False))
    try:
        found = find_agent(SECOND)
        found.end()
        samples = {sample.device.host: sample for sample in source.sample().devices}
    finally:
        source.close()
    assert samples[SECOND].utilization_percent.state is State.LOST
    assert SECOND in samples[SECOND].note
    assert samples[FIRST].utilization_percent.state is not State.LOST


def test_hosts_are_probed_at_once_and_together(devices: tuple[Device, ...]) -> None:
    prober = child_prober(devices, base_ms=5.0)
    try:
        alone = measure(prober, solo(2, 0, 8), solo(2, 1, 8))
        (group,) = measure(prober, layout_of((8, 4)))
        started = children()
        assert len(started) == 4
    finally:
        prober.close()
    assert all(isinstance(seen, Timed) and seen.step_seconds >= 0.005 for seen in (*alone, group)), (alone, group)
    assert isinstance(group, Timed)
    assert all(group.device_seconds)
    until_gone(started)


def test_what_fails_there_is_an_observation_here(devices: tuple[Device, ...]) -> None:
    outcomes: dict[str, type[object]] = {"memory": OutOfMemory, "raise": Failed, "kill": Failed}
    for fail, kind in outcomes.items():
        prober = child_prober(devices, fail=fail, at_share=6)
        try:
            well, ill = measure(prober, solo(2, 0, 4), solo(2, 1, 8))
        finally:
            prober.close()
        assert isinstance(well, Timed), well
        assert type(ill) is kind, ill
        assert isinstance(ill, OutOfMemory | Failed)
        assert ill.devices == (1,)
        assert kind is OutOfMemory or f"{SECOND}/CPU:1" in ill.detail


def test_a_dry_run_builds_on_the_first_host(devices: tuple[Device, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["balance", "--dry-run", "--devices", BOTH, "--workload", "synthetic"]) == 0
    assert f"{FIRST}/CPU:0" in capsys.readouterr().out


def test_a_device_is_locked_on_its_host(devices: tuple[Device, ...]) -> None:
    with lock_devices("", devices), pytest.raises(DeviceError, match=f"{SECOND}/CPU:1 is being measured"):
        lock_devices("", devices[1:])
    with lock_devices("", devices[1:]):
        pass


def test_a_plan_names_the_hosts(devices: tuple[Device, ...], tmp_path: Path) -> None:
    settings = {"base_ms": 2.0, "per_sample_ms": 0.1}
    request = Request(BOTH, workload="synthetic", framework="tensorflow", settings=settings, budget_seconds=6.0)
    session = Session(request)
    try:
        events = list(session.events())
    finally:
        session.close()
    plan = events[-1].plan  # type: ignore[union-attr]
    assert [(share.host, share.device) for share in plan.layout.share] == [
        (FIRST, "cpu-0-of-2"),
        (SECOND, "cpu-1-of-2"),
    ]
    file = tmp_path / "plan.toml"
    file.write_bytes(to_toml(plan))
    assert load_plan(file) == plan


SCRIPT = """
import torch
import sizes

class Model(torch.nn.Linear):
    def forward(self, rows):
        assert len(rows) < 64, "too many"
        return super().forward(rows)

def build(width=4):
    model = Model(sizes.INPUTS, width)
    return model, torch.optim.SGD(model.parameters(), 0.01), torch.nn.functional.mse_loss

def sample_batch(n):
    return torch.ones(n, sizes.INPUTS), torch.ones(n, 4)
"""


@pytest.mark.slow
def test_a_script_of_the_users_own_is_measured_on_every_host(devices: tuple[Device, ...], tmp_path: Path) -> None:
    skip_without("torch")
    folder = tmp_path / "work"
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    (folder / "sizes.py").write_text("INPUTS = 8\n")
    prober = child_prober(devices, f"{script}:build", "torch")
    try:
        (well,) = measure(prober, layout_of((8, 4)))
        (ill,) = measure(prober, layout_of((8, 64)))
    finally:
        prober.close()
    assert isinstance(well, Timed), well
    assert isinstance(ill, Failed), ill
    assert f"{script}:" in ill.detail, "the path is the user's own"
    assert ill.detail.endswith("too many")


@pytest.mark.slow
@pytest.mark.parametrize(("third", "shares"), [("127.0.0.4", (8, 0, 0)), ("127.0.0.5", (8, 8, 8))])
def test_a_host_that_goes_in_the_middle_is_named(cluster: Any, third: str, shares: tuple[int, ...]) -> None:
    """Its devices fail for good; the other hosts go on."""
    node = cluster.add_node(node_ip_address=third, **NODE)
    until(lambda: third in [each.host for each in list_nodes()], "the third host")
    devices = discover(f"ray:{third}/cpu:0,{BOTH}").devices
    prober = child_prober(devices, base_ms=5.0)
    found: list[Observation] = []
    started = threading.Event()
    probe = Probe(layout_of(shares), "solo" if shares[1] == 0 else "split", 300.0, 0, True)

    def note(progress: ProbeProgress) -> None:
        if progress.phase == "measuring":
            started.set()

    def run() -> None:
        found.extend(prober.measure((probe,), note, threading.Event()))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(60)
        began = children()
        kill_raylet(node)
        thread.join(60)
        assert not thread.is_alive()
        (seen,) = found
        assert isinstance(seen, Failed)
        assert (seen.cause, seen.devices) == ("device", (0,)), seen
        assert f"its host {third} has" in seen.detail
        (again,) = measure(prober, solo(3, 0, 8))
        assert isinstance(again, Failed), again
        assert again.cause == "device"
        assert all(isinstance(one, Timed) for one in measure(prober, solo(3, 1, 8), solo(3, 2, 8)))
    finally:
        prober.close()
        cluster.remove_node(node, allow_graceful=False)
    until_gone(began)


@pytest.mark.slow
def test_nothing_is_left_of_a_driver_that_was_killed(cluster: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "evener", "balance", "--devices", BOTH, "--workload", "synthetic", "--share"]
    before = {process.pid for process in list_processes("ray::Servant")}
    driver = subprocess.Popen(
        [*command, "--ray-address", cluster.address, "--budget", "60s"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ},
    )
    until(lambda: len(children()) >= 2, "its children")
    started = [*children(), *(each for each in list_processes("ray::Servant") if each.pid not in before)]
    assert len(started) >= 4
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    until_gone(started)


@pytest.mark.slow
def test_a_plan_over_hosts_is_launched_on_all_of_them(cluster: Any, tmp_path: Path) -> None:
    """1 + 2 slices, oversubscribed: the weights of one process, to 1e-12."""
    skip_without("torch")
    devices = discover(f"ray:{FIRST}/cpu/1:0,ray:{SECOND}/cpu").devices
    assert len(devices) == 3
    templates = tuple(Share(each.id, each.index, each.name, 0, 0.0, host=each.host) for each in devices)
    plan = msgspec.structs.replace(empty_plan(), layout=make_layout("split", templates, (1, 5, 2)))
    plan.save(tmp_path / "plan.toml")
    root = Path(__file__).parents[2]
    (tmp_path / "train.py").write_text(LAUNCHED.format(root=str(root)))
    command = [sys.executable, "-m", "evener", "launch", "--ray", "--ray-address", cluster.address]
    answer = subprocess.run(
        [*command, "plan.toml", "train.py", str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    check_ranks(tmp_path, (FIRST, SECOND, SECOND))
    assert f"[{SECOND}] hello" in answer.stdout


@pytest.mark.slow
def test_a_training_that_fails_on_a_host_ends_everywhere(cluster: Any, tmp_path: Path) -> None:
    """One device on one host needs no framework; its exit code is that of the launch there."""
    shares = (Share("cpu-0-of-2", 0, "EPYC", 0, 0.0, host=SECOND),)
    msgspec.structs.replace(empty_plan(), layout=make_layout("solo", shares, (8,))).save(tmp_path / "plan.toml")
    (tmp_path / "train.py").write_text("print('hello')\nraise SystemExit(7)")
    command = [sys.executable, "-m", "evener", "launch", "--ray", "--ray-address", cluster.address]
    answer = subprocess.run([*command, "plan.toml", "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert f"[{SECOND}] hello" in answer.stdout
    assert "ended with exit code 7" in answer.stdout


def test_a_cluster_that_shrank_since_the_plan_is_said(cluster: Any, tmp_path: Path) -> None:
    shares = (Share("cpu-0-of-1", 0, "EPYC", 0, 0.0, host="10.9.9.9"),)
    msgspec.structs.replace(empty_plan(), layout=make_layout("solo", shares, (8,))).save(tmp_path / "plan.toml")
    (tmp_path / "train.py").write_text("")
    with pytest.raises(RequestError, match=r"no host '10\.9\.9\.9'"):
        launch_on_cluster(tmp_path / "plan.toml", [str(tmp_path / "train.py")], 0, None, "")


LAUNCHED = """
import runpy, sys
print("hello", flush=True)
sys.path.insert(0, {root!r})
runpy.run_module("tests.support.launched_training", run_name="__main__")
"""


def empty_plan() -> Plan:
    """A plan that only lacks its layout."""
    return Plan(
        created="2026-11-22T12:00:00Z",
        workload="torch_mnist",
        framework="torch",
        precision="float32",
        xla=False,
        layout=make_layout("solo", (), ()),
        throughput=Throughput(100.0, 99.0, 101.0),
        evidence=(),
        search=SearchSummary(1, 0, 1.0, 0, "test"),
        fingerprint=Fingerprint((), "", {}, ""),
    )
