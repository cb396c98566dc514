"""What a scrape of `evener monitor --metrics` costs: 1,000 of them, 8 simulated devices, 3
trainings.

`python -m benchmarks.metrics` writes docs/benchmarks/metrics.md. prometheus-client's own parser
reads every answer.
"""

from __future__ import annotations

import argparse
import http.client
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from evener.live.files import (
    LiveDevice,
    LiveRecord,
    file_name,
    prepare_folder,
    replace_file,
    start_ticks,
)

DEVICES = "sim:" + ",".join(["gtx1080ti", "gtx1080"] * 4)
IDS = [f"sim-{index}-{name}" for index, name in enumerate(["gtx1080ti", "gtx1080"] * 4)]
WARM_SCRAPES = 200
IDLE_SECONDS = 10.0
REPORT = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "metrics.md"


def write_trainings(folder: Path) -> None:
    """Live files of three trainings on four, two and two of the devices, one for each rank."""
    prepare_folder(folder)
    pid = os.getpid()
    for position, identity in enumerate(IDS):
        training = max(0, position // 2 - 1)
        device = LiveDevice(identity, position, 128, 900.0, 64, 0.1, 0.02)
        record = LiveRecord(
            "torch",
            f"model{training}",
            900.0,
            1000,
            time.time(),
            (device,),
            training=f"t{training}",
            rank=position,
            world=4,
            step_s=0.13,
            step_spread=0.04,
            input_s=0.001,
            plan_samples_per_second=7000.0,
        )
        replace_file(
            folder / file_name(pid, start_ticks(pid) or 0, position), msgspec.json.encode(record)
        )


@contextmanager
def running_monitor(folder: Path) -> Iterator[tuple[psutil.Process, int]]:
    """`evener monitor --metrics` in a process of its own, and its port."""
    command = [sys.executable, "-m", "evener", "monitor", "-d", DEVICES, "--metrics", "127.0.0.1:0"]
    environment = os.environ | {"EVENER_LIVE_DIR": str(folder)}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
    ) as child:
        assert child.stderr is not None
        try:
            port = int(child.stderr.readline().split(b":")[-1].split(b"/")[0])
            while not scrape(port):
                time.sleep(0.05)
            yield psutil.Process(child.pid), port
        finally:
            child.terminate()


def scrape(port: int) -> str:
    """One answer, over a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def cpu_seconds(process: psutil.Process) -> float:
    """User plus system time so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(scrapes: int) -> str:
    """The page."""
    with tempfile.TemporaryDirectory() as folder:
        write_trainings(Path(folder))
        with running_monitor(Path(folder)) as (process, port):
            for _ in range(WARM_SCRAPES):
                scrape(port)
            idle = cpu_seconds(process)
            time.sleep(IDLE_SECONDS)
            idle_part = (cpu_seconds(process) - idle) / IDLE_SECONDS
            before, cpu, samples, took = (
                _size(process),
                cpu_seconds(process),
                list[int](),
                list[float](),
            )
            began = time.perf_counter()
            for number in range(scrapes):
                if number % 100 == 0:
                    write_trainings(
                        Path(folder)
                    )  # as trainings do, so that their figures stay current
                begun = time.perf_counter()
                text = scrape(port)
                took.append(time.perf_counter() - begun)
                samples.append(
                    sum(len(family.samples) for family in text_string_to_metric_families(text))
                )
            cpu = cpu_seconds(process) - cpu - idle_part * (time.perf_counter() - began)
            after = _size(process)
    ordered = sorted(took)
    rows = [
        (
            "median of a scrape, with its connection",
            f"{1e3 * statistics.median(took):.2f} ms",
            "at most 5 ms",
        ),
        ("99 of 100", f"{1e3 * ordered[int(0.99 * len(ordered))]:.2f} ms", ""),
        ("CPU for each", f"{1e3 * cpu / scrapes:.2f} ms", ""),
        (
            "memory, before and after",
            f"{before[0] / 2**20:.1f} and {after[0] / 2**20:.1f} MiB",
            "no growth",
        ),
        ("threads, before and after", f"{before[1]} and {after[1]}", "no growth"),
        ("open files, before and after", f"{before[2]} and {after[2]}", "no growth"),
    ]
    lines = "\n".join(f"| {what} | {figure} | {target} |" for what, figure, target in rows)
    return f"""# The cost of metrics

Written by `python -m benchmarks.metrics` on {platform.processor() or platform.machine()}, {os.cpu_count()} cores,
Python {platform.python_version()}; load average at the end {os.getloadavg()[0]:.1f}. `evener monitor --metrics` with
eight simulated devices and three trainings of four, two and two ranks; {scrapes:,} scrapes one after the other, each
with {max(samples)} samples. All were valid for prometheus-client's own parser. The CPU that the monitor takes without
scrapes, {100 * idle_part:.1f} % of a core, is left out.

| | measured | target |
| --- | --- | --- |
{lines}
"""  # noqa: E501


def _size(process: psutil.Process) -> tuple[int, int, int]:
    return process.memory_info().rss, process.num_threads(), process.num_fds()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scrapes", type=int, default=1000)
    page = measure(parser.parse_args().scrapes)
    REPORT.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
