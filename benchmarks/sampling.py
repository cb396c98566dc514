"""The cost of sampling: milliseconds per tick, CPU of the process, and the time of each NVML call.

    python -m benchmarks.sampling [--devices gpu] [--seconds 20] [--interval 1] [--readings]

Without GPUs it measures whatever `--devices` names; the driver's calls are listed only where there
is a driver.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from typing import Any

from evener.devices.discover import discover, open_source
from evener.devices.nvidia.gpu_reader import (
    ALL_LINKS,
    ECC_UNCORRECTED,
    ENERGY,
    LINK_RECEIVE_KIB,
    PCIE_RECEIVE_BYTES,
    POWER_AVERAGE,
    POWER_LIMIT,
    RECOVERY_ACTION,
    THROTTLING,
)
from evener.devices.nvidia.nvml_library import load, opened
from evener.devices.nvidia.source import NvmlSource
from evener.devices.sampler import Sampler
from evener.devices.types import Reading, Snapshot

FIELDS = (
    *(ENERGY, POWER_AVERAGE, POWER_LIMIT, ECC_UNCORRECTED, RECOVERY_ACTION, *THROTTLING),
    *(PCIE_RECEIVE_BYTES, (LINK_RECEIVE_KIB, ALL_LINKS)),
)


class TimedLibrary:
    """The NVML module, with a stopwatch around each of its functions."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name)
        if not name.startswith("nvml") or not callable(found):
            return found
        timed = self._timed(name, found)
        setattr(self, name, timed)
        return timed

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments, **keywords)
            finally:
                self.seconds[name].append(time.perf_counter() - started)

        return timed


def main() -> None:
    """Sample for a while, then print the table."""
    options = _options()
    found = discover(options.devices)
    library = TimedLibrary(load())
    is_gpu = found.machine is None and found.devices[0].kind == "gpu"
    source = NvmlSource(found.devices, library=library) if is_gpu else open_source(found)
    snapshots: list[Snapshot] = []
    started, used = time.perf_counter(), time.process_time()
    with closing(Sampler(source, options.interval)) as sampler:
        sampler.start(snapshots.append)
        time.sleep(options.seconds)
    elapsed, used = time.perf_counter() - started, time.process_time() - used
    _print_ticks(snapshots, used / elapsed)
    _print_calls(library, len(snapshots))
    if is_gpu:
        _print_fields(load())
    if options.readings:
        _print_readings(snapshots[-1])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument(
        "--readings", action="store_true", help="print every reading of the last tick"
    )
    options: argparse.Namespace = parser.parse_args()
    return options


def _print_ticks(snapshots: list[Snapshot], cpu_share: float) -> None:
    costs = sorted(snapshot.sampling_seconds * 1000 for snapshot in snapshots[1:]) or [0.0]
    first = snapshots[0].sampling_seconds * 1000
    print(f"ticks {len(snapshots)}, devices {len(snapshots[-1].devices)}, first {first:.2f} ms")
    print(
        f"ms a tick: median {costs[len(costs) // 2]:.2f}, 95 % "
        f"{costs[int(0.95 * (len(costs) - 1))]:.2f}, "
        f"most {costs[-1]:.2f}; CPU of the process {cpu_share:.2%} of one core"
    )


def _print_calls(library: TimedLibrary, ticks: int) -> None:
    library.seconds.pop("nvmlEventSetWait_v2", None)  # waits on a thread of its own
    for name, seconds in sorted(library.seconds.items(), key=lambda entry: -sum(entry[1])):
        mean, most = 1e3 * sum(seconds) / len(seconds), 1e3 * max(seconds)
        print(f"{name:45} {len(seconds):5} calls  mean {mean:8.3f} ms  most {most:8.3f} ms")
    print(
        f"{sum(len(seconds) for seconds in library.seconds.values()) / max(1, ticks):.1f} "
        f"calls a tick"
    )


def _print_fields(nvml: Any, repeats: int = 20) -> None:
    """Each field alone, on the first GPU."""
    with opened(nvml):
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        for field in FIELDS:
            started = time.perf_counter()
            for _ in range(repeats):
                (answer,) = nvml.nvmlDeviceGetFieldValues(handle, [field])
            mean = 1e3 * (time.perf_counter() - started) / repeats
            print(
                f"field {field!s:18} {mean:8.3f} ms  return {answer.nvmlReturn}  type "
                f"{answer.valueType}"
            )


def _print_readings(snapshot: Snapshot) -> None:
    for sample in snapshot.devices:
        print(
            sample.device.label, sample.device.name, sample.device.id, sample.note, *sample.events
        )
        for name in sample.__struct_fields__:
            reading = getattr(sample, name)
            if isinstance(reading, Reading):
                print(
                    f"  {name:32} {reading.state.value:12} "
                    f"{'' if reading.value is None else f'{reading.value:,.2f}'}"
                )
        print("  throttle_reasons", sample.throttle_reasons)
    for process in snapshot.processes:
        print(process)
    print(snapshot.host, snapshot.driver, snapshot.notes)


if __name__ == "__main__":
    main()
