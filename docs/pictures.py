"""Makes the pictures of the app in docs/pictures from simulated runs: `python -m docs.pictures
[NAME ...]`.

Clock, host and readings are fixed, so that the same program makes the same pictures on every
machine.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from textual.pilot import Pilot

from docs import chart, moving
from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.devices.discover import discover
from evener.devices.machine import Machine
from evener.devices.sampler import History, Subscriber
from evener.devices.simulated import SimulatedSource
from evener.devices.snapshot_builder import SnapshotBuilder, TrainingRates
from evener.devices.types import HostSample, ProcessSample, Snapshot, value
from evener.live.files import LastStep, LiveDevice, ShareChange, Training
from evener.training.step_sums import StepSums
from evener.tui.app import EvenerApp

README = Path(__file__).resolve().parents[1] / "README.md"
FOLDER = Path(__file__).resolve().parent / "pictures"
AT_SECONDS = 1_790_070_000.0
PAIR = "sim:gtx1080ti,gtx1080"
STEPS = 10  # of each rank, that a picture shows
EIGHT = "sim:" + ",".join(["gtx1080ti", "gtx1080"] * 4)
FONT = 'font-family: "Fira Code", "DejaVu Sans Mono", "Liberation Mono", Menlo, Consolas, monospace'
HOST = HostSample(
    cpu_percent=23.0,
    load_1min=2.4,
    memory_used_bytes=19 << 30,
    memory_total_bytes=64 << 30,
    cores=16,
    hostname="horse",
)


class PicturePublisher:
    """Publishes simulated devices on a clock and with trainings that the picture sets."""

    def __init__(
        self, machine: Machine, speeds: Sequence[tuple[float, int]], reports: Sequence[Training]
    ) -> None:
        self.interval_seconds = 1.0
        self._clock = 0.0
        self._source = SimulatedSource(
            machine, 7, SnapshotBuilder(TrainingRates(lambda: ()), lambda: self._clock)
        )
        self._reports = tuple(reports)
        self._speeds = speeds
        self._history = History(600)

    def start(self, subscriber: Subscriber) -> None:
        """Simulate some minutes at once, then show the last moment."""
        for tick in range(150):
            self._set_loads(tick)
            self._clock += 1.0
            snapshot = self._sample()
            self._history.add(snapshot)
        subscriber(snapshot)

    @property
    def ticks(self) -> int:
        """How many ticks there were."""
        return self._history.count

    def times(self, newest: int = 600) -> tuple[float, ...]:
        """When the newest ticks were."""
        return self._history.times(newest)

    def _set_loads(self, tick: int) -> None:
        for place, (speed, share) in enumerate(self._speeds):
            works = tick > 20 + 7 * place and not 80 < tick < 92
            wave = 1.0 + 0.06 * ((tick * (place + 3)) % 7 - 3) / 3
            self._source.set_load(place, speed * wave if works else 0.0, share)

    def _sample(self) -> Snapshot:
        snapshot = self._source.sample()
        at_seconds = AT_SECONDS + self._clock
        return msgspec.structs.replace(
            snapshot,
            at_seconds=at_seconds,
            host=HOST,
            processes=self._processes(),
            reports=self._reports,
            sampling_seconds=0.001,
        )

    def _processes(self) -> tuple[ProcessSample, ...]:
        rows = []
        for place, device in enumerate(self._source.devices()):
            speed, share = self._speeds[place]
            rows.append(
                ProcessSample(
                    pid=41_200 + 7 * place,
                    start_time=AT_SECONDS - 4000 + place,
                    user=("ada", "grace", "alan")[place % 3],
                    device_id=device.id,
                    device_label=device.label,
                    memory_bytes=value(share * (8 << 20) + (1 << 30)),
                    sm_percent=value(88 - place),
                    cpu_percent=value(97 + place),
                    command=f"python train.py --plan plan.toml --rank {place}",
                    samples_per_second=value(speed),
                )
            )
        return tuple(rows)

    def close(self) -> None:
        """Nothing to stop."""

    def history(self, key: str, metric: str, newest: int) -> tuple[float | None, ...]:
        """A metric's newest values."""
        return self._history.values(key, metric, newest)

    def set_loads(self, loads: object) -> None:
        """Keep the picture's own loads."""


def _reports() -> tuple[Training, ...]:
    """Two ranks that train with the plan; the second one's card became slower."""
    at_seconds = AT_SECONDS + 150.0
    change = "SIM:0 slower by 21 % since step 880"
    facts: dict[str, Any] = {
        "training": "picture",
        "world": 2,
        "step_s": 0.804,
        "step_spread": 0.03,
        "input_s": 0.03,
        "between_s": 0.015,
        "plan_samples_per_second": 2106.0,
        "changes": (ShareChange(900, at_seconds - 1130, (820, 568), (768, 620), change),),
    }
    ranks = (("sim-0-gtx1080ti", 768, 0.528, 0.211), ("sim-1-gtx1080", 620, 0.731, 0.008))
    return tuple(
        Training(
            "torch", "train.py", rows / 0.804, 2421, at_seconds - 0.3,
            (LiveDevice(device, rank, rows, rows / 0.804, rows, own, waiting, own_spread=0.03),),
            rank=rank, pid=41_200 + 7 * rank, **facts, **_steps(own, waiting),
        )
        for rank, (device, rows, own, waiting) in enumerate(ranks)
    )  # fmt: skip


def _steps(own_s: float, meeting_s: float) -> dict[str, Any]:
    """The last steps of a rank, none quite like another, and their sums."""
    paces = [1 + 0.03 * ((7 * number) % 5 - 2) for number in range(STEPS)]
    last = [
        LastStep(2421 - STEPS + number, 0.03, own_s * pace, meeting_s * (2 - pace), 0.035)
        for number, pace in enumerate(paces, 1)
    ]
    sums = StepSums(
        STEPS,
        input_s=0.03 * STEPS,
        own_work_s=sum(each.own_work_s for each in last),
        meeting_s=sum(each.meeting_s for each in last),
        update_s=0.02 * STEPS,
        between_s=0.015 * STEPS,
    )
    return {"recent": sums, "last_steps": tuple(last)}


def _app(spec: str, theme: str, reports: Sequence[Training] = ()) -> EvenerApp:
    found = discover(spec)
    assert found.machine is not None
    speeds = [(each.samples_per_second, each.devices[0].batch) for each in reports] or [
        (1240.0, 820) if "Ti" in device.name else (866.0, 568) for device in found.devices
    ]
    publisher: Any = PicturePublisher(found.machine, speeds, reports)  # in the place of a Sampler
    return EvenerApp(publisher, devices=spec, trainable=found.devices, theme=theme)


async def _settle(pilot: Pilot[int], seconds: float = 0.6) -> None:
    await pilot.pause(seconds)


async def _wait(pilot: Pilot[int], condition: Callable[[], object]) -> None:
    for _ in range(600):
        if condition():
            return
        await pilot.pause(0.05)
    raise RuntimeError("the picture did not appear")


async def _monitor(pilot: Pilot[int]) -> None:
    await _settle(pilot)


async def _balance(pilot: Pilot[int]) -> None:
    """A whole search, at its verdict."""
    app = pilot.app
    assert isinstance(app, EvenerApp)
    app.start_session(Request(devices=PAIR, pace=0.0), app.trainable)
    await pilot.press("2")
    await _wait(pilot, lambda: app.balance.ended)
    app.balance = msgspec.structs.replace(app.balance, run="20260922-093000-a1b2")
    await _settle(pilot)


async def _setup(pilot: Pilot[int]) -> None:
    await pilot.press("2")
    await _settle(pilot)


async def _trainings(pilot: Pilot[int]) -> None:
    await pilot.press("4")
    await _settle(pilot)


async def _runs(pilot: Pilot[int]) -> None:
    await asyncio.to_thread(_make_runs)
    await pilot.press("3")
    await _settle(pilot, 1.5)
    await pilot.press("space", "down")
    await _settle(pilot)


def _make_runs() -> None:
    for spec, run, created in (
        ("sim:gtx1080,gtx1080", "20260922-091500-6cbb", "2026-09-22T09:15:00Z"),
        (PAIR, "20260922-093000-77d9", "2026-09-22T09:30:00Z"),
    ):
        now = mock.patch("time.strftime", return_value=created)
        with mock.patch("evener.balancer.run.new_run_id", return_value=run), now:
            session = Session(open_run(Request(devices=spec)))
        try:
            for _ in session.events():
                pass
        finally:
            session.close()


PICTURES: dict[str, tuple[str, tuple[int, int], str, Callable[[Pilot[int]], object]]] = {
    "monitor": (PAIR, (120, 36), "dark", _monitor),
    "monitor-light": (EIGHT, (120, 36), "light", _monitor),
    "monitor-80x24": (EIGHT, (80, 24), "dark", _monitor),
    "setup": (PAIR, (120, 30), "dark", _setup),
    "balance": (PAIR, (120, 38), "dark", _balance),
    "result": (PAIR, (96, 26), "dark", _balance),  # README's first picture
    "runs": (PAIR, (120, 36), "dark", _runs),
    "trainings": (PAIR, (120, 40), "dark", _trainings),
}


def _cleaned(svg: str) -> str:
    """The picture without web fonts and without random numbers."""
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: Fira Code, monospace", FONT, svg)
    svg = re.sub(r"terminal-\d+", "terminal-evener", svg)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


async def _draw(name: str) -> None:
    spec, size, theme, lead = PICTURES[name]
    app = _app(spec, theme, _reports() if lead is _trainings else ())
    async with app.run_test(size=size) as pilot:
        await lead(pilot)  # type: ignore[misc]
        app.clear_notifications()
        await _settle(pilot)
        (FOLDER / f"{name}.svg").write_text(_cleaned(app.export_screenshot(title="evener")))


def main() -> None:
    """Make every picture."""
    os.environ["TZ"] = "UTC"
    time.tzset()
    os.environ.pop("NO_COLOR", None)
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or (*PICTURES, "evener", "results"):
        with tempfile.TemporaryDirectory() as state:
            os.environ["XDG_STATE_HOME"] = state
            if name in PICTURES:
                asyncio.run(_draw(name))
            elif name == "results":
                (FOLDER / "results.svg").write_text(
                    chart.draw_results(chart.read_results(README.read_text()))
                )
            else:
                (FOLDER / f"{name}.svg").write_text(
                    asyncio.run(moving.draw(AT_SECONDS, HOST, FONT))
                )
        print(f"{name}: {(FOLDER / f'{name}.svg').stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    main()
