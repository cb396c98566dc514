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
from tests.support.frameworks import IMPORTED, SLOW_FRAMEWORKS
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
# files whose tests are short, but which take 8 s and more: they aren't left to the end either
LONG = (
    "test_pictures.py",
    "test_app_screens.py",
    "test_race.py",
    "test_metamorphic_laws.py",
    "test_app_form.py",
    "test_balance_pictures.py",
)
# others each time; a busy machine is slow
settings.register_profile("evener", max_examples=40, deadline=None)
settings.register_profile("more", max_examples=1000, deadline=None)  # --hypothesis-profile=more
settings.load_profile("evener")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare this worker, and make sure that a killed test run leaves no processes behind.

    A leftover training script would hold a GPU's memory. The recorded journals become writable for
    their owner only, so that they are trusted.
    """
    end_with_this_process()
    gc.set_threshold(50_000, 20, 100)  # like in every Python that a test starts (light_start)
    # otherwise hundreds of processes would compile them under PYTHONDONTWRITEBYTECODE
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for folder in ("evener", "devices", "workloads", "balancer", "tui", "tests/support"):
            compileall.compile_dir(Path(__file__).parents[1] / folder, quiet=2)
    # OpenMP's threads, which PyTorch uses, sleep while they wait for work: spinning would take the
    # cores from other workers' tests, and make small operations ten times as long. The variable is
    # read when PyTorch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    add_to(registry)
    os.environ[SYS_VARIABLE] = os.devnull  # for this process and the Pythons that tests start
    keep_off_the_kernels_files(locks)
    sys.path.append(str(LIGHT_START))  # contains the synthetic workload
    paths = [str(LIGHT_START), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    for path in (Path(__file__).parent / "recorded").glob("*.jsonl"):
        with suppress(OSError):
            path.chmod(0o644)  # a checkout under umask 002 lets the group write them
    write_asserts(config)


def write_asserts(config: pytest.Config) -> None:
    """Rewrite the asserts of this worker's part of the test files, for all workers.

    Otherwise each worker would rewrite all files if PYTHONDONTWRITEBYTECODE is set, which is half
    of the collection time.
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
    """Place files with slow tests, and long ones, among the others, before the last quarter.

    They keep the cores busy while other tests wait, and no worker has one of them left at the end.
    The longest come first.
    """
    slow = list(dict.fromkeys(item.path for item in items if is_slow(item)))
    others = list(dict.fromkeys(item.path for item in items if item.path not in slow))
    places = {path: i / len(others) for i, path in enumerate(others)}
    places |= {path: 0.75 * i / len(slow) for i, path in enumerate(slow)}
    places |= {
        path: LONGEST.index(path.name) - len(LONGEST) for path in slow if path.name in LONGEST
    }
    items.sort(key=lambda item: places[item.path])


def is_slow(item: pytest.Item) -> bool:
    """True if a test is marked slow, or is in one of the long files."""
    return item.get_closest_marker("slow") is not None or item.path.name in LONG


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze all imported objects, so that garbage collections skip them.

    Scanning them would take a sixth of a test's time. Frameworks that test files have imported by
    now are noted for tests/arch/test_imports.py.
    """
    session.config.stash[IMPORTED] = sorted(set(SLOW_FRAMEWORKS) & sys.modules.keys())
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Collect garbage once and report its errors; pytest would scan all objects five times."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def default_signal_handlers() -> None:
    """Restore the handlers that nohup or `&` disabled; child processes inherit such settings."""
    for number, handler in (
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGINT, signal.default_int_handler),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def no_exported_terminal_size() -> None:
    """Unset COLUMNS and LINES, which would override the size of each terminal that a test opens."""
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def state_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Unused paths for state folders.

    Most tests never create theirs, and so need no temporary folder from pytest.
    """
    folder = tmp_path_factory.mktemp("states")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def own_state(state_folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate XDG_STATE_HOME, so that no test sees or locks the state of others."""
    home = next(state_folders)
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    return home


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Restore the environment after each test.

    Trainers set RANK, MASTER_PORT and others, which would affect later tests of the worker.
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
    """Restore the handler of SIGINT, which Ray Train and training with several ranks replace.

    Later tests send themselves Ctrl-C.
    """
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """Fail a test that leaves a process group open, instead of later tests of its worker."""
    yield
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("it left a process group open")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this test run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def rank_server(shared_folder: Path) -> Callable[[str], RankServer]:
    """`rank_server("module")` returns a process that all workers share until the test run ends."""
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    return lambda module: RankServer(module, shared_folder, owner)


@pytest.fixture(scope="session")
def trainer_ranks(
    rank_server: Callable[[str], RankServer], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[Any]]:
    """`trainer_ranks("module.function", *arguments, world=2)` returns what each rank saved.

    See rank_server.py. `imports` is a module that they use, which is imported once for all.
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
    """`keras_ranks("module.function", *arguments, world=2, roles=())` returns all results.

    There is one result per process. `roles` are those of TensorFlow's group: `chief` and `worker`.
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
    """`trainer_ranks` on two GPUs with NCCL; skips the test without two GPUs."""
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
    """Run the test in a folder of its own, for commands that read and write files there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches in this process measure for half a second at a time instead of four."""
    monkeypatch.setattr(budget, "BASE_SECONDS", QUICK)


@pytest.fixture(scope="session")
def servers_of_all(
    rank_server: Callable[[str], RankServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """The servers of `shared_servers`, which exit with the test run."""
    with running_servers(rank_server, tmp_path_factory.mktemp("probes")) as sharing:
        yield sharing


@pytest.fixture
def shared_servers(servers_of_all: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Let searches in this process fork their children from servers of earlier tests.

    These servers have already imported the framework.
    """
    with servers_of_all():
        yield


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Use one thread for a module's tests, because that is fastest for small tensors.

    The number of threads is restored afterwards.
    """
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`fake_nvml(gpus=2, driver=True)` replaces pynvml by a scripted double and returns it.

    None of its GPUs is hidden.
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
    """Hide GPUs and other ranks from this process, and send reports to a folder of the test."""
    torch = pytest.importorskip("torch")
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EVENER_LIVE_DIR", str(tmp_path / "live"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
