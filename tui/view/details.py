"""All facts about one device or one process, one per line."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from evener.balancer.number_format import percent, rate
from evener.devices.types import DeviceSample, ProcessSample, Reading, State

from ..text.formatting import duration, size
from .cells import Line, Span, Tone, clean, line, text_lines, whole_lines
from .devices import memory_tone
from .figures import (
    STATE_WORDS,
    celsius,
    fraction,
    percents,
    samples_rate,
    temperature_tone,
    throttle_tone,
    watts,
)

_LABEL_CELLS = 18
_megahertz = "{:.0f} MHz".format


def _fact(label: str, text: str, tone: Tone = "text") -> Line:
    return line(Span(f" {label:<{_LABEL_CELLS}}", "title"), Span(text, tone))


def reading_words(reading: Reading, draw: Callable[[float], str]) -> str:
    """A reading in words: its value, why there is none, or how old the last one is."""
    if reading.state is State.VALUE and reading.value is not None:
        return draw(reading.value)
    if reading.state is State.STALE and reading.value is not None:
        return f"{draw(reading.value)} (stale: {duration(reading.age_seconds)} old)"
    return STATE_WORDS[reading.state]


def _reading(
    label: str, reading: Reading, draw: Callable[[float], str], tone: Callable[[float], Tone] | Tone = "text"
) -> Line:
    number = reading.current
    if number is None:
        return _fact(label, reading_words(reading, draw), "bad" if reading.state is State.LOST else "dim")
    return _fact(label, draw(number), tone(number) if callable(tone) else tone)


def _limited(text: Callable[[float], str], whole: Reading) -> Callable[[float], str]:
    """A figure followed by its limit, where there is one."""
    return lambda number: f"{text(number)} of {text(whole.value)}" if whole.value else text(number)


def _per_second(number: float) -> str:
    return f"{size(number)}/s"


def _energy(joules: float) -> str:
    return f"{joules / 3.6e6:.3f} kWh since the start" if joules >= 3.6e5 else f"{joules:.0f} J since the start"


def device_details(sample: DeviceSample, width: int) -> tuple[Line, ...]:
    """Every metric of a device with its unit, or why it is missing."""
    device = sample.device
    in_memory = memory_tone(fraction(sample.memory_used_bytes, sample.memory_total_bytes))
    facts = [
        _fact("name", clean(device.name)),
        _fact("id", clean(device.id), "dim"),
        _reading("utilisation", sample.utilization_percent, percents, "accent"),
        _reading("SM busy", sample.sm_percent, percents),
        _reading("SM occupancy", sample.occupancy_percent, percents),
        _reading("tensor cores", sample.tensor_percent, percents),
        _reading("DRAM bandwidth", sample.dram_percent, percents),
        _reading("memory", sample.memory_used_bytes, _limited(size, sample.memory_total_bytes), in_memory),
        _reading("temperature", sample.temperature_celsius, celsius, temperature_tone(sample)),
        _reading("slows down at", sample.temperature_limit_celsius, celsius),
        _reading("power", sample.power_watts, _limited(watts, sample.power_limit_watts), "power"),
        _reading("energy", sample.energy_joules, _energy),
        _reading("clock", sample.clock_mhz, _limited(_megahertz, sample.clock_max_mhz)),
        _reading("throttled", sample.throttled_percent, lambda number: f"{number:.1f} % of the time", throttle_tone),
        _fact("why", clean(", ".join(sample.throttle_reasons)) or "no reason given", "text"),
        _reading("PCIe received", sample.pcie_receive_bytes_per_second, _per_second),
        _reading("PCIe sent", sample.pcie_send_bytes_per_second, _per_second),
        _reading("NVLink received", sample.link_receive_bytes_per_second, _per_second),
        _reading("NVLink sent", sample.link_send_bytes_per_second, _per_second),
        _reading("fan", sample.fan_percent, percents),
        _reading(
            "ECC errors",
            sample.ecc_errors,
            lambda number: f"{number:.0f} uncorrected",
            lambda number: "bad" if number else "text",
        ),
        _reading("throughput", sample.samples_per_second, samples_rate, "speed"),
    ]
    facts += [_fact("event", clean(event), "warn") for event in sample.events[-5:]]
    return (*(text_lines(sample.note, width, 4, "bad") if sample.note else ()), *facts)


def process_details(row: ProcessSample, started: str, width: int) -> tuple[Line, ...]:
    """All facts about a process; `started` is its start as readable text."""
    facts = [
        _fact("pid", str(row.pid), "strong"),
        _fact("user", clean(row.user)),
        _fact("started", started),
        _fact("device", clean(f"{row.device_label}  {row.device_id}")),
        _reading("device memory", row.memory_bytes, size, "memory"),
        _reading("SM busy", row.sm_percent, percents, "accent"),
        _reading("CPU", row.cpu_percent, lambda number: f"{percent(number / 100)} of a core"),
        _reading("throughput", row.samples_per_second, samples_rate, "speed"),
        *(_token_facts(row) if row.tokens_per_second.value is not None else ()),
        _fact("command", ""),
    ]
    return (*facts, *text_lines(row.command, width, 12, indent=3))


def _token_facts(row: ProcessSample) -> tuple[Line, ...]:
    return (
        _reading("tokens", row.tokens_per_second, lambda number: f"{rate(number)} tokens/s", "speed"),
        _reading("padding", row.padding_percent, lambda number: f"{percents(number)} of the computed tokens"),
    )


def environment_lines(variables: Mapping[str, str], width: int) -> tuple[Line, ...]:
    """The variables of a process by name, each whole."""
    text = "\n".join(f"{name}={variables[name]}".replace("\n", " ") for name in sorted(variables))
    return whole_lines(text or "This process has no environment.", width)
