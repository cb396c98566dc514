"""Check that evener names the right limit for training runs that have one known cause.

  python -m benchmarks.caused_limits [--turns 1]

The training runs of tests/support/caused_trainings.py run on two CPU ranks. Prints one line per
run: "ok" if its cause is named first (or, for a plain run, if no limit is named), else "MISS".
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from evener.launch.summary import summarize_training
from tests.support.rank_server import place_ranks


def run_rank(rank: int, folder: str, places: list[dict[str, str]]) -> None:
    """Train all the cases as one rank."""
    os.environ |= {**places[rank], "MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": ""}
    from tests.support.caused_trainings import train_all

    train_all(Path(folder), rank)


def judge(folder: Path) -> None:
    """Print for each training run whether the limit named first is its cause."""
    from tests.support.caused_trainings import FIRST, PLAIN, read_record

    ranks: list[dict[str, Any]] = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    for cause in ranks[0]:
        summary = summarize_training(
            [read_record(each[cause]) for each in ranks], "", "finished", {}
        )
        assert summary is not None
        expected = "host_starved" if cause == "cores" else FIRST.get(cause, "")
        named = summary.limits[0].kind.value if summary.limits else ""
        said = "; ".join(
            f"{each.kind.value} {100 * each.share:.0f} %, +{100 * each.gain:.0f} %"
            for each in summary.limits
        )
        right = named == expected and (cause in PLAIN or bool(named))
        print(f"{'ok  ' if right else 'MISS'} {cause}: {said or 'nothing over 5 %'}", flush=True)


def main() -> None:
    """Train the cases and print one line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=1)
    for _ in range(parser.parse_args().turns):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["EVENER_LIVE_DIR"] = f"{folder}/live"
            mp.spawn(run_rank, (folder, place_ranks(2)), nprocs=2)
            judge(Path(folder))


if __name__ == "__main__":
    main()
