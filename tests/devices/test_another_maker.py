"""An invented maker: with its class and one line in the registry, every command and probe uses its
cards.
"""

from __future__ import annotations

import threading
import time

import pytest

from evener.balancer.types import Probe, Stage, Timed, solo
from evener.devices.backend import Backend, Discovery, Listing, Vitals
from evener.devices.registry import BACKENDS
from evener.devices.snapshot_builder import SnapshotBuilder
from evener.devices.types import Device, DeviceSample, Snapshot, value
from evener.tui.cli.main import run
from tests.support.probe_children import list_probe_children
from tests.support.probers import child_prober

CARDS = tuple(Device(f"toy-{i:04x}", i, "Toyland Express", "toy", 8 << 30) for i in range(2))


# for the monitor: devices, sample and close; for probes: read and close
class ToyDriver(SnapshotBuilder):
    def devices(self) -> tuple[Device, ...]:
        return CARDS

    def sample(self) -> Snapshot:
        self.begin()
        return self.snapshot(
            [DeviceSample(device=card, power_watts=value(40.0)) for card in CARDS], driver="1.2"
        )

    def read(self, full: bool) -> Vitals:
        return Vitals(now := time.monotonic(), joules=40.0 * now)

    def close(self) -> None: ...


class ToyCards(Backend):
    kind, maker, id_prefixes, visible_variable = "toy", "Toyland", ("toy-",), "TOY_VISIBLE"

    def list_devices(self) -> Listing:
        return Listing(CARDS)

    def open_source(self, found: Discovery) -> ToyDriver:
        return ToyDriver()

    def open_vitals(self, device: Device) -> ToyDriver:
        return ToyDriver()


def test_an_invented_makers_cards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(BACKENDS, "toy", f"{__name__}:ToyCards")
    assert [run(["devices", "-d", "toy:1,toy-0000"]), run(["monitor", "--once", "-d", "toy"])] == [
        0,
        0,
    ]
    shown = capsys.readouterr().out
    assert [
        words for words in ("toy-0001", "TOY:0", "Toyland driver 1.2", "40 W") if words not in shown
    ] == []
    prober, visible = child_prober(CARDS, base_ms=1.0), set[str | None]()

    def look(_: object) -> None:
        visible.update(child.environ().get("TOY_VISIBLE") for child in list_probe_children())

    (seen,) = prober.measure((Probe(solo(2, 1, 8), Stage.SOLO, 0.5),), look, threading.Event())
    prober.close()
    assert (seen.watts if isinstance(seen, Timed) else seen, visible) == (
        (None, pytest.approx(40.0)),
        {"toy-0001"},
    )
