"""`evener devices` and `evener doctor`: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from evener.balancer.diagnostics import Check, Level, check_machine
from evener.devices.discover import discover
from evener.devices.limits import write_limit
from evener.devices.nvidia.reference_units import over_expected, reference_units
from evener.devices.terms import parse_request
from evener.devices.types import Device
from evener.errors import RequestError
from evener.tui.cli.options import DevicesOption, JsonOption, RayAddressOption
from evener.tui.text.formatting import plain, size
from evener.tui.text.safe_documents import json_text
from evener.tui.text.tables import align

_MARKS: dict[Level, str] = {"ok": "ok  ", "note": "note", "problem": "FAIL"}
app = typer.Typer()


@app.command("devices")
def list_devices(
    devices: DevicesOption = "auto", ray_address: RayAddressOption = "", as_json: JsonOption = False
) -> None:
    """List the devices that --devices selects, on this machine or a Ray cluster."""
    found = discover(devices, ray_address=ray_address)
    references = _references(found.devices)
    if as_json:
        listing = {
            "devices": [_as_json(device, *pair) for device, pair in zip(found.devices, references, strict=True)],
            "notes": found.notes,
        }
        print(json_text(listing))
        return
    for note in found.notes:
        print(f"evener: {plain(note)}", file=sys.stderr)
    rows: list[tuple[str, ...]] = [("device", "name", "memory", "limit", "cores", "id")]
    rows += [_row(device) for device in found.devices]
    if any(units is not None for units, _ in references):
        added = [("RGU", "measured/expected"), *(_reference_row(*pair) for pair in references)]
        rows = [(*row[:-1], *more, row[-1]) for row, more in zip(rows, added, strict=True)]
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


def _references(devices: Sequence[Device]) -> list[tuple[float | None, float | None]]:
    """Each device's reference units, and its measured share over the expected one, None where unknown."""
    units = [reference_units(device.name, device.memory_bytes) for device in devices]
    rates: Sequence[float | None] = [None] * len(units)
    if sum(unit is not None for unit in units) > 1:
        from evener.balancer.store.runs import find_solo_rates

        rates = find_solo_rates(devices)
    return list(zip(units, over_expected(units, rates), strict=True))


def _reference_row(units: float | None, part: float | None) -> tuple[str, str]:
    return ("-" if units is None else f"{units:.1f}", "-" if part is None else f"{part:.2f}")


def _as_json(device: Device, units: float | None, part: float | None) -> dict[str, Any]:
    return {
        **msgspec.to_builtins(device),
        "label": device.label,
        "usable_memory_bytes": device.usable_memory_bytes,
        "reference_gpu_units": units,
        "measured_over_expected": part,
    }


def _check(devices: str, address: str, script: Path | None) -> tuple[Check, ...]:
    if parse_request(devices)[0].host is None:
        if script is not None:
            raise RequestError("--script compares the hosts of a cluster.", "Name them: --devices ray.")
        discover(devices)  # what can't be had is its own sentence
        return check_machine()
    from evener.balancer.cluster_diagnostics import check_cluster

    return check_cluster(devices, address, script)


@app.command()
def doctor(
    devices: DevicesOption = "auto",
    ray_address: RayAddressOption = "",
    script: Annotated[
        Path | None,
        typer.Option("--script", help="A training script that is to be the same on the hosts of a cluster."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check Python, driver, frameworks and folders, of every host with --devices ray, and their network.

    Exit code 0: balance can run, 1: it can't.
    """
    checks = _check(devices, ray_address, script)
    code = int(any(check.level == "problem" for check in checks))
    if as_json:
        print(json_text({"exit_code": code, "checks": checks}))
        raise typer.Exit(code)
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{_MARKS[check.level]}  {check.name:<{width}}  {plain(check.found)}")
        if check.remedy:
            print(
                f"{'':{width + 6}}  → {plain(check.remedy)}" if sys.stdout.isatty() else f"      {plain(check.remedy)}"
            )
    raise typer.Exit(code)
