"""Disturb a real `evener balance` process: signals, closed streams, full disks, locks."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import evener
from evener.balancer import journal
from evener.balancer.journal import JournalContents
from evener.balancer.types import Observation, Stop, Timed
from evener.plan.file import load_plan
from evener.tui.cli import session_runner
from tests.support.python_path import python_path
from tests.support.quick_probes import QUICK_EVENER
from tests.support.small_disk import fill
from tests.support.waiting import wait_for

HOME = Path(evener.__file__).parents[1]
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
BALANCE = (
    "balance",
    "--devices",
    "cpu",
    "--workload",
    "synthetic",
    "--max-global-batch",
    "256",
    "--set",
    "base_ms=10",
)
SIMULATED = ("balance", "--devices", "sim:gtx1080ti,gtx1080", "--max-global-batch", "256")
EVENER = (sys.executable, "-m", "evener")
GONE_SECONDS = 60.0  # 2 would do on an idle machine
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def state(tmp_path: Path, own_state: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder, a folder for temporary files and a working folder of the test's own."""
    for name in ("tmp", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path / "work")
    return own_state


@pytest.fixture
def start(state: Path) -> Iterator[Start]:
    """Starts `evener` with these arguments; kills whatever is left of it after the test."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(
        *arguments: str, path: Sequence[Path] = (), command: Sequence[str] = EVENER, **keywords: Any
    ) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": python_path(*path, HOME)}
        streams: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        running.append(
            subprocess.Popen([*command, *arguments], env=environment, **{**streams, **keywords})
        )
        return running[-1]

    yield begin
    for process in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def measured(state: Path, stage: str = "solo") -> list[JournalContents]:
    """Return the journals of runs in which a probe of this stage was timed."""
    paths = [path for path in state.glob("evener/runs/*/journal.jsonl") if path.stat().st_size]
    records = [journal.read(path) for path in paths]
    return [
        record for record in records if any(is_timed(entry.seen, stage) for entry in record.seen)
    ]


def is_timed(seen: Observation, stage: str) -> bool:
    """True if a probe of this stage was measured successfully."""
    return isinstance(seen, Timed) and seen.probe.stage == stage


def children_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return all running descendants of a process."""
    return psutil.Process(process.pid).children(recursive=True)


def living(children: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that still run."""
    return [
        child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    ]


def ends(process: subprocess.Popen[bytes], children: list[psutil.Process]) -> int:
    """Return the exit code; check that the children exit, too."""
    code = process.wait(GONE_SECONDS)
    began = time.monotonic()
    while living(children):
        assert time.monotonic() - began < GONE_SECONDS, "children outlive it"
        time.sleep(0.02)
    return code


def nothing_left(tmp_path: Path) -> None:
    """Check that no temporary file is left, and nothing but the plan in the working folder."""
    assert not list((tmp_path / "tmp").iterdir())
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]
    assert {path.name for path in (tmp_path / "work").iterdir()} <= {"plan.toml"}


def read_errors(process: subprocess.Popen[bytes]) -> str:
    """Return everything that the process wrote to standard error."""
    assert process.stderr is not None
    return process.stderr.read().decode()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "stage"), [(signal.SIGTERM, "split")], ids=["SIGTERM in split"])
def test_a_signal_ends_with_the_best_plan_so_far(
    start: Start, state: Path, tmp_path: Path, number: signal.Signals, stage: str
) -> None:
    """The measured plan is printed and exported, and nothing is left.

    The exit code is the signal's.
    """
    process = start(
        *BALANCE, "--budget", "60s", "--export", "plan.toml", "--json", command=QUICK_EVENER
    )
    wait_for(lambda: measured(state, stage))
    children = wait_for(lambda: children_of(process))
    sent = time.monotonic()
    process.send_signal(number)
    assert process.stdout is not None
    answer = json.loads(process.stdout.read())
    assert ends(process, children) == SIGNALS[number]
    assert time.monotonic() - sent < GONE_SECONDS
    assert answer["interrupted"]
    plan = load_plan("plan.toml")
    assert plan.search.why_stopped == Stop.INTERRUPTED.value
    (path,) = state.glob("evener/runs/*/journal.jsonl")
    record = journal.read(path)
    assert record.ended is not None
    assert record.ended.plan == plan
    assert plan.layout.batches in {entry.seen.probe.layout.shares for entry in record.seen}
    assert "Traceback" not in read_errors(process)
    nothing_left(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_nothing_behind_that_the_doctor_started(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    """The doctor's children, which import frameworks for seconds, exit."""
    for framework in ("torch", "tensorflow"):
        (tmp_path / "slow" / framework).mkdir(parents=True)
        (tmp_path / "slow" / framework / "__init__.py").write_text(
            "import pathlib, time\n"
            f"pathlib.Path({str(tmp_path)!r}, __name__).touch()\n"
            "time.sleep(600)\n"
        )
    process = start("doctor", path=[tmp_path / "slow"])
    wait_for(lambda: (tmp_path / "torch").exists() and (tmp_path / "tensorflow").exists())
    children = children_of(process)
    assert len(children) == 2
    process.send_signal(number)
    assert ends(process, children) != 0


AT_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "{module}":
            sys.meta_path.remove(Finder)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize(
    "module",
    [
        "evener.tui.cli.main",
        "evener.tui.cli.balance",
        "evener.devices.discover",
        "evener.balancer.probes.child_prober",
    ],
)
def test_ctrl_c_while_it_still_imports(
    start: Start, tmp_path: Path, state: Path, module: str
) -> None:
    """A real signal during an import gives exit code 130 without output."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(AT_IMPORT.format(module=module))
    process = start(*BALANCE, path=[tmp_path / "site"])
    assert ends(process, []) == 130
    assert read_errors(process) == ""
    nothing_left(tmp_path)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_anything_was_measured(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    """Without a plan to keep, one sentence is printed; the exit code is still the signal's."""
    process = start(*BALANCE, "--export", "plan.toml", "--set", "base_ms=3000")
    children = wait_for(lambda: children_of(process))
    process.send_signal(number)
    assert ends(process, children) == SIGNALS[number]
    assert "before anything was measured" in read_last_error(read_errors(process))
    assert not list((tmp_path / "work").iterdir())
    nothing_left(tmp_path)


@pytest.mark.slow
def test_under_nohup_a_hang_up_ends_nothing(start: Start, state: Path) -> None:
    """A signal that the parent ignores stays ignored: the search continues until another signal."""
    # in the child, before it starts
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    process = start(
        *BALANCE,
        "--budget",
        "60s",
        "--export",
        "plan.toml",
        command=QUICK_EVENER,
        preexec_fn=ignore,
    )
    children = wait_for(lambda: children_of(process))
    process.send_signal(signal.SIGHUP)
    wait_for(lambda: measured(state))
    process.send_signal(signal.SIGTERM)
    assert ends(process, children) == SIGNALS[signal.SIGTERM]
    assert load_plan("plan.toml").search.why_stopped == Stop.INTERRUPTED.value


@pytest.mark.slow
def test_ctrl_c_pressed_twice_still_writes_the_plan(
    start: Start, state: Path, tmp_path: Path
) -> None:
    """A second signal during the first one's handling changes nothing.

    The test sends two kinds, as two of the same kind may be merged.
    """
    process = start(*BALANCE, "--budget", "60s", "--export", "plan.toml", command=QUICK_EVENER)
    wait_for(lambda: measured(state))
    children = wait_for(lambda: children_of(process))
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert ends(process, children) == 130
    assert "interrupted" in load_plan("plan.toml").search.why_stopped
    assert "Traceback" not in read_errors(process)


def test_a_later_second_signal_ends_at_once_and_says_what_is_missing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second signal after a while exits at once."""
    stopped: list[None] = []
    stop = lambda: stopped.append(None)  # noqa: E731 - called by a signal
    with session_runner.stopped_by_signals(stop, "stopping", "the plan is not written") as caught:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert caught == [130]
        monkeypatch.setattr(session_runner, "PRESSED_TWICE_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert len(stopped) == 1
    assert capfd.readouterr().err == "\nevener: stopping\n\nevener: the plan is not written\n"


def own_terminal() -> None:
    """Make standard input the controlling terminal of a new session; runs in the child."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.slow
def test_ctrl_c_on_a_terminal_leaves_it_as_it_was(start: Start, state: Path) -> None:
    """The cursor is shown, the terminal modes are restored, and children never get the signal."""
    import termios

    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = start(
        *BALANCE, "--budget", "60s", command=QUICK_EVENER, preexec_fn=own_terminal, **streams
    )
    drawn = b""

    def see() -> list[JournalContents]:
        nonlocal drawn
        while select.select([ours], [], [], 0)[0]:
            drawn += os.read(ours, 1 << 16)
        return measured(state)

    wait_for(see)
    children = children_of(process)
    os.write(ours, b"\x03")
    while process.poll() is None:
        see()
    assert ends(process, children) == 130
    see()
    assert drawn.count(b"\x1b[?25l") == drawn.count(b"\x1b[?25h")
    assert drawn.count(b"\x1b[?1049h") == drawn.count(b"\x1b[?1049l")
    assert b"samples/s" in drawn.rpartition(b"stopping")[2]
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_has_gone_loses_no_plan(start: Start, tmp_path: Path, stream: str) -> None:
    """With standard error closed nothing changes.

    With standard output closed, the plan is exported before the exit.
    """
    reading, writing = os.pipe()
    os.close(reading)
    process = start(*SIMULATED, "--export", "plan.toml", **{stream: writing})
    os.close(writing)
    code = process.wait(GONE_SECONDS)
    assert load_plan("plan.toml").layout.global_batch
    if stream == "stdout":
        assert code == 141
        assert "Traceback" not in read_errors(process)
    else:
        assert code == 0
        assert process.stdout is not None
        assert b"together" in process.stdout.read()
    nothing_left(tmp_path)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_stream_that_was_never_open_is_no_traceback(start: Start, stream: str) -> None:
    """`evener balance >&-` prints no traceback."""
    number = {"stdout": 1, "stderr": 2}[stream]
    process = start(*SIMULATED, "--export", "plan.toml", preexec_fn=lambda: os.close(number))
    assert process.wait(GONE_SECONDS) in (0, 141)
    assert load_plan("plan.toml").layout.global_batch


def read_last_error(text: str) -> str:
    """Return the last line, if it is an error message for people."""
    assert "Traceback" not in text
    last = text.strip().splitlines()[-1]
    assert last.startswith("evener: ")
    return last


def test_a_disk_that_fills_while_journalling_is_a_one_line_error(
    start: Start, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier journal entries stay intact and are exported.

    The run resumes once there is space.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(small_disk))
    fill(small_disk, 16_000)
    process = start(*SIMULATED, "--export", "plan.toml", "--json")
    assert process.stdout is not None
    shown = json.loads(process.stdout.read())
    assert process.wait(GONE_SECONDS) == 2
    assert "No space left" in read_last_error(read_errors(process))
    exported = load_plan("plan.toml")
    assert shown["interrupted"]
    assert [share["batch"] for share in shown["layout"]["share"]] == list(exported.batches)
    (path,) = small_disk.glob("evener/runs/*/journal.jsonl")
    before = journal.read(path)
    assert before.seen
    assert exported.batches in {entry.seen.probe.layout.shares for entry in before.seen}
    assert path.stat().st_size == before.whole_bytes, "a torn line is left"
    (small_disk / "filler").unlink()
    again = start("balance", "--resume", "last", "--json")
    assert again.stdout is not None
    answer = json.loads(again.stdout.read())
    assert again.wait() == 0
    after = journal.read(path)
    assert after.seen[: len(before.seen)] == before.seen
    assert answer["search"]["probes"] == len(after.seen)


def test_a_disk_without_room_for_the_last_line_costs_no_plan(
    start: Start, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All measurements are in the journal; only the end of the search is missing."""
    assert start(*SIMULATED, "--export", "whole.toml").wait(GONE_SECONDS) == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(small_disk))
    fill(small_disk, 24_000)
    process = start(*SIMULATED, "--export", "plan.toml")
    assert process.wait(GONE_SECONDS) == 2
    assert "No space left" in read_last_error(read_errors(process))
    (path,) = small_disk.glob("evener/runs/*/journal.jsonl")
    whole, plan = load_plan("whole.toml"), load_plan("plan.toml")
    assert journal.read(path).ended is None
    assert plan.search.probes == len(journal.read(path).seen) == whole.search.probes
    assert plan.layout == whole.layout


def test_a_disk_that_is_full_while_exporting_leaves_the_earlier_plan(
    start: Start, small_disk: Path, state: Path
) -> None:
    """One sentence is printed, and the earlier file stays intact without a temporary file.

    The plan is still in the run.
    """
    plan = small_disk / "plan.toml"
    assert start(*SIMULATED, "--export", str(plan)).wait(GONE_SECONDS) == 0
    before = plan.read_bytes()
    fill(small_disk, 0)
    process = start("export", "last", "-o", str(plan), "--force")
    assert process.wait(GONE_SECONDS) == 2
    assert "No space left" in read_last_error(read_errors(process))
    assert plan.read_bytes() == before
    assert {path.name for path in small_disk.iterdir()} == {"plan.toml", "filler"}


def test_a_file_size_limit_is_a_one_line_error_too(
    start: Start, tmp_path: Path, state: Path
) -> None:
    """RLIMIT_FSIZE, which sends a signal of its own, gives one sentence."""
    process = start(
        *SIMULATED, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
    )
    assert process.wait(GONE_SECONDS) == 2
    assert "File too large" in read_last_error(read_errors(process))
    (path,) = state.glob("evener/runs/*/journal.jsonl")
    assert journal.read(path).whole_bytes == path.stat().st_size <= 6000


@pytest.mark.parametrize("what", ["state", "export"])
def test_a_read_only_folder_is_a_one_line_error_before_any_probe(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A read-only file system, where even root can't write, gives one sentence."""
    folder = tmp_path / "readonly"
    folder.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mounted, check=False).returncode:
        pytest.skip("a read-only file system needs root")
    try:
        if what == "state":
            monkeypatch.setenv("XDG_STATE_HOME", str(folder))
        process = start(
            *BALANCE, *(["--export", str(folder / "plan.toml")] if what == "export" else [])
        )
        assert process.wait(GONE_SECONDS) == 2
        line = read_last_error(read_errors(process))
        assert "Read-only" in line
        assert str(folder) in line
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
def test_two_runs_on_the_same_devices(start: Start, state: Path) -> None:
    """The second run names the holder of the devices.

    It measures with --share, and so does a run after the first was killed.
    """
    holder = start(*BALANCE, "--budget", "10m")
    wait_for(lambda: children_of(holder))
    second = start(*BALANCE)
    assert second.wait(GONE_SECONDS) == 3
    line = read_last_error(read_errors(second))
    (run,) = [path.name for path in (state / "evener" / "runs").iterdir()]
    assert f"process {holder.pid}" in line
    assert f"run {run}" in line
    assert "--share" in line
    other_cut = start("balance", "--devices", "cpu/1:0", "--workload", "synthetic")
    assert other_cut.wait(GONE_SECONDS) == 3, "the same cores, cut otherwise"
    wait_for(lambda: measured(state))
    beside = start(*BALANCE, "--share", command=QUICK_EVENER)
    wait_for(lambda: len(measured(state)) == 2)
    beside.send_signal(signal.SIGINT)
    assert beside.wait(GONE_SECONDS) == 130
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    after = start(*BALANCE, command=QUICK_EVENER)
    wait_for(lambda: len(measured(state)) == 3)  # the kernel has released the locks
    after.send_signal(signal.SIGINT)
    assert after.wait(GONE_SECONDS) == 130
