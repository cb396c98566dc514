"""`evener compare` as a user runs it: rankings on simulated machines, real children, bad input,
interrupts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from evener.plan.file import load_plan, parse_plan
from evener.tui.cli.main import run
from tests.support.cores import two_cores
from tests.support.quick_probes import QUICK_EVENER

pytestmark = pytest.mark.usefixtures("own_folder")

MACHINE = """
[sync]
base_ms = {sync}
[[device]]
name = "Card A"
memory_mib = 8000
memory_base_mib = 500.0
memory_per_sample_mib = 2.0
curve = [[16, 8.0], [256, 40.0]]
noise = 0.003
pack_gain = {gain}
[[device]]
name = "Card B"
memory_mib = 8000
memory_base_mib = 500.0
memory_per_sample_mib = 2.0
curve = [[16, 8.0], [256, 40.0]]
noise = 0.003
[[placement]]
name = "towers"
curve = [[16, 12.0], [256, 55.0]]
"""
FLAT = "[[2, 0.97], [8, 0.9]]"
QUICK = (
    "-w",
    "synthetic",
    "--set",
    "base_ms=2",
    "--set",
    "per_sample_ms=0.02",
    "--global-batch",
    "32",
)


def machine(sync: float = 22.0, gain: str = FLAT) -> str:
    """Return `--devices` for a machine file in the test's folder."""
    Path("m.toml").write_text(MACHINE.format(sync=sync, gain=gain))
    return "sim:m.toml"


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    """Return a command's exit code and its JSON output."""
    code = run(["compare", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_split_that_loses_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = ask(capsys, "-d", machine(), "--global-batch", "256")
    assert code == 0
    assert answer["text"][0] == "simulated: Use one device, without a plan: 256 on SIM:0 alone."
    assert "+12 % over equal shares (128 + 128)" in answer["text"][1]
    assert "The split is slower because synchronizing the devices costs 22 ms" in answer["text"][2]
    assert answer["verdict"]["split_loss"]["cause"] == "exchange"
    names = [layout["name"] for layout in answer["layouts"]]
    assert names[0] == "best single device"
    assert {"equal shares", "pack of 2", "place towers"} <= set(names)
    assert answer["layout"]["kind"] == "solo"


def test_every_layout_has_latency_and_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    """A step of a pack takes as long as all of its trainings need; together they have its
    samples/s.
    """
    _, answer = ask(capsys, "-d", machine(), "--global-batch", "256")
    for layout in answer["layouts"]:
        samples = sum(layout["batches"]) * layout["processes"]
        assert samples / layout["step_milliseconds"] * 1000 == pytest.approx(
            layout["samples_per_second"], rel=0.01
        )
        low, high = layout["samples_per_second_interval"]
        assert low <= layout["samples_per_second"] <= high


def test_packing_that_gains_becomes_the_plan_with_its_rivals_as_evidence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, answer = ask(
        capsys,
        "-d",
        machine(gain="[[3, 1.9], [8, 1.8]]"),
        "--global-batch",
        "256",
        "--export",
        "plan.toml",
    )
    assert code == 0
    plan = load_plan("plan.toml")
    assert (plan.layout.kind, plan.layout.processes) == ("pack", 3)
    assert {"best single device", "equal shares", "place towers"} <= {
        rival.name for rival in plan.evidence
    }
    assert [one["processes"] for one in answer["packing"][0]["measured"]][:3] == [2, 3, 4]
    assert "over SIM:0 alone, each training takes 1.6 times as long" in answer["text"][1]


def test_the_printed_ranking_names_each_layout_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "-d", machine(sync=2.0), "--global-batch", "256"]) == 0
    out = capsys.readouterr().out
    assert out.count("place towers") == 1
    assert "equal shares over 1, 2, ... devices:" in out
    assert "packing:" in out
    assert out.rstrip().splitlines()[-1].endswith(".")


def test_what_a_batch_is_worth_stands_below_the_ranking(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["compare", "-d", machine(), "--noise-scale", "3900", "--layouts", "solo,split"]) == 0
    )
    assert "samples/s  worth in learning" in capsys.readouterr().out


def test_only_requested_layouts_run(capsys: pytest.CaptureFixture[str]) -> None:
    _, answer = ask(capsys, "-d", machine(), "--global-batch", "256", "--layouts", "solo,place")
    assert {layout["kind"] for layout in answer["layouts"]} == {"solo", "place"}
    assert answer["packing"] == []


def test_a_run_can_be_shown_and_exported_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    _, answer = ask(capsys, "-d", machine(), "--global-batch", "256")
    assert run(["export", answer["run"], "--format", "json"]) == 0
    plan = parse_plan(capsys.readouterr().out.encode())
    assert plan.layout.kind == answer["layout"]["kind"]
    assert run(["runs", "show", answer["run"]]) == 0


@two_cores
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layouts", "solo,sideways"), "solo, even, split, shard, pack, place"),
        (("--layouts", "solo,,even"), "list of words"),
        (("--try", "turbo"), "xla, mixed"),
        (("--layouts", "place", "-d", "sim:gtx1080ti,gtx1080"), "has no placements"),
        (("--layouts", "split", "-d", "sim:gtx1080"), "needs two devices"),
        (("--export", "plan.txt"), ".toml"),
        (("--budget", "soon"), "--budget"),
        (("-w", "keras_tower"), "keras_towers"),
        (("-w", "keras_towers", "-d", "cpu/2", "--set", "word=3"), "words"),
    ],
)
def test_bad_input_is_a_one_line_error_with_what_is_possible(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    code, answer = ask(capsys, *(() if "-d" in arguments else ("-d", machine())), *arguments)
    assert code == 2
    assert words in f"{answer['error']['message']} {answer['error']['remedy']}"


def test_unavailable_layouts_are_reported_and_the_others_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With one device, splitting and placing are left out, with a message."""
    Path("one.toml").write_text(
        MACHINE.format(sync=1.0, gain=FLAT).split('[[device]]\nname = "Card B"')[0]
    )
    code, answer = ask(
        capsys, "-d", "sim:one.toml", "--layouts", "solo,split,pack", "--global-batch", "64"
    )
    assert code == 0
    text = " ".join(answer["warnings"])
    assert "split needs two devices" in text
    assert {layout["kind"] for layout in answer["layouts"]} == {"solo", "pack"}


@two_cores
@pytest.mark.slow
def test_real_children_are_packed_and_an_interrupt_leaves_none() -> None:
    """It arrives once a pack was measured. The results so far are still printed."""
    command = [*QUICK_EVENER, "compare", "-d", "cpu/2", *QUICK, "--layouts", "solo,pack", "--json"]
    process = subprocess.Popen(
        [*command, "--budget", "60s"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "  packed " in line:
            break
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    answer = json.loads(out)
    assert answer["interrupted"]
    assert {layout["kind"] for layout in answer["layouts"]} == {"solo", "pack"}
    packed = next(one for one in answer["packing"][0]["measured"] if one["processes"] == 2)
    assert packed["outcome"] == "timed"
    assert packed["memory_bytes"] > 0
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
