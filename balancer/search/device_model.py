"""The interface of what is predicted of devices: for rows of equal cost (`rows`), or of cost by length (`texts`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from evener.plan.layout import Knots

from ..types import Layout, Probe, Timed
from .budget import Budget


class DeviceModel(ABC):
    """Predicts layouts by what exploration saw, and says what else it should see."""

    by_rows: bool  # the devices take rows in the order of the data: packs and placements can train so too

    @property
    @abstractmethod
    def splits(self) -> Sequence[Timed]:
        """Every split that exploration ran."""

    @abstractmethod
    def next_probes(self, budget: Budget, with_splits: bool) -> tuple[Probe, ...]:
        """The probes to run next, all at the same time; empty when nothing is wanted or affordable."""

    def why_none(self) -> str:
        """Why the devices that are left can't train; empty if one can."""
        return ""

    @abstractmethod
    def is_training(self, layout: Layout) -> bool:
        """True if an explored layout of one training may be chosen: some only show what a device costs."""

    @abstractmethod
    def predicted_rate(self, layout: Layout) -> float:
        """Samples/s of one training; 0 where that isn't known."""

    @abstractmethod
    def singles(self) -> list[Layout]:
        """The best single device that didn't fail in the race, if one can train alone; then others that may beat it."""

    def single_rate(self, layout: Layout) -> float:
        """Samples/s of one device alone: as measured, else as predicted."""
        return self.predicted_rate(layout)

    def efficient(self) -> list[Layout]:
        """Layouts of one device or some of them that should make the most samples per joule, where energy decides."""
        return []

    @abstractmethod
    def best_splits(self) -> list[Layout]:
        """The preferred split, then others that are worth a race."""

    @abstractmethod
    def even_splits(self, splits: Sequence[Layout], scaling: bool) -> list[Layout]:
        """The even split over all devices, at about the best split's batch; with `scaling` over fewer too."""

    @abstractmethod
    def sync_seconds(self) -> float | None:
        """The cost of keeping as many devices in step as the widest split has; None before any was measured."""

    def network_seconds(self, hosts: int) -> float:
        """The seconds that synchronization takes longer over `hosts` hosts than on one; 0 if unknown."""
        return 0.0

    def apart_seconds(self, layout: Layout) -> float | None:
        """The longest that a device would take alone for its share; None if none of them ran alone."""
        return None

    def curves(self, layout: Layout) -> tuple[tuple[Knots, int], ...]:
        """Each device's curve in a split of rows, and the rows of a pass that surely fit; nothing for other layouts."""
        return (((), 0),) * len(layout.shares)
