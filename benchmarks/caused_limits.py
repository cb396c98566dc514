"""Check the limits and gains that evener names for training runs with one known cause.

  python -m benchmarks.caused_limits [--turns 1]

The training runs of tests/support/caused_trainings.py run on two CPU ranks. Prints one line per
run: "ok" if its cause is named first (or, for a plain run, if no limit is named), else "MISS". Then
compares the promised gain of each remedy with its real gain, taken from the same run without the
cause or, if the remedy halves the cause's time, with half of that time. The gains are medians over
the turns. The benchmark needs two or more idle cores.
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

CLOSE = 0.15  # largest relative error of a gain that counts as right
# the fraction of a cause's time that its remedy saves
SAVED = {"optimizer": 0.5, "checkpoints": 0.5, "validation": 0.5, "validation between epochs": 0.5}
# causes whose remedy divides the rows differently: without the cause, both ranks would be fast
OTHERWISE = ("unequal",)


def run_rank(rank: int, folder: str, places: list[dict[str, str]]) -> None:
    """Train all the cases as one rank."""
    os.environ |= {**places[rank], "MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": ""}
    from tests.support.caused_trainings import train_all

    train_all(Path(folder), rank)


def summarize(folder: Path) -> Iterator[tuple[str, TrainingSummary]]:
    """Yield the name and the summary of each training run."""
    from tests.support.caused_trainings import read_record

    ranks: list[dict[str, Any]] = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    for cause in ranks[0]:
        summary = summarize_training(
            [read_record(each[cause]) for each in ranks], "", "finished", {}
        )
        assert summary is not None
        yield cause, summary


def judge_causes(summaries: Mapping[str, TrainingSummary]) -> None:
    """Print for each training run whether the limit named first is its cause."""
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
    """Print for each cause the promised gain and the true one, as medians over the turns."""
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
    """Train the cases, and print their limits and gains."""
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
