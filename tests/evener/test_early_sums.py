"""Which gradients are summed during the backward pass."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from evener.shares.divisions import LATE_PART, WORTH_BYTES, divide_sums

tensors = st.lists(
    st.tuples(st.integers(0, 1 << 24), st.sampled_from(["float32", "float16"])), max_size=12
)


@given(tensors)
def test_every_tensor_is_in_one_sum_of_its_type(given_: list[tuple[int, str]]) -> None:
    """Tensors are in the order in which they become ready; a type has at most two sums."""
    sums = divide_sums(given_)
    assert sorted(chain.from_iterable(sums)) == list(range(len(given_)))
    assert all(places == sorted(places) for places in sums)
    kinds = [{given_[place][1] for place in places} for places in sums]
    assert all(len(kind) == 1 for kind in kinds)
    assert all(kinds.count({kind}) <= 2 for kind in ("float32", "float16"))


@given(tensors)
def test_what_waits_for_the_last_gradient_is_a_quarter_or_that_gradient_alone(
    given_: list[tuple[int, str]],
) -> None:
    """Of many bytes of one type, the last sum has a quarter, or only the last gradient.

    Few bytes are summed at once.
    """
    sizes = [size for size, _ in given_]
    sums = divide_sums([(size, "float32") for size in sizes])
    if sum(sizes) < WORTH_BYTES:
        assert len(sums) == bool(sizes)
    else:
        late = sums[-1]
        assert late == [len(sizes) - 1] or sum(sizes[place] for place in late) <= LATE_PART * sum(
            sizes
        )


@given(tensors, st.integers(1, 3))
def test_nothing_waits_for_what_is_apart(given_: list[tuple[int, str]], apart: int) -> None:
    """The last tensors don't change how the others are summed, unless all fit into one sum."""
    figures = [(0, "float32")] * apart
    sums = divide_sums([*given_, *figures], apart)
    if sum(size for size, _ in given_) >= WORTH_BYTES:
        assert sums == [*divide_sums(given_), list(range(len(given_), len(given_) + apart))]
    else:
        assert len(sums) == len({kind for _, kind in [*given_, *figures]})


def test_dense_layers_are_summed_behind_the_convolutions_before_them() -> None:
    """In the backward pass of keras_maxer, the large dense layers come first.

    Eight times fewer bytes follow.
    """
    mib = 1 << 20
    assert divide_sums(
        [(8 * mib, "f"), (60 * mib, "f"), (200 * mib, "f"), (30 * mib, "f"), (6 * mib, "f")]
    ) == [
        [0, 1, 2],
        [3, 4],
    ]


def test_a_large_first_layer_waits_alone() -> None:
    """An embedding's gradient comes last, and the others don't wait for it."""
    mib = 1 << 20
    assert divide_sums([(4 * mib, "f"), (4 * mib, "f"), (90 * mib, "f")]) == [[0, 1], [2]]
