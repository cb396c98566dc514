"""Simulated machines from a TOML file or the built-in catalogue, read strictly.

Every fault is a RequestError that names the file, the device and the key.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from os import PathLike
from typing import Any, TypeVar

import msgspec

from evener.errors import RequestError
from evener.system.whole_files import read_whole

from ..machine import Machine, SimulatedDevice, SimulatedEvent, SimulatedPlacement, Sync

__all__ = ["Machine", "SimulatedDevice", "Sync", "catalogue", "catalogue_names", "load_machine", "parse_machine"]

Table = TypeVar("Table", bound=msgspec.Struct)


class MachineFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine file, key for key."""

    device: tuple[SimulatedDevice, ...] = ()
    sync: Sync = Sync()  # absent: it costs nothing
    placement: tuple[SimulatedPlacement, ...] = ()
    event: tuple[SimulatedEvent, ...] = ()


class _Entry(msgspec.Struct, frozen=True):
    device: SimulatedDevice
    sync: Sync | None  # how it keeps in step with its like; None: the catalogue's default


def load_machine(path: str | PathLike[str]) -> Machine:
    """The machine that a TOML file describes; RequestError says what is wrong in it, and where."""
    text = read_whole(path, "machine file", "Name an existing TOML file with [[device]] tables.")
    return parse_machine(text, str(path))


def parse_machine(text: bytes, source: str = "machine.toml") -> Machine:
    """The machine in a file's bytes; `source` names it in errors."""
    data = _decode(text, source)
    file = _convert(data, MachineFile, source)
    if not file.device:
        raise RequestError(f"{source} has no devices.", "Add at least one [[device]] table.")
    for i, table in enumerate(data["device"]):
        _check_memory_keys(table, _where(source, "device", i, table))
    _check_positions(file, source)
    return Machine(file.device, file.sync, placements=file.placement, events=file.event)


def _check_positions(file: MachineFile, source: str) -> None:
    """Placements and events fit the number of devices, and placements have names of their own."""
    devices = len(file.device)
    for i, placement in enumerate(file.placement):
        where = f"{source}: placement {i}"
        if placement.name in {other.name for other in file.placement[:i]}:
            raise RequestError(f"{where}: `name` is {placement.name!r} again.", "Give each placement its own name.")
        if placement.devices > devices:
            raise RequestError(f"{where}: `devices` is {placement.devices}.", f"The machine has {devices}.")
    for i, event in enumerate(file.event):
        if event.device >= devices:
            raise RequestError(f"{source}: event {i}: `device` is {event.device}.", f"The last one is {devices - 1}.")


def catalogue_names() -> tuple[str, ...]:
    """The names that `sim:` knows."""
    return tuple(_entries()[0])


def catalogue(names: Sequence[str]) -> Machine:
    """A machine of catalogue devices; a mixed one synchronises at the cost of its most expensive device."""
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
    default = _convert(data.pop("sync"), Sync, "catalogue.toml: sync")
    entries: dict[str, _Entry] = {}
    for name, table in data.items():
        own = table.pop("sync", None)
        device = _convert(table, SimulatedDevice, f"catalogue.toml: {name}")
        entries[name] = _Entry(device, _convert(own, Sync, f"catalogue.toml: {name}") if own else None)
    return entries, default


def _decode(text: bytes, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text.decode())
    except (RecursionError, ValueError) as error:  # also of text that isn't Unicode, and of endless numbers
        raise RequestError(f"{source} is not TOML: {error}.", "Correct that line.") from None


def _where(source: str, kind: str, position: int, table: object) -> str:
    name = table.get("name") if isinstance(table, dict) else None
    return f"{source}: {kind} {position}" + (f" ({name})" if isinstance(name, str) and name.isprintable() else "")


def _convert(table: Any, kind: type[Table], where: str) -> Table:
    try:
        return msgspec.convert(table, kind, strict=True)
    except msgspec.ValidationError as error:
        raise RequestError(f"{_explain(str(error), table, where)}.", "Correct that line of the file.") from None


def _explain(message: str, table: Any, where: str) -> str:
    """The fault in msgspec's words, with the table, the key and its value in front."""
    text, _, path = message.partition(" - at `$")
    seen = table
    for key, position in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        seen = seen[key or int(position)]
    found = re.fullmatch(r"\.(device|placement|event)\[(\d+)\](.*)", path.rstrip("`"))
    if found:
        where, path = _where(where, found[1], int(found[2]), table[found[1]][int(found[2])]), found[3]
    text = text.replace("Object contains unknown field", "unknown key")
    text = text.replace("Object missing required field", "missing key")
    key = path.strip(".`")
    shown = "" if isinstance(seen, dict | list) else f" is {seen!r}"
    return f"{where}: `{key}`{shown}: {text}" if key else f"{where}: {text}"


def _check_memory_keys(table: dict[str, Any], where: str) -> None:
    straight = [key for key in ("memory_base_mib", "memory_per_sample_mib") if key in table]
    if "memory_curve" in table and straight:
        raise RequestError(f"{where}: `memory_curve` and `{straight[0]}` exclude each other.", "Keep one of them.")
    if "memory_curve" not in table and len(straight) < 2:
        missing = "memory_per_sample_mib" if "memory_base_mib" in straight else "memory_base_mib"
        raise RequestError(f"{where}: missing key `{missing}`.", "Give both of the memory line, or `memory_curve`.")
