"""Whether a program's process group is that of evener's ranks, or of processes it started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evener.errors import RequestError
from evener.plan.file import load_plan
from evener.program import group
from evener.system.cores import allowed_cpus
from evener.training import first_rank, launched

PLAN = """
[[layout.share]]
device = "GPU-a"
batch = 1
[[layout.share]]
device = "GPU-b"
batch = 1
"""
EVENER_S = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "TORCHELASTIC_RUN_ID": "evener-1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "4000",
}


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that releases the other ranks, set in the environment of evener's first rank."""
    path, plan = tmp_path / "released-0", tmp_path / "plan.toml"
    plan.write_text(PLAN)
    given = {
        **EVENER_S,
        first_rank.RELEASE: str(path),
        first_rank.STARTED_AS: "0 2 evener-1",
        launched.RENDEZVOUS: "127.0.0.1:4000 /nowhere",
        launched.PLAN: str(plan),
        launched.DEVICE: "GPU-a",
        launched.RUN: "this",
    }
    for name in (*first_rank.RANK_VARIABLES, *given):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(group, "_member", None)
    monkeypatch.setattr(group, "_read_start_environment", lambda _: dict(os.environ))
    assert load_plan(plan).layout.batches == (1, 1)
    assert allowed_cpus()
    return path


def make_group(init_method: str | None = None, world_size: int = -1, rank: int = -1) -> None:
    """Do nothing; the parameters are those of torch.distributed.init_process_group."""


def begin(**given: Any) -> None:
    """Create a process group, like a program."""
    group.begin(make_group, None, (), given)


def test_ranks_of_evener_release_the_others(released: Path) -> None:
    begin()
    assert released.exists()
    assert (os.environ["RANK"], group.current_rank()) == ("0", 0)


def test_a_script_may_choose_its_address(released: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks are released unless a launcher has started another rank."""
    first = dict(os.environ)
    monkeypatch.setattr(group, "_read_start_environment", lambda _: first)
    begin(init_method="tcp://localhost:12355", rank=0, world_size=2)
    assert released.exists()


@pytest.mark.parametrize("beside", [True, False])
def test_a_launcher_is_known_by_the_ranks_that_it_has_started(
    beside: bool, released: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's launcher sets the same variables as evener; accelerate's only the address."""
    monkeypatch.setenv("MASTER_PORT", "29500")
    own = {**os.environ}
    other = {**own, "RANK": "1" if beside else "0"}
    monkeypatch.setattr(
        group, "_read_start_environment", lambda pid: own if pid == "self" else other
    )
    begin()
    assert released.exists() is not beside
    assert os.environ["RANK"] == "0"


def test_an_elastic_run_inside_is_not_evener_s(
    released: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An elastic run within a program may use the same port, as in swift and LLaMA-Factory."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launched.rendezvous_file("127.0.0.1:4000") is None
    begin()
    assert not released.exists()
    assert (os.environ["LOCAL_RANK"], group.current_rank()) == ("1", 1)
    assert os.environ[launched.DEVICE] == "GPU-b"
    assert launched.PLAN in os.environ


def test_another_number_of_processes_starts_without_the_plan(
    released: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for name, value in {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    begin()
    assert launched.PLAN not in os.environ
    assert os.environ[launched.DEVICE] == "GPU-b"


def test_a_process_that_a_program_has_started_is_no_rank_of_evener_s(
    released: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes started as in PyTorch's tutorials inherit the first rank's variables."""
    monkeypatch.setattr("multiprocessing.parent_process", object)
    begin(init_method="tcp://localhost:12355", rank=1, world_size=2)
    assert not released.exists()
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & {*os.environ}
    assert (group.current_rank(), os.environ[launched.DEVICE]) == (1, "GPU-b")


def test_a_group_over_several_machines_waits_for_its_other_ranks(released: Path) -> None:
    """Only one process of it is here, and others are started there."""
    released.with_name(f"{released.name}.first").write_text(str(os.getpid()))
    begin(rank=0, world_size=3, init_method="tcp://192.0.2.1:29500")


@pytest.mark.parametrize("starts_another", [False, True])
def test_a_group_whose_other_ranks_never_start_is_refused(
    released: Path, starts_another: bool
) -> None:
    """A program with its own list of three GPUs would wait for ever for its third process."""
    released.with_name(f"{released.name}.first").write_text(str(os.getpid()))
    words = [sys.executable, "-c", "input()"] if starts_another else ["true"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as other:
        if starts_another:
            begin(rank=0, world_size=3)
            other.communicate(b"\n")
            return
        other.wait()
        with pytest.raises(RequestError, match="3 processes, and evener run has one for each of 2"):
            begin(rank=0, world_size=3)


def test_what_is_spawned_while_the_first_rank_is_alone_inherits_no_rank(released: Path) -> None:
    seen: list[set[str]] = []

    def spawn() -> None:
        seen.append({"RANK", "WORLD_SIZE"} & {*os.environ})

    group.begin_processes(spawn, None, (), {})
    released.touch()
    group.begin_processes(spawn, None, (), {})
    assert seen == [set(), {"RANK", "WORLD_SIZE"}]
    assert os.environ["RANK"] == "0"


@pytest.mark.parametrize("released_first", [True, False])
def test_a_waiting_rank_starts_once_it_is_released_and_ends_with_the_first(
    released_first: bool, tmp_path: Path
) -> None:
    path = str(tmp_path / "released-0")
    first = (
        "from evener.training.first_rank import wait_for_release; import sys; "
        f"wait_for_release({path!r}, 0); sys.stdin.read()"
    )
    other = (
        "from evener.training.first_rank import wait_for_release; "
        f"wait_for_release({path!r}, 1); print('starts')"
    )
    start = [sys.executable, "-c"]
    with (
        subprocess.Popen([*start, first], stdin=subprocess.PIPE) as leading,
        subprocess.Popen([*start, other], stdout=subprocess.PIPE, text=True) as waiting,
    ):
        if released_first:
            Path(path).touch()
            printed, _ = waiting.communicate(timeout=120)
            leading.communicate()
        else:
            leading.communicate()
            printed, _ = waiting.communicate(timeout=120)
    assert printed == ("starts\n" if released_first else "")
    assert waiting.returncode == 0
