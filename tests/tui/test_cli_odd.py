"""Odd requests: names given twice, folders and disks that can't be written, runs without
a result.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from evener.balancer import trials
from evener.balancer.diagnostics import EXTRAS, Check, Level, check_machine, merge_checks
from evener.balancer.probes.links import LinkMeasurement
from evener.balancer.store.locks import lock_devices
from evener.balancer.store.runs import journal_path
from evener.devices.discover import discover
from evener.tui.cli.main import run

pytestmark = pytest.mark.usefixtures("own_folder")

PAIR = "sim:gtx1080ti,gtx1080"
FULL = Path("/dev/full")


def _last_run(capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert run(["runs", "--json"]) == 0
    return str(json.loads(capsys.readouterr().out)["runs"][0]["run"])


def test_a_target_that_cannot_be_read_is_a_one_line_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error comes before probing, without a traceback, not after minutes of measuring."""
    assert run(["balance", "--devices", PAIR, "--export", f"{'x' * 300}.toml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "File name too long" in line


@pytest.mark.skipif(
    shutil.which("setpriv") is None and os.geteuid() == 0, reason="root may look everywhere"
)
def test_a_target_in_another_user_s_folder_is_a_one_line_error(tmp_path: Path) -> None:
    """A folder that may not even be entered."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    rights = "-dac_override,-dac_read_search"
    bound = (
        ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}"] if os.geteuid() == 0 else []
    )
    command = [
        *bound,
        sys.executable,
        "-m",
        "evener",
        "balance",
        "-d",
        PAIR,
        "--export",
        str(closed / "plan.toml"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "Permission denied" in line


@pytest.mark.skipif(not FULL.exists(), reason="no such device here")
@pytest.mark.parametrize("more", [(), ("--json",)], ids=("words", "json"))
def test_a_full_disk_is_reported(more: tuple[str, ...]) -> None:
    """Lost output isn't treated as if its reader had exited."""
    with FULL.open("w") as stream:
        command = [sys.executable, "-m", "evener", "devices", "-d", PAIR, *more]
        done = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "No space left on device" in line


def test_a_run_that_is_named_twice_is_deleted_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The second time isn't an error."""
    assert run(["balance", "--devices", PAIR, "--budget", "1s"]) == 0
    name = _last_run(capsys)
    assert run(["runs", "delete", "last", name, "--yes"]) == 0
    assert capsys.readouterr().err == f"evener: deleted {name}\n"


def test_a_run_without_a_plan_does_not_claim_that_nothing_ran(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its measurements are listed, and only the plan is missing."""
    assert run(["balance", "--devices", PAIR, "--global-batch", "1000000"]) == 1
    name = _last_run(capsys)
    assert run(["runs", "show", name]) == 0
    shown = capsys.readouterr().out
    assert "alone  SIM:0[64]" in shown
    assert shown.endswith("this run has no plan\n")
    assert run(["export", name]) == 2
    printed = capsys.readouterr().err
    assert "has no plan" in printed
    assert "nothing was measured" not in printed


def test_a_probe_names_the_device_whose_memory_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """It doesn't name the devices on which the batch fits."""
    assert run(["probe", "--devices", PAIR, "--batches", "64", "9000", "--steps", "10"]) == 1
    assert "Out of memory on SIM:1: " in capsys.readouterr().err


def test_the_doctor_tells_of_a_runs_folder_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is one check among others."""
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "taken"))
    monkeypatch.setattr("evener.balancer.diagnostics._QUERIES", {})
    checks = {check.name: check for check in check_machine()}
    assert checks["runs folder"].level == "problem"
    assert "XDG_STATE_HOME" in checks["runs folder"].remedy
    assert checks["python"].level == "ok"


def test_the_doctor_names_missing_extras_and_the_line_that_adds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A missing app is a note. Each extra is in pyproject.toml."""
    there = importlib.util.find_spec
    monkeypatch.setattr("evener.balancer.diagnostics._QUERIES", {})
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("textual", "ray") else there(name),
    )
    extras = next(check for check in check_machine() if check.name == "extras")
    assert extras.level == "note"
    assert "app (the full-screen app)" in extras.found
    assert "pip install 'evener[app," in extras.remedy
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"].keys() >= EXTRAS.keys()


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("note", 0), ("problem", 1)])
def test_the_doctor_fails_only_if_balance_can_not_run(
    level: Level, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code and the last line say so."""
    checks = (Check("python", "ok", "3.12"), Check("torch", level, "seen", "Do it."))
    monkeypatch.setattr("evener.tui.cli.machine.check_machine", lambda: checks)
    assert run(["doctor", "--devices", "sim:gtx1080ti,gtx1080"]) == code
    last = capsys.readouterr().out.splitlines()[-1]
    if code:
        assert last.startswith("Not ready: torch.")
    else:
        by = " with torch" if level == "ok" else ""
        assert last == f"Ready: evener balance will use SIM:0, SIM:1{by}."
    assert run(["doctor", "--json"]) == json.loads(capsys.readouterr().out)["exit_code"] == code


def test_the_doctor_has_a_line_for_each_link_and_fails_for_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = (("CPU:0", "CPU:1"), ("CPU:0", "CPU:2"))
    cured = LinkMeasurement(
        pairs[1], "as it is", "hangs", detail="no rank", remedy="NCCL_P2P_DISABLE=1"
    )
    figures = (LinkMeasurement(pairs[0], "as it is", "ok", 6.1e9, 28e-6), cured)
    monkeypatch.setattr("evener.balancer.diagnostics.measure_links", lambda *_: figures)
    monkeypatch.setattr("evener.tui.cli.machine.check_machine", lambda: ())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert run(["doctor", "--devices", "cpu/2", "--links"]) == 1
    printed = capsys.readouterr().out
    assert "link CPU:0 – CPU:1  as it is 6.1 GB/s, 28 µs" in printed
    assert "With NCCL_P2P_DISABLE=1 it works" in printed
    assert run(["doctor", "--devices", "cpu/2", "--links", "--json"]) == 1
    links = json.loads(capsys.readouterr().out)["links"]
    assert [each["outcome"] for each in links] == ["ok", "hangs"]


@pytest.mark.parametrize(
    ("devices", "says"), [("sim:gtx1080ti,gtx1080", "no links"), ("ray", "one machine")]
)
def test_links_are_of_the_real_devices_of_one_machine(
    devices: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("evener.tui.cli.machine._check", lambda *_: ((), ""))
    assert run(["doctor", "--devices", devices, "--links"]) == 2
    assert says in capsys.readouterr().err


def test_a_probe_refuses_devices_of_another_session(capsys: pytest.CaptureFixture[str]) -> None:
    """Both results would be wrong. With --share it is allowed."""
    probe = [
        "probe",
        "--devices",
        "cpu/1",
        "--workload",
        "synthetic",
        "--batches",
        "8",
        "--steps",
        "5",
        "--repeat",
        "1",
    ]
    with lock_devices("20261121-145431-fb1d", discover("cpu/1").devices):
        assert run(probe) == 3
        printed = capsys.readouterr()
        assert "is being measured by another evener" in printed.err
        assert "--share" in printed.err
        assert printed.out == ""
        assert run([*probe, "--share"]) == 0
    assert run(probe) == 0, "and afterwards without it"


def test_a_probe_that_is_interrupted_still_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every outcome is one object with --json; here it has the completed runs."""
    runs = trials._runs

    def interrupted(*arguments: Any) -> Any:
        for turn in runs(*arguments):
            yield turn
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(trials, "_runs", interrupted)
    assert run(["probe", "--devices", PAIR, "--batches", "64", "64", "--json"]) == 130
    answer = json.loads(capsys.readouterr().out)
    assert answer["interrupted"] is True
    assert [turn["alone"] for turn in answer["runs"]] == [False]


def test_a_run_that_was_cut_off_is_reported_with_the_plan_that_is_exported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Neither requires that it is resumed first."""
    assert run(["balance", "--devices", PAIR]) == 0
    name = _last_run(capsys)
    journal = journal_path(name)
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(line for line in lines if b'"entry":"ended"' not in line))
    assert run(["export", name, "--format", "json"]) == 0
    batches = [share["batch"] for share in json.loads(capsys.readouterr().out)["layout"]["share"]]
    assert run(["report", name, "-o", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert all(f"SIM:{place}[{batch}]" in page for place, batch in enumerate(batches))


@pytest.mark.parametrize(
    "option", [["--devices", PAIR], ["--ascii"], ["--theme", "light"], ["--readonly"]]
)
def test_an_option_before_a_command_that_takes_no_notice_of_it_is_refused(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise other devices than the named ones would be measured."""
    assert run([*option, "devices"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{option[0]} before devices" in printed.err


@pytest.mark.parametrize("command", [[], ["monitor", "--once"]], ids=["app", "monitor"])
def test_a_theme_is_checked_where_nothing_is_drawn_too(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """In a pipe, an unknown theme is as wrong as on a terminal.

    Both commands that open the app have the option.
    """
    assert run([*command, "--devices", PAIR, "--theme", "purple"]) == 2
    assert "Give dark, light or contrast." in capsys.readouterr().err
    assert run([*command, "--devices", PAIR, "--theme", "light"]) == 0


@pytest.mark.parametrize(
    "option",
    [["--precision", "mixed_float16"], ["--xla"], ["--input", "device"], ["--engine", "towers"]],
    ids=str,
)
def test_what_simulated_devices_do_not_have_is_refused(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Their speeds are in a file, so the results would be the same without any message."""
    assert run(["balance", "--devices", PAIR, *option]) == 2
    printed = capsys.readouterr().err
    assert option[0] in printed
    assert "simulated devices" in printed


def test_a_file_that_is_no_plan_is_replaced_only_with_force(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A plan replaces a plan. A search refuses anything else before it begins."""
    assert run(["balance", "--devices", PAIR, "--export", "plan.toml"]) == 0
    before = Path("plan.toml").read_bytes()
    assert run(["balance", "--devices", PAIR, "--export", "plan.toml", "--seed", "1"]) == 0
    capsys.readouterr()
    assert run(["runs", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["runs"][-1]["run"]
    assert run(["export", first, "-o", "plan.toml"]) == 0
    assert Path("plan.toml").read_bytes() == before
    Path("plan.toml").write_text("mine")
    assert run(["export", first, "-o", "plan.toml"]) == 2
    assert "plan.toml exists already and isn't a plan. Add --force" in capsys.readouterr().err
    assert run(["export", first, "-o", "plan.toml", "--force"]) == 0
    assert Path("plan.toml").read_bytes() == before
    Path("pyproject.toml").write_text("[project]\n")
    capsys.readouterr()
    assert run(["balance", "--devices", PAIR, "--export", "pyproject.toml"]) == 2
    printed = capsys.readouterr().err
    assert "isn't a plan" in printed
    assert "solo" not in printed
    assert Path("pyproject.toml").read_text() == "[project]\n"
    Path("report.html").write_text("mine")
    assert run(["report", "last", "-o", "report.html"]) == 2
    assert Path("report.html").read_text() == "mine"


@pytest.mark.parametrize(
    "command", [["balance", "--devices", PAIR, "--export"], ["export", "last", "-o"]], ids=str
)
def test_a_plan_is_written_as_what_its_file_is_called(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """TOML in plan.yaml couldn't be read by a YAML parser."""
    assert run(["balance", "--devices", PAIR, "--budget", "1s"]) == 0
    capsys.readouterr()
    assert run([*command, "plan.yaml"]) == 2
    assert "plans are TOML or JSON" in capsys.readouterr().err
    assert not Path("plan.yaml").exists()


def test_json_is_json_on_either_side_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`runs --json show last` equals `runs show last --json`."""
    assert run(["balance", "--devices", PAIR, "--budget", "1s"]) == 0
    for command in (["list"], ["show", "last"]):
        capsys.readouterr()
        assert run(["runs", "--json", *command]) == 0
        before = json.loads(capsys.readouterr().out)
        assert run(["runs", *command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == before


def test_the_doctor_says_once_what_all_hosts_have() -> None:
    same, here, there = (
        Check("python", "ok", "3.11"),
        Check("torch", "ok", "2.13"),
        Check("torch", "note", "2.12", "Update."),
    )
    assert merge_checks({"a": (same, here), "b": (same, there)}) == (
        same,
        Check("torch", "ok", "a: 2.13"),
        Check("torch", "note", "b: 2.12", "Update."),
    )
