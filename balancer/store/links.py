"""Store the measured speed of links between devices, for later searches and displays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import msgspec

from evener.devices.types import Device
from evener.errors import RequestError
from evener.plan.file import Link
from evener.system.files import make_private, state_folder, write_atomically

from ..probes.links import (
    SET_HERE,
    LinkMeasurement,
    find_transport,
    switches_of,
    write_variables,
)
from ..types import KnownLink

MOST_RECORDS = 256  # maximum number of records that are searched


class LinkRecord(msgspec.Struct, frozen=True):
    """A stored file with link measurements between some devices."""

    driver: str
    devices: tuple[str, ...]  # ids of the devices, in order
    measured_at: float  # Unix time
    measurements: tuple[LinkMeasurement, ...] = msgspec.field(name="figures")
    labels: tuple[str, ...] = ()  # labels of the devices, as used in `measurements`


def save_links(
    devices: Sequence[Device], driver: str, measurements: Sequence[LinkMeasurement]
) -> Path:
    """Save measurements of links in place of earlier ones with the same devices and driver.

    Returns the path of the file. Raises OSError or RequestError if it can't be written.
    """
    path = _find_path(devices, driver)
    make_private(path.parent)
    labels = tuple(device.label for device in devices)
    record = LinkRecord(driver, _list_ids(devices), time.time(), tuple(measurements), labels)
    write_atomically(path, msgspec.json.encode(record))
    return path


def note_link(devices: Sequence[Device], driver: str, path: str, bytes_per_second: float) -> None:
    """Save the speed of a link that a probe measured, in addition to earlier measurements.

    `path` is the type of the connection, such as NVLink; "" if it is unknown. Errors while writing
    the file are ignored.
    """
    labels = tuple(device.label for device in devices)
    transport = find_transport(devices)
    variables = write_variables(switches_of(transport)) if transport == SET_HERE else ""
    measurement = LinkMeasurement(
        labels, transport, "ok", bytes_per_second, path=path, variables=variables
    )
    before = find_links(devices, driver)
    others = before.measurements if before is not None else ()
    replaced = (transport, variables, labels)
    kept = [one for one in others if (one.transport, one.variables, one.devices) != replaced]
    with suppress(OSError, RequestError):
        save_links(devices, driver, (*kept, measurement))


def find_links(devices: Sequence[Device], driver: str) -> LinkRecord | None:
    """Return the stored measurements of the links between exactly these devices, or None.

    Only measurements that were made with this driver are used.
    """
    record = _read(_find_path(devices, driver))
    if record is not None and (record.driver, record.devices) == (driver, _list_ids(devices)):
        return record
    return None


def list_links(devices: Sequence[Device], driver: str) -> tuple[Link, ...]:
    """Return the newest measured speed of each link among these devices.

    Links between two devices come first.
    """
    labels = {device.id: device.label for device in devices}
    found = []
    for ids, measurement in _find_newest(devices, driver).items():
        names = tuple(labels[label] for label in labels if label in ids)
        found.append(Link(names, measurement.path, measurement.bytes_per_second))
    return tuple(sorted(found, key=lambda link: (len(link.devices), link.devices)))


def find_known_link(devices: Sequence[Device], driver: str) -> KnownLink | None:
    """Return the measured link that connects the most of these devices, or None.

    If there are several such links, the slowest one is returned.
    """
    newest = _find_newest(devices, driver)
    widest = max(map(len, newest), default=0)
    known = [
        KnownLink(len(ids), measurement.bytes_per_second, measurement.latency_seconds)
        for ids, measurement in newest.items()
        if len(ids) == widest
    ]
    return min(known, key=lambda link: link.bytes_per_second, default=None)


def _find_newest(devices: Sequence[Device], driver: str) -> dict[frozenset[str], LinkMeasurement]:
    """Return the newest successful measurement for each set of devices, keyed by the devices' ids.

    Only measurements over the transport that this environment selects are used.
    """
    known = {device.id for device in devices}
    transport = find_transport(devices)
    variables = write_variables(switches_of(transport)) if transport == SET_HERE else ""
    found = {}
    for record in _list_records(driver):
        for measurement in record.measurements:
            ids = _ids_of(record, measurement)
            is_same = (measurement.transport, measurement.variables) == (transport, variables)
            if is_same and measurement.outcome == "ok" and ids <= known:
                found[ids] = measurement
    return found


def _list_records(driver: str) -> list[LinkRecord]:
    """Return the stored records of measurements with this driver, oldest first."""
    folder = state_folder() / "links"
    read = [_read(path) for path in sorted(folder.glob("*.json"))[:MOST_RECORDS]]
    own = [record for record in read if record is not None and record.driver == driver]
    return sorted(own, key=lambda record: record.measured_at)


def _read(path: Path) -> LinkRecord | None:
    with suppress(OSError, RequestError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=LinkRecord)
    return None


def _ids_of(record: LinkRecord, measurement: LinkMeasurement) -> frozenset[str]:
    """Return the ids of the devices between which a link was measured.

    `record` is the stored file that has the measurement.
    """
    pairs = zip(record.devices, record.labels, strict=False)
    return frozenset(identity for identity, label in pairs if label in measurement.devices)


def _list_ids(devices: Sequence[Device]) -> tuple[str, ...]:
    return tuple(device.id for device in devices)


def _find_path(devices: Sequence[Device], driver: str) -> Path:
    digest = blake2b(msgspec.json.encode((driver, _list_ids(devices))), digest_size=8).hexdigest()
    return state_folder() / "links" / f"{digest}.json"
