"""Reference GPU units: the table by a driver's names, and measured over expected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evener.devices.nvidia.reference_units import over_expected, reference_units
from evener.tui.cli.main import run

GIB = 1 << 30
PAIR = """
[[device]]
name = "Tesla V100-SXM2-16GB"
memory_mib = 16160
memory_base_mib = 500.0
memory_per_sample_mib = 2.0
curve = [[16, 8.0], [256, 40.0]]
[[device]]
name = "Tesla T4"
memory_mib = 15109
memory_base_mib = 500.0
memory_per_sample_mib = 2.0
curve = [[16, 16.0], [256, 80.0]]
"""


@pytest.mark.parametrize(
    ("name", "gib", "units"),
    [
        ("Tesla P100-PCIE-12GB", 11.9, 1.0),
        ("Tesla P100-PCIE-16GB", 15.9, 1.1),
        ("Tesla T4", 14.75, 1.3),
        ("Tesla V100-SXM2-16GB", 15.8, 2.2),
        ("Tesla V100-SXM2-32GB", 31.7, 2.6),
        ("NVIDIA A100-SXM4-40GB", 39.4, 4.0),
        ("NVIDIA A100 80GB PCIe", 79.2, 4.8),
    ],
)
def test_a_drivers_name_and_memory_find_the_model(name: str, gib: float, units: float) -> None:
    assert reference_units(name, round(gib * GIB)) == units


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA T400", "NVIDIA A1000", "GeForce GTX 1080 Ti", ""])
def test_a_model_that_the_table_lacks_is_unknown(name: str) -> None:
    assert reference_units(name, 16 * GIB) is None


def test_an_unknown_or_strange_memory_is_no_model() -> None:
    assert reference_units("NVIDIA A100", None) is None
    assert reference_units("NVIDIA A100", 20 * GIB) is None


def test_measured_over_expected_compares_parts_of_the_whole() -> None:
    """2.2 and 1.3 units promise 63 % and 37 %; two equal speeds are 0.80 and 1.35 of that."""
    found = over_expected([2.2, 1.3, None], [100.0, 100.0, 50.0])
    assert found[0] == pytest.approx(0.5 / (2.2 / 3.5))
    assert found[1] == pytest.approx(0.5 / (1.3 / 3.5))
    assert found[2] is None


def test_one_device_has_nothing_to_be_compared_with() -> None:
    assert over_expected([2.2, None], [100.0, 50.0]) == (None, None)
    assert over_expected([2.2, 1.3], [100.0, None]) == (None, None)


def test_the_list_of_devices_shows_units_and_once_probed_the_measure(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("m.toml").write_text(PAIR)
    assert run(["devices", "-d", "sim:m.toml", "--json"]) == 0
    before = json.loads(capsys.readouterr().out)["devices"]
    assert [each["reference_gpu_units"] for each in before] == [2.2, 1.3]
    assert [each["measured_over_expected"] for each in before] == [None, None]
    assert run(["balance", "-d", "sim:m.toml", "--json"]) == 0
    capsys.readouterr()
    assert run(["devices", "-d", "sim:m.toml", "--json"]) == 0
    after = json.loads(capsys.readouterr().out)["devices"]
    assert after[0]["measured_over_expected"] == pytest.approx((2 / 3) / (2.2 / 3.5), rel=0.02)
    assert run(["devices", "-d", "sim:m.toml"]) == 0
    assert "measured/expected" in capsys.readouterr().out
