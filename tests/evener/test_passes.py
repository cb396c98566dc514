"""A share is cut into passes of nearly one size, none larger than a device can take."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import RequestError
from evener.shares.whole_rows import count_passes, split_passes
from evener.training.retreat import LOOK_STEPS, PassLimit


@given(st.integers(0, 10**4), st.integers(1, 10**4))
def test_passes_are_as_few_as_can_be_and_of_one_size(batch: int, micro: int) -> None:
    passes = split_passes(batch, micro)
    assert sum(passes) == batch
    assert len(passes) == count_passes(batch, micro) == -(-batch // micro)
    assert max(passes, default=0) <= micro
    assert max(passes, default=0) - min(passes, default=0) <= 1
    assert list(passes) == sorted(passes)


def test_the_rest_is_spread_over_all_passes() -> None:
    assert split_passes(820, 410) == (410, 410)
    assert split_passes(820, 300) == (273, 273, 274)
    assert split_passes(820, 1000) == (820,)
    assert split_passes(0, 5) == ()


@pytest.mark.parametrize("micro", [0, -1, 2.5, "2", True, None])
def test_a_pass_has_a_whole_number_of_rows(micro: Any) -> None:
    with pytest.raises(RequestError, match="A pass can't have"):
        split_passes(8, micro)


def test_passes_are_the_plans_again_once_a_neighbour_has_gone() -> None:
    """It held 30 GiB as memory ran out; one that still holds most of it, or that was never seen,
    changes nothing.
    """
    for held, left, most in ((30 << 30, 20 << 30, 32), (30 << 30, 1 << 30, None), (0, 0, 32)):
        limit = PassLimit(0)
        limit.begin()
        assert limit.shrink(64, 1, held) == 32
        for _ in range(2 * LOOK_STEPS):
            limit.begin(partial(int, left))
        assert limit.most == most
