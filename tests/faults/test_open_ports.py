"""What others on the machine or the network can reach while evener works.

They can reach only loopback ports, and no store.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.balancer.probes.child_prober import ChildProber
from evener.balancer.request import Job, Request
from evener.balancer.types import Probe, Stage, Timed, layout_of
from evener.devices.cpu import slices
from tests.support.cores import two_cores
from tests.support.forked_evener import ForkedEvener
from tests.support.frameworks import skip_without
from tests.support.launched_plan import UNEVEN
from tests.support.listeners import Listener, ListenerLog, list_listeners, list_tree
from tests.support.python_path import python_path
from tests.support.rank_server import RankServer
from tests.support.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "tests/support/rendezvous_program.py")
NOBODY = 65534
LISTED, READ = ("fd", "map_files", "cwd"), ("environ", "mem")  # in a process's folder in /proc
SECONDS = 240.0
WAYS = {
    "launch": ("launch", "plan.toml", PROGRAM),
    "run": ("run", "--plan", "plan.toml", "--", sys.executable, PROGRAM),
}


@contextmanager
def stopped_at(folder: Path, stage: str) -> Iterator[list[int]]:
    """Wait until the program reaches a stage and yield the process ids of its ranks."""
    files = [folder / f"{stage}-{rank}" for rank in (0, 1)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files), stage, SECONDS)
    yield [int(file.read_text()) for file in files]
    (folder / f"{stage}-seen").touch()


@two_cores
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_training_on_one_host_has_no_store_that_others_reach(
    way: str, tmp_path: Path, rank_server: Callable[[str], RankServer]
) -> None:
    """A training run on one host has no store that others can reach.

    Ranks that have only met listen nowhere; training ranks listen on loopback, as gloo does; the
    launcher never listens. Another user who knows all names gets nothing.
    """
    skip_without("torch")
    (tmp_path / "plan.toml").write_text(UNEVEN)
    variables = {"PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}
    server = rank_server("tests.support.torch_imports")
    words = (*WAYS[way], f"{tmp_path}/")
    others = find_folders()
    evener = ForkedEvener(server, tmp_path, tmp_path / "evener", words, variables)
    with ListenerLog(evener.pid) as log:
        with stopped_at(tmp_path, "met") as ranks:
            assert list_listeners(evener.pid) == set()
            own = find_folders() - others
            stolen = run_as_nobody(evener.pid, _find_rendezvous(ranks[0]), own, ())
        with stopped_at(tmp_path, "trains") as ranks:
            trains = list_listeners(evener.pid)
            stolen += run_as_nobody(evener.pid, _find_rendezvous(ranks[0]), own, tuple(trains))
        with stopped_at(tmp_path, "insists"):
            insists = list_listeners(evener.pid)
            answers = [listener for listener in insists if _is_store(listener)]
        _, errors = evener.communicate(SECONDS)
    assert not evener.returncode, errors
    assert {each.pid for each in trains} == set(ranks)  # gloo's ports, and none of the launcher
    assert {each.pid for each in log.seen} == set(ranks)
    assert {each.address for each in log.seen} == {"127.0.0.1"}
    assert len(answers) == 1  # the store that the program itself has requested
    assert log.looks > 10
    assert own
    assert stolen == []


def find_folders() -> set[Path]:
    """Return the folders of all launches on this machine."""
    return set(Path(tempfile.gettempdir()).glob("evener-*"))


def _find_rendezvous(rank: int) -> str:
    """Return the path of the rendezvous file from a rank's environment."""
    variables = Path(f"/proc/{rank}/environ").read_bytes().split(b"\0")
    found = next(each for each in variables if each.startswith(b"EVENER_MEETING="))
    return found.decode().partition(" ")[2]


def run_as_nobody(
    root: int, rendezvous: str, folders: Iterable[Path], listeners: Sequence[Listener]
) -> list[str]:
    """Return what another user of this machine could read or write of a training run.

    Empty if this process can't become another user.
    """
    assert Path(rendezvous).read_bytes()  # this user can read it
    if os.getuid():
        return []
    "".encode(
        "idna"
    )  # connecting imports this codec, and another user may not read this Python's files
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            found = _steal(root, rendezvous, folders, listeners)
        except BaseException as error:
            found = [f"ended by {error!r}"]
        os.write(write, msgspec.json.encode(found))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        found = msgspec.json.decode(answer.read(), type=list[str])
    os.waitpid(child, 0)
    return found


def _steal(
    root: int, rendezvous: str, folders: Iterable[Path], listeners: Sequence[Listener]
) -> list[str]:
    """Return everything that this process can access, except sockets that refuse foreign data."""
    tried: list[tuple[str, Callable[[], Any]]] = [
        ("reads the store", lambda: Path(rendezvous).read_bytes()),
        ("writes the store", lambda: os.close(os.open(rendezvous, os.O_RDWR))),
    ]
    tried += [(f"lists {folder}", partial(os.listdir, folder)) for folder in folders]
    for pid in list_tree(root):
        own = Path(f"/proc/{pid}")
        tried += [(f"lists {own / name}", partial(os.listdir, own / name)) for name in LISTED]
        tried += [(f"reads {own / name}", (own / name).read_bytes) for name in READ]
    tried += [(f"is answered by {each}", partial(_ask_store, each)) for each in listeners]
    found = []
    for name, action in tried:
        with suppress(OSError):
            action()
            found.append(name)
    return found


def _is_store(listener: Listener) -> bool:
    with suppress(OSError):
        _ask_store(listener)
        return True
    return False


def _ask_store(listener: Listener) -> None:
    """Send the first request of PyTorch's TCPStore client; raise OSError if no store answers."""
    validate, magic, ping = b"\0", 0x3C85F7CE, b"\x0d"
    question = validate + magic.to_bytes(4, sys.byteorder) + ping + (7).to_bytes(4, sys.byteorder)
    with socket.create_connection((listener.address, listener.port), 5) as line:
        line.settimeout(1)
        line.sendall(question)
        if line.recv(4) != (7).to_bytes(4, sys.byteorder):
            raise ConnectionRefusedError


@two_cores
@pytest.mark.slow
def test_a_group_that_is_measured_listens_on_loopback_alone() -> None:
    """From the start of its two ranks to their exit, this process opens no port."""
    skip_without("torch")
    of_pytest = list_listeners(os.getpid())
    prober = ChildProber(Job(Request(), slices(2), "torch_mnist", "torch"))
    with ListenerLog(os.getpid()) as log, closing(prober):
        probe = Probe(layout_of((8, 8)), Stage.SPLIT, 0.2)
        (measured,) = prober.measure((probe,), lambda _: None, threading.Event())
        opened = wait_for(lambda: log.seen - of_pytest, "the ports of ranks")
        stores = [listener for listener in opened if _is_store(listener)]
    opened = log.seen - of_pytest
    assert isinstance(measured, Timed)
    assert stores == []
    assert {each.address for each in opened} == {"127.0.0.1"}
    assert len({each.pid for each in opened} - {os.getpid()}) == 2
    assert os.getpid() not in {each.pid for each in opened}


SERVERS = {
    "monitor": ("monitor", "--interval", "0.5"),
    "metrics": ("monitor", "--interval", "0.5", "--metrics", "127.0.0.1:0"),
    "web": ("--web",),
}
NEEDS = {"metrics": "prometheus_client", "web": "textual_serve"}


@pytest.mark.parametrize("way", SERVERS)
def test_a_server_listens_on_loopback_alone(way: str, own_folder: Path) -> None:
    """Without an option, the monitor itself listens nowhere."""
    if way in NEEDS:
        pytest.importorskip(NEEDS[way])
    words = [sys.executable, "-m", "evener", *SERVERS[way], "--devices", "sim:gtx1080"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as evener:
        assert evener.stdout is not None
        with ListenerLog(evener.pid) as log:
            evener.stdout.readline()
            end = time.monotonic() + 60
            while not log.seen and way != "monitor":
                assert time.monotonic() < end
                time.sleep(0.05)
            evener.send_signal(signal.SIGTERM)
            evener.communicate(timeout=60)
    wanted = set() if way == "monitor" else {"127.0.0.1"}
    assert {each.address for each in log.seen} == wanted
    assert log.looks
