"""The kinds of layouts that a search can compare, and how each is named and described."""

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
    """A way in which the user's workload itself puts parts of its model on devices."""

    name: str
    devices: int = 2  # maximum number of devices that it uses


class PlacementOptions(Protocol):
    """The options of a comparison that say where the workload can place the parts of its model."""

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placements that the workload offers; may be empty."""


class SearchView(Protocol):
    """Read-only view of a search, from which families list their layouts.

    Lists of layouts are sorted, best first.
    """

    @property
    def devices(self) -> int:
        """Number of devices of the request."""

    @property
    def options(self) -> PlacementOptions:
        """The options of the comparison, such as the workload's placements."""

    @property
    def common_batch(self) -> int | None:
        """Global batch at which all kinds of layouts are compared.

        It is None until the search has chosen it.
        """

    @property
    def singles(self) -> Sequence[Layout]:
        """The fastest layout that uses one device. The list is empty if there is none.

        If that layout uses gradient accumulation although one pass would surely fit in memory, the
        list also has the layout with one pass, in second place.
        """

    @property
    def splits(self) -> Sequence[Layout]:
        """The best layouts with unequal shares over several devices.

        The list is empty unless they are requested.
        """

    @property
    def even_splits(self) -> Sequence[Layout]:
        """Layouts that divide the batch equally among several devices."""

    @property
    def shards(self) -> Sequence[Layout]:
        """Layouts that shard the model over several devices."""

    @property
    def packs(self) -> Sequence[Layout]:
        """The best layout with several processes on one device, for each way to share the device.

        If no layout has been measured yet for one of these ways, the list has the layout to measure
        first.
        """


class Family(ABC):
    """Base class for a family: a kind of layout, such as equal shares or a sharded model.

    A family lists the layouts of its kind that a search should compare, and names them for users.
    `kind` is the name of these layouts in journals and plans, and `name` is the family's name on
    the command line. Register an instance with `add`.
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
        """Properties of the layouts of this family."""
        return KINDS[self.kind]

    @abstractmethod
    def layouts(self, view: SearchView) -> Sequence[Layout]:
        """Return the layouts of this family that are worth comparing now, best first.

        The list is empty until exploration has found what these layouts need, such as a global
        batch.
        """

    @abstractmethod
    def title(self, layout: Layout, devices: int, is_second: bool = False) -> str:
        """Return a short name for a layout, as in the rows of a table.

        - `devices`: how many devices the user's request has.
        - `is_second`: True for a second layout of this kind, listed below the best one.
        """

    @abstractmethod
    def describe(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """Describe a layout in words: its rows and its devices.

        - `labels`: the names of all devices of the request.
        - `ratios`: each device's fraction of the step's computing time, for layouts that assign
          rows by their computing time instead of their number.
        """


def write_rows(layout: Layout) -> str:
    """Format the shares of a layout, such as "640 + 384".

    With many devices, only the global batch is written.
    """
    shares = [(layout.shares[i], layout.pass_rows[i]) for i in layout.computing]
    return join_shares(shares) if len(shares) <= MOST_NAMED else str(layout.global_batch)


def write_devices(layout: Layout, labels: Sequence[str]) -> str:
    """Return the labels of the layout's devices, or their number if there are many."""
    names = [labels[i] for i in layout.active]
    return " + ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} devices"


def write_ratios(layout: Layout, ratios: Sequence[float]) -> str:
    """Format the fraction of the work that each used device does, such as "0.600 : 0.400".

    `ratios` has one fraction for each device of the request. Returns "" if there are many devices.
    """
    parts = [ratios[i] for i in layout.active]
    return " : ".join(f"{part:.3f}" for part in parts) if len(parts) <= MOST_NAMED else ""


class SoloFamily(Family):
    """Layouts with a single device."""

    name = kind = "solo"
    in_balance = True

    def layouts(self, view: SearchView) -> Sequence[Layout]:
        """Return the layouts with a single device that the search should compare."""
        return view.singles

    def title(self, layout: Layout, devices: int, is_second: bool = False) -> str:
        """Return "best single device" or, with `is_second`, "another single device"."""
        return "another single device" if is_second else BEST_SINGLE

    def describe(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """Describe a layout in words, such as "256 on GPU:0 alone"."""
        alone = " alone" if len(labels) > 1 else ""
        return f"{write_rows(layout)} on {write_devices(layout, labels)}{alone}"


def device_counts(devices: int) -> tuple[int, ...]:
    """Return the device counts to compare for scaling: powers of two, then all devices.

    Returns an empty tuple for a single device.
    """
    counts = []
    count = 2
    while count < devices:
        counts.append(count)
        count *= 2
    return (*counts, devices) if devices > 1 else ()


def split_evenly(
    devices: int, positions: tuple[int, ...], batch: int, quantum: int = 1
) -> Layout | None:
    """Return the layout with equal shares on the devices at `positions`.

    Shares are multiples of `quantum` rows, and differ by at most one quantum. Returns None if
    `batch` isn't a multiple of `quantum`, or too small to give each device one quantum.
    """
    if batch // quantum < len(positions) or batch % quantum:
        return None
    quanta = dict(zip(positions, even(batch // quantum, len(positions)), strict=True))
    return Layout("split", tuple(quanta.get(i, 0) * quantum for i in range(devices)))


def is_even(layout: Layout, quantum: int = 1) -> bool:
    """Return whether a layout has equal shares on several devices.

    Shares count as equal if they differ by at most `quantum` rows.
    """
    active = [layout.shares[i] for i in layout.active]
    return layout.by_rows and len(active) > 1 and max(active) - min(active) <= quantum


class EvenFamily(Family):
    """Equal shares over several devices, as frameworks split a batch by default."""

    name = "even"
    kind = "split"
    fewest_devices = 2
    simplicity = 1
    start_cost = 1.5  # its processes have to set up a group
    equal_shares = True
    in_balance = True

    def layouts(self, view: SearchView) -> Sequence[Layout]:
        """Return the layouts with equal shares that the search should compare."""
        return view.even_splits

    def title(self, layout: Layout, devices: int, is_second: bool = False) -> str:
        """Return "equal shares" or, if only some devices have a share, e.g. "equal shares over 2".

        Here, 2 is the number of devices that have a share. With `is_second`, "other" comes first.
        """
        count = len(layout.active)
        name = EQUAL_SHARES if count == devices else f"equal shares over {count}"
        return f"other {name}" if is_second else name

    def describe(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """Describe a layout in words, such as "256 + 256 on GPU:0 + GPU:1, in equal shares"."""
        return f"{write_rows(layout)} on {write_devices(layout, labels)}, in equal shares"


class SplitFamily(Family):
    """Unequal shares over several devices."""

    name = kind = "split"
    fewest_devices = 2
    simplicity = 2
    start_cost = 1.5  # its processes have to set up a group
    explored = True
    in_balance = True

    def layouts(self, view: SearchView) -> Sequence[Layout]:
        """Return the layouts with unequal shares that the search should compare."""
        return view.splits

    def title(self, layout: Layout, devices: int, is_second: bool = False) -> str:
        """Return "best split" or, with `is_second`, "another split"."""
        return "another split" if is_second else BEST_SPLIT

    def describe(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """Describe a layout in words, such as "826 + 571 on GPU:0 + GPU:1".

        If rows are assigned by their computing time instead of their number, the result has each
        device's fraction of that time.
        """
        where = write_devices(layout, labels)
        if not layout.costs:
            return f"{write_rows(layout)} on {where}"
        parts = write_ratios(layout, ratios)
        split = f", their cost split {parts}" if parts else ", split by their cost"
        return f"{layout.global_batch} rows on {where}{split}"


class ShardFamily(Family):
    """Layouts in which the model is sharded over several devices."""

    name = kind = "shard"
    fewest_devices = 2
    simplicity = 5
    start_cost = 1.5  # its processes have to set up a group
    in_balance = True

    def layouts(self, view: SearchView) -> Sequence[Layout]:
        """Return the layouts with a sharded model that the search should compare."""
        return view.shards

    def title(self, layout: Layout, devices: int, is_second: bool = False) -> str:
        """Return "shards of the model", preceded by "other" if `is_second` is set."""
        return "other shards of the model" if is_second else "shards of the model"

    def describe(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """Describe a layout in words: its shares, its devices, and their parts of the model."""
        parts = write_ratios(layout, layout.state) if layout.state else ""
        where = write_devices(layout, labels)
        if layout.computing == layout.active:
            return f"{write_rows(layout)} on {where}, the model in shards {parts}".rstrip()
        rows = write_devices(Layout(layout.kind, layout.shares), labels)
        return f"{write_rows(layout)} on {rows}, the model in shards {parts} on {where}"


def pack_on(
    single: Layout, processes: int, mode: PackMode = "", batch: int | None = None
) -> Layout:
    """Return a layout that runs several training processes on the device that `single` uses.

    Each process trains `batch` rows per step; with None, as many as `single` does.
    """
    size = single.global_batch if batch is None else batch
    return Layout("pack", tuple(size if share else 0 for share in single.shares), processes, mode)


class PackFamily(Family):
    """Several independent processes on one device, each training a model of its own."""

    name = kind = "pack"
    simplicity = 4
    start_cost = 0.8  # for each training
    more_children = True
    plural = "packs"

    def layouts(self, view: SearchView) -> Sequence[Layout]:
        """Return the layouts with several processes per device that the search should compare."""
        return view.packs

    def title(self, layout: Layout, devices: int, is_second: bool = False) -> str:
        """Return a name such as "pack of 3", preceded by "another" if `is_second` is set.

        The name also says how the processes share the device, unless they are plain processes.
        """
        name = f"pack of {layout.processes}{MODES.get(layout.placement, '')}"
        return f"another {name}" if is_second else name

    def describe(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """Describe a layout in words, such as "3 trainings of 256 side by side on GPU:0"."""
        where = f"{write_devices(layout, labels)}{MODES.get(layout.placement, '')}"
        return f"{layout.processes} trainings of {layout.global_batch} side by side on {where}"


def place_on(devices: int, placement: Placement, batch: int) -> Layout | None:
    """Return the layout in which the workload itself places its model on the first devices.

    It uses up to `placement.devices` devices. Returns None if this would be fewer than two devices,
    or more devices than `batch` has rows.
    """
    # the shares only mark devices as used; the workload doesn't split the batch by them
    used = min(devices, placement.devices)
    spread = split_evenly(devices, tuple(range(used)), batch) if used > 1 else None
    return spread and msgspec.structs.replace(spread, kind="place", placement=placement.name)


class PlaceFamily(Family):
    """Layouts in which the workload itself puts parts of its model on different devices."""

    name = kind = "place"
    fewest_devices = 2
    simplicity = 3
    more_children = True
    plural = "placements"

    def layouts(self, view: SearchView) -> Sequence[Layout]:
        """Return a layout for each of the workload's placements.

        The result is empty until the search has chosen the global batch at which layouts are
        compared.
        """
        if view.common_batch is None:
            return []
        found = [
            place_on(view.devices, placement, view.common_batch)
            for placement in view.options.placements
        ]
        return [layout for layout in found if layout is not None]

    def title(self, layout: Layout, devices: int, is_second: bool = False) -> str:
        """Return "place" and the workload's name for the placement, such as "place towers"."""
        name = f"place {layout.placement}"
        return f"another {name}" if is_second else name

    def describe(self, layout: Layout, labels: Sequence[str], ratios: Sequence[float]) -> str:
        """Describe a layout in words: its rows, its devices, and the name of the placement."""
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
    """Register a family, so that searches can compare its layouts.

    `traits` describe its kind of layout. They are needed only if no registered family has this
    kind yet.
    """
    FAMILIES[family.name] = family
    if traits is not None:
        KINDS[family.kind] = traits


def find_family(name: str) -> Family:
    """Return the family with this name, or raise RequestError if there is none."""
    if name not in FAMILIES:
        raise RequestError(
            f"There is no family of layouts {name!r}.", f"Choose from {', '.join(FAMILIES)}."
        )
    return FAMILIES[name]


def find_families(names: Iterable[str]) -> tuple[Family, ...]:
    """Return the families with these names, in the order in which they were registered.

    Raises RequestError for an unknown name.
    """
    wanted = {find_family(name).name for name in names}
    return tuple(family for name, family in FAMILIES.items() if name in wanted)


def family_of(layout: Layout) -> Family:
    """Return the family registered under the kind of a layout.

    Layouts with equal shares have the kind "split", so they get the family of unequal shares.
    """
    return FAMILIES[layout.kind]
