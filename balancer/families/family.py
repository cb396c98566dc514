"""The interface of a family of layouts, and the parts of the machine and the search that it may look at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from evener.plan.layout import KINDS, Traits

from ..types import Layout

PackMode = Literal["", "logical", "mps"]
MODES: dict[str, str] = {"": "", "logical": " with equal parts of the memory", "mps": " under MPS"}


class Placement(msgspec.Struct, frozen=True):
    """A workload's own way to lay its parts on devices."""

    name: str
    devices: int = 2  # most that it uses


class Offer(Protocol):
    """The ways of running trainings that the machine and the workload offer to families."""

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The workload's own ways to lay its parts on devices."""

    @property
    def pack_modes(self) -> tuple[PackMode, ...]:
        """The ways in which several trainings can share a device."""


class View(Protocol):
    """The findings of exploration by which families choose their layouts; lists have the best first."""

    @property
    def devices(self) -> int:
        """The number of devices."""

    @property
    def options(self) -> Offer:
        """The families that were asked for, and what the machine offers them."""

    @property
    def by_rows(self) -> bool:
        """True if devices take rows in the order of the data; False if rows are assigned by what they cost."""

    @property
    def common_batch(self) -> int | None:
        """The batch for layouts that have none of their own; None before one is known."""

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
    def packs(self) -> Sequence[Layout]:
        """The best pack of each mode, or the first to try."""


class Family(ABC):
    """A way to use the devices.

    `kind` is the name that its layouts have in journals and plans, `name` its own on the command line and in JSON.
    """

    name: str
    kind: str
    fewest_devices = 1
    simplicity = 0  # of layouts that tie, the one with the least is chosen
    start_cost = 1.0  # to start one of its processes, as a multiple of that of a device alone
    more_children = False  # its layouts need processes that exploration doesn't start
    explored = False  # exploration measures its layouts, and costs that only they show
    equal_shares = False  # what frameworks do by default: gains are said against it
    titled: str  # in tables; {0} is the layout
    advice: str  # the beginning of the verdict, and a layout as a subject: templates of `result.words`
    subjected = plural = ""  # for families that aren't one training by its shares

    @property
    def traits(self) -> Traits:
        """The traits that all layouts of the family share."""
        return KINDS[self.kind]

    @abstractmethod
    def layouts(self, view: View) -> Sequence[Layout]:
        """The family's layouts for the race, the best first."""

    def count_groups(self, offer: Offer, devices: int) -> int:
        """The number of process groups that measure all layouts of the family once; families of one kind share them."""
        return 1

    def title(self, layout: Layout, devices: int) -> str:
        """A layout's name in tables and in the plan's evidence; `devices` is how many there are."""
        return self.titled.format(layout, mode=MODES.get(layout.placement, ""))

    def sentences(self) -> dict[str, str]:
        """Templates of `result.words` by the codes of findings: what to do, and what a layout loses as a rival."""
        found = {f"advice.{self.name}": self.advice + "{knobs:with}"}
        if self.subjected:
            found[f"{self.name}.faster"] = (
                self.subjected + "{batch:at} {trainings:be} {gain:gain} faster{paired:in_turn}"
            )
            found[f"{self.name}.loses"] = self.subjected + "{batch:at} {trainings:lose} {loss:loss}{paired:in_turn}"
        return found
