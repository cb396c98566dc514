"""`evener launch --max-restarts`: training continues after killed processes and lost devices."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.balancer.store import runs
from evener.devices.discover import discover
from evener.devices.nvidia.device_check import check_gpu
from evener.errors import PlanError
from evener.launch import restarts
from evener.launch.processes import GroupExit
from evener.launch.restarts import find_broken
from evener.live.files import start_ticks
from evener.live.journal import StartEntry
from evener.plan.check import check_fit
from evener.plan.file import Kind, Plan, make_layout, parse_plan, to_toml
from evener.plan.solver import leave_out
from evener.training.launched import is_device_error
from tests.support.forked_evener import ForkedEvener
from tests.support.launched_plan import plan
from tests.support.python_path import python_path
from tests.support.rank_server import RankServer

ROOT = Path(__file__).resolve().parents[2]
TRAINING = str(ROOT / "tests/support/surviving_training.py")
SECONDS = 240
LAUNCH = ("launch", "--max-restarts", "2", "plan.toml")


def need_torch_and_two_cpus() -> None:
    pytest.importorskip("torch")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")


def prepare(folder: Path, device: str = "cpu-1-of-2") -> dict[str, str]:
    """Return the environment of a launch in a folder.

    Computations on the device fail while there is a file `dead`.
    """
    (folder / "sitecustomize.py").write_text(
        f"import os\nif os.environ.get('EVENER_DEVICE') == {device!r} and "
        f"os.path.exists('dead'):\n    os._exit(1)\n"
    )
    return {
        "PYTHONPATH": python_path(folder, ROOT),
        "EVENER_LIVE_DIR": str(folder / "live"),
        "OMP_NUM_THREADS": "1",
    }


def launch(
    folder: Path, device: str = "cpu-1-of-2", *options: str
) -> subprocess.CompletedProcess[str]:
    """Launch train.py with two restarts."""
    command, *words = LAUNCH
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "evener", command, *options, *words, "train.py"],
        cwd=folder,
        env={**os.environ, **prepare(folder, device)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_training_goes_on_without_a_device_that_is_lost_and_with_it_once_it_is_back(
    rank_server: Callable[[str], RankServer], tmp_path: Path
) -> None:
    """Training continues without a lost device, and with it once it is back.

    Rank 1 is killed in mid-epoch and its slice is dead; later the only rank is killed, and the
    slice is back. Each row is used once per epoch, and the weights are those of one undisturbed
    process. The journal has the three starts.
    """
    need_torch_and_two_cpus()
    import torch

    from tests.support import surviving_training, torch_ranks

    made = plan(["cpu-0-of-2", "cpu-1-of-2"])
    layout = make_layout("split", made.layout.share, (5, 3))
    msgspec.structs.replace(made, layout=layout).save(tmp_path / "plan.toml")
    server, words = rank_server("tests.support.torch_imports"), (*LAUNCH, TRAINING, str(tmp_path))
    launcher = ForkedEvener(server, tmp_path, tmp_path / "evener", words, prepare(tmp_path))
    _, errors = launcher.communicate(SECONDS)
    assert launcher.returncode == 0, errors
    every = [line for line in errors.splitlines() if line.startswith("evener:")]
    end = next(place for place, line in enumerate(every) if "has ended, after" in line)
    said = every[:end]
    assert every[end].startswith("evener: surviving_training.py has ended, after ")
    assert said == [
        "evener: surviving_training.py starts: 5 rows on CPU:0, 3 rows on CPU:1",
        "evener: rank 1 was ended by SIGKILL; trying the devices",
        "evener: CPU:1 (a device) no longer computes and is left out: 5+3 → 8+0 rows",
        "evener: all start again, 1 of 2 times",
        "evener: rank 0 was ended by SIGKILL; trying the devices",
        "evener: CPU:1 (a device) computes again: 8+0 → 5+3 rows",
        "evener: all start again, 2 of 2 times",
    ]
    (summary,) = runs.list_runs()
    training = runs.load_training(summary.run)
    assert training is not None
    assert [
        (entry.shares, entry.reason) for entry in training.entries if isinstance(entry, StartEntry)
    ] == [
        ((5, 3), ""),
        ((8,), "rank 1 was ended by SIGKILL"),
        ((5, 3), "rank 0 was ended by SIGKILL"),
    ]
    case = torch_ranks.CASES[surviving_training.NAME]
    weights, expected = torch_ranks.reference(case, 8)
    for rank in range(2):
        learned, losses, rows, shares = torch.load(tmp_path / f"{rank}.pt")
        # from the checkpoints after the 4th and 12th step
        assert shares == [(5, 3)] * 4 + [(8,)] * 8 + [(5, 3)] * 2
        assert losses == pytest.approx(expected, abs=1e-12)
        for mine, one_process in zip(learned, weights, strict=True):
            torch.testing.assert_close(mine, one_process, rtol=0, atol=1e-12)
        for epoch in range(2):
            seen = torch.cat(rows[7 * epoch : 7 * epoch + 7])
            assert sorted(map(tuple, seen.tolist())) == sorted(
                map(tuple, torch_ranks.data(case).tensors[0].tolist())
            )


KERAS = """
import json, os, signal, time
device, plan = os.environ["EVENER_DEVICE"], os.environ["EVENER_PLAN"]
workers = json.loads(os.environ.get("TF_CONFIG", '{"cluster": {"worker": []}}'))["cluster"]["worker"]
if os.path.exists("alone"):
    open(device, "w").write(f"{len(workers)} {plan}")
    raise SystemExit
if device == "cpu-1-of-2" or not workers:
    open("dead" if workers else "alone", "w").write(plan)
    if not workers:
        os.remove("dead")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(300)
"""  # noqa: E501


@pytest.mark.slow
def test_the_processes_of_keras_get_the_cluster_of_the_devices_that_are_left(
    tmp_path: Path,
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    made = plan(["cpu-0-of-2", "cpu-1-of-2"], framework="tensorflow", engine="multiworker")
    made.save(tmp_path / "plan.toml")
    (tmp_path / "train.py").write_text(KERAS)
    done = launch(tmp_path, "cpu-1-of-2", "--no-plan-check")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "alone").read_text().endswith("plan-1.toml")
    for device in ("cpu-0-of-2", "cpu-1-of-2"):
        assert (tmp_path / device).read_text() == f"2 {tmp_path / 'plan.toml'}"
    assert done.stderr.count("no longer computes") == done.stderr.count("computes again") == 1


@pytest.mark.slow
def test_no_device_that_computes_is_a_one_line_error_and_exit_code_3(tmp_path: Path) -> None:
    plan(["cpu-0-of-1"]).save(tmp_path / "plan.toml")
    (tmp_path / "train.py").write_text("import os\nopen('dead', 'w')\nos.abort()\n")
    done = launch(tmp_path, "cpu-0-of-1")
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "evener: train.py starts: 2 rows on CPU:0",
        "evener: rank 0 was ended by SIGABRT; trying the devices",
        "evener: CPU:0 no longer computes. Run evener doctor, and make a plan for what is left.",
    ]


# ---------------------------------------------------------------------- the plan for the devices
# that are left


def wide_plan(batches: list[int], most: list[int], curve: bool) -> Plan:
    made = plan([f"cpu-{i}-of-{len(batches)}" for i in range(len(batches))])
    shares = tuple(
        msgspec.structs.replace(
            share,
            most=limit,
            curve=((1.0, 0.01), (100.0, 0.01 + 0.01 * (share.index + 1))) if curve else (),
        )
        for share, limit in zip(made.layout.share, most, strict=True)
    )
    micros = tuple(min(batch, limit or batch) for batch, limit in zip(batches, most, strict=True))
    kind: Kind = "split" if sum(map(bool, batches)) > 1 else "solo"
    return msgspec.structs.replace(
        made, layout=make_layout(kind, shares, tuple(batches), micros=micros)
    )


@given(st.data())
def test_the_devices_that_are_left_take_the_whole_batch_within_their_memory(
    data: st.DataObject,
) -> None:
    batches = data.draw(st.lists(st.integers(0, 60), min_size=2, max_size=5).filter(any))
    most = [data.draw(st.sampled_from([0, 5, 20, 200])) for _ in batches]
    made = wide_plan(batches, most, data.draw(st.booleans()))
    gone = data.draw(st.sets(st.sampled_from(range(len(batches)))))
    names = {("", made.layout.share[i].device) for i in gone}
    left = {i for i, batch in enumerate(batches) if batch} - gone
    if not left:
        with pytest.raises(PlanError, match="None of the plan's devices is left"):
            leave_out(made, names)
        return
    smaller = leave_out(made, names)
    assert parse_plan(to_toml(smaller)) == smaller
    check_fit(smaller, devices=None, world=len(left), workload_digest=None, strict=True)
    assert {i for i, batch in enumerate(smaller.batches) if batch} == left
    assert sum(smaller.batches) == sum(batches)
    for share in smaller.layout.active:
        assert share.micro <= (share.most or share.batch)
    if all(limit == 0 or limit >= sum(batches) for limit in most):
        assert smaller.micros() == smaller.batches


def test_who_is_faster_takes_more_of_a_lost_share() -> None:
    """By the curves, the second device takes twice as long per row, whatever the plan's ratios."""
    smaller = leave_out(wide_plan([30, 30, 30], [0, 0, 0], curve=True), {("", "cpu-2-of-3")})
    assert smaller.batches == (60, 30, 0)
    assert leave_out(
        wide_plan([30, 30, 30], [0, 0, 0], curve=False), {("", "cpu-2-of-3")}
    ).batches == (45, 45, 0)
    assert smaller.throughput.samples_per_second == pytest.approx(100 * 2 / 3)
    assert smaller.warnings == ("Left out, because nothing computes there: CPU:2 (a device).",)


# ---------------------------------------------------------------------- what is a loss


@pytest.mark.parametrize(
    ("failures", "loss", "words"),
    [
        ({0: 1, 1: -9}, True, "rank 1 was ended by SIGKILL"),
        ({0: -6, 1: -9}, True, "rank 1 was ended by SIGKILL"),
        ({0: -15, 1: -6}, True, "rank 1 was ended by SIGABRT"),
        ({0: -15, 1: 1}, False, "rank 1 ended with exit code 1"),
        ({1: -15}, True, "rank 1 was ended by SIGTERM"),
        ({3: -35}, True, "rank 3 was ended by signal 35"),
        ({2: 1, 3: 2}, False, "rank 2 ended with exit code 1"),
    ],
)
def test_a_killed_process_is_a_loss_and_an_error_of_the_script_is_none(
    failures: dict[int, int], loss: bool, words: str
) -> None:
    ending = GroupExit(failures=failures)
    assert (ending.is_loss, ending.words) == (loss, words)


FAILING = """
import os, sys
from weakref import WeakMethod
from evener.torch.ranks.peers import explain_at_exit

class Training:
    def advise(self, error):
        return ""

training = Training()
for number, (text, device) in enumerate(zip(sys.argv[1::2], sys.argv[2::2])):
    if os.fork() == 0:
        os.dup2(os.open(f"{number}.txt", os.O_WRONLY | os.O_CREAT, 0o600), 2)
        os.environ["EVENER_DEVICE"] = device
        explain_at_exit(WeakMethod(training.advise))
        raise RuntimeError(text)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_a_cuda_error_ends_a_launched_process_by_sigabrt_after_its_traceback(
    own_folder: Path,
) -> None:
    """Another error, or a process that evener doesn't launch, ends with exit code 1."""
    pytest.importorskip("torch")
    cuda = "CUDA error: unspecified launch failure"
    failures = ((cuda, "GPU-1", -signal.SIGABRT), (cuda, "", 1), ("wrong shape", "GPU-1", 1))
    words = [word for text, device, _ in failures for word in (text, device)]
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", FAILING, *words], env=environment, capture_output=True, text=True
    )
    assert list(map(int, ended.stdout.split())) == [code for _, _, code in failures], ended.stderr
    for number, (text, _, _) in enumerate(failures):
        last = (own_folder / f"{number}.txt").read_text().splitlines()[-1]
        assert last == f"RuntimeError: {text}"


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.27", True),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", True),
        ("CUDA out of memory. Tried to allocate 20.00 MiB", False),
        ("CUDA error: out of memory", False),
        ("HIP error: an illegal memory access was encountered", True),
        ("CUDA error: device-side assert triggered", False),
        ("Connection closed by peer [127.0.0.1]:4711", False),
    ],
)
def test_which_errors_are_a_devices(text: str, device: bool) -> None:
    assert is_device_error(RuntimeError(text)) is device


# ---------------------------------------------------------------------- which devices compute


def test_a_slice_computes_unless_its_cores_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path(ROOT))
    (device,) = discover("cpu/1:0").devices
    gone = msgspec.structs.replace(device, cores=(4095,))
    assert find_broken([device, gone], "torch", []) == (gone,)


def test_a_device_that_hangs_is_broken_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child writes its pid and never exits; it is killed."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, "
        f"'w').write(str(os.getpid()))\ntime.sleep(300)\n"
    )
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path, ROOT))
    monkeypatch.setattr(restarts, "CHECK_SECONDS", 2.0)
    (device,) = discover("cpu/1:0").devices
    assert find_broken([device], "torch", []) == (device,)
    pid = tmp_path / "pid"
    if (
        written := pid.exists() and pid.read_text()
    ):  # on a busy machine it may not have written the pid yet
        assert start_ticks(int(written)) is None


class FakeCuda:
    """A driver in which the call `fails` returns an error, and whose memory may be defective."""

    def __init__(self, fails: str = "", keeps: int = 0xFFFFFFFF) -> None:
        self.fails, self.keeps, self.value = fails, keeps, 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name == "cuMemsetD32_v2":
                self.value = arguments[1] & self.keeps
            if name == "cuMemcpyDtoH_v2":
                target, _, size = arguments
                target[:] = [self.value] * (size.value // ctypes.sizeof(target._type_))
            return 719 if name == self.fails else 0

        return call


def test_a_gpu_computes_if_its_memory_returns_what_was_set() -> None:
    assert check_gpu(FakeCuda())  # type: ignore[arg-type]
    assert not check_gpu(FakeCuda(keeps=0xFF))  # type: ignore[arg-type]
    for name in ("cuInit", "cuCtxCreate_v2", "cuMemsetD32_v2", "cuMemcpyDtoH_v2"):
        assert not check_gpu(FakeCuda(fails=name))  # type: ignore[arg-type]
