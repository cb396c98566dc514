"""How far the search ends from the best on curves that real GPUs gave: `python -m
benchmarks.recorded [--seeds 5]`.

Each journal in tests/recorded becomes a simulated machine (tests/support/recorded_machines.py). The
best is found by trying every batch.
"""

from __future__ import annotations

import argparse

from tests.support.recorded_machines import curves, machine, records, search


def main() -> None:
    """Print a row for each journal: the median and the worst of the seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    journals = records()
    drawn = curves(journals.values())
    print("| recorded | best, samples/s | median regret | worst | probes | shares of the worst |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for name, record in journals.items():
        made = machine(record, drawn)
        found = sorted(
            (search(record, made, seed) for seed in range(options.seeds)),
            key=lambda one: one.regret,
        )
        middle, worst = found[len(found) // 2], found[-1]
        shares = " + ".join(map(str, worst.shares))
        figures = f"{middle.regret:.2%} | {worst.regret:.2%} | {middle.probes} | {shares}"
        print(f"| {name} | {worst.best.samples_per_second:,.0f} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
