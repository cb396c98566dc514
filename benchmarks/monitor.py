"""Measure the cost of the monitor compared with an empty Textual app.

`python -m benchmarks.monitor` measures CPU, first paint, memory and `monitor --once`, starts each
program on a pseudo-terminal of 160 x 48, and writes docs/benchmarks/monitor.md. CPU is user plus
system time of the process, from /proc, in a window after the start. Rows with training runs have
three of them with two ranks each, which report twice a second.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import platform
import pty
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import psutil

from evener.live.files import (
    LiveDevice,
    LiveRecord,
    file_name,
    prepare_folder,
    replace_file,
    start_ticks,
)

COLUMNS, ROWS = 160, 48
DEVICES = "sim:" + ",".join(["gtx1080ti", "gtx1080"] * 4)
REPORT = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "monitor.md"
SETTLE_SECONDS = 5.0

EMPTY = """
from textual.app import App
from textual.widgets import Static
class Empty(App):
    def compose(self): yield Static("READY")
Empty().run()
"""
EVENER = f"""
import sys
from evener.tui import start
start._is_first_start = lambda options: False  # its card would lie over the Monitor
sys.exit(start.run_app({DEVICES!r}))
"""
LOADED = f"""
import sys
from evener.tui import start
start._is_first_start = lambda options: False
from evener.devices.sampler import Sampler
def loaded(self, *subscriber):
    for place, _ in enumerate(self.source.devices()):
        self.source.set_load(place, 1100.0 - 40 * place, 600)
    begin(self, *subscriber)
begin, Sampler.start = Sampler.start, loaded
sys.exit(start.run_app({DEVICES!r}))
"""
NVITOP = "from nvitop.cli import main; main()"
ONCE = ("evener.__main__", ["monitor", "--once", "--devices", DEVICES])


class Cost(msgspec.Struct, frozen=True):
    """The resources that a program used."""

    name: str
    cpu_percent: float  # percent of one core
    first_paint_seconds: float
    memory_mib: float  # resident memory
    written_kib_per_second: float  # written to the terminal


class Screen:
    """A program on a pseudo-terminal whose output is read continuously, as by a terminal."""

    def __init__(
        self, code: str, variables: Mapping[str, str] = os.environ, kept_bytes: int = 1 << 20
    ) -> None:
        self._kept_bytes = kept_bytes  # how much of the start of the output is kept
        self._primary, secondary = pty.openpty()
        fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        environment = {**variables} | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self.started = time.perf_counter()
        self._child = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=secondary,
            stdout=secondary,
            stderr=secondary,
            env=environment,
            start_new_session=True,
        )
        os.close(secondary)
        self.process = psutil.Process(self._child.pid)
        self.seen = bytearray()
        self.written_bytes = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                if select.select([self._primary], [], [], 0.005)[0]:
                    part = os.read(self._primary, 65536)
                    self.written_bytes += len(part)
                    if len(self.seen) < self._kept_bytes:
                        self.seen += part
            except OSError:
                return

    def press(self, keys: bytes) -> None:
        """Send keys, like a keyboard."""
        os.write(self._primary, keys)

    def wait_for(self, wanted: bytes, seconds: float = 30.0) -> float:
        """Wait until the text appears; return the seconds since the start."""
        while wanted not in self.seen:
            if time.perf_counter() - self.started > seconds or self._child.poll() is not None:
                raise RuntimeError(f"never saw {wanted!r}: {bytes(self.seen[-500:])!r}")
            time.sleep(0.002)
        return time.perf_counter() - self.started

    def close(self) -> int:
        """Terminate the program unless it has exited; return its exit code."""
        if self._child.poll() is None:
            self._child.terminate()
        code = self._child.wait(20)
        os.close(self._primary)
        return code


@contextlib.contextmanager
def training(folder: Path) -> Iterator[None]:
    """Report three training runs of this process twice a second within the context."""
    ended = threading.Event()
    prepare_folder(folder)
    files = [
        folder / file_name(os.getpid(), start_ticks(os.getpid()) or 0, serial)
        for serial in range(6)
    ]

    def report() -> None:
        for step in range(1 << 30):
            for rank, path in enumerate(files):
                replace_file(path, msgspec.json.encode(_record(rank, step)))
            if ended.wait(0.5):
                return

    thread = threading.Thread(target=report)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for path in files:
            path.unlink()


def _record(rank: int, step: int) -> LiveRecord:
    """Return a record in which every value changes with the step."""
    wave = 1 + 0.05 * ((step * (rank + 3)) % 7 - 3) / 3
    device = LiveDevice(
        f"sim-{rank}-{('gtx1080ti', 'gtx1080')[rank % 2]}",
        rank,
        600,
        1100 * wave,
        300,
        0.1 * wave,
        0.04 / wave,
    )
    return LiveRecord(
        "torch",
        "train.py",
        1100 * wave,
        step,
        time.time(),
        (device,),
        9e4 * wave,
        0.1,
        training=f"training {rank // 2}",
        rank=rank % 2,
        world=2,
        step_s=0.15 * wave,
        step_spread=0.03,
        input_s=0.002,
        plan_samples_per_second=2500.0,
    )


def measure(name: str, code: str, wanted: bytes, seconds: float, keys: bytes = b"") -> Cost:
    """Start a program, press keys, wait until it idles, and measure its CPU time for `seconds`."""
    screen = Screen(code)
    try:
        first = screen.wait_for(wanted)
        screen.press(keys)
        time.sleep(SETTLE_SECONDS)
        cpu_before, bytes_before, begun = (
            _cpu(screen.process),
            screen.written_bytes,
            time.perf_counter(),
        )
        time.sleep(seconds)
        took = time.perf_counter() - begun
        cpu = (_cpu(screen.process) - cpu_before) / took
        written = (screen.written_bytes - bytes_before) / took / 1024
        return Cost(name, 100 * cpu, first, screen.process.memory_info().rss / 2**20, written)
    finally:
        screen.close()


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def first_paint(code: str, wanted: bytes, repeats: int) -> tuple[float, float]:
    """Return the median wall and CPU seconds of a warm start until the first row of values."""
    times = []
    for _ in range(repeats):
        screen = Screen(code)
        try:
            times.append((screen.wait_for(wanted), _cpu(screen.process)))
        finally:
            screen.close()
    wall, cpu = (statistics.median(each) for each in zip(*times, strict=True))
    return wall, cpu


def once_seconds(repeats: int) -> tuple[float, float]:
    """Return the median wall and CPU seconds of a warm `evener monitor --once`."""
    module, arguments = ONCE
    times = []
    for _ in range(repeats + 1):
        begun, before = time.perf_counter(), _children_cpu()
        subprocess.run(
            [sys.executable, "-m", module, *arguments], check=True, stdout=subprocess.DEVNULL
        )
        times.append((time.perf_counter() - begun, _children_cpu() - before))
    wall, cpu = (statistics.median(each) for each in zip(*times[1:], strict=True))
    return wall, cpu


def _children_cpu() -> float:
    """Return the CPU seconds of all children that have exited."""
    times = os.times()
    return times.children_user + times.children_system


def nvml_works() -> bool:
    """True if nvitop can run here."""
    try:
        import nvitop  # noqa: F401
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return False
    return True


def report(
    costs: list[Cost],
    paint: tuple[float, float],
    once: tuple[float, float],
    seconds: float,
    load: float,
    with_nvitop: bool,
) -> str:
    """Return the page with measured values and targets."""
    rows = [
        f"| {cost.name} | {cost.cpu_percent:.2f} % | {cost.memory_mib:.0f} MiB"
        f" | {cost.written_kib_per_second:.1f} KiB/s |"
        for cost in costs
    ]
    app = costs[1]
    missing = (
        ""
        if with_nvitop
        else "nvitop was not measured: there is no NVIDIA driver on this machine.\n"
    )
    busy = (
        "Other programs used all cores meanwhile: times until something is there are longer by "
        "that, those of CPU aren't.\n"
        if load > (os.cpu_count() or 1)
        else ""
    )
    return f"""# The cost of the monitor

Written by `python -m benchmarks.monitor` on {platform.processor() or platform.machine()}, {os.cpu_count()} cores,
Python {platform.python_version()}; load average at the start {load:.1f}. Eight simulated devices, one reading a second,
a terminal of {COLUMNS} x {ROWS}, {seconds:.0f} s each after {SETTLE_SECONDS:.0f} s of warm-up. CPU is user plus system
time of the whole process, as a share of one core.

| program | CPU | memory (resident) | written to the terminal |
| --- | --- | --- | --- |
{chr(10).join(rows)}

| | measured | target |
| --- | --- | --- |
| CPU of the Monitor screen, with three trainings | {app.cpu_percent:.2f} % | at most 1 % |
| first paint, warm, median | {paint[0]:.2f} s | at most 0.5 s |
| CPU until then, median | {paint[1]:.2f} s | |
| `evener monitor --once`, median | {once[0]:.2f} s | at most 0.3 s |
| CPU of it, median | {once[1]:.2f} s | |
| memory | {app.memory_mib:.0f} MiB | at most 70 MiB |

{busy}{missing}A working device changes every figure of its row at each reading, an idle one few.
"""  # noqa: E501


def _measure_trainings(folder: Path, seconds: float) -> tuple[Cost, ...]:
    with training(folder / "live"):
        return (
            measure("evener, 8 working devices, 3 trainings: Monitor", LOADED, b"SIM:7", seconds),
            measure("the same: Trainings", LOADED, b"SIM:7", seconds, b"4"),
        )


def main() -> None:
    """Measure everything and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=REPORT)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = os.environ["XDG_CONFIG_HOME"] = state
        os.environ["EVENER_LIVE_DIR"] = f"{state}/live"
        costs = [
            measure("an empty Textual app", EMPTY, b"READY", given.seconds),
            *_measure_trainings(Path(state), given.seconds),
            measure("evener, 8 working devices", LOADED, b"SIM:7", given.seconds),
            measure("evener, 8 idle devices", EVENER, b"SIM:7", given.seconds),
        ]
        with_nvitop = nvml_works()
        if with_nvitop:
            costs.append(measure("nvitop", NVITOP, b"NVITOP", given.seconds))
        with training(Path(os.environ["EVENER_LIVE_DIR"])):
            paint = first_paint(EVENER, b"SIM:7", given.repeats)
            once = once_seconds(given.repeats)
    text = report(costs, paint, once, given.seconds, load, with_nvitop)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
