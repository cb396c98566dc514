"""A driver's real answers, recorded on H200s, read again; nvidia-smi's rows of the same seconds bear witness."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.nvml_tape import Player, Recorder
from devices.base import DeviceSample, Reading, Snapshot, State
from devices.nvml import NvmlSource
from devices.surroundings import Surroundings
from devices.trainings import TrainingRates


def sampled(library: Any, clock: Callable[[], float], times: int, move: Callable[[int], None]) -> list[Snapshot]:
    """Looks at what a library tells, `move` being told the number of each before it."""
    source = NvmlSource(library=library, surroundings=Surroundings(TrainingRates(lambda: ())), clock=clock)
    found = []
    for look in range(times):
        move(look)
        found.append(source.sample())
    source.close()
    return found


def told_of(sample: DeviceSample, metric: str) -> tuple[State, float | None]:
    """A metric's state and value, whatever its age."""
    reading: Reading = getattr(sample, metric)
    return reading.state, reading.value


def test_a_tape_tells_what_the_driver_told(fake_nvml: Callable[..., Any], tmp_path: Path) -> None:
    nvml = fake_nvml(gpus=2)
    recorder = Recorder(nvml)
    heats = [40, 55, 55, 70, 60, 61, 62, 63]

    def heat(look: int) -> None:
        nvml.gpus[1].temperature = heats[look]
        nvml.advance(1.0)
        recorder.began -= 1.0

    told = sampled(recorder, lambda: time.monotonic() - recorder.began, len(heats), heat)
    (tmp_path / "tape.jsonl").write_text("\n".join(recorder.lines()))
    player = Player(tmp_path / "tape.jsonl")

    def wind(look: int) -> None:
        player.now = look + 1.5

    played = sampled(player, lambda: player.now, len(heats), wind)
    for one, other in zip(told[1:], played[1:], strict=True):
        for before, after in zip(one.devices, other.devices, strict=True):
            assert after.device == before.device
            for metric in ("temperature_celsius", "memory_used_bytes", "sm_percent", "power_watts", "fan_percent"):
                assert told_of(after, metric) == told_of(before, metric), metric


def test_what_is_no_tape_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="no tape"):
        Player(tmp_path / "other.jsonl")
