"""How many rows the memory is predicted to hold, for memory proportional to rows."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from evener.training.memory_growth import MemoryPeaks

FIXED = st.floats(0.0, 50.0)  # GiB
PER_ROW = st.floats(0.001, 1.0)
LEFT = st.sampled_from([0.1, 0.2])


def grow(
    fixed: float, per_row: float, rows: int, capacity: float, left: float, first_peak: float = 1.0
) -> list[int]:
    """Return the rows of passes that grow by half each time; the first peak may be too high."""
    peaks, seen = MemoryPeaks(), [rows]
    highest = first_peak * (fixed + per_row * rows)
    for _ in range(30):
        highest = max(highest, fixed + per_row * rows)
        peaks.record(rows, highest, fixed)
        more = min(rows + max(rows // 2, 1), peaks.most_rows(capacity, left))
        if more == rows:
            return seen
        rows = more
        seen.append(rows)
    return seen


@given(FIXED, PER_ROW, st.integers(1, 500), st.floats(1.0, 20.0), LEFT, st.floats(1.0, 1.3))
def test_no_pass_takes_more_than_what_may_be_used(
    fixed: float, per_row: float, rows: int, room: float, left: float, first_peak: float
) -> None:
    """No pass exceeds the memory, even if the first peak was too high.

    A first peak is too high if it includes the check of a loss, for example.
    """
    capacity = room * (fixed + per_row * rows)
    for more in grow(fixed, per_row, rows, capacity, left, first_peak)[1:]:
        assert fixed + per_row * more <= capacity * (1 - left) * (1 + 1e-9)


@given(FIXED, PER_ROW, st.integers(1, 500), st.floats(1.0, 20.0), LEFT)
def test_passes_grow_to_what_memory_holds(
    fixed: float, per_row: float, rows: int, room: float, left: float
) -> None:
    capacity = room * (fixed + per_row * rows)
    most = (capacity * (1 - left) - fixed) / per_row
    assume(rows + 1 <= (1 - left) * capacity / (fixed + per_row * rows) * rows)
    assume(rows * 1.5**20 > most)
    assert grow(fixed, per_row, rows, capacity, left)[-1] >= 0.99 * most - 2


@given(FIXED, PER_ROW, st.integers(2, 500), st.floats(0.0, 1000.0), st.floats(0.0, 1000.0), LEFT)
def test_more_memory_never_holds_fewer_rows(
    fixed: float, per_row: float, rows: int, one: float, other: float, left: float
) -> None:
    peaks = MemoryPeaks()
    for some in (rows, rows + rows // 2):
        peaks.record(some, fixed + per_row * some, fixed)
    less, more = sorted((one, other))
    assert peaks.most_rows(less, left) <= peaks.most_rows(more, left)
    assert peaks.most_rows(more, 0.2) <= peaks.most_rows(more, 0.1)
    assert peaks.most_rows(less, left) >= rows + rows // 2, "these have fitted"


def test_memory_that_grows_faster_than_rows_is_not_underestimated() -> None:
    peaks = MemoryPeaks()
    for rows in (100, 150, 225):
        peaks.record(rows, 5 + (rows / 100) ** 1.3, 5)
    assert peaks.predict(300) >= 0.98 * (5 + 3**1.3)


def test_without_a_peak_nothing_is_reported() -> None:
    peaks = MemoryPeaks()
    assert peaks.most_rows(1e9, 0.1) == 0
    peaks.record(10, 100.0)
    peaks.record(5, 100.0)  # the allocator's peak is still that of 10 rows
    assert peaks.predict(20) == 200.0
