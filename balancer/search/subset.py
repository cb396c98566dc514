"""Search for sharded layouts on some of the devices, as if there were no others.

A device without memory for a single row can't take part in a sharded step: it would have to gather
the model's units. The search on the other devices doesn't know of it. Here, what was observed is
rewritten for these devices, and layouts are rewritten for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from evener.plan.layout import Knots

from ..types import (
    Layout,
    MeasurementDoubt,
    Observation,
    OutOfMemory,
    PredictedCurve,
    Probe,
    Problem,
    Stage,
    Timed,
)
from .layouts import NO_CURVE
from .sharding import Sharding

_T = TypeVar("_T")
FEWEST = 2  # devices over which a model is sharded


def search_shards(
    problem: Problem, observations: Sequence[Observation]
) -> Sharding | ShardingOfSome:
    """Return the search for sharded layouts on the devices that have room for a row."""
    kept = find_devices_with_room(problem, observations)
    if FEWEST <= len(kept) < problem.devices:
        return ShardingOfSome(problem, observations, kept)
    return Sharding(problem, observations)


def find_devices_with_room(
    problem: Problem, observations: Sequence[Observation]
) -> tuple[int, ...]:
    """Return the positions of the devices that can hold a row beside a small part of the state.

    A device that hasn't been measured yet counts, too.
    """
    full: set[int] = set()
    ran: set[int] = set()
    for one in observations:
        layout = one.probe.layout
        if one.probe.stage != Stage.PART:
            continue
        if isinstance(one, Timed):
            ran.update(layout.active)
        elif isinstance(one, OutOfMemory):
            fewest = layout.global_batch <= problem.multiple_of
            full.update(layout.active if fewest or one.fits_no_rows else ())
    return tuple(i for i in range(problem.devices) if i not in full - ran)


class DeviceSubset:
    """Some of a search's devices; the others are left out of all layouts.

    - `devices`: the number of all devices.
    - `kept`: the positions of those that take part, in increasing order.
    """

    def __init__(self, devices: int, kept: tuple[int, ...]) -> None:
        self._devices, self._kept = devices, kept

    def select_problem(self, problem: Problem) -> Problem:
        """Return the problem of these devices alone."""
        return msgspec.structs.replace(
            problem,
            devices=len(self._kept),
            memory_bytes=self._select(problem.memory_bytes),
            hosts=self._select(problem.hosts),
            limits=self._select(problem.limits),
            labels=self._select(problem.labels),
        )

    def select(self, observations: Sequence[Observation]) -> list[Observation]:
        """Return the observations of these devices, without those in which others took part."""
        return [
            self._select_observation(one)
            for one in observations
            if set(one.probe.layout.active) <= set(self._kept)
        ]

    def expand(self, layout: Layout) -> Layout:
        """Return a layout of these devices as a layout of all devices."""
        return msgspec.structs.replace(
            layout,
            shares=self._expand(layout.shares, 0),
            micro=self._expand(layout.micro, 0),
            costs=self._expand(layout.costs, None),
            tokens=self._expand(layout.tokens, 0),
            state=self._expand(layout.state, 0.0),
        )

    def expand_probe(self, probe: Probe) -> Probe:
        """Return a probe of these devices as a probe of all devices."""
        return msgspec.structs.replace(probe, layout=self.expand(probe.layout))

    def select_layout(self, layout: Layout) -> Layout:
        """Return a layout of all devices as a layout of these; the others have no part in it."""
        return msgspec.structs.replace(
            layout,
            shares=self._select(layout.shares),
            micro=self._select(layout.micro),
            costs=self._select(layout.costs),
            tokens=self._select(layout.tokens),
            state=self._select(layout.state),
        )

    def expand_each(self, values: Sequence[_T], other: _T) -> tuple[_T, ...]:
        """Return values of these devices as values of all devices; the others get `other`."""
        return self._expand(tuple(values), other)

    def _select_observation(self, one: Observation) -> Observation:
        probe = msgspec.structs.replace(one.probe, layout=self.select_layout(one.probe.layout))
        if isinstance(one, Timed):
            return msgspec.structs.replace(
                one,
                probe=probe,
                memory_bytes=self._select(one.memory_bytes),
                device_seconds=self._select(one.device_seconds),
                short_bytes=self._select(one.short_bytes),
                work=self._select(one.work),
                watts=self._select(one.watts),
                parts=self._select(one.parts),
                warnings=tuple(map(self._select_doubt, one.warnings)),
            )
        if isinstance(one, OutOfMemory):
            devices = tuple(self._kept.index(i) for i in one.devices if i in self._kept)
            short = self._select(one.short_bytes)
            return msgspec.structs.replace(one, probe=probe, devices=devices, short_bytes=short)
        devices = tuple(self._kept.index(i) for i in one.devices if i in self._kept)
        return msgspec.structs.replace(one, probe=probe, devices=devices)

    def _select_doubt(self, doubt: MeasurementDoubt) -> MeasurementDoubt:
        if doubt.device not in self._kept:
            return doubt
        return msgspec.structs.replace(doubt, device=self._kept.index(doubt.device))

    def _select(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the values of these devices; an empty tuple stays empty."""
        return tuple(values[i] for i in self._kept) if values else ()

    def _expand(self, values: tuple[_T, ...], other: _T) -> tuple[_T, ...]:
        """Return values of these devices as values of all; an empty tuple stays empty."""
        if not values:
            return ()
        found = [other] * self._devices
        for position, value in zip(self._kept, values, strict=True):
            found[position] = value
        return tuple(found)


class ShardingOfSome:
    """The search for sharded layouts on some of the devices; the others are left out.

    - `kept`: the positions of the devices that take part, in increasing order.
    """

    def __init__(
        self, problem: Problem, observations: Sequence[Observation], kept: tuple[int, ...]
    ) -> None:
        self._kept = kept
        self._subset = DeviceSubset(problem.devices, kept)
        self._sharding = Sharding(
            self._subset.select_problem(problem), self._subset.select(observations)
        )

    def next_probes(self) -> tuple[Probe, ...]:
        """Return the next probes; empty if no further measurement is worth its time."""
        return tuple(map(self._subset.expand_probe, self._sharding.next_probes()))

    def layouts(self) -> list[Layout]:
        """Return the sharded layouts for the final comparison."""
        return list(map(self._subset.expand, self._sharding.layouts()))

    def curves(self, layout: Layout) -> tuple[tuple[Knots, int], ...]:
        """Return each device's compute time by rows, and its maximum rows, to be stored in a plan.

        Those of a device that is left out are empty.
        """
        own = self._sharding.curves(self._subset.select_layout(layout))
        return self._subset.expand_each(own, NO_CURVE[0])

    def predicted_curve(self, position: int) -> PredictedCurve:
        """Return the predicted step times of a device, as points to plot."""
        if position not in self._kept:
            return PredictedCurve(position, (), None, 1)
        found = self._sharding.predicted_curve(self._kept.index(position))
        return msgspec.structs.replace(found, device=position)

    @property
    def parts(self) -> tuple[float, ...] | None:
        """Each device's fraction of the state, 0 for those that are left out.

        Empty as long as it isn't known, and None if the state doesn't fit.
        """
        parts = self._sharding.parts
        return self._subset.expand_each(parts, 0.0) if parts else parts
