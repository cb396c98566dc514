"""Packing and placing in the physics and the file of simulated machines."""

from __future__ import annotations

import pytest

from evener.devices.machine import Machine, SimulatedDevice
from evener.devices.simulated import parse_machine
from evener.errors import RequestError

FILE = """
[[device]]
name = "Card A"
memory_mib = 1000
memory_base_mib = 100.0
memory_per_sample_mib = 1.0
curve = [[10, 20.0], [20, 30.0]]
pack_gain = [[2, 1.6], [4, 2.0]]
[[device]]
name = "Card B"
memory_mib = 1000
memory_base_mib = 100.0
memory_per_sample_mib = 1.0
curve = [[10, 20.0], [20, 30.0]]
[[placement]]
name = "towers"
curve = [[10, 15.0], [20, 25.0]]
"""


def test_packing_multiplies_the_throughput_by_its_gain() -> None:
    """The gain is linear up to the first point and between points, and level beyond the last."""
    machine = parse_machine(FILE.encode())
    alone = machine.device_seconds(0, 10, False)
    for processes, gain in ((1, 1.0), (2, 1.6), (3, 1.8), (4, 2.0), (9, 2.0)):
        assert machine.pack_seconds(0, 10, processes) == pytest.approx(processes * alone / gain)


def test_without_a_curve_trainings_share_the_time() -> None:
    machine = parse_machine(FILE.encode())
    assert machine.pack_seconds(1, 10, 3) == pytest.approx(3 * machine.device_seconds(1, 10, False))


def test_a_placement_has_a_curve_of_its_own() -> None:
    machine = parse_machine(FILE.encode())
    towers = machine.placement("towers")
    assert towers is not None
    assert towers.seconds(15) == pytest.approx(0.020)
    assert machine.placement("alternate") is None


def test_machines_without_packing_or_placing_are_as_before() -> None:
    device = SimulatedDevice(name="A", memory_mib=10.0, curve=((1, 1.0), (2, 2.0)))
    assert device.gain(5) == 1.0
    assert Machine((device,)).placements == ()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("[[2, 1.6], [4, 2.0]]", "[[4, 1.6], [2, 2.0]]", "pack_gain"),
        ("[[2, 1.6], [4, 2.0]]", "[[2, 0.0]]", "pack_gain"),
        ('name = "towers"', 'name = ""', "name"),
        ('name = "towers"', 'name = "towers"\ndevices = 3', "devices"),
        ("[[placement]]", "[placement]", "placement"),
        ("curve = [[10, 15.0], [20, 25.0]]", "curve = [[10, 15.0]]", "curve"),
        ("[[placement]]", "[[placements]]", "placements"),
    ],
)
def test_a_wrong_key_is_named(before: str, after: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        parse_machine(FILE.replace(before, after).encode(), "machine.toml")
