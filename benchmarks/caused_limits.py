"""What limits real trainings with one known cause each, on two ranks of a CPU: `python -m
benchmarks.caused_limits [--turns 1]`.

Each training is one of tests/support/caused_trainings.py. Prints a line for each: whether its cause
is named first, or, of plain ones, nothing. Then the gain that was promised beside the one that the
remedy gives: that of the same training without its cause or, where the remedy halves it, of half
its time. Several turns give the median of it. The cores are free in the end: give two or more that
nothing else uses.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.multiprocessing as mp

from evener.launch.summary import TrainingSummary, summarize_training
from tests.support.rank_server import place_ranks

CLOSE = 0.15  # of the true gain
# the fraction of a cause's time that its remedy saves
SAVED = {"optimizer": 0.5, "checkpoints": 0.5, "validation": 0.5, "validation between epochs": 0.5}
# whose remedy is another division of the rows: without the cause, both ranks would be fast
OTHERWISE = ("unequal",)


def run_rank(rank: int, folder: str, places: list[dict[str, str]]) -> None:
    """Train as one rank."""
    os.environ |= {**places[rank], "MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": ""}
    from tests.support.caused_trainings import train_all

    train_all(Path(folder), rank)


def summarize(folder: Path) -> Iterator[tuple[str, TrainingSummary]]:
    """The summary of each training."""
    from tests.support.caused_trainings import read_record

    ranks: list[dict[str, Any]] = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    for cause in ranks[0]:
        summary = summarize_training(
            [read_record(each[cause]) for each in ranks], "", "finished", {}
        )
        assert summary is not None
        yield cause, summary


def judge_causes(summaries: Mapping[str, TrainingSummary]) -> None:
    """A line for each training: what is named."""
    from tests.support.caused_trainings import FIRST, PLAIN

    for cause, summary in summaries.items():
        expected = "host_starved" if cause == "cores" else FIRST.get(cause, "")
        named = summary.limits[0].kind.value if summary.limits else ""
        said = "; ".join(
            f"{each.kind.value} {100 * each.share:.0f} %, +{100 * each.gain:.0f} %"
            for each in summary.limits
        )
        right = named == expected and (cause in PLAIN or bool(named))
        print(f"{'ok  ' if right else 'MISS'} {cause}: {said or 'nothing over 5 %'}", flush=True)


def judge_gains(turns: list[dict[str, TrainingSummary]]) -> None:
    """A line for each cause: the promised gain of each turn, and the true one of their medians."""
    from tests.support.caused_trainings import PLAIN

    plain_s = median(turn[PLAIN[0]].step_s for turn in turns)
    for cause in turns[0]:
        if cause in (*PLAIN, *OTHERWISE):
            continue
        limits = [turn[cause].limits[0] for turn in turns if turn[cause].limits]
        step_s = median(turn[cause].step_s for turn in turns)
        true = step_s / (step_s - SAVED.get(cause, 1.0) * (step_s - plain_s))
        if not limits:
            print(f"MISS {cause}: not named; the remedy gives {100 * (true - 1):+.0f} %")
            continue
        promised = median(1 + each.gain for each in limits)
        halves = [(each.gain_high - each.gain_low) / 2 / (1 + each.gain) for each in limits]
        held = sum(each.gain_low <= true - 1 <= each.gain_high for each in limits)
        off = promised / true - 1
        print(
            f"{'ok  ' if abs(off) <= CLOSE else 'MISS'} {cause}: promised "
            f"{100 * (promised - 1):+.0f} %, the remedy gives {100 * (true - 1):+.0f} %: off by "
            f"{100 * off:+.1f} %; interval ± {100 * median(halves):.0f} %, holds in {held} of "
            f"{len(limits)}",
            flush=True,
        )


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=1)
    turns = []
    for _ in range(parser.parse_args().turns):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["EVENER_LIVE_DIR"] = f"{folder}/live"
            mp.spawn(run_rank, (folder, place_ranks(2)), nprocs=2)
            turns.append(dict(summarize(Path(folder))))
            judge_causes(turns[-1])
    judge_gains(turns)


if __name__ == "__main__":
    main()
