"""What a loss is a mean over, by its figures."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evener.training.loss_check import LossFigures, describe, judge, mean_by

losses = st.floats(0.1, 10.0)
counts = st.integers(1, 50)


@given(st.tuples(losses, losses), st.tuples(counts, counts), st.tuples(counts, counts))
def test_a_weighted_mean_is_found_by_its_weights(
    parts: tuple[float, float], rows: tuple[int, int], labels: tuple[int, int]
) -> None:
    for name in ("rows", "labels"):
        figures = LossFigures(0.0, parts, {"rows": rows, "labels": labels})
        whole = LossFigures(mean_by(figures, name), parts, figures.counts)
        assert name in judge(whole).mean_over


@given(st.tuples(losses, losses), st.tuples(counts, counts), st.floats(0.01, 0.5))
def test_another_figure_is_no_mean(
    parts: tuple[float, float], rows: tuple[int, int], off: float
) -> None:
    figures = LossFigures(0.0, parts, {"rows": rows})
    moved = LossFigures(mean_by(figures, "rows") * (1 + off), parts, figures.counts)
    assert judge(moved).mean_over == ()
    assert "it isn't a mean over rows" in describe(moved) or "it is a sum" in describe(moved)


def test_a_part_without_labels_has_no_loss_that_counts() -> None:
    figures = LossFigures(2.0, (float("nan"), 2.0), {"rows": (3, 5), "labels": (0, 7)})
    assert judge(figures).mean_over == ("labels",)


def test_a_sum_is_called_one() -> None:
    assert "it is a sum" in describe(LossFigures(8.0, (3.0, 5.0), {"rows": (3, 5)}))
