"""An invented maker whose variable has its own spelling of devices, and whose library may be
missing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType

import pytest

from evener.devices.backend import Listing
from evener.devices.cluster.discovery import find_on_host, name_gpus
from evener.devices.discover import discover
from evener.devices.registry import BACKENDS, child_environment
from evener.devices.sampler import open_sampler
from evener.devices.terms import parse_request
from evener.devices.types import Device
from evener.errors import DeviceError
from tests.devices.test_another_maker import CARDS, ToyCards


class SpelledCards(ToyCards):
    def list_devices(self) -> Listing:
        try:
            import_module("toyland_smi")
        except ImportError:
            raise DeviceError(
                "Toyland's library isn't installed.", "pip install toyland-smi"
            ) from None
        return Listing(CARDS)

    def show(self, ids: Sequence[str]) -> dict[str, str]:
        return {"TOY_VISIBLE": ",".join(f"card{int(each[4:], 16)}" for each in ids)}

    def visible(
        self, devices: Sequence[Device], variables: Mapping[str, str]
    ) -> tuple[Device, ...]:
        return super().visible(
            devices, {name: text.replace("card", "") for name, text in variables.items()}
        )


@pytest.fixture(autouse=True)
def first_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `auto` ask this maker before any other, also on a machine with GPUs."""
    for kind, place in {"toy": f"{__name__}:SpelledCards", **BACKENDS}.items():
        monkeypatch.delitem(BACKENDS, kind, raising=False)
        monkeypatch.setitem(BACKENDS, kind, place)


def test_a_missing_library_does_not_end_auto() -> None:
    assert "toy" not in {device.kind for device in discover("auto").devices}
    with pytest.raises(DeviceError, match="library"):
        discover("toy")


def test_search_app_and_cluster_read_the_makers_own_spelling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "toyland_smi", ModuleType("toyland_smi"))
    shown = child_environment(CARDS[1:], "torch").variables["TOY_VISIBLE"]
    assert (shown, name_gpus(["1"])) == ("card1", (CARDS[1].id,))
    monkeypatch.setenv("TOY_VISIBLE", shown)
    on_host = find_on_host(parse_request("toy"), ["1"]).found.devices  # by Ray's numbers
    assert [discover("auto").devices, discover("toy").devices, open_sampler("toy")[1], on_host] == [
        CARDS[1:]
    ] * 4
