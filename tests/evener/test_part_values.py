"""How the values of a batch's parts combine to the whole batch's value, judged by numbers alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evener.training.part_values import SUM, find_fitting, mean_by

NEAR = 1e-5
losses = st.floats(0.1, 10.0)
counts = st.integers(1, 50)


@given(st.tuples(losses, losses), st.tuples(counts, counts), st.tuples(counts, counts))
def test_a_weighted_mean_is_found_by_its_weights(
    parts: tuple[float, float], rows: tuple[int, int], labels: tuple[int, int]
) -> None:
    units = {"rows": rows, "labels": labels}
    for name, each in units.items():
        assert name in find_fitting(mean_by(parts, each), parts, units, NEAR)


@given(st.tuples(losses, losses), st.tuples(counts, counts), st.floats(0.01, 0.5))
def test_another_value_is_no_mean(
    parts: tuple[float, float], rows: tuple[int, int], off: float
) -> None:
    moved = mean_by(parts, rows) * (1 + off)
    assert "rows" not in find_fitting(moved, parts, {"rows": rows}, NEAR)


def test_a_part_without_labels_has_no_loss_that_counts() -> None:
    parts = (float("nan"), 2.0)
    assert find_fitting(2.0, parts, {"rows": (3, 5), "labels": (0, 7)}, NEAR) == ["labels"]


def test_a_sum_is_called_one() -> None:
    assert find_fitting(8.0, (3.0, 5.0), {"rows": (3, 5)}, NEAR) == [SUM]
