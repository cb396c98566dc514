"""The families: ways to use the devices, of which a search compares layouts.

`Family` is what each of them has to say; `FAMILIES` lists them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import msgspec

from evener.errors import RequestError
from evener.plan.layout import BEST_SINGLE, BEST_SPLIT, EVEN_SPLIT, KINDS, Traits
from evener.shares.whole_rows import even

from .number_format import join_shares
from .types import Layout

PackMode = Literal["", "logical", "mps"]
MOST_NAMED = 8  # devices in an answer; the table beside it has the shares of more
MODES: dict[str, str] = {"": "", "logical": " with equal parts of the memory", "mps": " under MPS"}


class Placement(msgspec.Struct, frozen=True):
    """A workload's own way to lay its parts on devices."""

    name: str
    devices: int = 2  # most that it uses


class Offer(Protocol):
    """The ways of running trainings that the workload offers to families."""

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The workload's own ways to lay its parts on devices."""


class View(Protocol):
    """The findings of exploration by which families choose their layouts; lists have the best
    first.
    """

    @property
    def devices(self) -> int:
        """The number of devices."""

    @property
    def options(self) -> Offer:
        """The families that were asked for, and what the machine offers them."""

    @property
    def common_batch(self) -> int | None:
        """The batch for layouts that have none of their own; None before one is known, and where
        rows go by cost.
        """

    @property
    def singles(self) -> Sequence[Layout]:
        """One device alone: the best one, and others that may beat it."""

    @property
    def splits(self) -> Sequence[Layout]:
        """Splits worth a race; none unless they were asked for."""

    @property
    def even_splits(self) -> Sequence[Layout]:
        """Even splits at about the batch of the best split."""

    @property
    def shards(self) -> Sequence[Layout]:
        """Sharded trainings worth a race; none where each device holds the whole model, unless they
        were asked for.
        """

    @property
    def packs(self) -> Sequence[Layout]:
        """The best pack of each mode, or the first to try."""


class Family(ABC):
    """A way to use the devices.

    `kind` is the name that its layouts have in journals and plans, `name` its own on the command
    line and in JSON.
    """

    name: str
    kind: str
    fewest_devices = 1
    simplicity = 0  # of layouts that tie, the one with the least is chosen
    start_cost = 1.0  # to start one of its processes, as a multiple of that of a device alone
    more_children = False  # its layouts need processes that exploration doesn't start
    in_balance = False  # `evener balance` looks at its layouts too
    explored = False  # exploration measures its layouts, and costs that only they show
    equal_shares = False  # what frameworks do by default: gains are said against it
    plural = ""  # the name of several layouts, for families that don't train by shares

    @property
    def traits(self) -> Traits:
        """The traits that all layouts of the family share."""
        return KINDS[self.kind]

    @abstractmethod
    def layouts(self, view: View) -> Sequence[Layout]:
        """The family's layouts for the race, the best first."""

    @abstractmethod
    def title(self, layout: Layout, devices: int, another: bool = False) -> str:
        """A layout's name in tables, of `another` than the family's first; `devices` is how many
        there are.
        """

    @abstractmethod
    def answer(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """What to do, as the first words of a verdict: 826 + 571 on GPU:0 + GPU:1.

        `labels` are of all devices, `ratios` of the parts of each batch's work.
        """


def write_rows(layout: Layout) -> str:
    """The samples of each device of a layout: 826 + 571; of many devices, their sum."""
    shares = [(layout.shares[i], layout.pass_rows[i]) for i in layout.active]
    return join_shares(shares) if len(shares) <= MOST_NAMED else str(layout.global_batch)


def write_devices(layout: Layout, labels: Sequence[str]) -> str:
    """The devices of a layout: GPU:0 + GPU:1; many are counted."""
    names = [labels[i] for i in layout.active]
    return " + ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} devices"


def write_ratios(layout: Layout, ratios: Sequence[float]) -> str:
    """The parts of the devices of a layout: 0.591 : 0.409; nothing for many."""
    parts = [ratios[i] for i in layout.active]
    return " : ".join(f"{part:.3f}" for part in parts) if len(parts) <= MOST_NAMED else ""


class SoloFamily(Family):
    """One training on one device; the others are left out."""

    name = kind = "solo"
    in_balance = True

    def layouts(self, view: View) -> Sequence[Layout]:
        """The best device, and others that the race favours."""
        return view.singles

    def title(self, layout: Layout, devices: int, another: bool = False) -> str:
        """Best single device, or another one."""
        return "another single device" if another else BEST_SINGLE

    def answer(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """1024 on GPU:0 alone."""
        alone = " alone" if len(labels) > 1 else ""
        return f"{write_rows(layout)} on {write_devices(layout, labels)}{alone}"


def device_counts(devices: int) -> tuple[int, ...]:
    """2, 4, 8, ... and all of them: how many devices an even split is measured on."""
    counts = []
    count = 2
    while count < devices:
        counts.append(count)
        count *= 2
    return (*counts, devices) if devices > 1 else ()


def split_evenly(
    devices: int, positions: tuple[int, ...], batch: int, quantum: int = 1
) -> Layout | None:
    """The batch spread evenly over some devices, in whole quanta; None if it has too few for
    them.
    """
    if batch // quantum < len(positions) or batch % quantum:
        return None
    quanta = dict(zip(positions, even(batch // quantum, len(positions)), strict=True))
    return Layout("split", tuple(quanta.get(i, 0) * quantum for i in range(devices)))


def is_even(layout: Layout, quantum: int = 1) -> bool:
    """True if the shares of the active devices are rows and differ by at most one quantum."""
    active = [layout.shares[i] for i in layout.active]
    return layout.by_rows and len(active) > 1 and max(active) - min(active) <= quantum


class EvenFamily(Family):
    """One training whose devices have equal shares."""

    name = "even"
    kind = "split"
    fewest_devices = 2
    simplicity = 1
    start_cost = 1.5  # its processes have to meet
    equal_shares = True
    in_balance = True

    def layouts(self, view: View) -> Sequence[Layout]:
        """Over all devices and fewer, once it is clear what batch splits take."""
        return view.even_splits

    def title(self, layout: Layout, devices: int, another: bool = False) -> str:
        """The even split, or how many of the devices it is over."""
        count = len(layout.active)
        name = EVEN_SPLIT if count == devices else f"even over {count}"
        return f"another {name}" if another else name

    def answer(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """128 + 128 on GPU:0 + GPU:1, split evenly."""
        return f"{write_rows(layout)} on {write_devices(layout, labels)}, split evenly"


class SplitFamily(Family):
    """One training whose devices have the shares that they finish at the same time."""

    name = kind = "split"
    fewest_devices = 2
    simplicity = 2
    start_cost = 1.5  # its processes have to meet
    explored = True
    in_balance = True

    def layouts(self, view: View) -> Sequence[Layout]:
        """The preferred split, and others that may beat it; one of them may be one device."""
        return view.splits

    def title(self, layout: Layout, devices: int, another: bool = False) -> str:
        """Best split, or another one."""
        return "another split" if another else BEST_SPLIT

    def answer(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """826 + 571 on GPU:0 + GPU:1; where rows are assigned by cost, the parts of that."""
        where = write_devices(layout, labels)
        if not layout.costs:
            return f"{write_rows(layout)} on {where}"
        parts = write_ratios(layout, ratios)
        split = f", their cost split {parts}" if parts else ", split by their cost"
        return f"{layout.global_batch} rows on {where}{split}"


class ShardFamily(Family):
    """One training whose devices hold parts of the model by their memory, and compute rows by their
    speed.
    """

    name = kind = "shard"
    fewest_devices = 2
    simplicity = 5
    start_cost = 1.5  # its processes have to meet
    in_balance = True

    def layouts(self, view: View) -> Sequence[Layout]:
        """Rows by speed, state by the memory that is left beside them."""
        return view.shards

    def title(self, layout: Layout, devices: int, another: bool = False) -> str:
        """Shards of the model."""
        return "another shards of the model" if another else "shards of the model"

    def answer(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """820 + 568 on GPU:0 + GPU:1, the model in shards 0.600 : 0.400."""
        parts = write_ratios(layout, layout.state) if layout.state else ""
        where = write_devices(layout, labels)
        return f"{write_rows(layout)} on {where}, the model in shards {parts}".rstrip()


def pack_on(
    single: Layout, processes: int, mode: PackMode = "", batch: int | None = None
) -> Layout:
    """Several trainings side by side on the device of a solo layout, each with its batch unless
    another is given.
    """
    size = single.global_batch if batch is None else batch
    return Layout("pack", tuple(size if share else 0 for share in single.shares), processes, mode)


class PackFamily(Family):
    """The number of trainings that together get the most out of one device."""

    name = kind = "pack"
    simplicity = 4
    start_cost = 0.8  # of each training
    more_children = True
    plural = "packs"

    def layouts(self, view: View) -> Sequence[Layout]:
        """The best number of trainings in each mode, or the fewest."""
        return view.packs

    def title(self, layout: Layout, devices: int, another: bool = False) -> str:
        """Pack of 5 under MPS."""
        name = f"pack of {layout.processes}{MODES.get(layout.placement, '')}"
        return f"another {name}" if another else name

    def answer(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """5 trainings of 256 side by side on GPU:0."""
        where = f"{write_devices(layout, labels)}{MODES.get(layout.placement, '')}"
        return f"{layout.processes} trainings of {layout.global_batch} side by side on {where}"


def place_on(devices: int, placement: Placement, batch: int) -> Layout | None:
    """The model's parts on the first devices; the shares only say who takes part. None if there are
    too few.
    """
    used = min(devices, placement.devices)
    spread = split_evenly(devices, tuple(range(used)), batch) if used > 1 else None
    return spread and msgspec.structs.replace(spread, kind="place", placement=placement.name)


class PlaceFamily(Family):
    """One training in one process, whose parts lie as the workload says."""

    name = kind = "place"
    fewest_devices = 2
    simplicity = 3
    more_children = True
    plural = "placements"

    def layouts(self, view: View) -> Sequence[Layout]:
        """Each placement, at the batch of the best single device."""
        if view.common_batch is None:
            return []
        found = [place_on(view.devices, one, view.common_batch) for one in view.options.placements]
        return [layout for layout in found if layout is not None]

    def title(self, layout: Layout, devices: int, another: bool = False) -> str:
        """Place towers."""
        name = f"place {layout.placement}"
        return f"another {name}" if another else name

    def answer(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """256 on GPU:0 + GPU:1, the model's parts placed as towers."""
        where = write_devices(layout, labels)
        return f"{layout.global_batch} on {where}, the model's parts placed as {layout.placement}"


SOLO = SoloFamily()
EVEN = EvenFamily()
SPLIT = SplitFamily()
SHARD = ShardFamily()
PACK = PackFamily()
PLACE = PlaceFamily()

FAMILIES: dict[str, Family] = {one.name: one for one in (SOLO, EVEN, SPLIT, SHARD, PACK, PLACE)}


def add(family: Family, traits: Traits | None = None) -> None:
    """Add a family; with the traits of its layouts if they are of a kind of their own."""
    FAMILIES[family.name] = family
    if traits is not None:
        KINDS[family.kind] = traits


def find_family(name: str) -> Family:
    """A family by its name; RequestError if there is none."""
    if name not in FAMILIES:
        raise RequestError(
            f"There is no family of layouts {name!r}.", f"Choose from {', '.join(FAMILIES)}."
        )
    return FAMILIES[name]


def find_families(names: Iterable[str]) -> tuple[Family, ...]:
    """The families of these names, in the order of the registry."""
    wanted = {find_family(name).name for name in names}
    return tuple(family for name, family in FAMILIES.items() if name in wanted)


def family_of(layout: Layout) -> Family:
    """A layout's family, by its kind."""
    return FAMILIES[layout.kind]
