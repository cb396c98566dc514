"""Probes and trainings on the hosts of a Ray cluster: two nodes on loopback, each test on its own
cores.

They are in one file, because a cluster takes ten seconds of CPU to start.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from evener.balancer import diagnostics
from evener.balancer.diagnostics import Check, HostReport, check_cluster
from evener.balancer.events import Event, Finished, Observed, ProbeStarted
from evener.balancer.probes.child_prober import ChildProber
from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.balancer.store.locks import lock_devices
from evener.balancer.types import (
    Failed,
    Layout,
    Observation,
    OutOfMemory,
    Probe,
    Stage,
    Timed,
    layout_of,
    solo,
)
from evener.devices.cluster import discovery
from evener.devices.cluster.agents import find_agent
from evener.devices.cluster.connection import list_nodes
from evener.devices.cluster.discovery import describe_versions, hold_other_gpus
from evener.devices.discover import discover
from evener.devices.sampler import open_sampler
from evener.devices.types import Device, State
from evener.errors import DeviceError, PlanError, RequestError
from evener.launch.cluster import RemoteLaunch, launch_on_cluster, wait_for_hosts
from evener.plan.file import load_plan, parse_plan
from evener.tui.cli.main import run
from tests.support.cores import two_cores
from tests.support.frameworks import skip_without
from tests.support.probers import child_prober
from tests.support.ray_cluster import (
    FIRST,
    GPUS,
    NODE,
    SECOND,
    THIRD,
    end_agents,
    kill_raylet,
    list_children,
    list_processes,
    running_cluster,
    until,
    until_gone,
)
from tests.support.ray_programs import (
    IMPATIENT,
    SCRIPT,
    SURVIVING,
    WAITING,
    WAITING_ONCE,
    plan_over,
)

skip_without("ray")
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
    two_cores,
]
BOTH = f"ray:{FIRST}/cpu:0,ray:{SECOND}/cpu:1"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield the cluster, to which this process is connected."""
    with running_cluster(tmp_path_factory.mktemp("state")) as cluster:
        discover("ray", ray_address=cluster.address)
        yield cluster


@pytest.fixture
def devices(cluster: Any) -> tuple[Device, ...]:
    """Return a CPU slice on each of two hosts."""
    return discover(BOTH).devices


def measure(prober: ChildProber, *layouts: Layout, seconds: float = 0.2) -> list[Observation]:
    """Return the observations of these layouts, measured at the same time."""
    stages: list[Stage] = [
        Stage.SOLO if layout.kind == "solo" else Stage.SPLIT for layout in layouts
    ]
    probes = tuple(
        Probe(layout, stage, seconds) for layout, stage in zip(layouts, stages, strict=True)
    )
    return sorted(
        prober.measure(probes, lambda _: None, threading.Event()),
        key=lambda seen: probes.index(seen.probe),
    )


def test_devices_of_every_host_or_of_those_that_are_named(cluster: Any) -> None:
    every = discover("ray/cpu/1")
    assert [device.label for device in every.devices] == [f"{FIRST}/CPU:0", f"{SECOND}/CPU:0"]
    assert not any("versions" in note for note in every.notes), "both run this very code"
    assert "evener" in describe_versions()
    limited = discover(f"ray:{SECOND}/cpu:1@50%+1GiB").devices
    assert [(device.host, device.id, device.limit.percent) for device in limited] == [
        (SECOND, "cpu-1-of-2", 50.0)
    ]
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
    assert (
        run(["monitor", "--devices", f"ray:{FIRST}/cpu:0,ray:{SECOND}/cpu", "--json", "--once"])
        == 0
    )
    snapshot = json.loads(capsys.readouterr().out)
    shown = [(each["device"]["host"], each["device"]["id"]) for each in snapshot["devices"]]
    assert shown == [(FIRST, "cpu-0-of-2"), (SECOND, "cpu-0-of-2"), (SECOND, "cpu-1-of-2")]
    assert all(each["utilization_percent"]["state"] == "value" for each in snapshot["devices"])
    assert run(["monitor", "--devices", f"ray:{FIRST}/cpu:0,ray:{SECOND}/cpu", "--once"]) == 0
    assert f"{SECOND} " in capsys.readouterr().out
    publisher, trainable = open_sampler("ray/cpu/1")
    assert [device.label for device in trainable] == [f"{FIRST}/CPU:0", f"{SECOND}/CPU:0"]
    source = publisher.source
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
        until(lambda: len(list_children()) == 4, "two children alone and two of the group")
        started = list_children()
    finally:
        prober.close()
    assert all(
        isinstance(seen, Timed) and seen.step_seconds >= 0.005 for seen in (*alone, group)
    ), (alone, group)
    assert isinstance(group, Timed)
    assert all(group.device_seconds)
    until_gone(started)


def test_what_fails_there_is_an_observation_here(devices: tuple[Device, ...]) -> None:
    outcomes: dict[str, type[object]] = {"memory": OutOfMemory, "raise": Failed, "exit": Failed}
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


def test_a_dry_run_builds_on_the_first_host(
    devices: tuple[Device, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["balance", "--dry-run", "--devices", BOTH, "--workload", "synthetic"]) == 0
    assert f"{FIRST}/CPU:0" in capsys.readouterr().out


def test_a_device_is_locked_on_its_host(devices: tuple[Device, ...]) -> None:
    with (
        lock_devices("", devices),
        pytest.raises(DeviceError, match=f"{SECOND}/CPU:1 is being measured"),
    ):
        lock_devices("", devices[1:])
    with lock_devices("", devices[1:]):
        pass


def search(session: Session, enough: Callable[[Event], object]) -> Finished:
    """Return the end of a search that is stopped once `enough` is true."""
    with closing(session):
        for event in session.events():
            if enough(event):
                session.stop()
    assert isinstance(event, Finished)
    return event


def is_known(seen: Timed) -> bool:
    """Return whether a measurement is precise enough for a verdict, which ignores ± 25 %
    and more.
    """
    return seen.high_seconds - seen.low_seconds < 0.2 * seen.step_seconds


def was_timed(event: Event, stage: Stage) -> bool:
    """Return whether a measurement of this stage succeeded."""
    return (
        isinstance(event, Observed)
        and event.seen.probe.stage == stage
        and isinstance(event.seen, Timed)
    )


@pytest.mark.usefixtures("quick_probes")
def test_a_slow_network_makes_one_host_the_verdict_and_more_time_is_measured(
    devices: tuple[Device, ...],
) -> None:
    settings = {"base_ms": 2.0, "per_sample_ms": 0.1, "network_ms": 50.0}
    request = Request(
        BOTH,
        workload="synthetic",
        framework="tensorflow",
        settings=settings,
        global_batch=64,
        budget_seconds=120.0,
    )
    seen: list[Layout] = []

    def compared(event: Event) -> bool:
        """Whether a split and a device alone ran at the global batch, undisturbed, in whatever
        order it took them.
        """
        if isinstance(event, Observed) and isinstance(event.seen, Timed) and is_known(event.seen):
            seen.append(event.seen.probe.layout)
        return {layout.kind for layout in seen if layout.global_batch == 64} == {"solo", "split"}

    def raced(event: Event) -> bool:
        return was_timed(event, Stage.RACE)

    ended = search(Session(open_run(request)), compared)
    # steps that are slowed on a busy machine leave rates uncertain: the remedy is more time
    for _ in range(8):
        if "too uncertain" in ended.verdict:
            ended = search(Session(open_run(Request(), resume="last", extend_seconds=60.0)), raced)
    assert len(ended.plan.layout.active) == 1
    costs = re.search(r"synchronizing the devices costs (\d+) ms a step", ended.verdict)
    assert costs is not None, ended.verdict
    # nearly 50; the devices' compute time is predicted from steps that others slowed
    assert int(costs[1]) >= 25
    more = search(Session(open_run(Request(), resume="last", extend_seconds=60.0)), raced)
    assert more.plan.search.probes > ended.plan.search.probes


@pytest.mark.usefixtures("quick_probes")
def test_a_host_that_goes_in_a_split_is_left_out(cluster: Any, tmp_path: Path) -> None:
    """It is named, nothing runs on it any more, and the plan is for the others."""
    node = cluster.add_node(node_ip_address=THIRD, **NODE)
    until(lambda: THIRD in [each.host for each in list_nodes()], "the third host")
    ran: list[psutil.Process] = []
    failures: list[Failed] = []

    def note(event: Event) -> bool:
        if (
            isinstance(event, ProbeStarted)
            and event.probe.layout.shares[0]
            and event.probe.layout.kind == "split"
            and not ran
        ):
            ran.extend(list_children())
            kill_raylet(node)
        if isinstance(event, Observed) and isinstance(event.seen, Failed):
            failures.append(event.seen)
        return bool(failures) and was_timed(event, Stage.RACE)

    settings = {"base_ms": 2.0, "per_sample_ms": 0.1}
    every = f"ray:{THIRD}/cpu:0,{BOTH}"
    request = Request(
        every,
        workload="synthetic",
        framework="tensorflow",
        settings=settings,
        global_batch=96,
        budget_seconds=40.0,
    )
    plan = search(Session(open_run(msgspec.structs.replace(request, share=True))), note).plan
    assert {(seen.cause, seen.devices) for seen in failures} == {("device", (0,))}
    assert f"its host {THIRD} has left the cluster" in failures[0].detail
    until_gone(ran)
    places = [(share.host, share.device) for share in plan.layout.share]
    assert places == [(THIRD, "cpu-0-of-2"), (FIRST, "cpu-0-of-2"), (SECOND, "cpu-1-of-2")]
    assert THIRD not in [share.host for share in plan.layout.active]
    plan.save(tmp_path / "plan.toml")
    assert load_plan(tmp_path / "plan.toml") == plan
    cluster.remove_node(node, allow_graceful=False)


@pytest.mark.usefixtures("quick_probes")
def test_a_host_whose_actor_ends_gets_another_one(cluster: Any) -> None:
    """Ray's memory monitor may kill an actor: then one probe is lost, but no device."""
    ended: list[psutil.Process] = []
    later: list[Observation] = []  # on that host
    before = find_agent(SECOND).generation

    def note(event: Event) -> bool:
        if not ended and is_split(event):
            ended.extend([*list_children(), list_servants(SECOND)[-1]])
            ended[-1].kill()
        elif ended and isinstance(event, Observed) and event.seen.probe.layout.shares[1]:
            later.append(event.seen)
        return any(isinstance(seen, Timed) for seen in later)

    request = Request(
        BOTH,
        workload="synthetic",
        framework="tensorflow",
        settings={"base_ms": 2.0, "per_sample_ms": 0.1},
        global_batch=96,
        budget_seconds=90.0,
        share=True,
    )
    search(Session(open_run(request)), note)
    assert find_agent(SECOND).generation == before + 1
    assert isinstance(later[-1], Timed)
    assert not [seen for seen in later if isinstance(seen, Failed) and seen.cause == "device"]
    until_gone(ended[-1:])


def is_split(event: Event) -> bool:
    """Return whether the measurement of a split over both hosts begins."""
    return isinstance(event, ProbeStarted) and all(event.probe.layout.shares)


def list_servants(host: str) -> list[psutil.Process]:
    """Return evener's actors on a host, the newest last."""
    raylets = {
        process.pid
        for process in list_processes("raylet")
        if any(f"--node_ip_address={host}" in part for part in process.cmdline())
    }
    found = [each for each in list_processes("ray::HostActor") if each.ppid() in raylets]
    return sorted(found, key=lambda each: each.create_time())


@pytest.mark.slow
def test_a_script_of_the_users_own_is_measured_on_every_host(
    devices: tuple[Device, ...], tmp_path: Path
) -> None:
    skip_without("torch")
    folder = tmp_path / "work"
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    (folder / "sizes.py").write_text("INPUTS = 8\n")
    prober = child_prober(devices, f"{script}:build", "torch")
    try:
        well, ill = measure(prober, solo(2, 0, 8), solo(2, 1, 64))
    finally:
        prober.close()
    assert isinstance(well, Timed), well
    assert isinstance(ill, Failed), ill
    assert f"{script}:" in ill.detail, "the path is the user's own"
    assert ill.detail.endswith("too many")


def test_the_doctor_compares_hosts(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def describe_lightly(own: str, hosts: Sequence[str]) -> HostReport:
        """On the host, without starting the frameworks there, and as if its evener were its own."""
        vars(diagnostics)["check_machine"] = lambda: (Check("python", "ok", "3.11"),)
        found = diagnostics.describe_host(own, hosts)
        if own != hosts[0]:
            found = msgspec.structs.replace(found, versions={**found.versions, "evener": "0"})
        return found

    checks = {check.name: check for check in check_cluster("ray:10.9.9.9", "")}
    assert [(check.level, check.found) for check in checks.values()] == [
        ("problem", "The Ray cluster has no host '10.9.9.9'.")
    ]
    monkeypatch.setattr(diagnostics, "describe_host", describe_lightly)
    checks = {check.name: check for check in check_cluster(BOTH, "")}
    assert [name for name, check in checks.items() if check.level == "ok"] == [
        "python",
        "network interface",
        "ports",
        "devices",
    ]
    assert checks["network interface"].found == "lo"
    assert "different versions of evener" in checks["versions"].found
    end_agents()  # one was changed


def test_what_is_measured_is_reserved(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def free() -> list[tuple[float, int]]:
        return [(node.free_cpus, node.free_gpus) for node in list_nodes()]

    until(lambda: free() == [(1, 0), (1, GPUS)], "that nothing is reserved")
    other = ray.remote(num_cpus=1)(lambda: time.sleep(600)).remote()
    until(lambda: sum(cpus for cpus, _ in free()) == 1, "another job")
    (busy,) = (node.host for node in list_nodes() if not node.free_cpus)
    assert (
        f"{busy}: other jobs of the cluster hold 1 of the 1 CPUs to be measured."
        in discover(BOTH).notes
    )
    ray.cancel(other, force=True)
    until(lambda: sum(cpus for cpus, _ in free()) == 1, "what the other job held")
    discover(BOTH)
    until(lambda: free() == [(0, 0), (0, 0)], "that all is reserved")
    end_agents()
    until(lambda: free() == [(1, 0), (1, GPUS)], "that nothing is reserved")

    monkeypatch.setattr(
        discovery, "name_gpus", lambda ids: tuple(f"GPU-{number}" for number in ids)
    )
    node = list_nodes()[1]
    held = hold_other_gpus(node, ["GPU-1"])
    until(lambda: free()[1] == (1, 1), "that one GPU is held")
    get_ids = ray.remote(num_gpus=1)(lambda: ray.get_runtime_context().get_accelerator_ids()["GPU"])
    assert ray.get(get_ids.remote()) == ["1"], "only the plan's can be had"
    with pytest.raises(DeviceError, match=f"{SECOND} has no free GPU GPU-0"):
        hold_other_gpus(list_nodes()[1], ["GPU-0"])
    for agent in held:
        agent.end()


@pytest.mark.slow
def test_nothing_is_left_of_a_driver_that_was_killed(cluster: Any, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "evener",
        "balance",
        "--devices",
        BOTH,
        "--workload",
        "synthetic",
        "--share",
    ]
    before = {process.pid for process in list_processes("ray::HostActor")}
    errors = tmp_path / "errors.txt"
    with errors.open("w") as stream:
        driver = subprocess.Popen(
            [*command, "--ray-address", cluster.address, "--budget", "60s"],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=stream,
        )
    until(lambda: driver.poll() is not None or len(list_children()) >= 2, "its children")
    assert driver.poll() is None, errors.read_text()
    started = [
        *list_children(),
        *(each for each in list_processes("ray::HostActor") if each.pid not in before),
    ]
    assert len(started) >= 4
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    until_gone(started)


@pytest.fixture
def free_cluster(cluster: Any) -> Any:
    """Return the cluster without anything of this process on it."""
    end_agents()
    return cluster


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_training_goes_on_without_a_host_that_is_lost(free_cluster: Any, tmp_path: Path) -> None:
    """The others restart with its rows, and rendezvous at another host, because it was the first.

    They name the plan. Each process is on its device; one that fails ends all of them.
    """
    node = free_cluster.add_node(node_ip_address=THIRD, **NODE)
    until(lambda: THIRD in [each.host for each in list_nodes()], "the third host")
    devices = (
        ("cpu-0-of-1", THIRD),
        ("cpu-0-of-1", FIRST),
        ("cpu-0-of-2", SECOND),
        ("cpu-1-of-2", SECOND),
    )
    plan = plan_over(*devices, engine="multiworker")
    msgspec.structs.replace(plan, framework="tensorflow").save(tmp_path / "plan.toml")
    (tmp_path / "train.py").write_text(SURVIVING)
    errors, printed = tmp_path / "errors.txt", tmp_path / "printed.txt"
    with errors.open("w") as stream, printed.open("w") as output:
        command = [
            sys.executable,
            "-c",
            IMPATIENT,
            "launch",
            "--ray",
            "--ray-address",
            free_cluster.address,
        ]
        launch = subprocess.Popen(
            [*command, "--max-restarts", "1", "plan.toml", "train.py", str(tmp_path)],
            cwd=tmp_path,
            stdout=output,
            stderr=stream,
        )
    until(
        lambda: launch.poll() is not None or len(list(tmp_path.glob("4*.json"))) == 4,
        "all four",
        150,
    )
    assert launch.poll() is None, errors.read_text()
    kill_raylet(node)
    assert launch.wait(180) == 1, errors.read_text()
    free_cluster.remove_node(node, allow_graceful=False)
    said = [line for line in errors.read_text().splitlines() if line.startswith("evener: ")]
    assert said[0].startswith(f"evener: the host {THIRD} has ")  # left, or not answered
    assert said[1:3] == [
        f"evener: {THIRD} is left out: 1+5+2+2 → 0+6+2+2 rows",
        "evener: all others start again, 1 of 1 times",
    ]
    for world, kept in ((4, devices), (3, devices[1:])):
        hosts = [host for _, host in kept]
        for i, (device, host) in enumerate(kept):
            started = json.loads((tmp_path / f"{world} {i}.json").read_text())
            assert started["place"] == [host, device]
            assert [worker.rpartition(":")[0] for worker in started["workers"]] == hosts
    assert parse_plan(started["plan"].encode()).batches == (0, 6, 2, 2)
    assert f"[{SECOND}] [CPU:0] hello" in printed.read_text()
    assert "rank 1 ended with exit code 7" in printed.read_text()


@pytest.mark.slow
def test_a_training_goes_on_with_a_host_whose_actor_ended(
    free_cluster: Any, tmp_path: Path
) -> None:
    """All restart with the same plan, each host with all its devices."""
    (tmp_path / "train.py").write_text(WAITING_ONCE)
    plan = plan_over(("cpu-0-of-1", FIRST), ("cpu-0-of-1", SECOND), engine="multiworker")
    msgspec.structs.replace(plan, framework="tensorflow").save(tmp_path / "plan.toml")
    started, errors = tmp_path / "started", tmp_path / "errors.txt"
    started.mkdir()
    words = ["--ray", "--ray-address", free_cluster.address]
    words += ["--max-restarts", "2", "--no-plan-check"]
    with errors.open("w") as stream:
        launch = subprocess.Popen(
            [sys.executable, "-c", IMPATIENT, "launch", *words, "plan.toml", "train.py", started],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=stream,
        )
    until(lambda: launch.poll() is not None or len(list(started.iterdir())) == 2, "both hosts")
    assert launch.poll() is None, errors.read_text()
    list_servants(SECOND)[-1].kill()
    assert launch.wait(90) == 0, errors.read_text()
    said = errors.read_text()
    assert f"the host {SECOND} has lost evener's actor" in said
    assert "all start again, 1 of 2 times" in said
    assert "left out" not in said


class Training:
    """One host's part: it prints nothing, and ends with its exit code once `end` is set."""

    def __init__(self, code: int) -> None:
        self.code, self.end = code, threading.Event()

    def ask(self, method: str, seconds: float) -> tuple[list[bytes], int]:
        self.end.wait()
        return [], self.code


def test_a_launch_ends_with_the_code_of_the_host_that_failed_first() -> None:
    trainings: Any = [Training(143), Training(7)]
    parts = [RemoteLaunch("host", training, 1.0) for training in trainings]
    trainings[1].end.set()
    threading.Timer(0.5, trainings[0].end.set).start()  # it was stopped for that
    assert wait_for_hosts(parts, []) == 7
    assert [part.code for part in parts] == [143, 7]


def test_a_cluster_that_shrank_since_the_plan_is_reported(
    free_cluster: Any, tmp_path: Path
) -> None:
    plan_over(("cpu-0-of-1", "10.9.9.9")).save(tmp_path / "plan.toml")
    (tmp_path / "train.py").write_text("")
    with pytest.raises(RequestError, match=r"no host '10\.9\.9\.9'"):
        launch_on_cluster(tmp_path / "plan.toml", [str(tmp_path / "train.py")], 0, None, "", 60.0)


def test_ray_train_has_refusals(free_cluster: Any) -> None:
    skip_without("torch")
    trainer = pytest.importorskip("evener.ray").trainer
    plan = plan_over(("cpu-0-of-1", FIRST))
    nothing: dict[str, Any] = {}
    for wrong, options, words in (
        (plan_over(("cpu-0-of-1", "")), nothing, "names no hosts"),
        (plan_over(("cpu-0-of-1", "10.9.9.9")), {}, "no host"),
        (msgspec.structs.replace(plan, framework="tensorflow"), {}, "trains with PyTorch"),
        (plan, {"datasets": {}}, "datasets is decided by the plan"),
    ):
        with pytest.raises((PlanError, RequestError), match=words):
            trainer(wrong, print, **options)


@pytest.mark.slow
def test_ray_train_trains_by_a_plan_over_hosts(
    free_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice on each of two hosts has the weights of one process, to 1e-12, also from Ray's
    checkpoint.
    """
    skip_without("torch")
    pytest.importorskip("pydantic", reason="Ray Train needs it")
    import ray.train
    import torch
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback

    from evener.ray import trainer
    from tests.support import ray_training, torch_ranks

    # each is a separate process, and isn't used here
    for name in ("DatasetsCallback", "PlacementGroupCleanerCallback"):
        made_by = f"ray.train.v2.api.data_parallel_trainer.{name}"
        monkeypatch.setattr(made_by, lambda **_: WorkerGroupCallback(), raising=False)
    # not 2: it waits so long for a report, and the end
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")
    plan = plan_over(("cpu-0-of-1", FIRST), ("cpu-0-of-2", SECOND))
    stored = ray.train.RunConfig(storage_path=str(tmp_path / "ray"))
    made = trainer(
        plan,
        ray_training.train_loop,
        train_loop_config={"folder": str(tmp_path)},
        run_config=stored,
    )
    assert made.fit().metrics == {"steps": ray_training.SAVED}
    weights, losses = torch_ranks.reference(torch_ranks.CASES[ray_training.NAME], 6)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert sorted((rank["host"], rank["rows"]) for rank in ranks) == [(FIRST, 1), (SECOND, 5)]
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses, abs=1e-12)
        for mine, expected in zip(rank["weights"], weights, strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_launch_without_ray_s_head_ends_in_an_error_and_restarts_nothing(
    free_cluster: Any, tmp_path: Path
) -> None:
    """This test comes last, because the cluster loses its head.

    Ray alone would end the launcher after a minute, and none of the ranks.
    """
    import ray

    (tmp_path / "train.py").write_text(WAITING)
    plan = plan_over(("cpu-0-of-1", FIRST), ("cpu-0-of-1", SECOND), engine="multiworker")
    msgspec.structs.replace(plan, framework="tensorflow").save(tmp_path / "plan.toml")
    started = tmp_path / "started"
    started.mkdir()
    ray.shutdown()  # Ray would also end this process
    words = [
        "--ray",
        "--ray-address",
        free_cluster.address,
        "--max-restarts",
        "2",
        "plan.toml",
        "train.py",
        str(started),
    ]
    launcher = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, "launch", *words],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: len(list(started.iterdir())) == 2 or launcher.poll() is not None, "both hosts")
    os.kill(free_cluster.head_node.all_processes["gcs_server"][0].process.pid, signal.SIGKILL)
    _, errors = launcher.communicate(timeout=240)
    said = [line for line in errors.splitlines() if line.startswith("evener:")]
    assert launcher.returncode == 3, errors
    assert re.match(r"evener: The head of the Ray cluster, .*, doesn't answer any more: ", said[-1])
    assert not [line for line in said if "start again" in line]
    until_gone(list_processes(str(started)))
