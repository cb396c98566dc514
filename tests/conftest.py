"""Fixtures for all tests."""

from __future__ import annotations

import compileall
import gc
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite
from hypothesis import settings

from evener.balancer.search import budget
from evener.balancer.store import locks
from evener.workloads import registry
from tests.support.children import end_with_this_process
from tests.support.fake_nvml import FakeNvml
from tests.support.keras_start import make_configs
from tests.support.light_start.device_locks import SYS_VARIABLE, keep_off_the_kernels_files
from tests.support.light_start.synthetic_entry import add_to
from tests.support.python_path import LIGHT_START
from tests.support.quick_probes import QUICK
from tests.support.rank_server import RankServer, place_ranks, run_on_gpus
from tests.support.shared_servers import running_servers

NEED_TORCH = ["evener/test_torch_*.py", "workloads/test_torch_*.py"]  # they import it at the top
collect_ignore_glob = [] if find_spec("torch") else NEED_TORCH
LONGEST = (
    "test_keras_exact.py",
    "test_ray_hosts.py",
    "test_keras_options.py",
    "test_keras_programs.py",
    "test_keras_group.py",
    "test_trainer_matrix.py",
    "test_run_launchers.py",
    "test_keras_audit.py",
)  # half a minute of CPU time and more
# others each time; a busy machine is slow
settings.register_profile("evener", max_examples=40, deadline=None)
settings.register_profile("more", max_examples=1000, deadline=None)  # --hypothesis-profile=more
settings.load_profile("evener")


def pytest_configure(config: pytest.Config) -> None:
    """A killed test run leaves no training behind that would hold a GPU's memory; the recorded
    journals are trusted.
    """
    end_with_this_process()
    gc.set_threshold(50_000, 20, 100)  # as in every Python that a test starts (light_start)
    # or, under PYTHONDONTWRITEBYTECODE, hundreds of processes would do it
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for folder in ("evener", "devices", "workloads", "balancer", "tui", "tests/support"):
            compileall.compile_dir(Path(__file__).parents[1] / folder, quiet=2)
    # threads of OpenMP, which PyTorch computes with, sleep while they wait for work: spinning would
    # take the cores from
    # other workers' tests, and small operations ten times as long; read when PyTorch is imported
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    add_to(registry)
    os.environ[SYS_VARIABLE] = os.devnull  # for this process and the Pythons that tests start
    keep_off_the_kernels_files(locks)
    sys.path.append(str(LIGHT_START))  # for the workload itself
    paths = [str(LIGHT_START), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    for path in (Path(__file__).parent / "recorded").glob("*.jsonl"):
        with suppress(OSError):
            path.chmod(0o644)  # a checkout under umask 002 lets the group write them
    write_asserts(config)


def write_asserts(config: pytest.Config) -> None:
    """Rewrite the asserts of this worker's part of the test files, for all workers.

    Each would rewrite every file else, which is half of what collecting takes, where
    PYTHONDONTWRITEBYTECODE is set.
    """
    worker, workers = (
        os.environ.get("PYTEST_XDIST_WORKER"),
        int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)),
    )
    if worker:
        for path in sorted(Path(__file__).parent.rglob("test_*.py"))[
            int(worker.removeprefix("gw")) :: workers
        ]:
            written = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
            if rewrite._read_pyc(path, written) is None and rewrite.try_makedirs(written.parent):
                status, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, status, written)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests stand between the others, and all of them before the last quarter.

    They keep the cores busy while others wait, and no worker is left with one of them at the end.
    The longest come first.
    """
    slow = list(dict.fromkeys(item.path for item in items if item.get_closest_marker("slow")))
    others = list(dict.fromkeys(item.path for item in items if item.path not in slow))
    places = {path: i / len(others) for i, path in enumerate(others)}
    places |= {path: 0.75 * i / len(slow) for i, path in enumerate(slow)}
    places |= {
        path: LONGEST.index(path.name) - len(LONGEST) for path in slow if path.name in LONGEST
    }
    items.sort(key=lambda item: places[item.path])


def pytest_collection_finish() -> None:
    """What was imported for all tests stays: each search for garbage would go through it, a sixth
    of a test's time.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Search for garbage once, which says what it raises: pytest does it five times, and goes
    through all of it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def default_signal_handlers() -> None:
    """Restore the handlers that nohup or `&` turned off: child processes inherit ignored
    signals.
    """
    for number, handler in (
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGINT, signal.default_int_handler),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def no_exported_terminal_size() -> None:
    """COLUMNS and LINES of the caller would override the size of every terminal that a test
    opens.
    """
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def state_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Paths that nothing is at yet; most tests never make theirs, and need no folder of pytest's
    for it.
    """
    folder = tmp_path_factory.mktemp("states")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def own_state(state_folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """XDG_STATE_HOME of the test's own: no test sees or locks what another test, or a person,
    left.
    """
    home = next(state_folders)
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    return home


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Trainers set RANK, MASTER_PORT and the like for themselves; later tests of the worker must
    not see them.
    """
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    before["PYTEST_CURRENT_TEST"] = after["PYTEST_CURRENT_TEST"]  # it is pytest's
    for name, _ in before.items() ^ after.items():
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]


@pytest.fixture(autouse=True)
def own_ctrl_c() -> Iterator[None]:
    """Ray Train and trainings of several ranks leave a handler behind; later tests send themselves
    Ctrl-C.
    """
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """A process group that a test left open would fail later tests of the same worker; the test
    that left it fails.
    """
    yield
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("it left a process group open")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this test run have."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def rank_server(shared_folder: Path) -> Callable[[str], RankServer]:
    """`rank_server("module")`: one process for all workers, which ends with the test run."""
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    return lambda module: RankServer(module, shared_folder, owner)


@pytest.fixture(scope="session")
def trainer_ranks(
    rank_server: Callable[[str], RankServer], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[Any]]:
    """`trainer_ranks("module.function", *arguments, world=2)`: what each rank of it saved, see
    rank_server.py.

    `imports` is a module that they use, which is imported once for all.
    """
    torch, folder = pytest.importorskip("torch"), tmp_path_factory.mktemp("ranks")
    server = rank_server("tests.support.torch_imports")

    def run(function: str, *arguments: Any, world: int = 1, imports: str = "") -> list[Any]:
        own = folder / str(len(list(folder.iterdir())))
        server.run(function, own, *arguments, ranks=place_ranks(world), imports=imports)
        return [torch.load(own / f"{rank}.pt") for rank in range(world)]

    return run


@pytest.fixture(scope="session")
def keras_ranks(
    rank_server: Callable[[str], RankServer], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[Any]]:
    """`keras_ranks("module.function", *arguments, world=2, roles=())`: what each process of it
    returned.

    `roles` are those of TensorFlow's group: `chief` and `worker`.
    """
    folder, server = tmp_path_factory.mktemp("keras_ranks"), rank_server("keras")

    def run(function: str, *arguments: Any, world: int = 1, roles: Sequence[str] = ()) -> list[Any]:
        own = folder / str(len(list(folder.iterdir())))
        ranks = [{"TF_CONFIG": config} for config in make_configs(roles)] or [{}] * world
        server.run(
            "tests.support.keras_start.save", own, function, *arguments, ranks=ranks, seconds=950
        )
        return [json.loads((own / f"{rank}.json").read_text()) for rank in range(len(ranks))]

    return run


@pytest.fixture(scope="session")
def gpu_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """As `trainer_ranks`, on two GPUs and NCCL; skips where there aren't two."""
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    folder = tmp_path_factory.mktemp("gpu_ranks")

    def run(function: str, *arguments: Any) -> list[Any]:
        own = folder / str(len(list(folder.iterdir())))
        run_on_gpus(function, own, *arguments)
        return [torch.load(own / f"{rank}.pt") for rank in range(2)]

    return run


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test runs in a folder of its own, as commands do that read and write files beside
    them.
    """
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches in this process measure half a second at a time, not four."""
    monkeypatch.setattr(budget, "BASE_SECONDS", QUICK)


@pytest.fixture(scope="session")
def servers_of_all(
    rank_server: Callable[[str], RankServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """The servers of `shared_servers`, which end with the test run."""
    with running_servers(rank_server, tmp_path_factory.mktemp("probes")) as sharing:
        yield sharing


@pytest.fixture
def shared_servers(servers_of_all: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Searches in this process fork their children from servers that imported the framework for an
    earlier test.
    """
    with servers_of_all():
        yield


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """One thread for a module's tests: small tensors are fastest on one; restored because it counts
    for the process.
    """
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`fake_nvml(gpus=2, driver=True)` replaces pynvml by a scripted double and returns it; none is
    hidden.
    """

    def install(gpus: int = 2, driver: bool = True) -> Any:
        double = FakeNvml(gpus, driver)
        # a machine's own GPUs may be hidden from the tests
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setitem(sys.modules, "pynvml", double)
        return double

    return install


@pytest.fixture
def alone_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process is no rank of anybody's, PyTorch sees no GPU, and reports go to a folder of the
    test.
    """
    torch = pytest.importorskip("torch")
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EVENER_LIVE_DIR", str(tmp_path / "live"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
