"""Commands as a user runs them, on simulated devices: their output, exit codes and errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evener.balancer.result.measurements import ORDER
from evener.devices.simulated import catalogue
from evener.plan.file import load_plan, to_json, to_toml
from evener.tui.cli.main import run
from evener.tui.cli.output import draws_screens
from tests.support.cores import two_cores
from tests.support.machines import samples_per_second

pytestmark = pytest.mark.usefixtures("own_folder")

PAIR = "sim:gtx1080ti,gtx1080"
ALONE = """
[sync]
base_ms = 400.0
per_device_ms = 100.0
[[device]]
name = "fast"
memory_mib = 4000
memory_base_mib = 100.0
memory_per_sample_mib = 4.0
noise = 0.002
curve = [[64, 60.0], [512, 400.0]]
[[device]]
name = "slow"
memory_mib = 4000
memory_base_mib = 100.0
memory_per_sample_mib = 4.0
noise = 0.002
curve = [[64, 300.0], [512, 2000.0]]
"""


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    """Return a command's exit code and its JSON output."""
    code = run(list(arguments))
    return code, json.loads(capsys.readouterr().out)


def test_the_seed_s_two_cards_are_balanced(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan has at least 2120 samples/s and 0.58 to 0.62 for the Ti, after few probes."""
    code, answer = ask(capsys, "balance", "--devices", PAIR, "--json")
    assert code == 0
    batches = [share["batch"] for share in answer["layout"]["share"]]
    machine = catalogue(["gtx1080ti", "gtx1080"])
    assert samples_per_second(machine, batches) >= 2120
    assert 0.58 <= answer["layout"]["share"][0]["ratio"] <= 0.62
    assert answer["search"]["probes"] <= 16
    assert answer["search"]["out_of_memory"] <= 2
    assert {"equal shares", "best single device", "solo SIM:0", "solo SIM:1"} <= {
        r["name"] for r in answer["evidence"]
    }
    low, high = answer["throughput"]["low"], answer["throughput"]["high"]
    assert low <= answer["throughput"]["samples_per_second"] <= high
    assert answer["verdict"]


def test_one_device_wins_where_keeping_in_step_costs_too_much(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The plan is solo, and the sentence says why.

    Passes are off, because a larger batch would reduce the cost.
    """
    machine = tmp_path / "machine.toml"
    machine.write_text(ALONE)
    code, answer = ask(capsys, "balance", "--devices", f"sim:{machine}", "--micro", "off", "--json")
    assert code == 0
    assert answer["layout"]["kind"] == "solo"
    assert answer["layout"]["share"][1]["batch"] == 0
    assert "synchronizing" in "\n".join(answer["text"])


def test_the_same_seed_gives_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Simulated noise is part of the run, and so is the seed."""
    first, second = (
        ask(capsys, "balance", "--devices", PAIR, "--seed", "7", "--json")[1] for _ in range(2)
    )
    for key in ("layout", "throughput", "evidence"):
        assert first[key] == second[key]


def test_an_exported_plan_survives_a_round_trip(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """--export, `evener export` and load_plan give the same bytes, in TOML and in JSON."""
    plan = tmp_path / "plan.toml"
    assert run(["balance", "--devices", PAIR, "--export", str(plan)]) == 0
    assert to_toml(load_plan(plan)) == plan.read_bytes()
    again = tmp_path / "again.json"
    assert run(["export", "last", "--format", "json", "-o", str(again)]) == 0
    assert to_json(load_plan(plan)) == again.read_bytes()
    capsys.readouterr()
    assert run(["export", "last"]) == 0
    assert capsys.readouterr().out.encode() == plan.read_bytes()


def test_runs_are_listed_shown_and_deleted(capsys: pytest.CaptureFixture[str]) -> None:
    """A run is found by its id, a prefix of it, or `last`."""
    assert run(["balance", "--devices", PAIR]) == 0
    capsys.readouterr()
    code, listing = ask(capsys, "runs", "--json")
    assert code == 0
    (entry,) = listing["runs"]
    code, shown = ask(capsys, "runs", "show", entry["run"], "--json")
    assert code == 0
    assert shown["run"] == entry["run"]
    assert shown["plan"]["layout"]["kind"] == "split"
    assert len(shown["observations"]) == shown["plan"]["search"]["probes"]
    assert run(["runs", "show", "last"]) == 0
    assert "SIM:0" in capsys.readouterr().out
    assert run(["runs", "delete", entry["run"], "--yes"]) == 0
    capsys.readouterr()
    assert ask(capsys, "runs", "--json")[1] == {"runs": []}


def test_the_table_ends_in_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output has it with the next steps. Progress is on standard error."""
    assert run(["balance", "--devices", PAIR]) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[0].startswith("simulated: ")
    assert lines[2].split() == ["device", "name", "share", "ratio", "in", "the", "plan", "alone"]
    assert any(line.startswith("equal shares:") for line in lines)
    assert any(line.startswith("sum of each alone:") for line in lines)
    advice = next(i for i, line in enumerate(lines) if line.startswith("simulated: Use the plan"))
    assert lines[advice + 1].startswith("simulated: ")
    assert "evener export" not in output.out, "nobody trains on simulated devices"
    assert lines[-1].endswith(".")


def test_a_probe_names_the_devices_and_each_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The table has every device, and all devices together. Progress goes to standard error.

    No simulated device is called a GPU.
    """
    assert (
        run(
            [
                "probe",
                "--devices",
                PAIR,
                "--gpus",
                "0",
                "1",
                "--batches",
                "820",
                "568",
                "--repeat",
                "2",
            ]
        )
        == 0
    )
    output = capsys.readouterr()
    head, *rows = (line.split() for line in output.out.splitlines())
    assert head == [
        "run",
        "device",
        "batch",
        "samples/s",
        "±",
        "memory",
        "samples/J",
        "W",
        "idle",
        "W",
    ]
    assert [row[:3] for row in rows[:3]] == [
        ["1", "SIM:0", "820"],
        ["1", "SIM:1", "568"],
        ["1", "together", "1388"],
    ]
    assert rows[6][:3] == ["all", "together", "1388"]
    assert abs(float("".join(rows[6][3:5])) / 2158 - 1) < 0.03
    assert "run 2 of 2: " in output.err
    assert not {"GPU:0", "sps", "Done!"} & set(f"{output.out} {output.err}".split())


@pytest.mark.parametrize("batches", [["178,122"], ["178", "122"], ["=178,122"]], ids=str)
def test_batches_are_listed_with_or_without_commas(
    batches: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """They may be written like the values of --devices."""
    option = [f"--batches{batches[0]}"] if batches[0].startswith("=") else ["--batches", *batches]
    code, answer = ask(capsys, "probe", "--devices", PAIR, *option, "--repeat", "1", "--json")
    assert (code, answer["batches"]) == (0, [178, 122])


def test_a_probe_takes_passes_of_ones_own_choice(capsys: pytest.CaptureFixture[str]) -> None:
    """The table has 820 = 2 × 410, and JSON has the rows of a pass."""
    chosen = [
        "probe",
        "--devices",
        PAIR,
        "--batches",
        "820",
        "568",
        "--micro",
        "410,568",
        "--repeat",
        "1",
    ]
    assert run(chosen) == 0
    assert "820 = 2 × 410" in capsys.readouterr().out
    assert ask(capsys, *chosen, "--json")[1]["micro"] == [410, 568]


def test_one_output_has_one_error_of_a_figure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """For any width of the interval, the table, verdict, warning and measurement line agree."""
    machine = tmp_path / "noisy.toml"
    machine.write_text(
        '[[device]]\nname = "Noisy"\nmemory_mib = 4000\nmemory_base_mib = '
        "100.0\nmemory_per_sample_mib = 4.0\n"
        "noise = 1.0\ncurve = [[1, 60.0], [512, 400.0]]\n"
    )
    assert (
        run(
            [
                "balance",
                "--devices",
                f"sim:{machine}",
                "--global-batch",
                "64",
                "--budget",
                "5s",
                "--seed",
                "6",
            ]
        )
        == 0
    )
    output = capsys.readouterr()
    errors = re.findall(r"± ([\d.]+ %)", output.out)
    assert len(errors) == 5, "in the recommendation and in the column alone too"
    assert len(set(errors)) == 1
    assert float(errors[0].split()[0]) > 100
    (line,) = [line for line in output.err.splitlines() if "SIM:0[64]" in line]
    assert f"± {errors[0]}" in line


def test_a_request_that_cannot_be_met_leaves_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    """One sample for two devices is refused, and the list is empty."""
    assert run(["balance", "--devices", PAIR, "--global-batch", "1"]) == 2
    capsys.readouterr()
    assert ask(capsys, "runs", "--json") == (0, {"runs": []})


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--devices", "sim:t4"], "--devices"),
        (["--tolerance", "0.5"], "--tolerance"),
        (["--set", "seed=1"], "--set"),
        (["--workload", "keras_mnist"], "--workload"),
    ],
)
def test_resuming_with_another_request_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], option: str
) -> None:
    """The earlier measurements wouldn't fit it. The same options and a new budget are fine."""
    assert run(["balance", "--devices", PAIR]) == 0
    capsys.readouterr()
    assert run(["balance", "--resume", "last", *arguments]) == 2
    assert f"{option} differs from it" in capsys.readouterr().err
    same = ["--devices", PAIR, "--workload", "keras_maxer", "--budget", "5m"]
    assert run(["balance", "--resume", "last", *same]) == 0


def test_a_format_that_the_file_s_name_denies_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A TOML plan called plan.json could never be read. --format is for standard output."""
    assert run(["balance", "--devices", PAIR]) == 0
    assert run(["export", "last", "-o", "plan.json", "--format", "toml"]) == 2
    assert not (tmp_path / "plan.json").exists()
    assert run(["export", "last", "-o", "plan.json", "--format", "json"]) == 0
    assert load_plan(tmp_path / "plan.json").batches


C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "C"])
def test_a_terminal_that_knows_fewer_signs_gets_near_ones(encoding: str, tmp_path: Path) -> None:
    """No command fails because the locale has no plus-minus sign."""
    locale = C_LOCALE if encoding == "C" else {"PYTHONIOENCODING": encoding}
    encoding = encoding.replace("C", "ascii")
    environment = {**os.environ, **locale, "XDG_STATE_HOME": str(tmp_path / "state")}

    def shown(*words: str) -> str:
        command = [sys.executable, "-m", "evener", *words, "--devices", PAIR]
        return subprocess.run(
            command, capture_output=True, env=environment, check=True
        ).stdout.decode(encoding)

    assert ("+-" if encoding == "ascii" else "±") in shown("balance", "--budget", "30s")
    assert encoding != "ascii" or "SIM:1" in shown("monitor", "--once")


@pytest.mark.parametrize(
    ("terminal", "screens"),
    [("xterm-256color", True), ("dumb", False), (None, False)],
    ids=["xterm", "dumb", "unset"],
)
def test_only_a_terminal_that_can_gets_the_app(
    monkeypatch: pytest.MonkeyPatch, terminal: str | None, screens: bool
) -> None:
    """A shell within an editor has TERM=dumb, and would show the drawing as text."""
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("TERM", raising=False)
    if terminal is not None:
        monkeypatch.setenv("TERM", terminal)
    assert draws_screens() is screens


def test_the_monitor_draws_plain_ascii_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """`--ascii` also works without the app."""
    assert run(["monitor", "--once", "--ascii", "--devices", PAIR]) == 0
    assert capsys.readouterr().out.isascii()


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(("--devices", PAIR), id="simulated"),
        pytest.param(("--devices", "cpu/2", "--workload", "synthetic"), id="cpu", marks=two_cores),
    ],
)
def test_a_probe_of_a_number_of_steps_prints_steps_and_memory(
    where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each run times that many steps.

    Its JSON has them, each device's peak memory, and the doubts.
    """
    code, answer = ask(
        capsys,
        "probe",
        *where,
        "--gpus",
        "0",
        "1",
        "--batches",
        "16",
        "8",
        "--repeat",
        "2",
        "--steps",
        "60",
        "--json",
    )
    assert code == 0
    assert answer["batches"] == [16, 8]
    assert [turn["steps"] for turn in answer["runs"]] == [60, 60]
    assert [turn["samples"] for turn in answer["runs"]] == [60 * 24, 2 * 60 * 24]
    for turn in answer["runs"]:
        assert all(size > 0 for size in turn["memory_bytes"])
        assert {doubt["code"] for doubt in turn["warnings"]} <= set(ORDER)


def test_a_probe_lasts_all_its_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """Simulated steps are known after two or three seconds, but ten requested seconds are ten."""
    code, answer = ask(
        capsys, "probe", "--devices", PAIR, "--batches", "64", "--repeat", "1", "--json"
    )
    assert code == 0
    (turn,) = answer["runs"]
    assert turn["samples"] / turn["samples_per_second"] >= 10


def test_a_probe_with_too_large_a_batch_is_a_one_line_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Out of memory, however long the run should be."""
    assert run(["probe", "--devices", PAIR, "--batches", "64", "9000", "--steps", "10"]) == 1
    assert "Out of memory" in capsys.readouterr().err


def test_a_probe_without_gpus_takes_as_many_devices_as_batches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two batches are for the first two devices, one is for the first."""
    chosen = "sim:gtx1080ti,gtx1080,gtx1080"
    assert ask(
        capsys, "probe", "--devices", chosen, "--batches", "820", "568", "--repeat", "1", "--json"
    )[1]["batches"] == [820, 568, 0]
    assert run(["probe", "--devices", chosen, "--batches", "64", "--repeat", "1"]) == 0
    _, line, *_ = capsys.readouterr().out.splitlines()
    assert line.split()[:3] == ["1", "SIM:0", "64"]
    assert abs(float(line.split()[3]) / 684 - 1) < 0.05


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["balance", "--devices", "tpu"], 2, "tpu"),
        (["balance", "--devices", "sim:gtx9999"], 2, "gtx9999"),
        (["balance", "--devices", "sim:none.toml"], 2, "none.toml"),
        (["balance", "--devices", PAIR, "--workload", "keras_mist"], 2, "keras_mist"),
        (["balance", "--devices", PAIR, "--workload", "absent.py:build"], 2, "absent.py"),
        (["balance", "--devices", PAIR, "--workload", "absent.py"], 2, "absent.py:FUNCTION"),
        (["compare", "--devices", PAIR, "--workload", "absent.py"], 2, "absent.py:FUNCTION"),
        (
            ["probe", "--devices", PAIR, "--batches", "8", "--workload", "absent.py"],
            2,
            "absent.py:FUNCTION",
        ),
        (["balance", "--devices", PAIR, "--set", "no"], 2, "key=value"),
        (["balance", "--devices", PAIR, "--global-batch", "0"], 2, "0"),
        (["balance", "--devices", PAIR, "--global-batch", "1001", "--multiple-of", "8"], 2, "1001"),
        (["balance", "--devices", PAIR, "--tolerance", "2"], 2, "2"),
        (["balance", "--devices", PAIR, "--budget", "soon"], 2, "soon"),
        (["balance", "--devices", PAIR, "--budget", "0s"], 2, "--budget"),
        (["balance", "--devices", PAIR, "--resume", "nowhere"], 2, "run"),
        (["balance", "--devices", PAIR, "--objective", "beauty"], 2, "beauty"),
        (["balance", "--devices", PAIR, "--export", "missing/plan.toml"], 2, "missing"),
        (["balance", "--devices", PAIR, "--export", "plan.yaml"], 2, "plan.yaml"),
        (["balance", "--devcies", PAIR], 2, "--devcies"),
        (["balance", "--devices", PAIR, "--resume"], 2, "See evener balance --help."),
        (["probe", "--devices", PAIR, "--gpus", "0", "1", "--batches", "820"], 2, "batch"),
        (["probe", "--devices", PAIR, "--gpus", "0", "7", "--batches", "8", "8"], 2, "7"),
        (["probe", "--devices", PAIR, "--batches", "0"], 2, "0"),
        (["probe", "--devices", PAIR, "--batches", "8,x"], 2, "x"),
        (["probe", "--devices", PAIR, "--batches", "8", "--micro", "9"], 2, "--micro 9"),
        (["probe", "--devices", PAIR, "--batches", "8", "--micro", "0"], 2, "--micro 0"),
        (
            ["probe", "--devices", PAIR, "--batches", "8", "8", "--micro", "4"],
            2,
            "--micro gives 1 number",
        ),
        (["balance", "--devices", PAIR, "--micro", "410"], 2, "auto or off"),
        (["probe", "--devices", PAIR, "--batches", "8", "8", "8"], 2, "3 batches for 2 devices"),
        (
            ["probe", "--devices", PAIR, "--batches", "8", "--steps", "5", "--seconds", "3s"],
            2,
            "--steps",
        ),
        (["probe", "--devices", PAIR, "--batches", "8", "--steps", "0"], 2, "--steps"),
        (["probe", "--devices", PAIR, "--batches", "8", "--seconds", "0s"], 2, "--seconds"),
        (["probe", "--devices", PAIR, "--batches", "8", "--seconds", "25h"], 2, "--seconds"),
        (["export", "nowhere"], 2, "run"),
        (["runs", "show", "nowhere"], 2, "run"),
        (["balance", "--devices", "gpu"], 3, ""),
        (["devices", "--devices", "cpu:99"], 2, "99"),
        (
            ["run", "--devices", "cpu/1", "--noise", "--", "true"],
            2,
            "on one device there is only one",
        ),
        (["fly"], 2, "fly"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_a_one_line_error(
    arguments: list[str], code: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the cause and a remedy. The exit code is as documented, and nothing is a
    traceback.
    """
    assert run(arguments) == code
    output = capsys.readouterr()
    (line,) = output.err.strip().splitlines()[-1:]
    assert line.startswith("evener: ")
    assert word in line
    assert "Traceback" not in output.err
    assert output.out == ""


def test_errors_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Every outcome is one object with --json."""
    code, answer = ask(capsys, "balance", "--devices", "tpu", "--json")
    assert code == 2
    assert answer["error"]["kind"] == "request"
    assert answer["error"]["remedy"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_found_before_the_probing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Minutes of measuring aren't lost to a folder that can't be written."""
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    assert run(["balance", "--devices", PAIR, "--export", str(folder / "plan.toml")]) == 2
    assert "locked" in capsys.readouterr().err


def test_devices_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """They are in the order of the shares, with their limits."""
    code, answer = ask(capsys, "devices", "--devices", "sim:gtx1080ti,gtx1080@60%", "--json")
    assert code == 0
    assert [device["label"] for device in answer["devices"]] == ["SIM:0", "SIM:1"]
    assert answer["devices"][1]["limit"]["percent"] == 60
    assert run(["devices", "--devices", PAIR]) == 0
    assert "GTX 1080 Ti" in capsys.readouterr().out
