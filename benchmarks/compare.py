"""Check how often `evener compare` names the true winner, on simulated machines.

The best layout of each machine is known. The cases and their scores are in
tests/support/comparison_cases.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

from tests.support.comparison_cases import RIGHT, Score, make_case, score

MACHINES = 200
ENOUGH = 0.97  # minimum fraction of machines whose winner is named correctly


def table(scores: list[Score]) -> list[str]:
    """Return the results as lines of Markdown."""
    lines = [
        (
            "| best way | machines | named rightly | reached ≥ 99 % | median | worst | probes | "
            "virtual s |"
        ),
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind in [*sorted({one.truth for one in scores}), "all"]:
        own = [one for one in scores if kind in (one.truth, "all")]
        right = sum(one.right for one in own)
        reached = sorted(one.reached_part for one in own)
        probes, seconds = median(one.probes for one in own), median(one.seconds for one in own)
        near = sum(part >= RIGHT for part in reached) / len(own)
        figures = (
            f"{near:.1%} | {median(reached):.1%} | {reached[0]:.1%} | {probes:.0f} | {seconds:.0f}"
        )
        lines.append(f"| {kind} | {len(own)} | {right} ({right / len(own):.1%}) | {figures} |")
    return lines


def main(arguments: list[str]) -> int:
    """Print the table, and write it to the file given by `--output`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=MACHINES)
    parser.add_argument("--first", type=int, default=0, help="seed of the first machine")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    scores = [
        score(make_case(seed)) for seed in range(options.first, options.first + options.machines)
    ]
    lines = [*table(scores), ""]
    for one in scores:
        if one.reached_part < RIGHT:
            words = (
                f"best is {one.truth}, named {one.named}, which can have {one.named_part:.1%} of it"
            )
            lines.append(
                f"- seed {one.case.seed} ({one.case.name}): {words}; its batches reach "
                f"{one.reached_part:.1%}"
            )
    print("\n".join(lines))
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")
    return 0 if sum(one.right for one in scores) >= ENOUGH * len(scores) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
