"""The commands `devices` and `doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from evener.balancer.diagnostics import (
    FRAMEWORKS,
    Check,
    Level,
    check_cluster,
    check_links,
    check_machine,
    write_link,
)
from evener.balancer.number_format import size
from evener.balancer.probes.links import LinkMeasurement
from evener.devices.discover import discover
from evener.devices.registry import find_backend
from evener.devices.terms import parse_request, write_limit
from evener.devices.types import Device
from evener.errors import RequestError
from evener.printable import align, plain, print_notice

from ..text.formatting import json_text
from .options import DevicesOption, JsonOption, RayAddressOption

MOST_NAMED = 8  # further devices are only counted in the doctor's last line
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
    print_notice(*found.notes)
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


def _check(devices: str, address: str) -> tuple[tuple[Check, ...], str]:
    """Check this machine, or the Ray cluster if `devices` names hosts.

    Returns the checks, and a string that names the devices. Raises RequestError or DeviceError if
    the devices are unavailable.
    """
    if parse_request(devices)[0].host is None:
        found = discover(devices)  # unavailable devices raise an error of their own
        return check_machine(), _name_devices(found.devices)
    return check_cluster(devices, address), f"the devices of {devices}"


def _check_links(devices: str) -> tuple[tuple[Check, ...], tuple[LinkMeasurement, ...]]:
    """Measure an all-reduce between the devices, and return the checks and the measurements.

    Raises RequestError if the devices are on several hosts or simulated.
    """
    if parse_request(devices)[0].host is not None:
        raise RequestError(
            "--links measures the devices of one machine.",
            "Run evener doctor --links on each host.",
        )
    found = discover(devices)
    if any(find_backend(device.kind).simulated for device in found.devices):
        raise RequestError("Simulated devices have no links.", "Leave --devices out.")

    def report(measurement: LinkMeasurement) -> None:
        if measurement.outcome != "ok":
            print_notice(f"{' – '.join(measurement.devices)}, {write_link(measurement)}")

    return check_links(found.devices, found.driver, report)


def _name_devices(devices: Sequence[Device]) -> str:
    """List up to 8 device labels, and say how many more devices there are."""
    labels = [device.label for device in devices[:MOST_NAMED]]
    more = len(devices) - len(labels)
    return ", ".join(labels) + (f" and {more} more" if more else "")


def _conclude(checks: Sequence[Check], devices: str) -> str:
    """Summarize the checks in one sentence, which says "ready" or what is missing."""
    broken = [check.name for check in checks if check.level == "problem"]
    if broken and set(broken) == FRAMEWORKS:
        return (
            "Not ready: a framework is missing. evener demo and simulated devices work meanwhile."
        )
    if broken:
        return f"Not ready: {', '.join(broken)}. evener demo and simulated devices work meanwhile."
    frameworks = {check.name for check in checks if check.level == "ok"} & FRAMEWORKS
    by = f" with {' or '.join(sorted(frameworks))}" if frameworks else ""
    return f"Ready: evener balance will use {devices}{by}."


@app.command()
def doctor(
    devices: DevicesOption = "auto",
    ray_address: RayAddressOption = "",
    links: Annotated[
        bool,
        typer.Option(
            "--links",
            help="Also time an all-reduce between each pair of devices, and over all of them.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check Python, the driver, frameworks, extras and folders.

    With --devices ray, every host and the network between them are checked too.

    Exit code 0: balance can run, 1: it can't.
    """
    checks, used = _check(devices, ray_address)
    measurements: tuple[LinkMeasurement, ...] = ()
    if links:
        more, measurements = _check_links(devices)
        checks = (*checks, *more)
    code = int(any(check.level == "problem" for check in checks))
    if as_json:
        print(json_text({"exit_code": code, "checks": checks, "links": measurements}))
        raise typer.Exit(code)
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{_MARKS[check.level]}  {check.name:<{width}}  {plain(check.found)}")
        if check.remedy:
            print(f"      {plain(check.remedy)}")
    print(_conclude(checks, used))
    raise typer.Exit(code)
