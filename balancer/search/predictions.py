"""The layouts that should train fastest, as predicted from the observations so far; each is
computed once.

Of a cluster's hosts some may be left out of a step, as exchange across hosts costs more than within
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from evener.shares import waterfill
from evener.shares.waterfill import Allocation, Costs, DeviceCurve

from ..types import Layout
from .machine_model import MachineModel
from .ranking import LEAST_GAIN

Solve = Callable[[Sequence[DeviceCurve], Costs], Allocation | None]


class Predictions(MachineModel):
    """A model of the machine, and the layouts that it predicts to be best."""

    def layout(self, wanted: Allocation) -> Layout:
        """An allocation as a layout of the request."""
        shares = dict(wanted.shares)
        return self.lay_out(tuple(shares.get(i, 0) for i in range(self.problem.devices)))

    def fastest_of(self, devices: Sequence[DeviceCurve]) -> Allocation | None:
        """The fastest split over some of these devices or one of them alone, by their curves; None
        if none holds it.

        Curves may be of passes (`PassCurve`).
        """
        return fastest([self._split(devices), *map(self._best_alone, devices)])

    def _best_alone(self, device: DeviceCurve) -> Allocation | None:
        """The fixed batch on a device alone, else its best one; None if it doesn't fit."""
        batch = self.problem.global_batch
        if batch is None:
            return waterfill.single_best(device, self.quantum, self.problem.max_global_batch)
        return (
            Allocation(((device.position, batch),), device.curve.seconds(batch))
            if batch <= device.limit
            else None
        )

    @cached_property
    def fastest_split(self) -> Allocation | None:
        """The split of most samples/s that is predicted to fit; of a fixed batch shares go as far
        as they have to.

        In passes only where a wall is in its way and that gains by what is worth a measurement.
        """
        one = self._split(self._reachable)
        if one is None and self.problem.global_batch:
            one = self._split(self.split_curves)
        found = [(self.devices[each.position], each) for each in self._reachable]
        seconds = one.seconds if one else math.inf
        if all(
            not device.pass_rows
            or each.curve.largest(seconds, each.limit, self.quantum) < each.limit
            for device, each in found
        ):
            return one
        several = self._split([device.in_passes(each) for device, each in found])
        least = (1 + LEAST_GAIN) * one.samples_per_second if one else 0.0
        return several if several is not None and several.samples_per_second > least else one

    def split_over(self, positions: Sequence[int]) -> Allocation | None:
        """The fastest split over some of these devices, in one pass."""
        return self._split([device for device in self.split_curves if device.position in positions])

    def rate_of(self, batch: int) -> float:
        """The samples/s of the fastest layout of this batch in one pass; 0 if nothing is known to
        hold it.
        """
        split, live = self._split(self._reachable, batch), [self.devices[i] for i in self.live]
        alone = [
            batch / one.alone.seconds(batch) for one in live if one.alone and batch <= one.wall
        ]
        return max([split.samples_per_second if split else 0.0, *alone])

    def _split(self, devices: Sequence[DeviceCurve], of: int | None = None) -> Allocation | None:
        batch, limit, quantum = (
            of or self.problem.global_batch,
            self.problem.max_global_batch,
            self.quantum,
        )

        def solve(devices: Sequence[DeviceCurve], costs: Costs) -> Allocation | None:
            if batch is not None:
                return waterfill.split_fixed(devices, costs, batch, quantum, self.fewest)
            return waterfill.split_free(devices, costs, quantum, limit, self.fewest)

        return split_over_hosts(devices, self.hosts, self.exchange, solve)

    @cached_property
    def _reachable(self) -> tuple[DeviceCurve, ...]:
        """The devices, limited to batches that gain enough to matter and aren't far beyond those
        that ran.
        """
        return tuple(
            DeviceCurve(
                one.position, one.curve, self.devices[one.position].reachable(one.curve, one.limit)
            )
            for one in self.split_curves
        )

    # ------------------------------------------------------------------ one device

    @cached_property
    def fastest_single(self) -> Allocation | None:
        """The single device of most samples/s, at its best batch."""
        return fastest(map(self.single, self.live))

    @cached_property
    def best_single_rate(self) -> float:
        """The most samples/s of one device alone: measured at rest, else predicted."""
        found = [self.at_rest.get(i) or self.single(i) for i in {*self.at_rest, *self.live}]
        return max((one.samples_per_second for one in found if one), default=0.0)

    def single(self, position: int) -> Allocation | None:
        """The best batch of one device alone that is predicted to fit; None if none does."""
        device = self.devices[position]
        if device.alone is None or not device.one_pass or self.problem.all_together:
            return None
        if self.problem.global_batch is not None:
            return self._best_alone(
                device.in_passes(DeviceCurve(position, device.alone, device.one_pass))
            )
        reach = device.reachable(device.alone, device.one_pass)
        return self._best_alone(DeviceCurve(position, device.alone, reach))

    def within(self, part: float) -> Allocation | None:
        """The smallest global batch predicted to be within this part of the tolerance; None for a
        fixed batch.
        """
        problem, quantum = self.problem, self.quantum
        tops = [
            found.samples_per_second for found in (self.fastest_split, self.fastest_single) if found
        ]
        if problem.global_batch is not None or not problem.tolerance or not tops:
            return None
        rate, limit = max(tops) * (1 - part * problem.tolerance), problem.max_global_batch
        hosts = (
            {self.hosts[i] for i, _ in self.fastest_split.shares} if self.fastest_split else set()
        )
        near = [device for device in self._reachable if self.hosts[device.position] in hosts]
        found = [
            waterfill.smallest_reaching(
                near, self.exchange[len(hosts)], rate, quantum, limit, self.fewest
            )
        ]
        if not problem.all_together:
            alone = ((one, self.devices[one.position].alone) for one in self.split_curves)
            singles = [DeviceCurve(one.position, curve, one.limit) for one, curve in alone if curve]
            found += [waterfill.single_reaching(one, rate, quantum, limit) for one in singles]
        return min(
            (one for one in found if one),
            key=lambda one: (one.global_batch, one.seconds),
            default=None,
        )


# ---------------------------------------------------------------------- which hosts share a step


def split_over_hosts(
    devices: Sequence[DeviceCurve], hosts: Sequence[int], costs: Sequence[Costs], solve: Solve
) -> Allocation | None:
    """The fastest allocation that `solve` finds on one host, on all, or on those left when the
    idlest have gone.

    `hosts` has the host of each position. The best of all sets on 396 of 400 random clusters of 2
    to 6 hosts, and at most 6 % slower on the others.
    """

    def over(chosen: Sequence[int]) -> Allocation | None:
        return solve(
            [device for device in devices if hosts[device.position] in chosen], costs[len(chosen)]
        )

    chosen = list(dict.fromkeys(hosts[device.position] for device in devices))
    if len(chosen) < 2 or costs[len(chosen)] == costs[1]:  # nothing is known of the network
        return over(chosen)
    found = [over([host]) for host in chosen]
    while len(chosen) > 1:
        found.append(over(chosen))
        done = dict.fromkeys(chosen, 0)
        for position, share in found[-1].shares if found[-1] else ():
            done[hosts[position]] += share
        chosen.remove(min(chosen, key=lambda host: done[host]))
    return fastest(found)


def fastest(found: Iterable[Allocation | None]) -> Allocation | None:
    """The allocation of most samples/s; None of none."""
    return max((one for one in found if one), key=lambda one: one.samples_per_second, default=None)
