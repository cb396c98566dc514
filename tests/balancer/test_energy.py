"""Energy: driver counters become the watts of a probe, and samples per joule decide if
requested.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.balancer.families import find_family
from evener.balancer.objectives import find_objective
from evener.balancer.probes.block_timing import Block
from evener.balancer.probes.failures import GroupError, RankFailure
from evener.balancer.probes.interference import ProbeInterference
from evener.balancer.search.layouts import Candidate
from evener.balancer.search.ranking import choose_winner, compare_turns, throughput
from evener.balancer.types import Layout, Probe, Problem, Stage, Timed, layout_of
from evener.devices.backend import Vitals
from evener.devices.nvidia.gpu_reader import GpuReader
from evener.devices.nvidia.nvml_library import describe
from evener.plan.file import load_plan
from evener.tui.cli.main import run
from evener.tui.text.run_report import read_report
from tests.support.efficiency_oracle import is_efficient

ENERGY = find_objective("samples-per-joule")
LEAN = """
[[device]]
name = "Lean"
memory_mib = 8000
memory_base_mib = 100
memory_per_sample_mib = 1
curve = [[1, 2.0], [1000, 12.0], [4000, 42.0]]
noise = 0.01
power_watts = 200

[[device]]
name = "Greedy"
memory_mib = 8000
memory_base_mib = 100
memory_per_sample_mib = 1
curve = [[1, 10.0], [1000, 110.0], [4000, 410.0]]
noise = 0.01
power_watts = 450
"""


def timed(layout: Layout, rate: float, *watts: float | None) -> Timed:
    """Return a layout that ran at this rate in samples/s."""
    step = layout.global_batch / rate
    probe = Probe(layout, Stage.RACE, 1.0)
    return Timed(
        probe, step, step * 0.99, step * 1.01, 10, (None,) * 2, (None,) * 2, step, 1.0, watts=watts
    )


def value_of(turns: dict[int, Timed]) -> float:
    """Return the samples per joule of a layout from its turns."""
    return ENERGY.value(throughput(turns).value, turns.values())


@given(
    st.lists(
        st.tuples(st.floats(10, 1000), st.none() | st.floats(10, 1000), st.floats(0, 100)),
        min_size=1,
        max_size=6,
    ),
    st.floats(0, 0.9),
)
def test_the_most_efficient_layout_within_the_slowdown_is_chosen(
    drawn: list[tuple[float, float | None, float]], slowdown: float
) -> None:
    """No layout that is fast enough has more samples per joule, and the chosen one is
    fast enough.
    """
    layouts = [layout_of((10 + place, 10)) for place in range(len(drawn))]
    turns = {
        layout: {0: timed(layout, rate, watts, idle)}
        for layout, (rate, watts, idle) in zip(layouts, drawn, strict=True)
    }
    candidates = [Candidate(find_family("split"), layout) for layout in layouts]
    problem = Problem(2, (None, None), tolerance=0.5, objective=ENERGY.name, max_slowdown=slowdown)
    chosen = turns[choose_winner(candidates, turns, problem).layout]
    fastest = max(turns.values(), key=lambda one: one[0].samples_per_second)
    assert chosen is fastest or compare_turns(chosen, fastest).value >= -slowdown
    for rival in turns.values():
        if compare_turns(rival, fastest).value >= -slowdown:
            assert value_of(chosen) >= value_of(rival)


def test_idle_devices_count_and_unknown_ones_leave_the_figure_unknown() -> None:
    power = timed(Layout("solo", (8, 0)), 100.0, 40.0, 10.0).power
    assert power is not None
    assert (power.active_watts, power.idle_watts, power.watts) == (40.0, 10.0, 50.0)
    assert value_of({0: timed(Layout("solo", (8, 0)), 100.0, 40.0, 10.0)}) == pytest.approx(2.0)
    assert timed(Layout("solo", (8, 0)), 100.0, 40.0, None).power is None
    assert timed(Layout("solo", (8, 0)), 100.0).power is None


class Driver:
    """Two GPUs at 300 and 50 W. The second may be gone, the third reports nothing."""

    def __init__(self) -> None:
        self.at, self.gone = 10.0, False

    def read(self, positions: Collection[int]) -> Mapping[int, Vitals]:
        if self.gone and 1 in positions:
            raise GroupError(RankFailure(0, "device", "gone"))
        joules = {0: 300 * self.at, 1: 50 * self.at, 2: None}
        return {i: Vitals(self.at, joules=joules[i]) for i in positions}


def test_the_mean_power_of_a_probe_is_what_the_counters_rose_by() -> None:
    driver = Driver()
    watch = ProbeInterference(driver, (0,), driver.read((1, 2)))
    assert watch.mean_watts() == {}
    for _ in range(3):
        driver.at += 0.7
        watch.annotate(Block(10, 0.7))
    assert watch.mean_watts() == pytest.approx({0: 300.0, 1: 50.0})
    driver.gone = True
    assert watch.mean_watts() == pytest.approx({0: 300.0}), (
        "an idle device that has gone doesn't fail the probe"
    )


@pytest.mark.parametrize("counted", [True, False])
def test_energy_comes_from_the_counter_or_else_from_the_power(
    counted: bool, fake_nvml: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = fake_nvml(1)
    if not counted:
        nvml.fail("field 83", pynvml.NVML_ERROR_NOT_SUPPORTED)
    nvml.nvmlInit()
    now = 100.0
    monkeypatch.setattr("evener.devices.nvidia.gpu_reader.time.monotonic", lambda: now)
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    reader = GpuReader(nvml, handle, describe(nvml, handle, 0))
    first = reader.vitals(False).joules
    nvml.gpus[0].power_watts = 500.0
    now += 2.0
    nvml.advance(2.0)
    last = reader.vitals(False).joules
    assert first is not None
    assert last is not None
    assert last - first == pytest.approx(1000.0 if counted else 800.0)  # the mean of 300 and 500 W


def test_a_search_by_energy_takes_the_lean_device_alone(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The split is 5 % faster and draws three times as much power.

    The plan, its evidence and the texts say so.
    """
    Path("machine.toml").write_text(LEAN)
    asked = ["balance", "-d", "sim:machine.toml", "--global-batch", "4096", "--export", "plan.toml"]
    efficient = [*asked, "--objective", "samples-per-joule"]
    assert run(asked) == 0
    assert load_plan("plan.toml").batches[1] > 0, "by speed both are used"
    assert run(efficient) == 0
    plan = load_plan("plan.toml")
    printed = capsys.readouterr().out
    assert plan.batches == (4096, 0)
    split = next(one for one in plan.evidence if one.name == "best split").throughput
    own = plan.throughput
    assert own.samples_per_joule == pytest.approx(
        own.samples_per_second / (own.active_watts + own.idle_watts)
    )
    assert own.idle_watts == pytest.approx(0.08 * 450)
    assert own.samples_per_joule > 1.5 * split.samples_per_joule > 0
    assert split.samples_per_second > own.samples_per_second
    assert "samples/J at 227 W: 191 W, and 36 W in idle devices" in printed
    assert "the objective decides against it" in printed
    assert "the most among the layouts at most 10 % slower than the fastest, and" in printed
    ranked = {one.name: one.throughput for one in read_report("last").ranking}
    assert ranked["the plan"] == own
    assert ranked["best split"] == split
    assert run([*efficient, "--max-slowdown", "1%"]) == 0
    assert load_plan("plan.toml").batches[1] > 0, "the lean device alone is too slow for that"
    capsys.readouterr()
    assert run(["compare", *efficient[1:5], *efficient[-2:], "--json"]) == 0
    first, *others = json.loads(capsys.readouterr().out)["layouts"]
    assert first["samples_per_joule"] > max(one["samples_per_joule"] for one in others)
    assert first["idle_watts"] == pytest.approx(36.0)


def test_simulated_machines_train_most_samples_per_joule_within_the_slowdown() -> None:
    """Plans are compared with an oracle that tries every set of devices.

    benchmarks/efficiency.py tries 200 machines.
    """
    assert sum(map(is_efficient, range(30))) >= 29


def test_a_slower_card_that_draws_little_is_raced_alone(own_folder: Path) -> None:
    """It has less than half of the samples/s, and draws a seventeenth of the power."""
    slower = LEAN.replace(
        "[[1, 10.0], [1000, 110.0], [4000, 410.0]]", "[[1, 4.0], [1000, 28.0], [4000, 100.0]]"
    )
    Path("machine.toml").write_text(
        slower.replace("watts = 200", "watts = 700").replace("watts = 450", "watts = 40")
    )
    asked = [
        "balance",
        "-d",
        "sim:machine.toml",
        "--objective",
        "samples-per-joule",
        "--export",
        "plan.toml",
    ]
    assert run([*asked, "--max-slowdown", "80%"]) == 0
    assert [share.index for share in load_plan("plan.toml").layout.active] == [1]
    assert run([*asked, "--max-slowdown", "10%"]) == 0
    assert load_plan("plan.toml").batches[0] > 0


def test_a_probe_says_samples_per_joule_of_each_run_and_of_all(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unused devices count, and are listed separately.

    If a device reports no energy, there is no value.
    """
    Path("machine.toml").write_text(LEAN)
    asked = ["probe", "-d", "sim:machine.toml", "--batches", "4096", "--repeat", "2"]
    assert run(asked) == 0
    head, *rows, _ = (line.split("  ") for line in capsys.readouterr().out.splitlines())
    assert [cell.strip() for cell in head if cell][-3:] == ["samples/J", "W", "idle W"]
    assert [row[-1].strip() for row in rows] == ["36", "36", "36"]
    assert run([*asked, "--json"]) == 0
    for each in json.loads(capsys.readouterr().out)["runs"]:
        watts = each["power"]["active_watts"] + each["power"]["idle_watts"]
        assert each["samples_per_joule"] == pytest.approx(each["this_run"]["value"] / watts)
    Path("dark.toml").write_text(LEAN.replace("power_watts = 200", ""))
    assert run(["probe", "-d", "sim:dark.toml", "--batches", "64", "--repeat", "1", "--json"]) == 0
    (each,) = json.loads(capsys.readouterr().out)["runs"]
    assert (each["power"], each["samples_per_joule"]) == (None, None)


@pytest.mark.parametrize(
    ("devices", "options", "said"),
    [
        (
            "cpu:0",
            ["--objective", "samples-per-joule"],
            "CPU slices report no energy, so samples per joule can't",
        ),
        (
            "sim:dark.toml",
            ["--objective", "samples-per-joule"],
            "The power of SIM:0 isn't written down",
        ),
        (
            "sim:gtx1080",
            ["--max-slowdown", "5%"],
            "--max-slowdown goes with --objective samples-per-joule.",
        ),
        (
            "sim:gtx1080",
            ["--objective", "samples-per-joule", "--max-slowdown", "105%"],
            "--max-slowdown is 105%.",
        ),
        (
            "sim:gtx1080",
            ["--objective", "samples-per-joule", "--max-slowdown", "x"],
            "'x' is not a number",
        ),
    ],
)
def test_devices_without_energy_readings_are_refused_with_a_message(
    devices: str,
    options: list[str],
    said: str,
    own_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("dark.toml").write_text(LEAN.replace("power_watts = 200", ""))
    assert run(["balance", "-d", devices, *options]) == 2
    assert said in capsys.readouterr().err
