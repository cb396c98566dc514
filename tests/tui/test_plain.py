"""The plain monitor prints once, in a loop, and as JSON."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from typing import Any

import msgspec
import pytest

from evener.balancer.store.links import list_links, note_link
from evener.errors import RequestError
from evener.tui.cli.monitor import monitor, snapshot_document, snapshot_text
from evener.tui.text.formatting import json_text
from evener.tui.view.monitor import device_details

SIM = "sim:gtx1080ti,gtx1080"


def _printed(*arguments: Any, **options: Any) -> str:
    with redirect_stdout(io.StringIO()) as out:
        monitor(*arguments, **options)
    return out.getvalue()


def test_once_prints_every_device_without_colour() -> None:
    text = _printed(SIM, once=True)
    assert "SIM:0 GTX 1080 Ti" in text
    assert "SIM:1 GTX 1080" in text
    assert "none is measured" in text
    assert "\x1b" not in text


def test_json_is_one_object_with_units_in_its_keys() -> None:
    reading = json.loads(_printed(SIM, as_json=True))
    first = reading["devices"][0]
    assert first["device"]["name"] == "GTX 1080 Ti"
    assert first["power_watts"]["state"] == "value"
    assert first["utilization_percent"]["value"] == 0.0
    assert msgspec.json.encode(reading)


def test_a_measured_link_is_in_the_text_in_json_and_in_details(script: Any) -> None:
    snapshot = script.snapshot()
    devices = [sample.device for sample in snapshot.devices]
    assert "link GPU" not in snapshot_text(snapshot, 120, colour=False)
    note_link(devices, snapshot.driver, "PCIe, no P2P", 6.1e9)
    line = "GPU:0 – GPU:1  PCIe, no P2P, 6.1 GB/s"
    assert f"link {line}" in snapshot_text(snapshot, 120, colour=False)
    (link,) = json.loads(json_text(snapshot_document(snapshot)))["links"]
    assert link["bytes_per_second"] == 6.1e9
    links = list_links(devices, snapshot.driver)
    details = device_details(snapshot.devices[0], 120, links)
    assert any(line in each.text for each in details)
    assert not any(line in each.text for each in device_details(snapshot.devices[0], 120))


def test_too_short_an_interval_is_refused_with_its_reason() -> None:
    with pytest.raises(RequestError, match="slow the devices down"):
        monitor(SIM, interval="0.01")


def test_a_loop_prints_one_object_a_line_until_the_reader_goes() -> None:
    class ThreeLines(io.StringIO):
        def write(self, text: str) -> int:
            if self.getvalue().count("\n") == 3:
                raise BrokenPipeError
            return super().write(text)

    out = ThreeLines()
    with pytest.raises(BrokenPipeError), redirect_stdout(out):
        monitor(SIM, as_json=True, interval="0.1")
    assert [len(json.loads(row)["devices"]) for row in out.getvalue().splitlines()] == [2, 2, 2]
