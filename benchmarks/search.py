"""Measure the search on seeded random machines: regret, probes, intervals and rivals.

  python -m benchmarks.search            writes docs/benchmarks/search.md and search.svg
  python -m benchmarks.search --quick    a small sample to the terminal, in well under 40 s
  python -m benchmarks.search --families hard [--budget 40] [--starts 3] [--seeds 20]
                                         hard machines as users search them, to the terminal;
                                         old ones, or any by name

Also counts out-of-memory errors.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import msgspec

from benchmarks import search_hard
from benchmarks.search_report import plot, report
from benchmarks.search_runs import MODES, Job, SearchOutcome, run
from tests.support import machine_families as machines
from tests.support import machine_families_hard as hard_machines

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    # for such small matrices, one process per core is faster than threads
    os.environ.setdefault(name, "1")

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks" / "search.md"
SEEDS = 8
HARD_SEEDS = 20  # seeds per hard family
FIRST_SEED = 1000  # the search was tuned on machines with smaller seeds
QUICK_SIZES, QUICK_NOISES = (2, 8), (0.01, 0.03)
RIVAL_SEEDS = 3  # seeds per kind of machine on which rivals run
PLAIN = ("even split", "by speed at one batch", "by largest batch", "OmniLearn rule", "random")


def jobs(seeds: int, sizes: Sequence[int], noises: Sequence[float], quick: bool) -> list[Job]:
    """Return jobs for all combinations; rivals join on the first seeds, at tolerance 0."""
    return [
        Job(
            family,
            devices,
            noise,
            mode,
            FIRST_SEED + turn,
            _rivals(devices, noise, mode, turn, quick),
        )
        for family in machines.FAMILIES
        for devices in sizes
        for noise in noises
        for mode in MODES
        for turn in range(seeds)
    ]


def _rivals(devices: int, noise: float, mode: str, turn: int, quick: bool) -> tuple[str, ...]:
    """Return the rivals that run on a machine.

    Optuna takes up to minutes per machine, so its TPE sampler runs on one seed with up to 8
    devices, and its Gaussian process only with 2 devices and a fixed batch.
    """
    if mode in ("tolerant", "beyond") or turn >= RIVAL_SEEDS:
        return ()
    if quick or noise != 0.01 or turn or devices > 8 or find_spec("optuna") is None:
        return PLAIN
    if devices > 2 or mode != "fixed":
        return (*PLAIN, "Optuna TPE")
    return (*PLAIN, "Optuna TPE", "Optuna GP")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small sample, to the terminal")
    parser.add_argument(
        "--seeds", type=int, default=None, help=f"machines of each kind ({SEEDS}; quick: 1)"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--families",
        default="",
        help="hard, old, or names with commas: with a budget, to the terminal",
    )
    parser.add_argument(
        "--budget", type=float, help="seconds, in place of the default or the family's own"
    )
    parser.add_argument(
        "--starts", type=float, help="seconds that each group of children takes to start"
    )
    parser.add_argument(
        "--first", type=int, default=FIRST_SEED, help="the first seed of --families"
    )
    parser.add_argument(
        "--laws",
        action="store_true",
        help="of --families: the laws that hold for pairs of searches",
    )
    parser.add_argument("--output", type=Path, help="every run as JSON")
    options = parser.parse_args(arguments)
    if options.families:
        _run_hard(options)
        return
    seeds = options.seeds or (1 if options.quick else SEEDS)
    sizes, noises = (
        (QUICK_SIZES, QUICK_NOISES) if options.quick else (machines.SIZES, machines.NOISES)
    )
    todo = jobs(seeds, sizes, noises, options.quick)
    with ProcessPoolExecutor(options.processes) as pool:
        outcomes: list[SearchOutcome] = list(pool.map(run, todo, chunksize=2))
    if options.output:
        options.output.write_bytes(msgspec.json.encode(outcomes))
    command = "python -m benchmarks.search" + (" --quick" if options.quick else "")
    command += f" --seeds {options.seeds}" if options.seeds else ""
    page = report(outcomes, seeds, command)
    if options.quick:
        print(page)
        return
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page, encoding="utf-8")
    if find_spec("matplotlib"):
        plot(outcomes, PAGE.with_suffix(".svg"))
    print(f"wrote {PAGE}")


def _run_hard(options: argparse.Namespace) -> None:
    """Search machines of these families with a budget; print the table and the failures."""
    sets = {"hard": tuple(hard_machines.FAMILIES), "old": tuple(machines.FAMILIES)}
    families = [name for word in options.families.split(",") for name in sets.get(word, (word,))]
    asked = {
        key: each
        for key, each in (("budget", options.budget), ("start", options.starts))
        if each is not None
    }
    seeds = range(options.first, options.first + (options.seeds or HARD_SEEDS))
    todo = search_hard.jobs(families, seeds, asked)
    with ProcessPoolExecutor(options.processes) as pool:
        if options.laws:
            steady = [job for job in todo if job.family not in hard_machines.CHANCE]
            found = [one for each in pool.map(search_hard.pairs, steady) for one in each]
            print(search_hard.law_table(found))
            if options.output:
                options.output.write_bytes(msgspec.json.encode(found))
            return
        rows = [row for found in pool.map(search_hard.run, todo, chunksize=4) for row in found]
    print(search_hard.table(rows), search_hard.worst(rows), sep="\n\n")
    if options.output:
        options.output.write_bytes(msgspec.json.encode(rows))


if __name__ == "__main__":
    main()
