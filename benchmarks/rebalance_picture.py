"""Draws samples/s over the steps of a training: `python -m benchmarks.rebalance_picture FILE.json
PICTURE.svg`.

FILE.json is what `python -m benchmarks.rebalance gpus --json FILE.json` wrote.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot

STEPS = 10  # that a figure is the median of
LABELS = {"rebalance": "rebalance=True", "even": "even shares"}


def rates(times: list[float], batch: int) -> tuple[list[int], list[float]]:
    """Steps, and samples/s of the steps around each."""
    seconds = [after - before for before, after in pairwise(times)]
    middles = range(STEPS // 2, len(seconds) - STEPS // 2, STEPS // 2)
    return list(middles), [
        batch / median(seconds[step - STEPS // 2 : step + STEPS // 2]) for step in middles
    ]


def draw(found: dict[str, Any], target: Path) -> None:
    """Both trainings, the best fixed shares, and the changes."""
    mpl.rcParams["svg.hashsalt"] = "rebalance"
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    axes.axvspan(
        found["start"], found["end"], color="0.93", label="another program on the second GPU"
    )
    for name, times in found["times"].items():
        axes.plot(*rates(times, found["batch"]), label=LABELS[name], linewidth=1.2)
    shares, seconds = min(found["static"].items(), key=lambda item: item[1])
    span = found["start"], found["end"]
    rate = found["batch"] / seconds
    axes.plot(
        span,
        (rate, rate),
        "--",
        color="0.3",
        label=f"best fixed shares, {shares.replace('+', ' + ')}",
    )
    for number, (step, changed) in enumerate(found["changes"]):
        beside = {"xytext": (3, 3 + 9 * (number % 3)), "textcoords": "offset points", "fontsize": 7}
        axes.annotate(" + ".join(map(str, changed)), (step, 0), **beside)
        axes.axvline(step, color="0.6", linewidth=0.6, linestyle=":")
    axes.set(xlabel="step", ylabel="samples/s", ylim=(0, None), xlim=(0, found["steps"]))
    figure.legend(fontsize=8, loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None, dpi=150)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("picture", type=Path)
    given = parser.parse_args()
    draw(json.loads(given.file.read_text()), given.picture)


if __name__ == "__main__":
    main()
