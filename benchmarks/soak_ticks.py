"""Measure what grows in the app per half hour of ticks.

  python -m benchmarks.soak_ticks [--ticks 10800] [--devices sim:gtx1080ti,gtx1080] [--lines]

Counts Python objects, cache entries and free memory that malloc keeps. The app runs on a terminal
over simulated devices whose load changes at every tick. Each tick moves their clock by a second, so
histories grow as in real use; keys are pressed and the terminal is resized as often per tick as in
`benchmarks.soak`. The app counts for itself; the report goes to stdout. `--lines` draws the
Monitor's lines without a terminal, so a working day takes minutes.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import functools
import gc
import math
import os
import signal
import struct
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec
import psutil
from textual.cache import LRUCache
from textual.events import Key

from benchmarks.monitor import Screen
from evener.devices.discover import discover
from evener.devices.sampler import HISTORY_TICKS, History, Sampler, Subscriber
from evener.devices.simulated import SimulatedSource
from evener.devices.snapshot_builder import SnapshotBuilder, TrainingRates
from evener.devices.types import Snapshot
from evener.live.reporter import Reporter
from evener.tui.app import EvenerApp
from evener.tui.view.alerts import AlertRules, AlertWatch
from evener.tui.view.devices import DEVICES, device_rows, group_rows
from evener.tui.view.monitor import host_line
from evener.tui.view.table import table_lines
from evener.tui.view.timelines import TimeView, draw_timelines, place_graphs

HALF_HOUR = 1800  # ticks
# two rounds of all keys at all sizes, so that the app is in the same state at each sample
SAMPLE_TICKS = 150
KEYS_OF_FIVE_TICKS = (0, 2, 4)
TICK_SECONDS, KEY_SECONDS = 0.015, 0.03
KEYS = (
    *"231",
    "question_mark",
    "escape",
    "enter",
    "escape",
    *"TTs",
    "down",
    "up",
    "slash",
    "a",
    "escape",
    "comma",
    "escape",
    "left",
    "left",
    "escape",
    "right_square_bracket",
    "left_square_bracket",
)
SIZES = ((40, 132), (24, 80), (60, 200))  # rows, columns
SHARE = 600  # rows of a training step
LINES_TICKS = 10  # ticks between two drawings without the app
WIDE, GRAPH_ROWS = 198, 35


class AppSample(msgspec.Struct, frozen=True):
    """The counts of the app at one tick."""

    tick: int
    memory_bytes: int
    objects: int  # Python objects after a garbage collection
    cached: int  # entries in all caches of limited size
    # resident after malloc has returned its free memory; in the last sample only
    trimmed_bytes: int | None = None


class TickPublisher(Sampler):
    """A snapshot publisher whose time passes only by `tick`."""

    interval_seconds = 1.0
    state = ""
    source: SimulatedSource

    def __init__(self, devices: str) -> None:
        machine = discover(devices).machine
        if machine is None:
            raise SystemExit(f"{devices} are no simulated devices; name some, like sim:t4,t4.")
        self._seconds = 0.0
        self._began = time.time()
        around = SnapshotBuilder(TrainingRates(clock=self._clock), self._clock)
        self.source = SimulatedSource(machine, builder=around)
        self._history = History(HISTORY_TICKS)
        self._lock = threading.Lock()
        self._reporter = Reporter()
        self._subscriber: Subscriber = lambda _: None
        self.started = threading.Event()

    def _clock(self) -> float:
        return self._seconds

    def start(self, subscriber: Subscriber | None = None) -> None:
        """Publish snapshots from now on."""
        self._subscriber = subscriber or self._subscriber
        self.started.set()

    def close(self, wait_seconds: float = 0.0) -> bool:
        """Publish nothing from now on."""
        self._subscriber = lambda _: None
        self._reporter.close()
        return True

    def set_loads(self, loads: Mapping[str, tuple[float | None, int]]) -> None:
        """Do nothing, because no search runs here."""

    def tick(self) -> None:
        """Pass one second: change the loads, train a step and publish a snapshot."""
        self._seconds += 1.0
        devices = self.source.devices()
        for position in range(len(devices)):
            wave = 500 * math.sin(self._seconds / 37 + position) + 20 * math.sin(
                1.7 * self._seconds
            )
            self.source.set_load(position, 600 + wave, SHARE)
        self._reporter.report(SHARE, devices=[devices[0].id], workload="soak")
        snapshot = msgspec.structs.replace(
            self.source.sample(), at_seconds=self._began + self._seconds
        )
        with self._lock:
            self._history.add(snapshot)
        self._subscriber(snapshot)


def run_app(devices: str, ticks: int, output: str) -> int:
    """Run the app on this terminal for `ticks`, and write a line per sample to `output`."""
    publisher = TickPublisher(devices)
    app = EvenerApp(publisher, devices=devices, trainable=publisher.source.devices())
    threading.Thread(target=_drive, args=(app, publisher, ticks, Path(output)), daemon=True).start()
    app.run()
    return app.return_code or 0


def draw_lines(devices: str, ticks: int) -> list[AppSample]:
    """Draw the Monitor's lines every tenth tick in this process, and return the samples.

    Histories and alerts are updated at each tick.
    """
    publisher, watch = TickPublisher(devices), AlertWatch(AlertRules())
    seen: list[Snapshot] = []

    def take(snapshot: Snapshot) -> None:
        seen[:] = [snapshot]
        watch.update(snapshot)

    publisher.start(take)
    samples = []
    for tick in range(1, ticks + 1):
        publisher.tick()
        (snapshot,) = seen
        if tick % LINES_TICKS == 0:
            draw_monitor(snapshot, publisher)
        if tick % SAMPLE_TICKS == 0 or tick == ticks:
            samples.append(take_sample(tick, tick == ticks))
    publisher.close()
    return samples


def draw_monitor(snapshot: Snapshot, past: TickPublisher) -> None:
    """Draw the lines of a Monitor of 200 x 60."""
    rows = group_rows(device_rows(snapshot, past.history), ())
    host_line(snapshot, WIDE)
    table_lines(DEVICES, rows, WIDE, len(rows) + 1)
    plan = place_graphs(snapshot.devices, past, WIDE, GRAPH_ROWS)
    if plan is not None:
        draw_timelines(plan, past, TimeView(2), WIDE)


def _drive(app: EvenerApp, publisher: TickPublisher, ticks: int, output: Path) -> None:
    """Play all ticks, then exit the app in any case."""
    publisher.started.wait()
    time.sleep(1.0)
    try:
        _play(app, publisher, ticks, output)
    finally:
        app.call_from_thread(app.exit)


def _play(app: EvenerApp, publisher: TickPublisher, ticks: int, output: Path) -> None:
    """Pass ticks, press keys and resize in turns; the app finishes each before the next."""
    pressed = 0
    with output.open("wb") as lines:
        for tick in range(1, ticks + 1):
            publisher.tick()
            _wait_for_app(app, TICK_SECONDS)
            if tick % 5 in KEYS_OF_FIVE_TICKS:
                _press(app, KEYS[pressed % len(KEYS)])
                pressed += 1
                if pressed % len(KEYS) == 0:
                    _resize(*SIZES[pressed // len(KEYS) % len(SIZES)])
                _wait_for_app(app, KEY_SECONDS)
            if tick % SAMPLE_TICKS == 0 or tick == ticks:
                _wait_for_app(app, 0.2)
                seen = app.call_from_thread(take_sample, tick, tick == ticks)
                lines.write(msgspec.json.encode(seen) + b"\n")
                lines.flush()


def _press(app: EvenerApp, key: str) -> None:
    app.post_message(Key(key, key if len(key) == 1 else None))


def _wait_for_app(app: EvenerApp, seconds: float) -> None:
    time.sleep(seconds)
    app.call_from_thread(lambda: None)  # waits for the calls before it


def _resize(rows: int, columns: int) -> None:
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    os.kill(os.getpid(), signal.SIGWINCH)


def take_sample(tick: int, trim: bool) -> AppSample:
    """Count the resources of this process."""
    gc.collect()
    objects = gc.get_objects()
    kind = type(functools.lru_cache(int))
    cached = sum(each.cache_info().currsize for each in objects if type(each) is kind)
    cached += sum(len(each) for each in objects if type(each) is LRUCache)
    process, count = psutil.Process(), len(objects)
    memory_bytes, trimmed = process.memory_info().rss, None
    if trim and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
        trimmed = process.memory_info().rss
    return AppSample(tick, memory_bytes, count, cached, trimmed)


def report(samples: Sequence[AppSample], devices: str, written_bytes: int, seconds: float) -> str:
    """Return a Markdown table with the sample medians of each half hour."""
    ticks = samples[-1].tick
    lines = [
        (
            f"`python -m benchmarks.soak_ticks --ticks {ticks} --devices {devices}`, "
            f"{time.strftime('%Y-%m-%d')}:"
        ),
        (
            f"{ticks} ticks in {seconds / 60:.0f} minutes, {written_bytes / ticks / 1024:.0f} KiB "
            f"drawn at each."
        ),
        "",
        "| ticks | memory | Python's objects | entries of bounded caches |",
        "| --- | ---: | ---: | ---: |",
    ]
    for first in range(0, ticks, HALF_HOUR):
        span = [each for each in samples if first < each.tick <= first + HALF_HOUR]
        memory, objects, cached = (
            median(getattr(each, name) for each in span)
            for name in ("memory_bytes", "objects", "cached")
        )
        lines.append(
            f"| {first + 1} – {span[-1].tick} | {memory / 1e6:.2f} MB | {objects:.0f} | "
            f"{cached:.0f} |"
        )
    last = samples[-1]
    if last.trimmed_bytes is not None:
        freed = last.memory_bytes - last.trimmed_bytes
        lines += [
            "",
            (
                f"Of the last {last.memory_bytes / 1e6:.1f} MB, {freed / 1e6:.1f} MB were free "
                f"memory held by malloc."
            ),
        ]
    return "\n".join(lines)


def main() -> int:
    """Run the app on its own terminal and print its counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ticks", type=int, default=6 * HALF_HOUR)
    parser.add_argument("--devices", default="sim:gtx1080ti,gtx1080,t4,t4")
    parser.add_argument("--lines", action="store_true", help="draw lines alone, without the app")
    options = parser.parse_args()
    if options.lines:
        begun = time.perf_counter()
        samples = draw_lines(options.devices, options.ticks)
        print(report(samples, f"{options.devices} --lines", 0, time.perf_counter() - begun))
        return 0
    with tempfile.TemporaryDirectory() as home:
        output = Path(home) / "samples"
        call = f"run_app({options.devices!r}, {options.ticks}, {str(output)!r})"
        variables = {
            **os.environ,
            "XDG_STATE_HOME": home,
            "XDG_CONFIG_HOME": home,
            "EVENER_LIVE_DIR": f"{home}/live",
        }
        screen = Screen(
            f"import sys; from benchmarks.soak_ticks import run_app; sys.exit({call})", variables
        )
        while screen.process.is_running() and screen.process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.2)
        seconds, code = time.perf_counter() - screen.started, screen.close()
        if code or not output.exists() or not output.read_bytes():
            print(screen.seen.decode(errors="replace")[-2000:], file=sys.stderr)
            return 1
        samples = msgspec.json.decode(
            b"[" + b",".join(output.read_bytes().splitlines()) + b"]", type=list[AppSample]
        )
    print(report(samples, options.devices, screen.written_bytes, seconds))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
