"""The form that starts a search: what was ticked and typed, as the options of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evener.devices.limits import write_limit
from evener.devices.types import Device
from evener.errors import RequestError


def subset(spec: str, devices: Sequence[Device], chosen: Sequence[int]) -> str:
    """`--devices` for the chosen ones of the devices in `spec`; RequestError for none, or a part of a machine file."""
    if not chosen:
        raise RequestError("No device is chosen.", "Tick at least one with Space.")
    if len(chosen) == len(devices):
        return spec
    picked = [devices[position] for position in chosen]
    if picked[0].kind == "sim":
        return _simulated(spec, devices, chosen)
    prefix = "gpu:"
    names = [device.id for device in picked]
    if picked[0].kind == "cpu":
        prefix = f"cpu/{picked[0].id.rpartition('-of-')[2]}:"
        names = [str(device.index) for device in picked]
    return prefix + ",".join(_limited(name, device) for name, device in zip(names, picked, strict=True))


def _limited(name: str, device: Device) -> str:
    return f"{name}@{write_limit(device.limit)}" if device.limit else name


def _simulated(spec: str, devices: Sequence[Device], chosen: Sequence[int]) -> str:
    pieces = [piece.strip().removeprefix("sim:") for piece in spec.split(",")]
    if len(pieces) != len(devices):
        raise RequestError("A machine file can't be used in part.", "Tick every device, or write a smaller file.")
    return "sim:" + ",".join(pieces[position] for position in chosen)


def whole_number(text: str, name: str) -> int | None:
    """A number of samples, None if the field is empty; RequestError names the field."""
    if not text.strip():
        return None
    try:
        return int(text.replace(" ", ""))
    except ValueError:
        raise RequestError(f"{name} {text.strip()!r} is not a whole number.", "Give samples, like 1024.") from None


def number(text: str, name: str) -> float:
    """A number; RequestError names the field."""
    try:
        return float(text)
    except ValueError:
        raise RequestError(f"{name} {text.strip()!r} is not a number.", "Write it like 0.5.") from None


def request_fields(devices: str, workload: str, framework: str, typed: Mapping[str, str]) -> dict[str, object]:
    """The form as arguments of `make_request`; an empty field is the option's default."""
    fields: dict[str, object] = {
        "devices": devices,
        "workload": workload or None,
        "framework": framework,
        "settings": typed.get("settings", "").split(),
        "objective": typed["objective"],
        "precision": typed["precision"],
        "inputs": typed["input"],
        "engine": typed.get("engine", "auto"),
        "global_batch": whole_number(typed.get("global_batch", ""), "global batch"),
        "max_global_batch": whole_number(typed.get("max_global_batch", ""), "max global batch"),
    }
    if typed.get("budget", "").strip():
        fields["budget"] = typed["budget"].strip()
    if typed.get("tolerance", "").strip():
        fields["tolerance"] = number(typed["tolerance"], "tolerance")
    if typed.get("pace", "").strip():
        fields["pace"] = number(typed["pace"], "pace")
    return fields
