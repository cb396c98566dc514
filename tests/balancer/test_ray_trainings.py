"""Trainings by a plan over the hosts of a Ray cluster: two nodes on loopback, each test on cores of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.devices.cluster.connection import list_nodes
from evener.devices.discover import discover
from evener.errors import PlanError, RequestError
from evener.plan.file import Fingerprint, Plan, SearchSummary, Share, Throughput, make_layout, parse_plan
from evener.tui.launch.cluster import HostPart, launch_on_cluster, wait_for_hosts
from tests.support.frameworks import skip_without
from tests.support.ray_cluster import (
    FIRST,
    NODE,
    SECOND,
    THIRD,
    end_agents,
    kill_raylet,
    list_processes,
    running_cluster,
    until,
    until_gone,
)

skip_without("ray")
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The cluster, to which this process is connected."""
    with running_cluster(tmp_path_factory.mktemp("state")) as cluster:
        discover("ray", ray_address=cluster.address)
        yield cluster


@pytest.mark.slow
def test_a_plan_over_hosts_is_launched_on_all_of_them(cluster: Any, tmp_path: Path) -> None:
    """Each process on its device; one that fails ends all of them."""
    plan = plan_over(("cpu-0-of-1", FIRST), ("cpu-0-of-2", SECOND), ("cpu-1-of-2", SECOND), engine="multiworker")
    msgspec.structs.replace(plan, framework="tensorflow").save(tmp_path / "plan.toml")
    (tmp_path / "train.py").write_text(LAUNCHED)
    command = [sys.executable, "-m", "evener", "launch", "--ray", "--ray-address", cluster.address]
    answer = subprocess.run(
        [*command, "plan.toml", "train.py", str(tmp_path)], cwd=tmp_path, capture_output=True, text=True
    )
    assert answer.returncode == 1, answer.stdout + answer.stderr
    processes = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(3)]
    assert [each["place"] for each in processes] == [
        [FIRST, "cpu-0-of-1"],
        [SECOND, "cpu-0-of-2"],
        [SECOND, "cpu-1-of-2"],
    ]
    (workers,) = {tuple(each["workers"]) for each in processes}
    assert [worker.rpartition(":")[0] for worker in workers] == [FIRST, SECOND, SECOND]
    assert f"[{SECOND}] [CPU:0] hello" in answer.stdout
    assert "rank 1 ended with exit code 7" in answer.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_training_goes_on_without_a_host_that_is_lost(cluster: Any, tmp_path: Path) -> None:
    """The others start again with its rows, and meet at another host, as it was the first; they name the plan."""
    node = cluster.add_node(node_ip_address=THIRD, **NODE)
    until(lambda: THIRD in [each.host for each in list_nodes()], "the third host")
    plan = plan_over(("cpu-0-of-1", THIRD), ("cpu-0-of-2", FIRST), ("cpu-1-of-2", SECOND), engine="multiworker")
    msgspec.structs.replace(plan, framework="tensorflow").save(tmp_path / "plan.toml")
    (tmp_path / "train.py").write_text(SURVIVING)
    errors = tmp_path / "errors.txt"
    with errors.open("w") as stream:
        command = [sys.executable, "-m", "evener", "launch", "--ray", "--ray-address", cluster.address]
        launch = subprocess.Popen(
            [*command, "--max-restarts", "2", "plan.toml", "train.py", str(tmp_path)],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=stream,
        )
    until(lambda: launch.poll() is not None or len(list(tmp_path.glob("3*.json"))) == 3, "all three", 150)
    assert launch.poll() is None, errors.read_text()
    kill_raylet(node)
    assert launch.wait(180) == 0, errors.read_text()
    cluster.remove_node(node, allow_graceful=False)
    said = [line for line in errors.read_text().splitlines() if line.startswith("evener: ")]
    assert said[0].startswith(f"evener: the host {THIRD} has ")  # left, or not answered
    assert said[1:] == [
        f"evener: {THIRD} is left out: 1+5+2 → 0+6+2 rows",
        "evener: all others start again, 1 of 2 times",
    ]
    for i, host in enumerate((FIRST, SECOND)):
        started = json.loads((tmp_path / f"2 {host}.json").read_text())
        assert [worker.rpartition(":")[0] for worker in started["workers"]] == [FIRST, SECOND]
        assert parse_plan(started["plan"].encode()).batches == (0, 6, 2)
        assert started["index"] == i


SURVIVING = """
import json, os, sys, time
from pathlib import Path
from evener.training.launched import launched_plan
config = json.loads(os.environ["TF_CONFIG"])
workers = config["cluster"]["worker"]
name = f"{len(workers)} {os.environ['EVENER_HOST']}"
plan = Path(launched_plan("plan.toml")).read_text()
written = Path(sys.argv[1], name + ".new")
written.write_text(json.dumps({"plan": plan, "workers": workers, "index": config["task"]["index"]}))
written.rename(Path(sys.argv[1], name + ".json"))
time.sleep(600 if len(workers) == 3 else 0)
"""


class Training:
    """One host's part: it says nothing, and ends with its code once `end` is set."""

    def __init__(self, code: int) -> None:
        self.code, self.end = code, threading.Event()

    def ask(self, method: str, seconds: float) -> tuple[list[bytes], int]:
        self.end.wait()
        return [], self.code


def test_a_launch_ends_with_the_code_of_the_host_that_failed_first() -> None:
    trainings: Any = [Training(143), Training(7)]
    parts = [HostPart("host", training) for training in trainings]
    trainings[1].end.set()
    threading.Timer(0.5, trainings[0].end.set).start()  # it was stopped for that
    assert wait_for_hosts(parts, []) == 7
    assert [part.code for part in parts] == [143, 7]


def test_a_cluster_that_shrank_since_the_plan_is_said(cluster: Any, tmp_path: Path) -> None:
    plan_over(("cpu-0-of-1", "10.9.9.9")).save(tmp_path / "plan.toml")
    (tmp_path / "train.py").write_text("")
    with pytest.raises(RequestError, match=r"no host '10\.9\.9\.9'"):
        launch_on_cluster(tmp_path / "plan.toml", [str(tmp_path / "train.py")], 0, None, "", 60.0)


LAUNCHED = """
import json, os, sys, time
from pathlib import Path
config = json.loads(os.environ["TF_CONFIG"])
place = [os.environ["EVENER_HOST"], os.environ["EVENER_DEVICE"]]
number = config["task"]["index"]
written = Path(sys.argv[1], "new" + str(number))
written.write_text(json.dumps({"place": place, "workers": config["cluster"]["worker"]}))
written.rename(Path(sys.argv[1], f"{number}.json"))
print("hello", flush=True)
while len(list(Path(sys.argv[1]).glob("*.json"))) < 3:
    time.sleep(0.05)
sys.exit({0: 0, 1: 7}[number] if number < 2 else time.sleep(600))
"""


def plan_over(*devices: tuple[str, str], engine: str = "") -> Plan:
    """A plan for these devices of hosts, with 1, 5 and 2 rows."""
    shares = tuple(Share(name, i, "EPYC", 0, 0.0, host=host) for i, (name, host) in enumerate(devices))
    layout = make_layout("split" if len(shares) > 1 else "solo", shares, (1, 5, 2)[: len(shares)])
    return Plan(
        created="2026-11-22T12:00:00Z",
        workload="torch_mnist",
        framework="torch",
        precision="float32",
        xla=False,
        layout=msgspec.structs.replace(layout, engine=engine),
        throughput=Throughput(100.0, 99.0, 101.0),
        evidence=(),
        search=SearchSummary(1, 0, 1.0, 0, "test"),
        fingerprint=Fingerprint((), "", {}, ""),
    )


def test_ray_train_has_refusals(cluster: Any) -> None:
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
def test_ray_train_trains_by_a_plan_over_hosts(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 + 2 slices, oversubscribed: the weights of one process, to 1e-12, also from Ray's checkpoint."""
    skip_without("torch")
    pytest.importorskip("pydantic", reason="Ray Train needs it")
    import ray.train
    import torch

    from evener.ray import trainer
    from tests.support import ray_training, torch_ranks

    end_agents()  # which hold the CPUs
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")  # not 2: it waits so long for a report, and the end
    plan = plan_over(("cpu-0-of-1", FIRST), ("cpu-0-of-2", SECOND), ("cpu-1-of-2", SECOND))
    stored = ray.train.RunConfig(storage_path=str(tmp_path / "ray"))
    made = trainer(plan, ray_training.train_loop, train_loop_config={"folder": str(tmp_path)}, run_config=stored)
    assert made.fit().metrics == {"steps": ray_training.SAVED}
    weights, losses = torch_ranks.reference(torch_ranks.CASES[ray_training.NAME], 8)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)]
    assert sorted((rank["host"], rank["rows"]) for rank in ranks) == [(FIRST, 1), (SECOND, 2), (SECOND, 5)]
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses, abs=1e-12)
        for mine, expected in zip(rank["weights"], weights, strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


WAITING = """
import os, sys, time
open(os.path.join(sys.argv[1], os.environ["EVENER_HOST"]), "w").close()
time.sleep(600)
"""


@pytest.mark.slow
def test_a_launch_without_ray_s_head_ends_in_a_sentence_and_starts_nothing_again(cluster: Any, tmp_path: Path) -> None:
    """The last test, as the cluster loses its head. Ray alone ends the launcher after a minute, and no rank."""
    import ray

    (tmp_path / "train.py").write_text(WAITING)
    plan = plan_over(("cpu-0-of-1", FIRST), ("cpu-0-of-1", SECOND), engine="multiworker")
    msgspec.structs.replace(plan, framework="tensorflow").save(tmp_path / "plan.toml")
    started = tmp_path / "started"
    started.mkdir()
    end_agents()
    ray.shutdown()  # Ray would end this process too
    words = ["--ray", "--ray-address", cluster.address, "--max-restarts", "2", "plan.toml", "train.py", str(started)]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "evener", "launch", *words],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: len(list(started.iterdir())) == 2 or launcher.poll() is not None, "both hosts")
    os.kill(cluster.head_node.all_processes["gcs_server"][0].process.pid, signal.SIGKILL)
    _, errors = launcher.communicate(timeout=240)
    said = [line for line in errors.splitlines() if line.startswith("evener:")]
    assert launcher.returncode == 3, errors
    assert re.match(r"evener: The head of the Ray cluster, .*, doesn't answer any more: ", said[-1])
    assert not [line for line in said if "start again" in line]
    until_gone(list_processes(str(started)))
