"""The form that starts a search: what was ticked and typed, as the options of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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


def whole_number(text: str, name: str) -> int:
    """A number of samples; RequestError names the field."""
    try:
        return int(text.replace(" ", ""))
    except ValueError:
        raise RequestError(f"{name} {text!r} is not a whole number.", "Give samples, like 1024.") from None


def number(text: str, name: str) -> float:
    """A number; RequestError names the field."""
    try:
        return float(text)
    except ValueError:
        raise RequestError(f"{name} {text!r} is not a number.", "Write it like 0.5.") from None


def request_fields(typed: Mapping[str, str]) -> dict[str, Any]:
    """The form's fields as arguments of `make_request`; an empty one is left out."""
    readers: dict[str, Callable[[str, str], Any]] = {
        "settings": lambda text, _: text.split(),
        "global_batch": whole_number,
        "max_global_batch": whole_number,
        "tolerance": number,
        "pace": number,
    }
    filled = {name: text.strip() for name, text in typed.items() if text.strip()}
    return {
        name: readers[name](text, name.replace("_", " ")) if name in readers else text for name, text in filled.items()
    }
