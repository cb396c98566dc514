"""The memory of a model's state in a verdict, and the largest models that devices could train."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.balancer.model_memory import FULL, LORA, QLORA, TrainingMethod
from evener.balancer.result.state_memory import (
    find_state_memory,
    write_adapters,
    write_state_memory,
)
from evener.balancer.types import (
    Facts,
    Layout,
    ModelState,
    Observation,
    OutOfMemory,
    Probe,
    Stage,
    Timed,
    layout_of,
)
from evener.devices.types import Device

GIB = 1 << 30
PARAMETERS = 1_100_000_000
STATE = ModelState(16 * PARAMETERS, GIB, 0, PARAMETERS, PARAMETERS)
CARDS = tuple(
    Device(f"sim-{i}", i, "a card", "sim", memory_bytes=size * GIB)
    for i, size in enumerate((16, 12))
)
SHARDED = Layout("shard", (8, 4), state=(0.6, 0.4))


def full(position: int) -> OutOfMemory:
    """Return an observation of a device that ran out of memory alone."""
    shares = tuple(int(i == position) for i in range(2))
    return OutOfMemory(Probe(layout_of(shares), Stage.SOLO, 1.0), (position,), "", 1.0)


def ran(position: int) -> Timed:
    """Return an observation of a device that trained alone."""
    shares = tuple(int(i == position) for i in range(2))
    return Timed(Probe(layout_of(shares), Stage.SOLO, 1.0), 1.0, 1.0, 1.0, 1, (1, 1), (), 0.1, 1.0)


def write(state: ModelState | None, seen: list[Observation], chosen: Layout | None) -> str:
    found = find_state_memory(Facts(state=state), seen, CARDS, chosen)
    return "" if found is None else write_state_memory(found)


def test_a_model_that_no_card_holds_is_reported_in_gigabytes_with_what_would_fit() -> None:
    said = write(STATE, [full(0), full(1)], SHARDED)
    assert "takes 16.4 GiB, which no device holds alone" in said
    assert "in shards it is 9.83 GiB on SIM:0 and 6.56 GiB on SIM:1" in said
    assert "LoRA (r=16, bfloat16) would take about 2.21 GiB" in said
    assert "that fits SIM:0 or SIM:1 alone" in said


def test_what_one_card_holds_alone_is_named() -> None:
    assert "which SIM:0 holds alone" in write(STATE, [ran(0), full(1)], SHARDED)
    assert write(STATE, [ran(0), full(1)], layout_of((8, 0))) == ""


def test_adapters_are_not_suggested_if_they_are_trained_or_unknown() -> None:
    adapters = msgspec.structs.replace(STATE, trained=PARAMETERS // 100)
    found = find_state_memory(Facts(state=adapters), [full(0)], CARDS, SHARDED)
    assert found is not None
    assert write_adapters(found) == []
    assert write(None, [full(0)], SHARDED) == ""
    assert write(ModelState(GIB, GIB), [full(0)], SHARDED) == ""


@pytest.mark.parametrize("method", [FULL, LORA, QLORA])
@given(limits=st.lists(st.integers(GIB, 200 * GIB), min_size=1, max_size=8))
def test_the_largest_model_fits_and_a_larger_one_does_not(
    method: TrainingMethod, limits: list[int]
) -> None:
    def fits_whole(parameters: float) -> bool:
        return parameters * (method.divided_bytes + method.whole_bytes) <= min(limits)

    def fits_in_shards(parameters: float) -> bool:
        left = [limit - parameters * method.whole_bytes for limit in limits]
        return min(left) >= 0 and sum(left) >= parameters * method.divided_bytes

    for largest, fits in (
        (method.largest_whole(limits), fits_whole),
        (method.largest_sharded(limits), fits_in_shards),
    ):
        assert fits(0.999 * largest)
        assert not fits(1.001 * largest + 1)
