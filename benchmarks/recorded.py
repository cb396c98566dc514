"""Measure how far the search ends from the best layout on curves recorded from real GPUs.

  python -m benchmarks.recorded [--seeds 5]

Each journal in tests/recorded becomes a simulated machine (tests/support/recorded_machines.py). The
best layout is found by trying every batch.
"""

from __future__ import annotations

import argparse

from tests.support.recorded_machines import curves, machine, records, search


def main() -> None:
    """Print the median and worst result over the seeds for each journal."""
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
