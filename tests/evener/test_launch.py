"""`evener launch`: which processes start on which devices, and how a training run ends."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.balancer.probes.launch_plan import OPEN_SERVERS
from evener.balancer.result.sentences import write_training_step
from evener.devices.network import find_interface
from evener.errors import DeviceError, EvenerError, RequestError
from evener.launch.job import make_job
from evener.launch.processes import named_output
from evener.plan.file import Plan, make_layout
from evener.system.signals import caught_signals
from evener.training.start_rank import STARTS
from evener.tui.cli.launch import _list_shares
from evener.tui.cli.main import run
from tests.support.cores import two_cores
from tests.support.forked_evener import ForkedEvener
from tests.support.launched_checks import check_ranks
from tests.support.launched_plan import plan
from tests.support.rank_server import RankServer
from tests.support.torch_start import free_port

ROOT = Path(__file__).resolve().parents[2]
TRAINING = str(ROOT / "tests/support/launched_training.py")
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.3")
SECONDS = 240


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script in the test's folder, with plan files next to it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


def starts(made: Plan, script: str, **options: str) -> list[dict[str, Any]]:
    """Return the arguments and variables of each process of this host."""
    made.save("plan.toml")
    job = make_job(Path("plan.toml"), [script], options.get("host"), options.get("meeting"))
    environment = job.environment()
    assert environment["EVENER_PLAN"] == str(Path("plan.toml").absolute())
    found: list[dict[str, Any]] = json.loads(environment[STARTS])
    return found


@two_cores
def test_each_slice_that_computes_gets_a_process_on_its_cores(script: str) -> None:
    count = len(os.sched_getaffinity(0))
    made = starts(plan([f"cpu-{i}-of-{count}{'' if i else '(out)'}" for i in range(count)]), script)
    assert [start["variables"]["EVENER_DEVICE"] for start in made] == [
        f"cpu-{i}-of-{count}" for i in range(1, count)
    ]
    assert all(
        len(start["cores"]) == 1 and start["variables"]["OMP_NUM_THREADS"] == "1" for start in made
    )


def test_pytorch_counts_the_gpus_that_compute_as_local_ranks_do(
    script: str, fake_nvml: Callable[..., Any]
) -> None:
    """PyTorch's processes see all GPUs in the plan's order, by numbers, as DeepSpeed reads no ids.

    A Keras process sees its own GPU, or all of them if it is the only process.
    """
    ids = [device.id for device in _gpus(fake_nvml(gpus=3))]
    torch = starts(plan([ids[2], ids[1] + "(out)", ids[0]]), script)
    assert [start["variables"]["EVENER_DEVICE"] for start in torch] == [ids[2], ids[0]]
    assert {start["variables"]["CUDA_VISIBLE_DEVICES"] for start in torch} == {"2,0"}
    assert {start["variables"]["CUDA_DEVICE_ORDER"] for start in torch} == {"PCI_BUS_ID"}
    for engine, visible in {
        "multiworker": [ids[2], ids[0]],
        "towers": [f"{ids[2]},{ids[0]}"],
    }.items():
        keras = starts(plan([ids[2], ids[0]], framework="tensorflow", engine=engine), script)
        assert [start["variables"]["CUDA_VISIBLE_DEVICES"] for start in keras] == visible


@two_cores
def test_a_plan_by_hand_says_devices_and_batches_and_the_script_the_framework(script: str) -> None:
    devices = "".join(
        f'[[layout.share]]\ndevice = "cpu-{i}-of-2"\nbatch = {6 - 5 * i}\n' for i in (0, 1)
    )
    Path("plan.toml").write_text(devices)
    for text, processes in (("", 2), ("import torch", 2), ("import keras", 1)):
        Path(script).write_text(text)
        job = make_job(Path("plan.toml"), [script], None, None)
        assert (len(job.processes), job.framework) == (
            processes,
            "torch" if processes == 2 else "tensorflow",
        )
        assert _list_shares(job) == "6 rows on CPU:0, 1 row on CPU:1"
    held = devices.replace("batch = 6", "batch = 6\nstate = 0.75")
    held = held.replace("batch = 1", "batch = 0\nstate = 0.25")
    Path("plan.toml").write_text(f'[layout]\nkind = "shard"\n{held}')
    said = _list_shares(make_job(Path("plan.toml"), [script], None, None))
    assert said == "6 rows on CPU:0, 25 % of the state and no rows on CPU:1"


def _gpus(_: object) -> Any:
    from evener.devices.discover import discover

    return discover("gpu").devices


def test_a_host_starts_its_own_shares(script: str) -> None:
    made = plan(
        ["cpu-0-of-1", "cpu-0-of-1", "cpu-0-of-1"], ("127.0.0.2", "203.0.113.1", "203.0.113.2")
    )
    assert len(starts(made, script)) == 1
    job = make_job(Path("plan.toml"), [script], "203.0.113.2", "localhost:4711")
    assert (job.host, job.hosts, job.rendezvous) == (
        "203.0.113.2",
        ("127.0.0.2", "203.0.113.1", "203.0.113.2"),
        ("localhost", 4711),
    )
    assert make_job(Path("plan.toml"), [script], None, None).rendezvous == ("127.0.0.2", 29400)
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("nowhere.invalid") == ""


@pytest.mark.parametrize(
    ("devices", "changes", "named", "error"),
    [
        (["cpu-0-of-9999"], {}, "can't be cut into 9999", DeviceError),
        (["sim-0-p100"], {}, "a simulated device", DeviceError),
        (["GPU-nowhere"], {}, "GPU-nowhere", DeviceError),
        (["cpu-0"], {}, "cpu-0 isn't a slice", RequestError),
        (["cpu--1-of-2"], {}, "cpu--1-of-2 isn't a slice", RequestError),
        (["cpu-0-of-1"], {"kind": "place"}, r"places a model's parts \(by layer\)", RequestError),
        (["cpu-0-of-1"], {"kind": "pack"}, "packs 1 trainings", RequestError),
        (["cpu-0-of-1", "cpu-0-of-1"], {"hosts": HOSTS}, "--host", RequestError),
    ],
)
def test_what_cannot_be_started_here_is_a_one_line_error(
    devices: list[str],
    changes: dict[str, Any],
    named: str,
    error: type[EvenerError],
    script: str,
    fake_nvml: Callable[..., Any],
) -> None:
    fake_nvml(gpus=1)
    with pytest.raises(error, match=named):
        starts(plan(devices, **changes), script)


def test_a_wrong_command_line_is_a_one_line_error(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(["cpu-0-of-1"]).save("plan.toml")
    for words, named in {
        "plan.toml elsewhere.py": "no script elsewhere.py",
        "nowhere.toml train.py": "nowhere.toml can't be read",
        "train.py train.py": "train.py",
        "plan.toml --max-restarts 2 train.py": "stand before the plan",
        "plan.toml -m": "names no module",
        "--host here plan.toml train.py": "'here' is none of the plan's hosts",
        "--rendezvous nowhere.invalid:29400 plan.toml train.py": "nowhere.invalid can't be found",
        "--rendezvous 29400 plan.toml train.py": "--rendezvous 29400 isn't an address",
    }.items():
        assert run(["launch", *words.split()]) == (3 if "can't be found" in named else 2)
        (said,) = capsys.readouterr().err.splitlines()
        assert named in said


def test_the_line_to_launch_names_the_users_script() -> None:
    said = write_training_step
    made = plan(["cpu-0-of-1"], workload="my train.py:build")
    assert said(made, "plan.toml") == "to train with it: evener launch plan.toml 'my train.py'"
    hosts = said(plan(["cpu-0-of-1", "cpu-0-of-1"], HOSTS, workload="train.py:build"), "a.toml")
    assert hosts == "to train with it, on each of its hosts: evener launch a.toml train.py"
    assert said(plan(["sim-0-p100"], workload="train.py:build"), "a.toml") == ""
    assert said(plan(["cpu-0-of-1"], kind="place", workload="train.py:build"), "a.toml") == ""
    assert said(plan(["cpu-0-of-1"], workload="keras_mnist"), "a.toml") == "", "it has no script"


# ---------------------------------------------------------------------- real processes

SCRIPT = """
import glob, os, sys, time
rank, world = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", "1"))
again = str(int(os.path.exists("started" + rank)))
open("started" + rank, "w")


def write_line(*words):  # one write, as the ranks share a pipe
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()


write_line(rank, os.environ["EVENER_DEVICE"], *os.sched_getaffinity(0), again, *sys.argv[1:])
write_line(rank, "restarts", os.environ.get("TORCHELASTIC_RESTART_COUNT"))
if sys.argv[1] == "fail" and rank == "0":
    raise SystemExit(3)
if rank == "0" and again == "0":
    while len(glob.glob("started*")) < world:
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
open(f"ready{rank}-{again}", "w")
try:
    time.sleep(300)
except KeyboardInterrupt:
    write_line(rank, "interrupted")
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts evener in the test's folder; it is killed after the test."""
    running: list[subprocess.Popen[str]] = []

    def begin(*words: str, module: str = "evener", **variables: str) -> subprocess.Popen[str]:
        paths = os.pathsep.join((os.environ["PYTHONPATH"], str(ROOT)))
        environment = {
            **os.environ,
            "PYTHONPATH": paths,
            "EVENER_LIVE_DIR": str(tmp_path / "live"),
            **variables,
        }
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, *words],
            cwd=tmp_path,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def fork(
    rank_server: Callable[[str], RankServer], tmp_path: Path
) -> Iterator[Callable[..., ForkedEvener]]:
    """Like `start`, but forked from a process that has imported PyTorch's elastic agent."""
    running: list[ForkedEvener] = []

    def begin(*words: str) -> ForkedEvener:
        paths = os.pathsep.join((os.environ["PYTHONPATH"], str(ROOT)))
        variables = {
            "PYTHONPATH": paths,
            "EVENER_LIVE_DIR": str(tmp_path / "live"),
            "OMP_NUM_THREADS": "1",
        }
        server, files = (
            rank_server("tests.support.torch_imports"),
            tmp_path / f"evener-{len(running)}",
        )
        running.append(ForkedEvener(server, tmp_path, files, words, variables))
        return running[-1]

    yield begin
    for process in running:
        process.kill()


def test_each_line_of_several_processes_says_whose_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    """Lines of a progress bar, unfinished ones and ones larger than a pipe are printed whole."""
    long = b"y" * 200_000
    left = 0  # a child of a process that still has its output
    with named_output(("rank 0", "rank 1")) as files:
        assert [len(each) for each in files] == [2, 2]
        (quiet, _), (output, errors) = files
        for path, text in (
            (output, b"one\ntw"),
            (quiet, b"mine\n"),
            (output, b"o\n\nhalf"),
            (errors, b"\r10 %\r20 %\n" + long),
        ):
            Path(path).write_bytes(text)
        left = os.open(output, os.O_WRONLY)
    os.close(left)
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert [line for line in lines if "0" in line] == ["[rank 0] mine"]
    assert [line for line in lines if "1" in line] == [
        "[rank 1] one",
        "[rank 1] two",
        "[rank 1] ",
        "[rank 1] half",
    ]
    assert err.startswith("[rank 1] \r[rank 1] 10 %\r[rank 1] 20 %\n[rank 1] yyy")
    assert err.count("y") == len(long)


def list_messages(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("evener:")]


def need_torch_and_two_cpus() -> None:
    pytest.importorskip("torch")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")


def wait_for(paths: list[Path], process: subprocess.Popen[str] | ForkedEvener) -> None:
    while not all(path.exists() for path in paths):
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(
    "hosts", [("",), HOSTS[:2]], ids=["own child", "elastic agents of two hosts"]
)
def test_processes_are_started_again_and_end_by_ctrl_c(
    hosts: tuple[str, ...], start: Callable[..., Any], fork: Callable[..., Any], tmp_path: Path
) -> None:
    """A killed process ends those of the other host; then all restart, until a signal."""
    if len(hosts) == 2:
        need_torch_and_two_cpus()
    (tmp_path / "train.py").write_text(SCRIPT)
    plan(["cpu-0-of-1"] * len(hosts), hosts, framework="torch").save(tmp_path / "plan.toml")
    meet = ["--rendezvous", f"127.0.0.2:{free_port()}"]
    words = ["--max-restarts", "1", "plan.toml", "train.py", "--json", "--gpus", "0,1"]
    running = [
        fork("launch", "--host", host, *meet, *words) if host else start("launch", *words)
        for host in hosts
    ]
    wait_for([tmp_path / f"ready{rank}-1" for rank in range(len(hosts))], running[0])
    for process in running:
        process.send_signal(signal.SIGINT)
    said = [process.communicate(timeout=SECONDS) for process in running]
    assert [process.returncode for process in running] == [130] * len(hosts), said
    lines = [line for output, _ in said for line in output.splitlines()]
    for rank in range(len(hosts)):
        *_, last = (line.split() for line in lines if line.startswith(f"{rank} cpu"))
        assert last[1] == "cpu-0-of-1"
        assert last[-4:] == ["1", "--json", "--gpus", "0,1"]
        assert f"{rank} interrupted" in lines
    if len(hosts) == 1:
        assert list_messages(said[0][1]) == [
            "evener: train.py starts: 2 rows on CPU:0",
            "evener: rank 0 was ended by SIGKILL; trying the devices",
            "evener: all start again, 1 of 1 times",
        ]
    else:
        again = "evener: a process of this host has ended; all start again, 1 of 1 times"
        first, second = (f"evener: train.py starts: {rows} rows on CPU:0" for rows in (4, 2))
        other = "evener: a process of another host has ended; all start again"
        assert [list_messages(errors) for _, errors in said] == [[first, again], [second, other]]
        assert sorted(line for line in lines if "restarts" in line) == [
            f"{rank} restarts {i}" for rank in (0, 1) for i in (0, 1)
        ]


ASKING = """
import json, os
from evener.training.launched import ask_for_processes
ask_for_processes("This model needs them.")
config = json.loads(os.environ.get("TF_CONFIG", "{}"))
print(json.dumps([config.get("task"), len(config.get("cluster", {}).get("worker", [])), os.environ["EVENER_DEVICE"]]))
"""  # noqa: E501


@pytest.mark.parametrize("engine", ["", "towers", "multiworker"])
def test_a_model_that_needs_processes_gets_them_where_the_plan_leaves_the_choice(
    engine: str, start: Callable[..., Any], tmp_path: Path
) -> None:
    """For a plan without an engine, one process starts and is replaced by two if it can't train.

    It says why.
    """
    if (count := len(os.sched_getaffinity(0))) < 2:
        pytest.skip("needs two CPUs")
    (tmp_path / "train.py").write_text(ASKING)
    devices = [f"cpu-{i}-of-{count}" for i in range(2)]
    plan(devices, framework="tensorflow", engine=engine).save(tmp_path / "plan.toml")
    process = start("launch", "--no-plan-check", "plan.toml", "train.py")
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    each = [
        f"[rank {i}] " + json.dumps([{"type": "worker", "index": i}, 2, own])
        for i, own in enumerate(devices)
    ]
    assert sorted(output.splitlines()) == (each if engine != "towers" else ['[null, 0, ""]'])
    asked = "evener: This model needs them. A process for each device is started."
    wanted = ([] if engine else [asked]) + (
        [] if engine == "towers" else [f"evener: {OPEN_SERVERS}"]
    )
    assert list_messages(errors)[1:-1] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2], ids=["own children", "elastic agent"])
def test_an_error_of_the_script_ends_all_with_one_line_and_exit_code_1(
    ranks: int, start: Callable[..., Any], fork: Callable[..., Any], tmp_path: Path
) -> None:
    if ranks == 2:
        need_torch_and_two_cpus()
    (tmp_path / "train.py").write_text(SCRIPT)
    plan([f"cpu-{i}-of-{ranks}" for i in range(ranks)], framework="torch").save(
        tmp_path / "plan.toml"
    )
    begin = fork if ranks == 2 else start
    process = begin("launch", "--max-restarts", "2", "plan.toml", "-m", "train", "fail")
    output, errors = process.communicate(timeout=SECONDS)
    others = "; the others were stopped" if ranks == 2 else ""
    shares = "2 rows on CPU:0" if ranks == 1 else "4 rows on CPU:0, 2 rows on CPU:1"
    starts, ends = (
        f"evener: -m train starts: {shares}",
        f"evener: rank 0 ended with exit code 3{others}",
    )
    assert (process.returncode, list_messages(errors)) == (1, [starts, ends])
    assert len([line for line in output.splitlines() if "0 cpu" in line]) == 1


@pytest.fixture
def plan_of_two_hosts(tmp_path: Path) -> None:
    """Write a plan of one and two shares for two loopback addresses as hosts."""
    need_torch_and_two_cpus()
    made = plan(["cpu-0-of-1", "cpu-0-of-2", "cpu-1-of-2"], HOSTS)
    layout = make_layout("split", made.layout.share, (1, 5, 2))
    msgspec.structs.replace(made, layout=layout).save(tmp_path / "plan.toml")


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.usefixtures("plan_of_two_hosts")
def test_one_and_two_shares_on_two_hosts_learn_what_one_process_learns(
    fork: Callable[..., Any], tmp_path: Path
) -> None:
    """The hosts are started with the line that launch prints.

    Before, every rank reports a share that would be used twice, or a different plan.
    """
    place = ["--rendezvous", f"127.0.0.3:{free_port()}"]  # this isn't the first host of the plan
    running = [
        fork("launch", "--host", host, *place, "plan.toml", TRAINING, str(tmp_path))
        for host in ("127.0.0.3", "127.0.0.2")
    ]
    errors = [process.communicate(timeout=2 * SECONDS)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors)
    check_ranks(tmp_path, HOSTS)


@pytest.mark.slow
@pytest.mark.usefixtures("plan_of_two_hosts")
def test_ranks_of_torchrun_on_two_hosts_do_too(
    rank_server: Callable[[str], RankServer], tmp_path: Path
) -> None:
    """The ranks have torchrun's environment, as documented.

    The test of examples/torch_gru_digits.py starts torchrun itself.
    """
    common = {
        "WORLD_SIZE": "3",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.2",
        "MASTER_PORT": str(free_port()),
    }
    places = [(0, 0, 1), (1, 0, 2), (1, 1, 2)]
    ranks = [
        {
            **common,
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(size),
            "GROUP_RANK": str(group),
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "EVENER_HOST": HOSTS[rank],
        }
        for rank, (group, local, size) in enumerate(places)
    ]
    words = str(tmp_path), str(tmp_path / "plan.toml")
    server = rank_server("tests.support.torch_imports")
    server.run("tests.support.script_ranks.run_launched", tmp_path, TRAINING, *words, ranks=ranks)
    check_ranks(tmp_path, HOSTS)


@pytest.mark.slow
def test_the_first_host_prints_the_line_for_the_second(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    plan(["cpu-0-of-1", "cpu-0-of-1"], HOSTS[:2]).save(tmp_path / "my plan.toml")
    process = start("launch", "--host", "127.0.0.2", "my plan.toml", "train.py", "--epochs", "3")
    line = process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    head, _, command = line.rstrip().partition(" run: ")
    assert head == "evener: on 127.0.0.3"
    place = ["--host", "127.0.0.3", "--rendezvous", "127.0.0.2:29400"]
    assert shlex.split(command) == [
        *(
            "evener",
            "launch",
            *place,
            str(tmp_path / "my plan.toml"),
            str(tmp_path / "train.py"),
            "--epochs",
            "3",
        )
    ]


@pytest.mark.slow
def test_hosts_that_do_not_meet_are_a_one_line_error(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    need_torch_and_two_cpus()
    (tmp_path / "train.py").write_text(SCRIPT)
    plan(["cpu-0-of-1", "cpu-0-of-1"], HOSTS[:2]).save(tmp_path / "plan.toml")
    nobody = f"127.0.0.2:{free_port()}"
    process = start(
        "launch",
        "--host",
        "127.0.0.3",
        "--rendezvous",
        nobody,
        "--wait",
        "1s",
        "plan.toml",
        "train.py",
    )
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 3
    _, line = errors.splitlines()
    assert line.startswith(
        f"evener: The hosts 127.0.0.2, 127.0.0.3 didn't meet at {nobody} within 1 s. "
    )


def test_a_launch_under_nohup_outlives_its_terminal() -> None:
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with caught_signals() as caught:
            signal.raise_signal(signal.SIGHUP)
            assert caught == []
            signal.raise_signal(signal.SIGTERM)
            assert caught == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, earlier)
