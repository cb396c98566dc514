"""`evener devices` and `evener doctor`: what this machine has, what is missing, and what to do
about it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import typer

from evener.balancer.diagnostics import Check, Level, check_cluster, check_machine
from evener.balancer.number_format import size
from evener.devices.discover import discover
from evener.devices.terms import parse_request, write_limit
from evener.devices.types import Device
from evener.printable import align, plain, say

from ..text.formatting import json_text
from .options import DevicesOption, JsonOption, RayAddressOption

_MARKS: dict[Level, str] = {"ok": "ok  ", "note": "note", "problem": "FAIL"}
app = typer.Typer()


@app.command("devices")
def list_devices(
    devices: DevicesOption = "auto", ray_address: RayAddressOption = "", as_json: JsonOption = False
) -> None:
    """List the devices that --devices selects, on this machine or a Ray cluster."""
    found = discover(devices, ray_address=ray_address)
    if as_json:
        print(
            json_text(
                {"devices": [_as_json(device) for device in found.devices], "notes": found.notes}
            )
        )
        return
    say(*found.notes)
    rows: list[tuple[str, ...]] = [("device", "name", "memory", "limit", "cores", "id")]
    rows += [_row(device) for device in found.devices]
    print("\n".join(align(rows, numbers_from=len(rows[0]))))


def _row(device: Device) -> tuple[str, str, str, str, str, str]:
    memory = size(device.memory_bytes) if device.memory_bytes is not None else "?"
    cores = ",".join(map(str, device.cores)) or "-"
    return (
        device.label,
        plain(device.name, 40),
        memory,
        write_limit(device.limit) or "-",
        cores,
        plain(device.id, 80),
    )


def _as_json(device: Device) -> dict[str, Any]:
    return {
        **msgspec.to_builtins(device),
        "label": device.label,
        "usable_memory_bytes": device.usable_memory_bytes,
    }


def _check(devices: str, address: str) -> tuple[Check, ...]:
    if parse_request(devices)[0].host is None:
        discover(devices)  # what can't be had is its own sentence
        return check_machine()
    return check_cluster(devices, address)


@app.command()
def doctor(
    devices: DevicesOption = "auto",
    ray_address: RayAddressOption = "",
    as_json: JsonOption = False,
) -> None:
    """Check Python, the driver, frameworks, extras and folders; with --devices ray, on every host,
    and the network.

    Exit code 0: balance can run, 1: it can't.
    """
    checks = _check(devices, ray_address)
    code = int(any(check.level == "problem" for check in checks))
    if as_json:
        print(json_text({"exit_code": code, "checks": checks}))
        raise typer.Exit(code)
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{_MARKS[check.level]}  {check.name:<{width}}  {plain(check.found)}")
        if check.remedy:
            print(f"      {plain(check.remedy)}")
    raise typer.Exit(code)
