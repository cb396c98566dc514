"""Check that nothing grows in balance sessions, in the sampler and in the app on a terminal.

  python -m benchmarks.soak [--sessions 500] [--minutes 30] [--output docs/benchmarks/soak.md]

Each part runs in its own process, whose resident memory, file descriptors and threads are sampled
from outside. Growth is the median of the last tenth of the samples minus that of the second tenth,
so that what is loaded once doesn't count.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import pty
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median

import msgspec
import psutil

from evener.balancer.events import Finished
from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.devices.discover import discover, open_source
from evener.devices.sampler import Sampler
from evener.live.reporter import Reporter
from evener.tui.cli.monitor import snapshot_text

LOOK_SECONDS = 0.5
KEY_SECONDS = 1.7
END_SECONDS = 20.0
MOST_GROWTH_BYTES = 5_000_000
MACHINES = ("sim:gtx1080ti,gtx1080", "sim:t4,t4", "sim:gtx1080ti", "sim:gtx1080ti,gtx1080,t4,t4")
KEYS = (b"2", b"3", b"1", b"?", b"\x1b", b"T", b"T", b"s", b"\x1b[B", b"\x1b[A", b"/", b"\x1b")
SIZES = ((40, 132), (24, 80), (60, 200))  # rows, columns


class UsageSample(msgspec.Struct, frozen=True):
    """The resources of a process at one moment."""

    memory_bytes: int
    descriptors: int
    threads: int


class Part(msgspec.Struct, frozen=True):
    """The samples of one process from its start to its exit."""

    name: str
    samples: tuple[UsageSample, ...]
    seconds: float
    exit_code: int

    def grown(self, field: str) -> float:
        """Return the median of the last tenth minus that of the second."""
        tenth = max(1, len(self.samples) // 10)
        values = [getattr(sample, field) for sample in self.samples]
        return float(median(values[-tenth:]) - median(values[tenth : 2 * tenth] or values))

    def most(self, field: str) -> int:
        """Return the highest value of all samples."""
        return int(max(getattr(sample, field) for sample in self.samples))

    @property
    def sound(self) -> bool:
        """True if the process exited with success and nothing grew."""
        still = self.grown("descriptors") <= 0 and self.grown("threads") <= 0
        return self.exit_code == 0 and still and self.grown("memory_bytes") < MOST_GROWTH_BYTES


def main() -> int:
    """Run the parts at the same time; print and write the table; return 1 if anything grew."""
    options = _options()
    if options.part == "sessions":
        return run_sessions(options.sessions)
    if options.part == "monitor":
        return run_monitor(options.minutes * 60)
    with tempfile.TemporaryDirectory() as home:
        parts = _run_parts(options.sessions, options.minutes, home)
    text = report(parts, options.sessions)
    print(text)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)
    return 0 if all(part.sound for part in parts) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--output", type=Path, help="write the report here, as Markdown")
    parser.add_argument("--part", choices=("sessions", "monitor"), help=argparse.SUPPRESS)
    options: argparse.Namespace = parser.parse_args()
    return options


def run_sessions(count: int) -> int:
    """Run `count` searches one after the other; return 1 if one finds no plan."""
    for number in range(count):
        session = Session(open_run(Request(devices=MACHINES[number % len(MACHINES)], seed=number)))
        *_, last = session.events()
        session.close()
        if not isinstance(last, Finished):
            return 1
    return 0


def run_monitor(seconds: float) -> int:
    """Sample the CPU slices ten times a second, report a training run, and draw each snapshot."""
    reporter = Reporter()
    drawn = 0
    with closing(Sampler(open_source(discover("cpu")), 0.1)) as sampler:
        sampler.start()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            reporter.report(8, devices=["cpu-0-of-2"], workload="soak")
            snapshot = sampler.latest()
            if snapshot is not None:
                drawn += bool(snapshot_text(snapshot, 132, colour=True))
                sampler.history(snapshot.devices[0].device.id, "utilization_percent")
            time.sleep(0.1)
    reporter.close()
    return 0 if drawn else 1


def _run_parts(sessions: int, minutes: float, home: str) -> list[Part]:
    environment = {
        **os.environ,
        "XDG_STATE_HOME": home,
        "EVENER_LIVE_DIR": f"{home}/live",
        "TERM": "xterm-256color",
    }
    this = [
        sys.executable,
        "-m",
        "benchmarks.soak",
        "--sessions",
        str(sessions),
        "--minutes",
        str(minutes),
    ]
    found: list[Part] = []

    def follow(name: str, command: list[str], seconds: float | None) -> None:
        watched = _watch_on_terminal if seconds is not None else _watch
        found.append(watched(name, command, environment, seconds))

    threads = [
        threading.Thread(
            target=follow,
            args=(f"{sessions} balance sessions", [*this, "--part", "sessions"], None),
        ),
        threading.Thread(
            target=follow, args=("sampler and plain view", [*this, "--part", "monitor"], None)
        ),
        threading.Thread(
            target=follow,
            args=(
                "the app on a terminal",
                [sys.executable, "-m", "evener", "--devices", "cpu"],
                minutes * 60,
            ),
        ),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found, key=lambda part: part.name)


def _watch(name: str, command: list[str], environment: dict[str, str], _: float | None) -> Part:
    """Sample a process until it exits by itself."""
    started = time.monotonic()
    samples: list[UsageSample] = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            _sample(process.pid, samples)
            time.sleep(LOOK_SECONDS)
    return Part(name, tuple(samples), time.monotonic() - started, process.returncode)


def _watch_on_terminal(
    name: str, command: list[str], environment: dict[str, str], seconds: float | None
) -> Part:
    """Sample a process on its own terminal, press keys and resize it, then press q."""
    started = time.monotonic()
    samples: list[UsageSample] = []
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        pressed, next_key, next_look = 0, started + 5, started
        while process.poll() is None and time.monotonic() < started + (seconds or 0):
            _drain(ours, 0.1)
            if time.monotonic() >= next_look:
                next_look += LOOK_SECONDS
                _sample(process.pid, samples)
            if time.monotonic() >= next_key:
                next_key += KEY_SECONDS
                os.write(ours, KEYS[pressed % len(KEYS)])
                _resize(ours, *SIZES[pressed // len(KEYS) % len(SIZES)])
                # the kernel doesn't send it, as no process has this controlling terminal
                process.send_signal(signal.SIGWINCH)
                pressed += 1
        _leave(process, ours)
    os.close(ours)
    return Part(name, tuple(samples), time.monotonic() - started, process.returncode)


def _leave(process: subprocess.Popen[bytes], terminal: int) -> None:
    """Close dialogs and press q; kill the process if it doesn't exit."""
    until = time.monotonic() + END_SECONDS
    while process.poll() is None and time.monotonic() < until:
        for key in (b"\x1b", b"q"):
            os.write(terminal, key)
            _drain(terminal, 1.0)
    process.kill()


def _sample(pid: int, samples: list[UsageSample]) -> None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            samples.append(
                UsageSample(process.memory_info().rss, process.num_fds(), process.num_threads())
            )
    except psutil.Error:
        return  # the process has just exited


def _drain(terminal: int, seconds: float) -> None:
    """Read the output, so that the terminal never blocks."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and select.select([terminal], [], [], left)[0]:
        try:
            os.read(terminal, 1 << 16)
        except OSError:
            return


def _resize(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def report(parts: Sequence[Part], sessions: int) -> str:
    """Return the table as Markdown, with the machine."""
    lines = [
        "# Soak: what grows",
        "",
        f"`python -m benchmarks.soak --sessions {sessions} --minutes "
        f"{max(p.seconds for p in parts) / 60:.0f}`, "
        f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {os.cpu_count()} "
        f"logical CPUs, "
        f"{platform.system()}.",
        "",
        (
            "Each part is a process of its own, sampled twice a second from outside. Growth is "
            "the median of the last"
        ),
        (
            "tenth of the samples minus that of the second tenth. The app got keys and changes of "
            "its terminal's size."
        ),
        "",
        "| part | minutes | samples | memory, most | memory, growth | descriptors, most (growth) "
        "| threads, most (growth) | ended with | sound |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    lines += [_row(part) for part in parts]
    return "\n".join((*lines, "", f"Sound: exit code 0, memory grew by less than "
    f"{MOST_GROWTH_BYTES / 1e6:.0f} MB, "
                      "descriptors and threads not at all.", ""))  # fmt: skip


def _row(part: Part) -> str:
    cells = (
        part.name,
        f"{part.seconds / 60:.1f}",
        str(len(part.samples)),
        f"{part.most('memory_bytes') / 1e6:.1f} MB",
        f"{part.grown('memory_bytes') / 1e6:+.2f} MB",
        f"{part.most('descriptors')} ({part.grown('descriptors'):+.0f})",
        f"{part.most('threads')} ({part.grown('threads'):+.0f})",
        str(part.exit_code),
        "yes" if part.sound else "NO",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
