"""Devices that a maker's driver lists: which of them a request means, and which a variable leaves. Pure.

The rules are those of CUDA_VISIBLE_DEVICES, which other makers' variables share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from evener.errors import DeviceError, RequestError

from .machine import Machine
from .types import Device, Term, limited

CROWDED = 0.05  # of a device's memory: others' use above it is worth a note
_INDEX = re.compile(r"\d{1,6}", re.ASCII)


class Listing(msgspec.Struct, frozen=True):
    """The devices of one kind that a driver lists, and notes on those that don't answer."""

    devices: tuple[Device, ...]
    used_bytes: dict[str, int | None] = {}  # by id: the memory in use on it now
    notes: tuple[str, ...] = ()
    driver: str = ""  # its version; empty if it doesn't say


class Discovery(msgspec.Struct, frozen=True):
    """The devices of a request, and notes on them."""

    devices: tuple[Device, ...]
    notes: tuple[str, ...] = ()  # to be shown: what `auto` chose and why, a device that others use
    machine: Machine | None = None  # the physics, if the devices are simulated
    driver: str = ""  # version of the devices' driver


def choose_devices(listing: Listing, terms: Sequence[Term], variable: str, variables: Mapping[str, str]) -> Discovery:
    """The listed devices that the terms name; those without a pick mean all that `variable` leaves."""
    hidden = variables.get(variable)
    chosen: list[Device] = []
    for term in terms:
        picked = (pick_device(listing.devices, term.pick),) if term.pick else visible_devices(listing.devices, hidden)
        if not picked:
            kind = listing.devices[0].kind
            remedy = f"Unset it, or name {kind.upper()}s as in {kind}:0."
            raise DeviceError(f"{variable}={hidden!r} hides every {kind.upper()}.", remedy)
        chosen += [limited(device, term.limit) for device in picked]
    crowded = [
        f"{device.label} has {used / 2**30:.1f} of {device.memory_bytes / 2**30:.1f} GiB in use by others."
        for device in chosen
        if device.memory_bytes and (used := listing.used_bytes.get(device.id) or 0) > CROWDED * device.memory_bytes
    ]
    return Discovery(tuple(chosen), (*listing.notes, *crowded), driver=listing.driver)


def pick_device(devices: Sequence[Device], pick: str) -> Device:
    """The device with this index, this id, or the only one whose id begins so; RequestError names what is there."""
    found = _matching(devices, pick)
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"{device.index} ({device.name}, {device.id})" for device in devices)
    if found:
        raise RequestError(f"{pick!r} is the beginning of {len(found)} UUIDs.", f"Write more of it: {there}.")
    raise RequestError(f"There is no {devices[0].kind.upper()} {pick!r}.", f"This machine has {there}.")


def visible_devices(devices: Sequence[Device], variable: str | None) -> tuple[Device, ...]:
    """The devices that a variable's text leaves, in its order; None: it isn't set.

    Entries are indices or beginnings of ids; all behind the first that names no device are ignored, and a device named
    twice hides them all. Source: CUDA C++ programming guide, environment variables.
    """
    if variable is None:
        return tuple(devices)
    chosen: list[Device] = []
    for text in variable.split(","):
        found = _matching(devices, text.strip())
        if len(found) != 1:
            break
        if found[0] in chosen:
            return ()
        chosen += found
    return tuple(chosen)


def _matching(devices: Sequence[Device], pick: str) -> list[Device]:
    if _INDEX.fullmatch(pick):
        return [device for device in devices if device.index == int(pick)]
    wanted = pick.lower()
    if not wanted.startswith(tuple(f"{device.id.lower().partition('-')[0]}-" for device in devices)):
        return []
    exact = [device for device in devices if device.id.lower() == wanted]
    return exact or [device for device in devices if device.id.lower().startswith(wanted)]
