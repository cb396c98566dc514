"""The CPU as devices: this machine's slices, their cores and their memory."""

from __future__ import annotations

import os

import pytest

from evener.devices.cpu import MEMORY_SHARE, available_memory_bytes, slices
from evener.errors import RequestError


def test_the_slices_of_this_machine_share_its_cores_and_free_memory() -> None:
    devices = slices()
    cores = [core for device in devices for core in device.cores]
    assert len(cores) == len(set(cores))
    assert set(cores) <= os.sched_getaffinity(0)
    assert (
        0
        < sum(device.memory_bytes or 0 for device in devices)
        <= available_memory_bytes() * (MEMORY_SHARE + 0.1)
    )
    assert [device.id for device in slices(1)] == ["cpu-0-of-1"]


@pytest.mark.parametrize("count", [0, -1, 100_000])
def test_an_impossible_number_of_slices_is_a_request_error(count: int) -> None:
    with pytest.raises(RequestError):
        slices(count)
