"""The driver's counter of energy against power that is added up, GPU by GPU: `python -m
benchmarks.gpu_energy`.

Added up are the readings of `evener monitor --json`, one a second, and those by which a probe
counts energy on chips without the counter. Prints JSON; run it beside something that computes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pynvml

from evener.devices.nvidia.gpu_reader import GpuReader
from evener.devices.nvidia.nvml_library import describe
from evener.devices.types import UNSUPPORTED

MONITOR = (sys.executable, "-m", "evener", "monitor", "--json", "-i", "1", "--devices")
SETTLE_SECONDS = 4.0  # until the monitor's second reading


def integrate(readings: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Joules between two times by readings of (time, watts), on straight lines between them."""
    joules = 0.0
    for (before, watts), (after, more) in pairwise(readings):
        first, last = max(before, start), min(after, end)
        if first < last:
            middle = ((first + last) / 2 - before) / (after - before)
            joules += (last - first) * (watts + middle * (more - watts))
    return joules


def compare_energy(devices: str, seconds: float) -> list[dict[str, Any]]:
    """For each GPU: joules by the counter, by the monitor's readings and by a probe's."""
    pynvml.nvmlInit()
    handles = [
        pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
    ]
    probes = [
        GpuReader(pynvml, handle, describe(pynvml, handle, i)) for i, handle in enumerate(handles)
    ]
    with (
        tempfile.TemporaryFile("w+") as lines,
        subprocess.Popen((*MONITOR, devices), stdout=lines) as monitor,
    ):
        time.sleep(SETTLE_SECONDS)
        start = time.time()
        counted = [pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3 for handle in handles]
        added = [0.0] * len(handles)
        while time.time() < start + seconds:
            added = [probe._used_joules(time.monotonic(), UNSUPPORTED) or 0.0 for probe in probes]
            time.sleep(1.0)
        added = [probe._used_joules(time.monotonic(), UNSUPPORTED) or 0.0 for probe in probes]
        end = time.time()
        spent = [
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3 - before
            for handle, before in zip(handles, counted, strict=True)
        ]
        time.sleep(SETTLE_SECONDS)  # a reading behind the end
        monitor.terminate()
        monitor.wait(20)
        lines.seek(0)
        watts = read_power(lines.read())
    return [
        {
            "index": index,
            "seconds": end - start,
            "counter_joules": joules,
            "monitor_joules": integrate(watts.get(index, []), start, end),
            "probe_joules": added[index],
        }
        for index, joules in enumerate(spent)
    ]


def read_power(text: str) -> dict[int, list[tuple[float, float]]]:
    """Of each device, by index: the times and watts of the monitor's readings."""
    found: dict[int, list[tuple[float, float]]] = {}
    for line in text.splitlines():
        if line.startswith("{") and line.endswith("}"):
            snapshot = json.loads(line)
            for device in snapshot["devices"]:
                if device["power_watts"]["state"] == "value":
                    reading = snapshot["at_seconds"], device["power_watts"]["value"]
                    found.setdefault(device["device"]["index"], []).append(reading)
    return found


def main() -> None:
    """Print the comparison, and by how much the sums are off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--devices", default="gpu")
    given = parser.parse_args()
    for found in compare_energy(given.devices, given.seconds):
        off = {
            f"{name}_off_percent": round(
                100 * (found[f"{name}_joules"] / found["counter_joules"] - 1), 2
            )
            for name in ("monitor", "probe")
        }
        print(json.dumps({**found, **off}))


if __name__ == "__main__":
    main()
