"""Simulated machines from a TOML file or the built-in catalogue, read strictly.

Every fault is a RequestError that names the file, the device and the key.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from evener.devices.simulated.machine import Machine, Points, SimulatedDevice, SimulatedEvent, SimulatedPlacement, Sync
from evener.errors import RequestError

__all__ = ["Machine", "SimulatedDevice", "Sync", "catalogue", "catalogue_names", "load_machine", "parse_machine"]

LARGEST_FILE_BYTES = 4 << 20
LARGEST = 1e12  # of any number in a machine file, so that no product of two overflows
MOST_SLOWED = 0.99  # share of its speed that a device may hold back
RANGES = {  # key -> (lowest, highest); `memory_mib` must be above its lowest
    "memory_base_mib": (0.0, LARGEST),
    "memory_per_sample_mib": (0.0, LARGEST),
    "noise": (0.0, 1.0),
    "stall_ms": (0.0, LARGEST),
    "contention": (0.0, LARGEST),
}

Table = TypeVar("Table", bound=msgspec.Struct)


class _Entry(msgspec.Struct, frozen=True):
    device: SimulatedDevice
    sync: Sync | None  # how it keeps in step with its like; None: the catalogue's default


def load_machine(path: str | PathLike[str]) -> Machine:
    """The machine that a TOML file describes; RequestError says what is wrong in it, and where."""
    source = Path(path)
    try:
        if source.is_dir():
            raise RequestError(f"{source} is not a machine file.", "Name a TOML file with [[device]] tables.")
        with source.open("rb") as stream:
            text = stream.read(LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise RequestError(
            f"The machine file {source} can't be read: {getattr(error, 'strerror', None) or error}.",
            "Name a TOML file that is there.",
        ) from None
    if len(text) > LARGEST_FILE_BYTES:
        raise RequestError(f"{source} is not a machine file.", "Name a TOML file with [[device]] tables.")
    return parse_machine(text, str(source))


def parse_machine(text: bytes, source: str = "machine.toml") -> Machine:
    """The machine in a file's bytes; `source` names it in errors."""
    data = _decode(text, source)
    unknown = sorted(set(data) - {"device", "sync", "placement", "event"})
    if unknown:
        known = "[sync], [[device]], [[placement]] and [[event]]"
        raise RequestError(f"{source}: unknown key `{unknown[0]}`.", f"The tables are {known}.")
    tables = _tables(data, "device", source)
    if not tables:
        raise RequestError(f"{source} has no devices.", "Add at least one [[device]] table.")
    sync = read_sync(data.get("sync", {}), f"{source}: sync")
    return Machine(
        tuple(_read_device(table, _where(source, i, table)) for i, table in enumerate(tables)),
        sync,
        placements=_read_placements(_tables(data, "placement", source), len(tables), source),
        events=_read_events(_tables(data, "event", source), len(tables), source),
    )


def _tables(data: dict[str, Any], key: str, source: str) -> list[dict[str, Any]]:
    tables = data.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise RequestError(f"{source}: `{key}` is not a list of tables.", f"Write [[{key}]] above each {key}.")
    return tables


def _read_placements(tables: list[dict[str, Any]], devices: int, source: str) -> tuple[SimulatedPlacement, ...]:
    placements: list[SimulatedPlacement] = []
    for i, table in enumerate(tables):
        where = f"{source}: placement {i}"
        placement = _convert(table, SimulatedPlacement, where)
        _check_points("curve", placement.curve, "time", where)
        if not placement.name or placement.name in {other.name for other in placements}:
            raise RequestError(f"{where}: `name` is {placement.name!r}.", "Give each placement a name of its own.")
        if not 2 <= placement.devices <= devices:
            raise RequestError(
                f"{where}: `devices` is {placement.devices}, and the machine has {devices}.",
                "A placement takes two devices or more.",
            )
        placements.append(placement)
    return tuple(placements)


def _read_events(tables: list[dict[str, Any]], devices: int, source: str) -> tuple[SimulatedEvent, ...]:
    events = []
    for i, table in enumerate(tables):
        where = f"{source}: event {i}"
        event = _convert(table, SimulatedEvent, where)
        _check_range("at_seconds", event.at_seconds, 0.0, LARGEST, where)
        _check_range("device", event.device, 0, devices - 1, where)
        _check_range("memory_taken_mib", event.memory_taken_mib, 0.0, LARGEST, where)
        _check_range("slowed", event.slowed, 0.0, MOST_SLOWED, where)
        if not event.until_seconds > event.at_seconds:
            raise RequestError(f"{where}: it ends at {event.until_seconds} s, before it begins.", "Raise that time.")
        events.append(event)
    return tuple(events)


def catalogue_names() -> tuple[str, ...]:
    """The names that `sim:` knows."""
    return tuple(_entries()[0])


def catalogue(names: Sequence[str]) -> Machine:
    """A machine of catalogue devices; a mixed one pays for keeping in step as its dearest device does."""
    entries, default = _entries()
    for name in names:
        if name.lower() not in entries:
            raise RequestError(
                f"The catalogue has no simulated device {name!r}.",
                f"It has {', '.join(entries)}; a machine file of your own ends in .toml.",
            )
    if not names:
        raise RequestError("No simulated device is named.", f"The catalogue has {', '.join(entries)}.")
    chosen = [entries[name.lower()] for name in names]
    sync = max((entry.sync or default for entry in chosen), key=lambda cost: cost.seconds(len(chosen) + 1))
    return Machine(tuple(entry.device for entry in chosen), sync)


@cache
def _entries() -> tuple[dict[str, _Entry], Sync]:
    data = _decode(files("evener.devices.simulated").joinpath("catalogue.toml").read_bytes(), "catalogue.toml")
    default = read_sync(data.pop("sync"), "catalogue.toml: sync")
    entries: dict[str, _Entry] = {}
    for name, table in data.items():
        where = f"catalogue.toml: {name}"
        own = table.pop("sync", None)
        entries[name] = _Entry(_read_device(table, where), read_sync(own, f"{where}: sync") if own else None)
    return entries, default


def _decode(text: bytes, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text.decode())
    except (RecursionError, ValueError) as error:  # also of text that isn't Unicode, and of endless numbers
        raise RequestError(f"{source} is not TOML: {error}.", "Mend that line.") from None


def _where(source: str, position: int, table: dict[str, Any]) -> str:
    name = table.get("name")
    return f"{source}: device {position}" + (f" ({name})" if isinstance(name, str) and name.isprintable() else "")


def read_sync(table: Any, where: str) -> Sync:
    """The [sync] table; an absent one costs nothing."""
    sync = _convert(table, Sync, where)
    for key in ("base_ms", "per_device_ms"):
        _check_range(key, getattr(sync, key), 0.0, LARGEST, where)
    return sync


def _read_device(table: dict[str, Any], where: str) -> SimulatedDevice:
    device = _convert(table, SimulatedDevice, where)
    if not device.slug:
        raise RequestError(f"{where}: `name` has no letter or digit.", "Give the device a name.")
    if not (math.isfinite(device.memory_mib) and 0 < device.memory_mib <= LARGEST):
        raise RequestError(f"{where}: `memory_mib` is {device.memory_mib}.", "Give its memory in MiB, above 0.")
    for key, (low, high) in RANGES.items():
        _check_range(key, getattr(device, key), low, high, where)
    _check_memory_keys(table, where)
    _check_points("curve", device.curve, "time", where)
    if "memory_curve" in table:
        _check_points("memory_curve", device.memory_curve, "memory", where)
        _check_rising_memory(device.memory_curve, where)
    _check_gain(device.pack_gain, where)
    return device


def _check_gain(points: Points, where: str) -> None:
    sizes = [size for size, _ in points]
    sound = all(size >= 1 for size in sizes) and all(math.isfinite(gain) and 0 < gain <= LARGEST for _, gain in points)
    if not sound or sizes != sorted(set(sizes)):
        raise RequestError(
            f"{where}: `pack_gain` is no curve of (trainings, gain).",
            "Give each number of trainings once, in rising order, with a gain above 0.",
        )


def _convert(table: Any, kind: type[Table], where: str) -> Table:
    try:
        return msgspec.convert(table, kind, strict=True)
    except msgspec.ValidationError as error:
        raise RequestError(f"{where}: {_plain(str(error))}.", "Mend that key.") from None


def _plain(message: str) -> str:
    """msgspec's words, with the key in front."""
    known = {"Object contains unknown field": "unknown key", "Object missing required field": "missing key"}
    for theirs, ours in known.items():
        message = message.replace(theirs, ours)
    found = re.fullmatch(r"(?P<text>.*) - at `\$\.?(?P<key>.*?)`", message)
    return f"`{found['key']}`: {found['text']}" if found else message


def _check_range(key: str, number: float, low: float, high: float, where: str) -> None:
    if not (math.isfinite(number) and low <= number <= high):
        raise RequestError(f"{where}: `{key}` is {number}.", f"Give a number from {low:g} to {high:g}.")


def _check_memory_keys(table: dict[str, Any], where: str) -> None:
    straight = [key for key in ("memory_base_mib", "memory_per_sample_mib") if key in table]
    if "memory_curve" in table and straight:
        raise RequestError(f"{where}: `memory_curve` and `{straight[0]}` contradict each other.", "Keep one of them.")
    if "memory_curve" not in table and len(straight) < 2:
        missing = "memory_per_sample_mib" if "memory_base_mib" in straight else "memory_base_mib"
        raise RequestError(f"{where}: missing key `{missing}`.", "Give both of the memory line, or `memory_curve`.")


def _check_points(key: str, points: Points, what: str, where: str) -> None:
    if len(points) < 2:
        raise RequestError(f"{where}: `{key}` has {len(points)} points.", "A line needs at least two.")
    for batch, number in points:
        if not 1 <= batch <= LARGEST or not math.isfinite(number) or not 0 < number <= LARGEST:
            raise RequestError(
                f"{where}: `{key}` holds [{batch}, {number}].", f"Give a batch of 1 or more and a {what} above 0."
            )
    for (batch0, _), (batch1, _) in pairwise(points):
        if batch1 <= batch0:
            fault = "repeats" if batch1 == batch0 else "is not sorted at"
            raise RequestError(f"{where}: `{key}` {fault} batch {batch1}.", "Give each batch once, in rising order.")


def _check_rising_memory(points: Points, where: str) -> None:
    for (batch0, mib0), (batch1, mib1) in pairwise(points):
        if mib1 < mib0:
            raise RequestError(
                f"{where}: `memory_curve` falls from batch {batch0} to {batch1}.",
                "Memory must not fall as the batch grows.",
            )
