"""Kill `evener launch` at random moments, and run training scripts that exit in odd ways.

The processes are real and use no framework.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evener.balancer.probes.launch_plan import OPEN_SERVERS
from evener.errors import PlanError
from evener.plan.file import load_plan
from evener.system import files
from tests.support.forked_evener import ForkedEvener
from tests.support.killed_launchers import list_processes
from tests.support.launched_plan import plan
from tests.support.listeners import list_tree
from tests.support.python_path import python_path
from tests.support.rank_server import RankServer
from tests.support.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
KILLS = int(
    os.environ.get("EVENER_KILLS", "12")
)  # number of random moments; 200 or more when run by hand
# time limit for all to exit: 5 would do on an idle machine
SECONDS = float(os.environ.get("EVENER_SECONDS", "60"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose processes are killed after the test."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    yield tmp_path
    for words in list_processes(tmp_path):
        os.kill(int(words.split()[0]), signal.SIGKILL)


def test_a_killed_launcher_leaves_nothing_behind(folder: Path) -> None:
    """`kill -9` at any moment leaves no rank, no child of a rank and no temporary folder."""
    module, seed = "tests.support.killed_launchers", os.environ.get("EVENER_SEED", "1")
    words = [sys.executable, "-m", module, str(folder), str(KILLS), seed, str(SECONDS)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120 + KILLS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


HELPER = """
import signal, subprocess, sys, time
if "helper" not in sys.argv:
    subprocess.Popen([sys.executable, __file__, "helper"], start_new_session=True)
    open(__file__ + ".runs", "w").close()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(300)
"""


def test_a_killed_run_leaves_nothing_although_its_guard_was_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If SIGTERM reaches all processes at once, the guard stays until its launcher exits."""
    (folder / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder / "temporary"))
    (folder / "train.py").write_text(HELPER)
    plan(["cpu-0-of-2"]).save(folder / "plan.toml")
    words = [sys.executable, "-m", "evener", "run", "--plan", str(folder / "plan.toml"), "--"]
    evener = subprocess.Popen([*words, sys.executable, str(folder / "train.py")])
    wait_for((folder / "train.py.runs").exists)
    assert [each.name[:11] for each in (folder / "temporary").iterdir()] == ["evener-run-"]
    guards = [each for each in list_tree(evener.pid) if _is_guard(each)]
    assert len(guards) == 1
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(guards[0], number)
    evener.kill()
    evener.wait()
    wait_for(lambda: not list_processes(folder) and not any((folder / "temporary").iterdir()))


def _is_guard(pid: int) -> bool:
    return b"watcher.py" in Path(f"/proc/{pid}/cmdline").read_bytes()


LEAVER = """
import os, sys, time
rank, folder = os.environ["EVENER_DEVICE"][4], os.path.dirname(__file__)
if rank == "0":
    os.symlink(f"/proc/{os.getpid()}/stat", f"{folder}/first")
    sys.exit(0)  # in mid-epoch
while not os.path.islink(f"{folder}/first") or os.path.exists(f"{folder}/first"):
    time.sleep(0.01)  # until its launcher has seen its end
sys.exit("connection closed by peer")
"""
CHANGER = """
import os, pathlib, signal
if os.environ["EVENER_DEVICE"] == "cpu-0-of-2":
    path = pathlib.Path(os.environ["EVENER_PLAN"])
    path.write_text(path.read_text().replace("seed = 0", "seed = 1"))
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""


def prepare(folder: Path, script: str, framework: str) -> None:
    """Write a script and its plan for two slices."""
    (folder / "train.py").write_text(script)
    engine = "multiworker" if framework == "tensorflow" else ""
    plan(["cpu-0-of-2", "cpu-1-of-2"], framework=framework, engine=engine).save(
        folder / "plan.toml"
    )


def launch(
    folder: Path, script: str, *options: str, framework: str = "tensorflow"
) -> subprocess.CompletedProcess[str]:
    """Run a script on two slices by evener launch."""
    prepare(folder, script, framework)
    words = [sys.executable, "-m", "evener", "launch", *options, "plan.toml", "train.py"]
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )


WHO_LEFT = (
    "evener: rank 0 left with exit code 0, and rank 1 ended with exit code 1; the "
    "others were stopped"
)


def list_messages(errors: str) -> list[str]:
    """Return evener's messages without those about the start and its ports."""
    lines = [line for line in errors.splitlines() if line.startswith("evener: ")][1:]
    return [line for line in lines if OPEN_SERVERS not in line]


def test_a_rank_that_leaves_in_mid_epoch_is_the_one_that_is_named(folder: Path) -> None:
    """The rank that exits is named, not the others, which fail because of it."""
    done = launch(folder, LEAVER)
    assert (done.returncode, list_messages(done.stderr)) == (1, [WHO_LEFT])


@pytest.mark.slow
def test_a_rank_of_pytorch_s_agent_that_leaves_is_named_too(
    folder: Path, rank_server: Callable[[str], RankServer]
) -> None:
    pytest.importorskip("torch")
    prepare(folder, LEAVER, "torch")
    server, variables = (
        rank_server("tests.support.torch_imports"),
        {"PYTHONPATH": python_path(ROOT)},
    )
    launcher = ForkedEvener(
        server, folder, folder / "evener", ("launch", "plan.toml", "train.py"), variables
    )
    _, errors = launcher.communicate(240)
    assert (launcher.returncode, list_messages(errors)) == (1, [WHO_LEFT])


def test_a_plan_that_has_changed_is_not_started_again(folder: Path) -> None:
    done = launch(folder, CHANGER, "--max-restarts", "2")
    assert done.returncode == 2
    assert "plan.toml has changed since the training began. " in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_script_of_another_framework_than_the_plan_s_is_a_one_line_error(folder: Path) -> None:
    """The script is refused before anything starts.

    A script that imports both frameworks, or is broken, is left to Python.
    """
    for framework, script, words in (
        ("torch", "import keras", "for PyTorch, and train.py trains with TensorFlow. "),
        (
            "tensorflow",
            "from transformers import Trainer",
            "for TensorFlow, and train.py trains with PyTorch. ",
        ),
    ):
        done = launch(folder, script, framework=framework)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert words in done.stderr
    done = launch(folder, "import )")
    assert "SyntaxError" in done.stderr


def test_a_pipe_as_a_plan_is_a_one_line_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe is refused, because each process would have to read it."""
    monkeypatch.setattr(files, "PIPE_SECONDS", 0.1)
    os.mkfifo(folder / "plan.toml")
    (folder / "train.py").touch()
    words = [sys.executable, "-m", "evener", "launch", "plan.toml", "train.py"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "isn't a file" in done.stderr
    with pytest.raises(PlanError, match="Nothing is written to the pipe"):
        load_plan(folder / "plan.toml")
