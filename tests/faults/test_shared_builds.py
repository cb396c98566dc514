"""A build that takes long is made once: later children are forked with it, unless it left something
that a fork doesn't survive.
"""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from evener.balancer.probes.child_prober import ChildProber
from evener.balancer.probes.hosts import LocalHost
from evener.balancer.probes.protocol import Build
from evener.balancer.probes.shared_build import BuildChannel
from evener.balancer.request import Job, Request
from evener.balancer.types import Layout, Probe, Stage, Timed, solo
from evener.devices.cpu import slices
from evener.workloads.protocol import WorkerSetup
from tests.support.cores import two_cores
from tests.support.fake_cuda import make_cuda_library
from tests.support.python_path import python_path

pytest.importorskip("torch")

SCRIPT = """
import threading, time
import torch

def sample_batch(n):
    return torch.randn(n, 8), torch.randn(n, 4)

def build():
    with open({folder!r} + "/builds", "a") as log:
        log.write("x")
    {left}
    time.sleep({seconds})
    model = torch.nn.Linear(8, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss()
"""
THREAD = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
SECONDS = 2.2

LOADS = """
import threading, time
import torch

def note(what):
    with open({folder!r} + "/builds", "a") as log:
        log.write(what)

def sample_batch(n):
    return torch.randn(n, 8), torch.randn(n, 4)

def load_model(width=8):
    note("x")
    time.sleep({seconds})
    return torch.nn.Linear(width, 4)

def build(model):
    note("b")
    {left}
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss()
"""

# what a build may leave, and a word of why its process can't be forked
LEFT = {
    THREAD: "thread",
    "ctypes.CDLL(FOLDER + '/libcuda.so.1')": "driver",  # a stand-in in which CUDA has started
    "held = open(FOLDER + '/rows', 'w')": "rows open",
    # as NVML does: then the driver is started in a trial
    "held = os.open(FOLDER + '/nvidiactl', os.O_CREAT)": "",
    "held = os.open(FOLDER + '/nvidiactl', os.O_CREAT); starts = False": "exit code 1",
    "held = open(FOLDER + '/a', 'w'); fcntl.flock(held, fcntl.LOCK_EX)": "a open",
    # threads of a library, which OpenBLAS ends before a fork and PyTorch's OpenMP doesn't
    "numpy.ones((600, 600)) @ numpy.ones((600, 600))": "",
    "torch.set_num_threads(2); torch.ones(800, 800) @ torch.ones(800, 800)": "thread",
    "hangs = True": "hangs",
    "fails = True": "exit code 1",
    "held = subprocess.Popen(['sleep', '60'], stdin=subprocess.DEVNULL)": "process",
    "os.environ.get('LOCAL_RANK', '0')": "LOCAL_RANK",
    "os.getenv('CUDA_VISIBLE_DEVICES')": "CUDA_VISIBLE_DEVICES",
    "asked()": "its group",
    "lock = threading.Lock(); lock.acquire()": "",  # the same thread holds it in the fork
    "random.seed(3)": "",
    "open(FOLDER + '/closed', 'w').close()": "",
    "os.environ.get('HOME')": "",
}
if find_spec("pyarrow") is not None:
    LEFT["import pyarrow"] = ""  # its jemalloc has a thread, and needs none in a fork
LEAVES = """
import ctypes, fcntl, os, random, signal, subprocess, sys, threading, time
import numpy, torch
from evener.balancer.probes import forkable
from evener.balancer.probes.forkable import BuildWatch

FOLDER = sys.argv[1]
for backend in forkable.all_backends():
    if backend.driver_files:
        backend.driver_files = (FOLDER + "/nvidia",)
torch.set_num_threads(1)
for line in sys.stdin.read().splitlines():
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        continue
    os.setsid()
    watch = BuildWatch()
    names = {**globals(), "asked": watch.recording(lambda: None, "its group")}
    with watch.watching():
        exec(compile(line, FOLDER + "/train.py", "exec"), names)

    forkable.TRIAL_SECONDS = 0.5 if "hangs" in names else 60.0

    def compute(with_driver):
        if "fails" in names or (with_driver and not names.get("starts", True)):
            raise ValueError
        if "hangs" in names:
            time.sleep(600)

    print(repr(watch.find_obstacle(compute)), flush=True)
    os.killpg(0, signal.SIGKILL)
"""


def test_what_a_fork_does_not_survive_is_found(tmp_path: Path) -> None:
    make_cuda_library(tmp_path, 0)
    ran = subprocess.run(
        [sys.executable, "-c", LEAVES, str(tmp_path)],
        input="\n".join(LEFT),
        env={**os.environ, "PYTHONPATH": python_path(), "OPENBLAS_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = dict(zip(LEFT, map(ast.literal_eval, ran.stdout.splitlines()), strict=True))
    wrong = {
        line: why
        for line, why in found.items()
        if LEFT[line] not in why or bool(why) != bool(LEFT[line])
    }
    assert not wrong


COUNTS_GPUS = """
import os, socket, sys
import torch
from evener.balancer.probes import shared_build
from evener.balancer.probes.protocol import Build
from evener.workloads.protocol import WorkerSetup

asked = []

def device_count():
    if not asked:
        asked.append(os.pipe())
    return 0

torch.cuda.device_count = device_count
shared_build.WORTH_SECONDS = 0.0
near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
channel = shared_build.BuildChannel(far.detach(), lambda *_: None)
channel.build(Build(sys.argv[1], "torch", {}, WorkerSetup(("cpu:0",))))
print(repr(channel.obstacle), flush=True)
"""


def test_a_build_that_counts_gpus_opens_nothing_that_a_fork_does_not_survive(
    own_folder: Path,
) -> None:
    """The driver's management library opens pipes in a forked process when it is first asked."""
    script = own_folder / "train.py"
    script.write_text(
        SCRIPT.format(folder=str(own_folder), left="torch.cuda.device_count()", seconds=0)
    )
    ran = subprocess.run(
        [sys.executable, "-c", COUNTS_GPUS, f"{script}:build"],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ast.literal_eval(ran.stdout) == ""


@pytest.mark.parametrize(
    "changes", [{"peers": ("a", "b")}, {"state": (0.5,)}, {"placement": "halves"}]
)
def test_a_child_of_a_group_or_in_shards_builds_by_itself(changes: dict[str, Any]) -> None:
    """A group's ranks meet before they build, and a sharded model isn't moved to its device."""
    near, far = socket.socketpair()
    command = Build("train.py:build", "torch", {}, WorkerSetup(("cpu:0",), **changes))
    assert BuildChannel(far.detach(), lambda *_: None).build(command) is None
    assert not near.recv(1)
    near.close()


@pytest.fixture
def prober(own_folder: Path, shared_servers: None) -> Iterator[Callable[[str], ChildProber]]:
    """A prober of a script whose build takes longer than is repeated, and leaves something."""
    made: list[ChildProber] = []

    def make(left: str, source: str = SCRIPT) -> ChildProber:
        script = own_folder / "train.py"
        script.write_text(source.format(folder=str(own_folder), left=left, seconds=SECONDS))
        made.append(ChildProber(Job(Request(), slices(2), f"{script}:build", "torch")))
        return made[-1]

    yield make
    for each in made:
        each.close()


def measure(prober: ChildProber, layout: Layout) -> Timed:
    stage = Stage.SPLIT if layout.traits.together else Stage.REST
    probe = Probe(layout, stage, 0.2)
    (seen,) = prober.measure((probe,), lambda _: None, threading.Event())
    assert isinstance(seen, Timed), seen
    return seen


def local_host(prober: ChildProber) -> LocalHost:
    (host,) = prober._hosts._by_name.values()
    assert isinstance(host, LocalHost)
    return host


@two_cores
def test_later_children_are_forked_with_what_the_first_one_built(
    prober: Callable[[str], ChildProber], own_folder: Path
) -> None:
    """Another device alone, then both as a group, in several threads; all end with the search."""
    probes = prober("pass")
    assert measure(probes, solo(2, 0, 8)).restart_seconds >= SECONDS
    (built,) = local_host(probes)._built.values()
    assert built.alive
    measure(probes, solo(2, 1, 8))
    measure(probes, Layout("split", (8, 8)))
    assert (own_folder / "builds").read_text() == "x"
    running = [Path(f"/proc/{child.pid}") for child in local_host(probes)._running]
    probes.close()
    deadline = time.monotonic() + 20
    while any(map(Path.exists, running)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(Path.exists, running))
    assert not built.alive


@two_cores
def test_a_build_that_leaves_a_thread_is_repeated(
    prober: Callable[[str], ChildProber], own_folder: Path
) -> None:
    probes = prober(THREAD)
    measure(probes, solo(2, 0, 8))
    (built,) = local_host(probes)._built.values()
    assert not built.alive
    assert "thread" in built.obstacle
    assert probes.facts().builds_again == built.obstacle
    measure(probes, solo(2, 1, 8))
    assert probes.facts().builds_again == built.obstacle  # the second process reports none
    assert probes.facts().build_seconds >= SECONDS
    assert (own_folder / "builds").read_text() == "xx"


HOLDS_A_DRIVER_FILE = LOADS.replace(
    "    time.sleep",
    """    global held
    import os
    from evener.balancer.probes import forkable
    for backend in forkable.all_backends():
        if backend.driver_files:
            backend.driver_files = ({folder!r} + "/nvidia",)
    held = os.open({folder!r} + "/nvidiactl", os.O_CREAT | os.O_RDONLY)
    time.sleep""",
)


@two_cores
def test_files_of_the_driver_stay_open_in_forked_children(
    prober: Callable[..., ChildProber], own_folder: Path
) -> None:
    """NVML goes on using the numbers of its files, which other files would get once closed."""
    look = "import os; note(os.readlink('/proc/self/fd/%d' % held).rpartition('/')[2][:6])"
    probes = prober(look, HOLDS_A_DRIVER_FILE)
    measure(probes, solo(2, 0, 8))
    (built,) = local_host(probes)._built.values()
    assert built.alive
    measure(probes, solo(2, 1, 8))
    assert (own_folder / "builds").read_text() == "x" + 2 * "bnvidia"


@two_cores
def test_a_model_is_loaded_once_whatever_is_made_of_it(
    prober: Callable[..., ChildProber], own_folder: Path
) -> None:
    """As with a Trainer, whose arguments start CUDA: `build` leaves a thread in each child."""
    probes = prober(THREAD, LOADS)
    measure(probes, solo(2, 0, 8))
    (built,) = local_host(probes)._built.values()
    assert built.alive
    measure(probes, solo(2, 1, 8))
    measure(probes, Layout("split", (8, 8)))
    assert (own_folder / "builds").read_text() == "xbbbb"
