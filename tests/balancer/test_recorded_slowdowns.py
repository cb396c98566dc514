"""Heat and a power cap are recognized from a driver's answers, by a search and by a training.

The answers under a power cap are recorded: two H200, of which the second computes matrix products
from tick 12 to 24. Those under heat are invented from NVML's documentation: see
tests/support/heat_tape.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evener.balancer.probes.block_timing import Block
from evener.balancer.probes.interference import ProbeInterference
from evener.balancer.result.training_limits import find_training_limits
from evener.balancer.search.layouts import LayoutOptions
from evener.balancer.search.report import SearchReport
from evener.balancer.types import Interval, PartSeconds, Probe, Problem, Result, Stage, Timed, solo
from evener.devices.nvidia import gpu_reader
from evener.devices.nvidia.gpu_reader import GpuReader
from evener.devices.nvidia.source import NvmlSource
from evener.devices.snapshot_builder import SnapshotBuilder, TrainingRates
from evener.devices.types import Device
from evener.live.files import LiveDevice, LiveRecord
from evener.live.reporter import Training
from evener.training.limits import LimitKind, TrainingLimit
from evener.training.step_limits import TrainingAnalysis
from evener.tui.view.ranks import find_causes, place_ranks
from tests.support.heat_tape import SOFTWARE_MHZ, make_hot
from tests.support.nvml_tape import NvmlPlayer

TAPE = Path(__file__).parents[1] / "recorded" / "h200x2-nvml.tape"
BEFORE = 12.1  # a time when the second GPU's clock is still its highest
BEGIN, END = 16.1, 20.1  # the recorder asked for the counters every four seconds
POWER_MHZ, HIGHEST_MHZ = 1440, 1980  # at tick 20
STEPS = 40
STEP_S = (END - BEGIN) / STEPS
LAYOUT = solo(1, 0, 64)


Change = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


@pytest.fixture
def tape(tmp_path: Path) -> Callable[..., NvmlPlayer]:
    """Return a function that changes the recording and returns a player of it."""

    def make(change: Change = list) -> NvmlPlayer:
        header, *rows = map(json.loads, TAPE.read_text().splitlines())
        path = tmp_path / "tape"
        path.write_text("\n".join(map(json.dumps, (header, *change(rows)))))
        return NvmlPlayer(path)

    return make


def with_higher_clock(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows like those of GeForce cards, whose driver names a higher clock than they ever
    reach.
    """
    for row in rows:
        if row["call"] == "nvmlDeviceGetMaxClockInfo":
            row["answers"] = [[at, 2500] for at, _ in row["answers"]]
    return rows


def name_in_search(player: NvmlPlayer, monkeypatch: pytest.MonkeyPatch) -> list[TrainingLimit]:
    """Return the limits of a step that a probe timed on the second GPU meanwhile."""
    device = Device("GPU-1", 1, "NVIDIA H200", "gpu", None)
    clock = SimpleNamespace(monotonic=lambda: player.now)
    monkeypatch.setattr(gpu_reader, "time", clock)
    player.now = BEFORE
    reader = GpuReader(player, player.nvmlDeviceGetHandleByIndex(1), device)
    watch: Any = SimpleNamespace(read=lambda _: {0: reader.vitals(False)})
    watch.read(())
    player.now = BEGIN
    interference = ProbeInterference(watch, (0,))
    player.now = END
    (part,) = interference.annotate(Block(STEPS, END - BEGIN, parts=(PartSeconds(),))).parts
    seconds = PartSeconds(
        heat_seconds=part.heat_seconds / STEPS, power_seconds=part.power_seconds / STEPS
    )
    seen = Timed(
        probe=Probe(LAYOUT, Stage.CHECK, 4.0),
        step_seconds=STEP_S,
        low_seconds=STEP_S,
        high_seconds=STEP_S,
        steps=STEPS,
        memory_bytes=(None,),
        device_seconds=(STEP_S,),
        first_step_seconds=STEP_S,
        elapsed_seconds=5.0,
        parts=(seconds,),
    )
    rate = LAYOUT.global_batch / STEP_S
    report = SearchReport(
        problem=Problem(1, (None,)),
        options=LayoutOptions(),
        chosen=Result(LAYOUT, Interval(rate, rate, rate), 1),
        turns={LAYOUT: (seen,)},
    )
    return list(find_training_limits(report, [seen], (device,)))


def name_in_training(player: NvmlPlayer) -> list[str]:
    """Return the causes on the Trainings screen for a training on the second GPU, at tick 22."""
    builder = SnapshotBuilder(TrainingRates(lambda: ()), lambda: player.now)
    source = NvmlSource(library=player, builder=builder)
    for tick in range(23):
        player.now = tick + 0.1
        snapshot = source.sample()
    source.close()
    sample = snapshot.devices[1]
    live = LiveDevice(sample.device.id, 1, 64, 640.0)
    now = time.time()
    record = LiveRecord("torch", "train.py", 640.0, 100, now, (live,))
    report = Training(**{name: getattr(record, name) for name in record.__struct_fields__}, pid=1)
    ranks = list(place_ranks(report, {("", sample.device.id): sample}, now))
    causes = find_causes(ranks, TrainingAnalysis(STEP_S, (), (), None), ())
    return [cause.kind for cause in causes]


@pytest.mark.parametrize(
    ("change", "kind", "mhz"),
    [
        (list, LimitKind.POWER, POWER_MHZ),
        (with_higher_clock, LimitKind.POWER, POWER_MHZ),
        (make_hot, LimitKind.HEAT, SOFTWARE_MHZ[-1]),
        (partial(make_hot, counters=False), LimitKind.HEAT, SOFTWARE_MHZ[-1]),
        (partial(make_hot, by_hardware=True), LimitKind.HEAT, HIGHEST_MHZ // 2),
    ],
    ids=["power cap", "GeForce", "heat", "heat, no counters", "heat, halved clocks"],
)
def test_what_slowed_a_gpu_is_named(
    change: Change,
    kind: LimitKind,
    mhz: int,
    tape: Callable[..., NvmlPlayer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (limit,) = name_in_search(tape(change), monkeypatch)
    assert (limit.kind, limit.by) == (kind, "GPU:1")
    assert limit.share == pytest.approx(1 - mhz / HIGHEST_MHZ, rel=0.1)
    assert limit.gain_low < HIGHEST_MHZ / mhz - 1 < limit.gain_high
    assert name_in_training(tape(change)) == [kind.value]
