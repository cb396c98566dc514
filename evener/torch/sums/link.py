"""Measure the latency and bandwidth of all-reduces between devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..stores import open_file_store

LARGE_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}  # size of the tensor that measures bandwidth
SMALL_SUMS = 20
LARGE_SUMS = 11
WARM_UP = 3
WHOLE_NUMBERS = 1009  # a prime, so that patterns don't repeat at a power of two


class LinkSums(NamedTuple):
    """Measured speed of the all-reduces in a group of devices.

    - `latency_seconds`: median time for a single value.
    - `bytes_per_second`: bandwidth per device, counting the bytes that a ring all-reduce sends.
    - `wrong`: description of wrong results, or "" if all are right.
    """

    latency_seconds: float
    bytes_per_second: float
    wrong: str = ""


class LinkMember:
    """A process that takes part in measuring all-reduces, with one device."""

    def __init__(self, device: str, rank: int) -> None:
        self._device, self._rank = torch.device(device), rank
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        torch.zeros(1, device=self._device)  # fails, or takes long, if the device doesn't work
        self._groups: dict[tuple[int, ...], Any] = {}

    def join(
        self, file: str, world: int, seconds: float, groups: Sequence[tuple[int, ...]]
    ) -> None:
        """Join the process group of all members; they find each other through a file.

        Arguments:

        - `file`: path of the file, the same for all members.
        - `world`: number of members.
        - `seconds`: timeout of collectives.
        - `groups`: ranks of the members of each group that is measured.
        """
        dist.init_process_group(
            "nccl" if self._device.type == "cuda" else "gloo",
            store=open_file_store(file),
            rank=self._rank,
            world_size=world,
            timeout=timedelta(seconds=seconds),
        )
        # every rank creates every group: with use_local_synchronization=True, ranks that are in
        # different numbers of groups give a group different names, and never meet
        for members in groups:
            self._groups[members] = dist.new_group(list(members))

    def measure(self, members: tuple[int, ...]) -> LinkSums:
        """Measure the speed of a group's all-reduces.

        `members` are the ranks in the group. Every one of them has to call this.
        """
        return measure_sums(self._groups[members], self._rank, members, self._device)


def measure_sums(group: Any, rank: int, members: Sequence[int], device: Any) -> LinkSums:
    """Return the latency and bandwidth of a group's all-reduces, and check their results.

    All members have to call this at the same time. `rank` and `members` are global ranks.
    """

    def add_up(tensor: Any) -> None:
        dist.all_reduce(tensor, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    size = LARGE_BYTES[device.type] // 4
    wrong = check_sums(add_up, size, rank, members, device)
    small = torch.zeros(1, device=device)
    large = torch.zeros(size, device=device)
    latency = _time(lambda: add_up(small), SMALL_SUMS)
    seconds = _time(lambda: add_up(large), LARGE_SUMS)
    crossing = 2 * (len(members) - 1) / len(members) * 4 * size
    return LinkSums(latency, crossing / seconds, wrong)


def check_sums(
    add_up: Callable[[Any], None], size: int, rank: int, members: Sequence[int], device: Any
) -> str:
    """All-reduce known values, and return a description of wrong sums, or "" if all are right.

    `add_up` runs the all-reduce in place, and `size` is the number of values. `rank` and `members`,
    the ranks that take part, are global ranks.
    """
    # each rank sends a different pattern, whose sums are exact in float32
    numbers = torch.arange(size, device=device)

    def pattern(sender: int) -> Any:
        return ((numbers * (sender + 1) + 7 * sender) % WHOLE_NUMBERS).float()

    expected = sum(pattern(sender) for sender in members)
    arrived = pattern(rank)
    add_up(arrived)
    differ = int((arrived != expected).sum())
    if not differ:
        return ""
    first = int((arrived != expected).nonzero()[0])
    return (
        f"{differ} of {size} values are wrong: value {first} is {float(arrived[first]):g} instead "
        f"of {float(expected[first]):g}"
    )


def _time(call: Callable[[], None], repetitions: int) -> float:
    """Return the median duration of a call in seconds, after a few calls to warm up."""
    for _ in range(WARM_UP):
        call()
    seconds = []
    for _ in range(repetitions):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return median(seconds)
