"""`evener devices`: what `--devices` means on this machine."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from devices.base import Device, Limit
from devices.discover import discover
from tui.documents import json_text
from tui.words import plain, size


def run_devices(spec: str, as_json: bool) -> int:
    """List the devices in the order that shares will have."""
    found = discover(spec)
    if as_json:
        listing = {"devices": [_as_json(device) for device in found.devices], "notes": found.notes}
        print(json_text(listing))
        return 0
    for note in found.notes:
        print(f"evener: {plain(note)}", file=sys.stderr)
    rows = [("device", "name", "memory", "limit", "cores", "id")]
    rows += [_row(device) for device in found.devices]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(device: Device) -> tuple[str, str, str, str, str, str]:
    memory = size(device.memory_bytes) if device.memory_bytes is not None else "?"
    cores = ",".join(map(str, device.cores)) or "-"
    return (device.label, plain(device.name, 40), memory, limit_words(device.limit) or "-", cores, plain(device.id, 80))


def limit_words(limit: Limit) -> str:
    """A limit as it was given: "60%+8 GiB"; empty without one."""
    parts = []
    if limit.percent is not None:
        parts.append(f"{limit.percent:g}%")
    if limit.memory_bytes is not None:
        parts.append(size(limit.memory_bytes))
    return "+".join(parts)


def _as_json(device: Device) -> dict[str, Any]:
    return {**msgspec.to_builtins(device), "label": device.label, "usable_memory_bytes": device.usable_memory_bytes}
