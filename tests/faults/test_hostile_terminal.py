"""Text from outside that contains control sequences never reaches a terminal raw."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import evener
from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.balancer.store import runs
from evener.devices.cpu import slices
from evener.live.reporter import read_trainings
from evener.plan.file import load_plan
from evener.printable import plain, printable
from evener.tui.cli.main import run
from tests.support.probe_children import at_birth
from tests.support.waiting import wait_for

HOME = Path(evener.__file__).parents[1]
EVIL = (
    "a\x1b]0;gotcha\x07b\x1b[31mgot\x9b31md\u202ee\u2066\r\n\x08\x7f\u2028\u200bf"
    "\x1b]52;c;ZXZpbA==\x07\x1bPq#0\x1b\\\x1bc\x9d0;x\x9c"
)
RAW = (
    b"\x1b]0;gotcha",
    b"\x1b[31mgot",
    "\x9b31m".encode(),
    "\u202e".encode(),
    b"\x08",
    b"\x7f",
    b"\x07",
)
ON_TERMINAL = (  # sequences that a terminal must never get from evener
    *(
        b"\x1b]0;gotcha",
        b"\x1b]52;c;ZXZpbA",
        b"\x1b[31mgot",
        b"\x1bPq#0",
        b"\x1bc",
        "\x9b31m".encode(),
        b"\x9b31m",
    ),
    *(
        "\x9d0;x".encode(),
        b"\x9d0;x",
        "\u202e".encode(),
        "\u2066".encode(),
        "\u2028".encode(),
        "\u200b".encode(),
    ),
)
MACHINE = """
[[device]]
name = {name}
memory_mib = 4000
memory_base_mib = 100.0
memory_per_sample_mib = 4.0
curve = [[64, 60.0], [512, 400.0]]
"""
WORDS = {
    "action",
    "why_not",
    "stopped",
    "engine",
    "entry",
    "outcome",
    "kind",
    "stage",
    "cause",
    "code",
    "state",
}  # keys whose texts come from a fixed set


def poisoned(data: Any) -> Any:
    """Return the same JSON with every free text replaced by the evil one."""
    if isinstance(data, dict):
        kept = {key: item if key in WORDS else poisoned(item) for key, item in data.items()}
        # all are different
        return {**kept, "device": f"{EVIL}{data['device']}"} if "device" in data else kept
    if isinstance(data, list):
        return [poisoned(item) for item in data]
    return EVIL if isinstance(data, str) else data


def is_harmless(text: str) -> None:
    """Check that the text has only printable characters and newlines."""
    for line in text.split("\n"):
        shown = line.replace("\t", " ")
        assert shown == plain(shown, len(shown) + 1), repr(line)


@pytest.fixture
def poisoned_run() -> str:
    """Return a run whose journal has evil texts everywhere, including a failed probe."""
    session = Session(open_run(Request(devices="sim:gtx1080ti,gtx1080", max_global_batch=128)))
    list(session.events())
    session.close()
    path = runs.journal_path(session.run_id)
    lines = [poisoned(json.loads(line)) for line in path.read_text().splitlines()]
    failed = next(line for line in lines if line["entry"] == "seen")
    probe = {**failed["seen"]["probe"], "turn": 7}
    seen = {"outcome": "failed", "probe": probe, "cause": "raised", "detail": EVIL, "devices": [0]}
    lines.insert(-1, {**failed, "seen": {**seen, "elapsed_seconds": 1.0}})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return session.run_id


@pytest.mark.parametrize(
    "arguments",
    [
        ("runs",),
        ("runs", "--json"),
        ("runs", "show", "{}"),
        ("runs", "show", "{}", "--json"),
        ("export", "{}"),
        ("export", "{}", "--format", "json"),
        ("balance", "--resume", "{}"),
        ("balance", "--resume", "{}", "--json"),
    ],
    ids=" ".join,
)
def test_a_journal_is_printed_plain(
    poisoned_run: str, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """An evil journal is plain as a table, as JSON, as TOML, and in the error of resuming it."""
    run([part.replace("{}", poisoned_run) for part in arguments])
    output = capsys.readouterr()
    is_harmless(output.out)
    is_harmless(output.err)
    assert output.out or output.err


def test_what_is_escaped_still_says_the_same(
    poisoned_run: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A printed document reads back as the written one, because TOML and JSON have escapes."""
    for form in ("toml", "json"):
        path = tmp_path / f"plan.{form}"
        assert run(["export", poisoned_run, "-o", str(path)]) == 0
        capsys.readouterr()
        assert run(["export", poisoned_run, "--format", form]) == 0
        shown = tmp_path / f"shown.{form}"
        shown.write_text(capsys.readouterr().out)
        assert load_plan(shown) == load_plan(path)
        assert load_plan(path).workload == printable(EVIL)


def test_errors_of_a_hostile_plan_are_plain_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors that quote a plan's keys and values, a machine file or any argument are plain."""
    (tmp_path / "machine.toml").write_text(f"[{json.dumps(EVIL)}]\n")
    (tmp_path / EVIL.replace("/", "")).mkdir()
    for arguments in (
        ["devices", "--devices", f"sim:{tmp_path / 'machine.toml'}"],
        ["devices", "--devices", EVIL],
        ["devices", "--devices", f"sim:{tmp_path}/{EVIL}/x.toml"],
        ["balance", "--devices", "sim:t4", "--workload", EVIL],
        ["balance", "--devices", "sim:t4", "--workload", f"{EVIL}.py:build"],
        ["balance", "--devices", "sim:t4", "--set", f"{EVIL}=1"],
        ["balance", "--devices", "sim:t4", "--set", EVIL],
        ["balance", "--devices", "sim:t4", "--budget", EVIL],
        ["balance", "--devices", "sim:t4", "--export", f"{tmp_path}/{EVIL}/{EVIL}/p.toml"],
        ["runs", "show", EVIL],
        ["probe", "--devices", "sim:t4", "--gpus", EVIL, "--batches", "8"],
        ["probe", "--devices", "sim:t4", "--batches", EVIL],
        [EVIL],
        [f"--{EVIL}"],
        ["balance", f"--{EVIL}"],
    ):
        for more in ([], ["--json"]):
            code = run([*arguments, *more])
            output = capsys.readouterr()
            assert code == 2, arguments
            is_harmless(output.out)
            is_harmless(output.err)


def test_a_simulated_device_s_name_is_plain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name is plain in the list, a search's table, its plan, and the monitor.

    The output is text or JSON.
    """
    machine = tmp_path / "machine.toml"
    machine.write_text(MACHINE.format(name=json.dumps(EVIL)) + MACHINE.format(name='"Plain"'))
    plan = tmp_path / f"{EVIL}.toml".replace("/", "")
    for arguments in (
        ["devices", "--devices", f"sim:{machine}"],
        ["monitor", "--devices", f"sim:{machine}", "--once"],
        [
            "balance",
            "--devices",
            f"sim:{machine}",
            "--max-global-batch",
            "64",
            "--export",
            str(plan),
        ],
        ["compare", "--devices", f"sim:{machine}", "--max-global-batch", "64"],
        [
            "probe",
            "--devices",
            f"sim:{machine}",
            "--batches",
            "8",
            "--repeat",
            "1",
            "--seconds",
            "1s",
        ],
        ["runs", "show", "last"],
    ):
        for more in ([], ["--json"]):
            assert run([*arguments, *more]) == 0
            output = capsys.readouterr()
            is_harmless(output.out)
            is_harmless(output.err)


@pytest.fixture
def evil_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A real process with an evil command line that reports a training run with an evil name."""
    monkeypatch.setenv("EVENER_LIVE_DIR", str(tmp_path / "live"))
    device = slices()[0].id
    code = (
        "import sys, time; from evener import report\n"
        f"while True: report(8, devices=['{device}'], workload=sys.argv[1], "
        f"framework=sys.argv[1]); time.sleep(0.05)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, EVIL])
    wait_for(read_trainings, "its report")
    yield process.pid
    process.kill()
    process.wait()


def test_process_and_gpu_names_are_plain(
    evil_process: int, fake_nvml: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A real process's command line, a driver's version and invalid GPU names are plain."""
    double = fake_nvml(2)
    double.gpus[0].name = EVIL
    process = sys.modules[type(double).__module__].FakeProcess(evil_process)
    double.gpus[0].processes.append(process)
    for devices in ("cpu", "gpu"):
        for arguments in (
            ["monitor", "--once"],
            ["monitor", "--once", "--json"],
            ["devices"],
            ["devices", "--json"],
        ):
            assert run([*arguments, "--devices", devices]) == 0
            output = capsys.readouterr()
            is_harmless(output.out)
            is_harmless(output.err)
            if arguments[0] == "monitor":
                assert str(evil_process) in output.out


def test_what_a_child_writes_is_plain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Output on standard error or in place of a reply is plain in progress lines and errors.

    It is also plain when the run is shown.
    """
    wicked = (
        f"import os; os.write(2, {EVIL!r}.encode()); os.write(1, "
        f"{EVIL.replace(chr(10), ' ')!r}.encode() + b'\\n')"
    )
    at_birth(monkeypatch, tmp_path, wicked)
    assert run(["balance", "--devices", "cpu", "--workload", "synthetic", "--budget", "4s"]) == 1
    assert run(["runs", "show", "last"]) == 0
    assert run(["runs", "show", "last", "--json"]) == 0
    output = capsys.readouterr()
    is_harmless(output.out)
    is_harmless(output.err)
    assert "gotcha" in output.err


@pytest.mark.slow
def test_the_app_draws_nothing_raw(poisoned_run: str) -> None:
    """Evil runs with open details are drawn plain on a real terminal."""
    keys = (b"\x1b[B", b"\r", b"\x1b", b"3", b"\r", b"\x1b[B", b"\x1b", b"?", b"\x1b", b"1", b"q")
    shown_harmless(drawn_by(["--devices", "sim:t4,t4"], keys, first=b"T4"))


@pytest.mark.slow
def test_live_processes_are_drawn_plain(evil_process: int) -> None:
    """The monitor screen draws a real process with an evil command line and training name plain."""
    pid = str(evil_process).encode()
    drawn = drawn_by(["--devices", "cpu"], (b"\t", b"\r", b"\x1b", b"\x1b[B", b"q"), first=pid)
    assert pid in drawn
    shown_harmless(drawn)


@pytest.mark.slow
def test_a_search_on_hostile_devices_is_drawn_as_plain_text(tmp_path: Path) -> None:
    """The form, the balance screen and the run list draw evil device names plain."""
    machine = tmp_path / "machine.toml"
    machine.write_text(MACHINE.format(name=json.dumps(EVIL)) + MACHINE.format(name='"Plain"'))
    drawn = drawn_by(
        ["--devices", f"sim:{machine}"], (b"2", b"\x13", b"\t", b"3", b"\r", b"\x1b", b"q")
    )
    assert b"samples/s" in drawn, "it searched"
    shown_harmless(drawn)


@pytest.mark.slow
def test_what_a_child_writes_is_drawn_plain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`evener balance` on a terminal draws garbage from its children plain."""
    wicked = (
        f"import os; os.write(2, {EVIL!r}.encode()); os.write(1, "
        f"{EVIL.replace(chr(10), ' ')!r}.encode() + b'\\n')"
    )
    (tmp_path / "site").mkdir()
    at_birth(monkeypatch, tmp_path / "site", wicked)
    shown_harmless(
        drawn_by(["balance", "--devices", "cpu", "--workload", "synthetic", "--budget", "3s"], ())
    )


def drawn_by(arguments: list[str], keys: Sequence[bytes], first: bytes = b"got") -> bytes:
    """Return all bytes that `evener` writes to its own terminal; `first` comes before the keys."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 180, 0, 0))
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(HOME))))
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "evener", *arguments]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        drawn, until = b"", time.monotonic() + 60
        while keys and first not in drawn and time.monotonic() < until:
            drawn += read_for(ours, 0.1)
        begun = time.monotonic() < until
        for key in keys:
            drawn += read_answer(ours)
            os.write(ours, key)
        while process.poll() is None and time.monotonic() < until:
            # leave a dialog, and confirm the end of a search
            for key in (b"\x1b", b"q", b"y") if keys else ():
                drawn += read_answer(ours)
                os.write(ours, key)
            drawn += read_for(ours, 0.1)
        ended = process.poll() is not None
        process.kill()
    drawn += read_for(ours, 0.1)
    os.close(ours)
    assert begun, f"{first!r} is never drawn"
    assert ended, "it goes on"
    return drawn


def shown_harmless(drawn: bytes) -> None:
    """Check that the evil text is shown, without its control characters."""
    assert b"got" in drawn, "the evil text is shown at all"
    for raw in ON_TERMINAL:
        assert raw not in drawn, raw


def read_answer(terminal: int) -> bytes:
    """Return the output until nothing is drawn for a while; at most half a second."""
    until = time.monotonic() + 0.5
    drawn = last = read_for(terminal, 0.1)
    while time.monotonic() < until and (last or not drawn):
        drawn += (last := read_for(terminal, 0.1))
    return drawn


def read_for(terminal: int, seconds: float) -> bytes:
    """Return the output of so many seconds."""
    drawn, until = b"", time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and select.select([terminal], [], [], left)[0]:
        try:
            drawn += os.read(terminal, 1 << 16)
        except OSError:
            break
    return drawn
