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

from .types import Layout

PackMode = Literal["", "logical", "mps"]
# behind a layout's name: knobs, and its samples where the name isn't enough
NAMED = "{knobs:also}{shares:apart}"
MOST_NAMED = 8  # devices in an advice; the table beside it has the shares of more
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
    # templates of `result.words`: a layout's name in tables, the beginning of the verdict,
    titled: str
    advice: str
    # and a layout as a subject, for families that aren't one training by its shares;
    subjected = ""
    plural = ""  # all of them

    @property
    def traits(self) -> Traits:
        """The traits that all layouts of the family share."""
        return KINDS[self.kind]

    @abstractmethod
    def layouts(self, view: View) -> Sequence[Layout]:
        """The family's layouts for the race, the best first."""

    def code(self, layout: Layout, devices: int) -> str:
        """The code of the finding that names a layout; `devices` is how many there are."""
        return f"layout.{self.name}"

    def sentences(self) -> dict[str, str]:
        """Templates of `result.words` by code: a layout's name, what to do, and what a layout loses
        as a rival.
        """
        found = {
            f"layout.{self.name}": self.titled + NAMED,
            f"advice.{self.name}": self.advice + "{knobs:with}",
        }
        if self.subjected:
            found[f"{self.name}.faster"] = (
                self.subjected + "{batch:at} {trainings:be} {gain:gain} faster{paired:in_turn}"
            )
            found[f"{self.name}.loses"] = (
                self.subjected + "{batch:at} {trainings:lose} {loss:loss}{paired:in_turn}"
            )
        return found


class SoloFamily(Family):
    """One training on one device; the others are left out."""

    name = kind = "solo"
    in_balance = True
    titled = "{another:best}" + BEST_SINGLE.removeprefix("best ")
    advice = "Use {devices:and}{alone:alone}, {shares:shares} samples a step"

    def layouts(self, view: View) -> Sequence[Layout]:
        """The best device, and others that the race favours."""
        return view.singles


def device_counts(devices: int) -> tuple[int, ...]:
    """2, 4, 8, ... and all of them: how many devices an even split is measured on."""
    counts, count = [], 2
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

    name, kind = "even", "split"
    fewest_devices = 2
    simplicity = 1
    start_cost = 1.5  # its processes have to meet
    equal_shares = True
    in_balance = True
    titled = "{another:another}" + EVEN_SPLIT
    advice = "Split evenly over {devices:devices} ({shares:shares} samples)"

    def layouts(self, view: View) -> Sequence[Layout]:
        """Over all devices and fewer, once it is clear what batch splits take."""
        return view.even_splits

    def code(self, layout: Layout, devices: int) -> str:
        """A code of its own where the split isn't over all devices."""
        return super().code(layout, devices) + ("" if len(layout.active) == devices else "_over")

    def sentences(self) -> dict[str, str]:
        """The family's sentences, with a name for splits over some of the devices."""
        return {
            **super().sentences(),
            f"layout.{self.name}_over": "{another:another}even over {count}" + NAMED,
        }


class SplitFamily(Family):
    """One training whose devices have the shares that they finish at the same time."""

    name = kind = "split"
    fewest_devices = 2
    simplicity = 2
    start_cost = 1.5  # its processes have to meet
    explored = True
    in_balance = True
    titled = "{another:best}" + BEST_SPLIT.removeprefix("best ")
    advice = "Split {ratios:ratios}over {devices:devices} ({shares:shares} samples)"

    def layouts(self, view: View) -> Sequence[Layout]:
        """The preferred split, and others that may beat it; one of them may be one device."""
        return view.splits

    def sentences(self) -> dict[str, str]:
        """The family's sentences, with another advice for rows that are assigned by cost: there the
        cost is split.
        """
        by_cost = (
            "Split the cost of each batch {ratios:ratios}over {devices:devices} ({samples} "
            "samples){knobs:with}"
        )
        return {**super().sentences(), "advice.cost": by_cost}


class ShardFamily(Family):
    """One training whose devices hold parts of the model by their memory, and compute rows by their
    speed.
    """

    name = kind = "shard"
    fewest_devices = 2
    simplicity = 5
    start_cost = 1.5  # its processes have to meet
    in_balance = True
    titled = "{another:another}shards of the model"
    advice = (
        "Shard the model {states:ratios}and each batch {ratios:ratios}over "
        "{devices:devices} ({shares:shares} samples)"
    )

    def layouts(self, view: View) -> Sequence[Layout]:
        """Rows by speed, state by the memory that is left beside them."""
        return view.shards

    def sentences(self) -> dict[str, str]:
        """The family's sentences, with those of models that no device holds."""
        return {
            **super().sentences(),
            "failure.shards": "in shards its state of {state_bytes:size} doesn't fit either: "
            "the devices have"
            " {memory_bytes:size} in all, for that and, on each, {gathered_bytes:size} of "
            "gathered units and the"
            " activations of a row",
            "failure.shards_row": (
                "in shards {devices:and} ran out of memory too, without the state"
            ),
            "failure.shards_failed": "in shards it failed: {why}",
            "remedy.shards": "Free some of its memory, or run evener balance, which also tries "
            "the model in "
            "shards over"
            " all of the devices.",
            "outlook.largest_model": "AdamW in float32 trains at most {whole:millions} "
            "parameters where each device"
            " holds the model, and {sharded:millions} in shards (split.shard), by memory "
            "alone: gathered units and"
            " activations take some",
        }


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
    titled = "{another:another}pack of {trainings}{mode:mode}"
    advice = (
        "Run {trainings} trainings side by side on {devices:and}{mode:mode}, {samples} samples each"
    )
    subjected = "{trainings} trainings side by side"
    plural = "packs"

    def layouts(self, view: View) -> Sequence[Layout]:
        """The best number of trainings in each mode, or the fewest."""
        return view.packs


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
    titled = "{another:another}place {placement}"
    advice = "Place the model's parts as {placement} over {devices:and}, {samples} samples"
    subjected = "the placement {placement}"
    plural = "placements"

    def layouts(self, view: View) -> Sequence[Layout]:
        """Each placement, at the batch of the best single device."""
        if view.common_batch is None:
            return []
        found = [place_on(view.devices, one, view.common_batch) for one in view.options.placements]
        return [layout for layout in found if layout is not None]


SOLO, EVEN, SPLIT, SHARD, PACK, PLACE = (
    SoloFamily(),
    EvenFamily(),
    SplitFamily(),
    ShardFamily(),
    PackFamily(),
    PlaceFamily(),
)

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
