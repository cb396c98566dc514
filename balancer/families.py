"""Families of layouts: each is one way to use the devices, such as an even split.

A search compares layouts of the requested families. `Family` is the interface of a family.
`FAMILIES` has all families by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import msgspec

from evener.errors import RequestError
from evener.plan.layout import BEST_SINGLE, BEST_SPLIT, EQUAL_SHARES, KINDS, Traits
from evener.shares.whole_rows import even

from .number_format import join_shares
from .types import Layout

PackMode = Literal["", "logical", "mps"]
MOST_NAMED = 8  # devices in a recommendation; the table beside it lists the shares of more devices
MODES: dict[str, str] = {"": "", "logical": " with equal parts of the memory", "mps": " under MPS"}


class Placement(msgspec.Struct, frozen=True):
    """A named way to place the parts of the workload's model on several devices."""

    name: str
    devices: int = 2  # maximum number of devices that it uses


class PlacementOptions(Protocol):
    """The search options that the layout families read."""

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements of the workload; empty if it has none."""


class SearchView(Protocol):
    """The results of a search's exploration, from which families choose layouts for the race.

    Exploration measures each device and a few splits. The race then measures candidate layouts in
    alternation. Lists are sorted, best first.
    """

    @property
    def devices(self) -> int:
        """The number of devices of the request."""

    @property
    def options(self) -> PlacementOptions:
        """The search's options, which list the workload's placements."""

    @property
    def common_batch(self) -> int | None:
        """The global batch for layouts whose best batch wasn't measured, such as placements.

        It is the user's batch or, without one, a batch that exploration has tried on one device.
        None until the batch is known, or if rows are assigned by cost.
        """

    @property
    def singles(self) -> Sequence[Layout]:
        """The best solo layout; empty if there is none.

        If it has several passes although its whole batch is known to fit in memory, the same layout
        with one pass comes second.
        """

    @property
    def splits(self) -> Sequence[Layout]:
        """The candidate splits worth racing; empty unless splits were requested."""

    @property
    def even_splits(self) -> Sequence[Layout]:
        """Even splits for the race, with a global batch close to the best split's."""

    @property
    def shards(self) -> Sequence[Layout]:
        """The sharded layouts worth racing.

        Empty if every device can hold the whole model and the user didn't request shards.
        """

    @property
    def packs(self) -> Sequence[Layout]:
        """The best measured pack for each way to share a device: plain processes and MPS.

        If no pack has been measured yet for a way, the list has the pack to measure first.
        """


class Family(ABC):
    """A family of layouts: one way to use the devices.

    `kind` is the name of its layouts in journals and plans. `name` is the family's name on the
    command line and in JSON.
    """

    name: str
    kind: str
    fewest_devices = 1
    simplicity = 0  # if layouts tie, the layout with the lowest value is chosen
    start_cost = 1.0  # cost of starting a process, relative to a process on a single device
    more_children = False  # True if its layouts need processes that exploration doesn't start
    in_balance = False  # True if `evener balance` also considers its layouts
    explored = False  # True if exploration measures its layouts, for costs that only they reveal
    equal_shares = False  # True for the default of frameworks; gains are relative to it
    plural = ""  # the plural name of its layouts, for families that don't train by shares

    @property
    def traits(self) -> Traits:
        """The traits that all layouts of the family share, such as training on one device."""
        return KINDS[self.kind]

    @abstractmethod
    def layouts(self, view: SearchView) -> Sequence[Layout]:
        """Return the family's layouts for the race, best first.

        Return an empty sequence if exploration hasn't found a value that they need, such as a
        batch.
        """

    @abstractmethod
    def title(self, layout: Layout, devices: int, another: bool = False) -> str:
        """Return a layout's name for tables, such as `best split`.

        `devices` is the number of devices of the request. With `another`, return the name of a
        second layout, such as `another split`.
        """

    @abstractmethod
    def describe(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """Return the layout as text, such as `826 + 571 on GPU:0 + GPU:1`.

        A verdict begins with this text. `labels` has the label of every device. `ratios` has the
        fraction of a batch that each device computes, by rows or by cost.
        """


def write_rows(layout: Layout) -> str:
    """Return a layout's samples per device as text, such as `826 + 571`.

    For a layout with many devices, return only the sum.
    """
    shares = [(layout.shares[i], layout.pass_rows[i]) for i in layout.computing]
    return join_shares(shares) if len(shares) <= MOST_NAMED else str(layout.global_batch)


def write_devices(layout: Layout, labels: Sequence[str]) -> str:
    """Return the labels of a layout's devices as text, such as `GPU:0 + GPU:1`.

    `labels` has the label of every device. For a layout with many devices, return only their
    number.
    """
    names = [labels[i] for i in layout.active]
    return " + ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} devices"


def write_ratios(layout: Layout, ratios: Sequence[float]) -> str:
    """Return the work's fractions per device as text, such as `0.591 : 0.409`.

    `ratios` has the fraction of every device. Return "" for a layout with many devices.
    """
    parts = [ratios[i] for i in layout.active]
    return " : ".join(f"{part:.3f}" for part in parts) if len(parts) <= MOST_NAMED else ""


class SoloFamily(Family):
    """One training on one device; the other devices are unused."""

    name = kind = "solo"
    in_balance = True

    def layouts(self, view: SearchView) -> Sequence[Layout]:
        """Return the best solo layout; empty if there is none.

        If it has several passes although its whole batch is known to fit in memory, the same layout
        with one pass comes second.
        """
        return view.singles

    def title(self, layout: Layout, devices: int, another: bool = False) -> str:
        """Return the name of the best solo layout or, with `another`, of a second one."""
        return "another single device" if another else BEST_SINGLE

    def describe(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """Return the layout as text, such as `1024 on GPU:0 alone`."""
        alone = " alone" if len(labels) > 1 else ""
        return f"{write_rows(layout)} on {write_devices(layout, labels)}{alone}"


def device_counts(devices: int) -> tuple[int, ...]:
    """Return the numbers of devices for even splits: 2, 4, 8, ... and all."""
    counts = []
    count = 2
    while count < devices:
        counts.append(count)
        count *= 2
    return (*counts, devices) if devices > 1 else ()


def split_evenly(
    devices: int, positions: tuple[int, ...], batch: int, quantum: int = 1
) -> Layout | None:
    """Divide the batch evenly among the devices at `positions`.

    Each part is a multiple of `quantum` rows. `devices` is the number of devices of the request.
    Return None if the batch isn't a multiple of the quantum, or has fewer quanta than devices.
    """
    if batch // quantum < len(positions) or batch % quantum:
        return None
    quanta = dict(zip(positions, even(batch // quantum, len(positions)), strict=True))
    return Layout("split", tuple(quanta.get(i, 0) * quantum for i in range(devices)))


def is_even(layout: Layout, quantum: int = 1) -> bool:
    """True if the shares of a split differ by at most `quantum` rows.

    False for a single device, and if rows are assigned by cost.
    """
    active = [layout.shares[i] for i in layout.active]
    return layout.by_rows and len(active) > 1 and max(active) - min(active) <= quantum


class EvenFamily(Family):
    """The even splits: one training in which all devices have equal shares."""

    name = "even"
    kind = "split"
    fewest_devices = 2
    simplicity = 1
    start_cost = 1.5  # its processes have to set up a group
    equal_shares = True
    in_balance = True

    def layouts(self, view: SearchView) -> Sequence[Layout]:
        """Return even splits over all devices and over fewer devices.

        Return an empty sequence until exploration has found a global batch for splits.
        """
        return view.even_splits

    def title(self, layout: Layout, devices: int, another: bool = False) -> str:
        """Return the name of an even split.

        If devices are left out, the name tells how many are used, as in `equal shares over 4`.
        """
        count = len(layout.active)
        name = EQUAL_SHARES if count == devices else f"equal shares over {count}"
        return f"other {name}" if another else name

    def describe(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """Return the layout as text, such as `128 + 128 on GPU:0 + GPU:1, in equal shares`."""
        return f"{write_rows(layout)} on {write_devices(layout, labels)}, in equal shares"


class SplitFamily(Family):
    """Splits: one training whose shares make all devices finish at the same time."""

    name = kind = "split"
    fewest_devices = 2
    simplicity = 2
    start_cost = 1.5  # its processes have to set up a group
    explored = True
    in_balance = True

    def layouts(self, view: SearchView) -> Sequence[Layout]:
        """Return the splits that may be fastest, the one predicted to be fastest first.

        A single device is among them if it may be faster.
        """
        return view.splits

    def title(self, layout: Layout, devices: int, another: bool = False) -> str:
        """Return the name of the best split or, with `another`, of a second one."""
        return "another split" if another else BEST_SPLIT

    def describe(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """Return the layout as text, such as `826 + 571 on GPU:0 + GPU:1`.

        If rows are assigned by cost, the text has fractions of the cost instead of rows.
        """
        where = write_devices(layout, labels)
        if not layout.costs:
            return f"{write_rows(layout)} on {where}"
        parts = write_ratios(layout, ratios)
        split = f", their cost split {parts}" if parts else ", split by their cost"
        return f"{layout.global_batch} rows on {where}{split}"


class ShardFamily(Family):
    """One training whose model state is sharded in proportion to the devices' free memory.

    The rows of a batch are divided in proportion to the devices' speed.
    """

    name = kind = "shard"
    fewest_devices = 2
    simplicity = 5
    start_cost = 1.5  # its processes have to set up a group
    in_balance = True

    def layouts(self, view: SearchView) -> Sequence[Layout]:
        """Return the sharded layouts worth racing.

        The devices' rows are in proportion to their speed. Their parts of the model's state are in
        proportion to the memory that these rows leave free.
        """
        return view.shards

    def title(self, layout: Layout, devices: int, another: bool = False) -> str:
        """Return the name of the sharded layout or, with `another`, of a second one."""
        return "another shards of the model" if another else "shards of the model"

    def describe(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """Return the layout as text.

        For example, `820 + 568 on GPU:0 + GPU:1, the model in shards 0.600 : 0.400`.
        """
        parts = write_ratios(layout, layout.state) if layout.state else ""
        where = write_devices(layout, labels)
        if layout.computing == layout.active:
            return f"{write_rows(layout)} on {where}, the model in shards {parts}".rstrip()
        rows = write_devices(Layout(layout.kind, layout.shares), labels)
        return f"{write_rows(layout)} on {rows}, the model in shards {parts} on {where}"


def pack_on(
    single: Layout, processes: int, mode: PackMode = "", batch: int | None = None
) -> Layout:
    """Return a pack of `processes` trainings on the device of the solo layout `single`.

    `mode` is how the trainings share the device. Each training has the global batch `batch`, by
    default the batch of `single`.
    """
    size = single.global_batch if batch is None else batch
    return Layout("pack", tuple(size if share else 0 for share in single.shares), processes, mode)


class PackFamily(Family):
    """Packs: as many trainings on one device as give the highest total throughput."""

    name = kind = "pack"
    simplicity = 4
    start_cost = 0.8  # for each training
    more_children = True
    plural = "packs"

    def layouts(self, view: SearchView) -> Sequence[Layout]:
        """Return the best measured pack for each way to share a device, such as MPS.

        If no pack has been measured yet for a way, the list has the pack to measure first.
        """
        return view.packs

    def title(self, layout: Layout, devices: int, another: bool = False) -> str:
        """Return the name of a pack, such as `pack of 5 under MPS`."""
        name = f"pack of {layout.processes}{MODES.get(layout.placement, '')}"
        return f"another {name}" if another else name

    def describe(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """Return the layout as text, such as `5 trainings of 256 side by side on GPU:0`."""
        where = f"{write_devices(layout, labels)}{MODES.get(layout.placement, '')}"
        return f"{layout.processes} trainings of {layout.global_batch} side by side on {where}"


def place_on(devices: int, placement: Placement, batch: int) -> Layout | None:
    """Return the layout that trains with a placement and this global batch.

    The placement uses the first of the `devices` devices. Return None if there are too few devices
    or samples.
    """
    # the shares only mark devices as used; the workload doesn't split the batch by them
    used = min(devices, placement.devices)
    spread = split_evenly(devices, tuple(range(used)), batch) if used > 1 else None
    return spread and msgspec.structs.replace(spread, kind="place", placement=placement.name)


class PlaceFamily(Family):
    """One training in one process, with its model's parts placed on devices by the workload."""

    name = kind = "place"
    fewest_devices = 2
    simplicity = 3
    more_children = True
    plural = "placements"

    def layouts(self, view: SearchView) -> Sequence[Layout]:
        """Return a layout for each of the workload's placements, with the common global batch.

        Return an empty sequence until exploration has found that batch.
        """
        if view.common_batch is None:
            return []
        found = [
            place_on(view.devices, placement, view.common_batch)
            for placement in view.options.placements
        ]
        return [layout for layout in found if layout is not None]

    def title(self, layout: Layout, devices: int, another: bool = False) -> str:
        """Return the name of a layout with a placement, such as `place towers`.

        With `another`, return a name for a second such layout.
        """
        name = f"place {layout.placement}"
        return f"another {name}" if another else name

    def describe(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """Return the layout as text.

        For example, `256 on GPU:0 + GPU:1, the model's parts placed as towers`.
        """
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
    """Register a family, so that searches can use it.

    `traits` are needed only if no other family has layouts of the same kind.
    """
    FAMILIES[family.name] = family
    if traits is not None:
        KINDS[family.kind] = traits


def find_family(name: str) -> Family:
    """Return the family with this name. Raises RequestError if there is none."""
    if name not in FAMILIES:
        raise RequestError(
            f"There is no family of layouts {name!r}.", f"Choose from {', '.join(FAMILIES)}."
        )
    return FAMILIES[name]


def find_families(names: Iterable[str]) -> tuple[Family, ...]:
    """Return the families with these names, without duplicates, in the order of `FAMILIES`.

    Raises RequestError if a name is unknown.
    """
    wanted = {find_family(name).name for name in names}
    return tuple(family for name, family in FAMILIES.items() if name in wanted)


def family_of(layout: Layout) -> Family:
    """Return the family that this layout belongs to, according to its kind."""
    return FAMILIES[layout.kind]
