"""The links between devices as they were last measured, kept by driver and devices.

Another driver, or other devices, have other links: what was kept for them isn't found then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import msgspec

from evener.devices.types import Device
from evener.errors import RequestError
from evener.system.files import make_private, state_folder, write_atomically

from ..probes.links import LinkFigure


class LinkRecord(msgspec.Struct, frozen=True):
    """What was measured, when, and on what."""

    driver: str
    devices: tuple[str, ...]  # ids, in order
    measured_at: float  # seconds since the epoch
    figures: tuple[LinkFigure, ...]


def save_links(devices: Sequence[Device], driver: str, figures: Sequence[LinkFigure]) -> Path:
    """Keep the figures; the file that they are in. RequestError if it can't be written."""
    path = _find_path(devices, driver)
    make_private(path.parent)
    record = LinkRecord(driver, _list_ids(devices), time.time(), tuple(figures))
    write_atomically(path, msgspec.json.encode(record))
    return path


def find_links(devices: Sequence[Device], driver: str) -> LinkRecord | None:
    """What is known of the links between these devices by this driver; None if nothing is."""
    with suppress(OSError, RequestError, msgspec.DecodeError):
        record = msgspec.json.decode(_find_path(devices, driver).read_bytes(), type=LinkRecord)
        if (record.driver, record.devices) == (driver, _list_ids(devices)):
            return record
    return None


def _list_ids(devices: Sequence[Device]) -> tuple[str, ...]:
    return tuple(device.id for device in devices)


def _find_path(devices: Sequence[Device], driver: str) -> Path:
    digest = blake2b(msgspec.json.encode((driver, _list_ids(devices))), digest_size=8).hexdigest()
    return state_folder() / "links" / f"{digest}.json"
