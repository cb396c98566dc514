"""All families, by the names that the command line, journals and JSON have for them."""

from __future__ import annotations

from collections.abc import Iterable

from evener.errors import RequestError
from evener.plan.layout import KINDS, Traits

from ..types import Layout
from .even import EvenFamily
from .family import Family
from .pack import PackFamily
from .place import PlaceFamily
from .solo import SoloFamily
from .split import SplitFamily

SOLO, EVEN, SPLIT, PACK, PLACE = SoloFamily(), EvenFamily(), SplitFamily(), PackFamily(), PlaceFamily()
FAMILIES: dict[str, Family] = {one.name: one for one in (SOLO, EVEN, SPLIT, PACK, PLACE)}


def add(family: Family, traits: Traits | None = None) -> None:
    """Add a family; with the traits of its layouts if they are of a kind of their own."""
    FAMILIES[family.name] = family
    if traits is not None:
        KINDS[family.kind] = traits


def find_family(name: str) -> Family:
    """A family by its name; RequestError if there is none."""
    if name not in FAMILIES:
        raise RequestError(f"There is no family of layouts {name!r}.", f"Choose from {', '.join(FAMILIES)}.")
    return FAMILIES[name]


def find_families(names: Iterable[str]) -> tuple[Family, ...]:
    """The families of these names, in the order of the registry."""
    wanted = {find_family(name).name for name in names}
    return tuple(family for name, family in FAMILIES.items() if name in wanted)


def family_of(layout: Layout) -> Family:
    """A layout's family, by its kind."""
    return FAMILIES[layout.kind]
