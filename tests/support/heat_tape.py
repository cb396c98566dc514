"""An invented recording of NVML: the driver's answers about a GPU that gets too hot.

No GPU was heated for it. It is the recording of a GPU at full load, in which the answers that heat
changes are replaced as NVML documents them (nvml.h, "NvmlClocksEventReasons"):

- SwThermalSlowdown (0x20): the clocks are lowered so that the GPU doesn't exceed its highest
  operating temperature. They fall step by step, and the temperature stays there.
- HwThermalSlowdown (0x40), with HwSlowdown (0x08): the temperature is too high, and the core clocks
  are reduced by a factor of two or more.

Both counters count the nanoseconds of such time. Neither reason is a power cap: the counter of that
doesn't rise, the limit stays the same, and the GPU draws less power than before, because its clock
is lower. Chips without counters report only the current reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HOT_GPU = 1
HIGHEST_MHZ = 1980
LIMIT_WATTS = 700
# the highest operating temperature, and that at which the hardware halves the clocks
HIGHEST_CELSIUS, SLOWDOWN_CELSIUS = 87, 89
HOT_FROM = 14  # the tick at which it reaches the first temperature, 2 s after the load began
LOAD = range(12, 24)
POWER_CAP, SOFTWARE_HEAT, HARDWARE_HEAT = "74", "269", "270"  # fields of nvml.h
SOFTWARE, HARDWARE = 0x20, 0x40 | 0x08  # bits of the reasons; 0x08 is HwSlowdown
UNSUPPORTED = 3  # NVML_ERROR_NOT_SUPPORTED
# at successive ticks; the last one remains
SOFTWARE_MHZ = (1980, 1905, 1830, 1740, 1650, 1575, 1515)


class Tick:
    """The GPU in one second of the recording."""

    def __init__(self, second: int, by_hardware: bool) -> None:
        hot = second - HOT_FROM if second in LOAD else -1
        self.reasons = 0
        self.mhz = HIGHEST_MHZ if second in LOAD else 345
        self.celsius = 34 if second < LOAD.start else 45
        if second in LOAD:
            self.celsius = min(HIGHEST_CELSIUS, 60 + 14 * (second - LOAD.start))
        if hot >= 0:
            self.reasons = SOFTWARE
            self.mhz = SOFTWARE_MHZ[min(hot, len(SOFTWARE_MHZ) - 1)]
        if hot >= 1 and by_hardware:  # the fan has stopped
            self.reasons = SOFTWARE | HARDWARE
            self.mhz = HIGHEST_MHZ // 2
            self.celsius = SLOWDOWN_CELSIUS
        # power falls with clock and voltage, and is below the limit from the start
        self.watts = 80.0 if second not in LOAD else 80 + 560 * (self.mhz / HIGHEST_MHZ) ** 2


def make_hot(
    rows: list[dict[str, Any]], by_hardware: bool = False, counters: bool = True
) -> list[dict[str, Any]]:
    """Return a recording's rows with the answers about GPU 1 that heat changes.

    With `by_hardware`, its clocks are halved as well. Without `counters`, the chip doesn't count
    throttled time.
    """
    ticks = [Tick(second, by_hardware) for second in range(32)]
    software = _count(ticks, SOFTWARE)
    hardware = _count(ticks, HARDWARE)
    made: dict[tuple[str, str], list[Any]] = {
        ("nvmlDeviceGetTemperature", "[0]"): [tick.celsius for tick in ticks],
        ("nvmlDeviceGetTemperatureThreshold", "[1]"): [SLOWDOWN_CELSIUS] * len(ticks),
        ("nvmlDeviceGetClockInfo", "[1]"): [tick.mhz for tick in ticks],
        ("nvmlDeviceGetCurrentClocksEventReasons", "[]"): [tick.reasons for tick in ticks],
        ("field", "190"): [[0, 1, 1000 * LIMIT_WATTS]] * len(ticks),
        ("field", "185"): [[0, 1, round(1000 * tick.watts)] for tick in ticks],
        ("field", POWER_CAP): [[0, 3, 0]] * len(ticks),
        ("field", SOFTWARE_HEAT): [[0, 3, each] for each in software],
        ("field", HARDWARE_HEAT): [[0, 3, each] for each in hardware],
    }
    if not counters:
        for field in (POWER_CAP, "76", SOFTWARE_HEAT, HARDWARE_HEAT, "271"):
            made["field", field] = [[UNSUPPORTED, 3, 0]] * len(ticks)
    return [*_without(rows, made), *map(_row, made, made.values())]


def _without(rows: list[dict[str, Any]], made: Mapping[tuple[str, str], Any]) -> Any:
    return [row for row in rows if (row["call"], row["of"]) not in made or row["gpu"] != HOT_GPU]


def _row(key: tuple[str, str], answers: list[Any]) -> dict[str, Any]:
    call, of = key
    timed = [[round(second + 0.003, 3), answer] for second, answer in enumerate(answers)]
    return {"call": call, "gpu": HOT_GPU, "of": of, "answers": timed}


def _count(ticks: list[Tick], bits: int) -> list[int]:
    """Return the nanoseconds before each tick in which one of these reasons applied."""
    counted = [0]
    for tick in ticks[:-1]:
        counted.append(counted[-1] + 10**9 * bool(tick.reasons & bits))
    return counted
