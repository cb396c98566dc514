"""Compare monitors on loaded GPUs: their cost, and evener's metrics with nvidia-smi's.

  python -m benchmarks.gpu_watch --out FOLDER [--seconds 20]

All run at the same time, beside what computes on the GPUs already. Each monitor has its own
pseudo-terminal and its default interval of about a second. CPU time is user plus system time of the
process, from a moment at which all monitors have started.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.monitor import SETTLE_SECONDS, Screen

LOAD = """
import sys, time, torch
size = 8192
a = torch.randn(size, size, device="cuda:" + sys.argv[1], dtype=torch.bfloat16)
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
"""
METRICS = "127.0.0.1:9401"
SMI_SECONDS = 2  # between two readings of nvidia-smi
# what both report: evener's name, nvidia-smi's column, its unit in evener's
COMPARED = (
    ("utilization_percent", 1, 1.0),
    ("memory_used_bytes", 2, float(1 << 20)),
    ("power_watts", 3, 1.0),
    ("temperature_celsius", 4, 1.0),
)
SCREENS = {
    "evener": "import sys; from evener.tui.start import run_app; sys.exit(run_app({devices!r}))",
    "evener --metrics": f"""
import sys
sys.argv = ["evener", "monitor", "--devices", {{devices!r}}, "--metrics", {METRICS!r}]
from evener.__main__ import main
main()
""",
    "nvitop": "from nvitop.cli import main; main()",
    "gpustat": (
        "import sys; sys.argv = ['gpustat', '-i', '1']; from gpustat.cli import main; main()"
    ),
    "nvtop": "import os; os.execvp('nvtop', ['nvtop'])",
}
EVENER_JSON = (sys.executable, "-m", "evener", "monitor", "--json", "-i", "1", "--devices")
SMI = (
    "nvidia-smi",
    "--query-gpu=index,utilization.gpu,memory.used,power.draw,temperature.gpu,clocks.sm,clocks.mem",
    "--format=csv,noheader,nounits",
)


@contextmanager
def loaded(gpus: Sequence[int], seconds: float) -> Iterator[None]:
    """Run matrix products on each GPU in child processes."""
    loads = [subprocess.Popen([sys.executable, "-c", LOAD, str(gpu), str(seconds)]) for gpu in gpus]
    try:
        yield
    finally:
        for load in loads:
            load.terminate()
            load.wait(timeout=60)


def installed() -> list[str]:
    """Return the monitors that are installed here."""
    modules = [name for name in ("nvitop", "gpustat") if importlib.util.find_spec(name)]
    return ["evener", "evener --metrics", *modules, *(["nvtop"] if shutil.which("nvtop") else [])]


def compare_monitors(
    seconds: float, environment: dict[str, str], devices: str = "gpu"
) -> dict[str, Any]:
    """Return the CPU, memory and output of all monitors in the same window, and evener's readings.

    Prometheus metrics are fetched once a second if they are served.
    """
    with ExitStack() as stack:
        screens = {
            name: Screen(SCREENS[name].format(devices=devices), environment) for name in installed()
        }
        for screen in screens.values():
            stack.callback(screen.close)
        # a pipe must be read, else it fills up
        lines = stack.enter_context(tempfile.TemporaryFile("w+"))
        command = (*EVENER_JSON, devices)
        reader = stack.enter_context(
            subprocess.Popen(command, stdout=lines, text=True, env=environment)
        )
        stack.callback(reader.terminate)
        time.sleep(2 * SETTLE_SECONDS)
        alive = {
            name: screen
            for name, screen in screens.items()
            if screen.process.status() != psutil.STATUS_ZOMBIE
        }
        before = {name: _spent(screen) for name, screen in alive.items()}
        plain = psutil.Process(reader.pid)
        plain_before, parts_before = _cpu_seconds(plain), _threads(alive["evener"])
        began = time.perf_counter()
        witness, metrics = [], ""
        for second in range(round(seconds)):
            if second % SMI_SECONDS == 0:
                before_smi, rows = time.time(), smi()
                witness.append({"at": (before_smi + time.time()) / 2, "rows": rows})
            metrics = fetch_metrics()
            time.sleep(max(0.0, began + second + 1 - time.perf_counter()))
        took = time.perf_counter() - began
        costs = {name: _cost(before[name], screen, took) for name, screen in alive.items()}
        parts = {
            thread: spent - parts_before.get(thread, 0.0)
            for thread, spent in _threads(alive["evener"]).items()
        }
        costs["evener"]["cpu_percent_by_thread"] = sorted(
            (100 * part / took for part in parts.values()), reverse=True
        )
        costs["evener --json"] = {"cpu_percent": 100 * (_cpu_seconds(plain) - plain_before) / took}
        reader.terminate()
        reader.wait(timeout=10)
        lines.seek(0)
        out = lines.read()
    readings = [
        json.loads(line) for line in out.splitlines() if line.startswith("{") and line.endswith("}")
    ]
    missing = {
        name: bytes(screens[name].seen[-300:]).decode(errors="replace")
        for name in screens.keys() - alive.keys()
    }
    found = {"seconds": took, "costs": costs, "did_not_run": missing, "metrics": metrics}
    return {**found, "nvidia_smi": witness, "readings": readings}


def fetch_metrics() -> str:
    """Return the Prometheus metrics; empty if they aren't served."""
    with (
        suppress(OSError),
        urllib.request.urlopen(f"http://{METRICS}/metrics", timeout=5) as answer,
    ):
        return str(answer.read().decode())
    return ""


def smi() -> list[list[str]]:
    """Return nvidia-smi's rows.

    The columns are the GPU, utilization, used MiB, watts, °C, and the clocks of multiprocessors and
    memory.
    """
    if not shutil.which(SMI[0]):
        return []
    done = subprocess.run(SMI, capture_output=True, text=True, timeout=20)
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]


def _threads(screen: Screen) -> dict[int, float]:
    """Return the CPU seconds of each thread; the first thread is the one that draws."""
    return {each.id: each.user_time + each.system_time for each in screen.process.threads()}


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _spent(screen: Screen) -> tuple[float, int]:
    return _cpu_seconds(screen.process), screen.written_bytes


def _cost(before: tuple[float, int], screen: Screen, seconds: float) -> dict[str, Any]:
    cpu, written = _spent(screen)
    return {
        "cpu_percent": 100 * (cpu - before[0]) / seconds,
        "memory_mib": screen.process.memory_info().rss / 2**20,
        "written_kib_per_second": (written - before[1]) / 1024 / seconds,
    }


def compare_readings(found: dict[str, Any]) -> Iterator[str]:
    """Yield a line per metric and GPU: nvidia-smi's median, evener's, and their differences.

    A reading of nvidia-smi is compared with evener's nearest one, at most half a second away.
    """
    for metric, column, unit in COMPARED:
        pairs: dict[int, list[tuple[float, float]]] = {}
        for seen in found["nvidia_smi"]:
            nearest, apart_s = _find_nearest(found["readings"], seen["at"])
            if apart_s > 0.5:
                continue
            own = {each["device"]["index"]: each[metric]["value"] for each in nearest["devices"]}
            for row in seen["rows"]:
                index = int(row[0])
                if own.get(index) is not None:
                    pairs.setdefault(index, []).append((float(row[column]), own[index] / unit))
        for index, values in sorted(pairs.items()):
            theirs, ours = (median(each) for each in zip(*values, strict=True))
            apart = [abs(one - other) for one, other in values]
            yield (
                f"{metric}, GPU {index}: nvidia-smi {theirs:,.1f}, evener {ours:,.1f}; apart "
                f"{median(apart):.2f}, at most {max(apart):.2f} ({len(apart)} readings)"
            )


def _find_nearest(readings: Sequence[dict[str, Any]], at: float) -> tuple[dict[str, Any], float]:
    """Return the reading that is nearest to a time, and its distance in seconds."""
    apart = [abs(reading["at_seconds"] - at) for reading in readings]
    nearest = min(apart)
    return readings[apart.index(nearest)], nearest


def main() -> None:
    """Print what the monitors cost and how evener's readings differ from nvidia-smi's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--devices", default="gpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = compare_monitors(options.seconds, dict(os.environ), options.devices)
    (options.out / "watch.json").write_text(json.dumps(found))
    for name, cost in found["costs"].items():
        print(f"{name}: {cost['cpu_percent']:.2f} % of a core", flush=True)
    for name, end in found["did_not_run"].items():
        print(f"{name} didn't run: {end[-200:]!r}")
    for line in compare_readings(found):
        print(line, flush=True)


if __name__ == "__main__":
    main()
