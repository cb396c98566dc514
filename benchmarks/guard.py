"""The cost of watching a probe for interference on a real GPU: `python -m benchmarks.guard
[--device gpu:0]`.

Readings are timed as a probe takes them, between blocks. Then another process takes a part of the
GPU's memory (with torch). It counts as a child of the session first, by its pid, then as somebody
else's process.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time

from evener.balancer.probes.block_timing import Block
from evener.balancer.probes.interference import InterferenceMonitor, ProbeInterference
from evener.devices.backend import VitalsWatch
from evener.devices.discover import discover
from evener.devices.nvidia.backend import NvmlVitals
from evener.devices.types import Device

READINGS = 500
HOLD = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device=f"cuda:{sys.argv[2]}").fill_(1)
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


def main() -> None:
    """Print the figures as Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="gpu:0", help="one GPU, as in --devices")
    parser.add_argument(
        "--share", type=float, default=0.3, help="part of its memory that the other process takes"
    )
    options = parser.parse_args()
    device = discover(options.device).devices[0]
    print(f"# Watching probes on {device.name}\n")
    print(_costs(device))
    print(_driver_counters(device))
    print(_taken(device, options.share))


def _costs(device: Device) -> str:
    monitor = InterferenceMonitor((device,))
    monitor.wait_for_drivers((0,), threading.Event())
    interference = ProbeInterference(monitor, (0,))
    times = []
    for _ in range(READINGS):
        started = time.perf_counter()
        interference.annotate(Block(1, 0.01))
        times.append(time.perf_counter() - started)
        time.sleep(0.005)
    started = time.perf_counter()
    monitor.measure_short((0,), (), (0,))
    full = time.perf_counter() - started
    monitor.close()
    slow = statistics.quantiles(times, n=100)[98]
    return (
        f"A reading between two blocks: median {statistics.median(times) * 1e6:.0f} us, 99 % "
        f"within {slow * 1e6:.0f} us"
        f" (1000 are allowed). A reading of memory and processes: {full * 1e6:.0f} us."
    )


def _driver_counters(device: Device) -> str:
    watch = VitalsWatch(NvmlVitals(device))
    watch.ask(full=True)
    seen = watch.answer(time.monotonic() + 10.0)
    watch.close()
    return (
        f"The driver counts: held back {seen.held_seconds} s, at its power limit "
        f"{seen.capped_seconds} s, in use"
        f" {(seen.used_bytes or 0) / 2**20:.0f} MiB by {len(seen.processes)} named processes. "
        f"{seen.trouble}"
    )


def _taken(device: Device, share: float) -> str:
    size = int(share * (device.memory_bytes or 0))
    monitor = InterferenceMonitor((device,))
    before = monitor.measure_short((0,), (), (0,)).get(0, 0)
    command = [sys.executable, "-c", HOLD, str(size), str(device.index)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        own = monitor.measure_short((0,), (other.pid,), ()).get(0, 0)
        somebodys = monitor.measure_short((0,), (), (0,)).get(0, 0)
        other.kill()
    monitor.close()
    rows = (
        ("nobody", before),
        ("a child of the session, by its pid", own),
        ("somebody else", somebodys),
    )
    lines = [f"| {size / 2**20:.0f} MiB held by | reported as missing |", "| --- | ---: |"]
    return "\n".join((*lines, *(f"| {who} | {short / 2**20:.0f} MiB |" for who, short in rows)))


if __name__ == "__main__":
    main()
