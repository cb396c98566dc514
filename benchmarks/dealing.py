"""How well rows of unequal length are dealt, and what dealing costs: `python -m
benchmarks.dealing`.

Lognormal lengths on ranks up to four times as fast as each other. "over" is the latest predicted
finish, less 1, over a bound that no way can beat: the larger of (the least cost of the batch on one
device, in the best passes, / the sum of speeds) and (the longest row on the fastest rank). "over
rows" has a bound that knows no padding, and one pass on each rank. "random rows" are dealt by row
shares, in one pass each, as they are without lengths.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from statistics import median, quantiles

from evener.shares.curves import Cost, RankCost
from evener.shares.whole_rows import apportion, bounds
from evener.training.dealing import Deal, Dealer
from tests.support.dealing_oracle import least_seconds

RANKS = (2, 3, 4, 8)
FIXED = (0.0, 0.002, 0.01, 0.04)  # seconds of a pass, as a part of a rank's mean share of the batch
LENGTH = 100  # the median
BEND = 1e-3  # per_token_length_s / per_token_s


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--sigma", type=float, default=1.0)
    options = parser.parse_args()
    print(
        "| ranks | a pass costs | passes | over: median | 95th | over rows: median | random "
        "rows: median |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for ranks in RANKS:
        for fixed in FIXED:
            print(quality_row(ranks, fixed, options.sigma, options.batches), flush=True)
    print(
        "\n| ranks | rows | over: median | ms for a batch | s for 1,000 |\n| ---: | ---: | "
        "---: | ---: | ---: |"
    )
    for ranks in RANKS:
        print(time_row(ranks, 256, options.sigma, options.batches), flush=True)


def quality_row(ranks: int, fixed: float, sigma: float, batches: int) -> str:
    """One line of the first table, of 64 rows."""
    draws = random.Random(ranks)
    over, over_rows, over_random, passes = [], [], [], []
    for _ in range(batches):
        lengths, dealer = draw(draws, ranks, 64, fixed, sigma)
        costs = dealer.ranks
        dealt = dealer.deal(lengths)
        least = least_seconds(lengths, costs)
        alone = (
            sum(rank.cost.row_seconds(length) for length in lengths) + ranks * rank.cost.fixed_s
            for rank in costs
        )
        rows_least = max(
            1 / sum(1 / each for each in alone),
            min(rank.cost.seconds(1, max(lengths)) for rank in costs),
        )
        over.append(max(dealt.seconds) / least - 1)
        over_rows.append(max(dealt.seconds) / rows_least - 1)
        over_random.append(random_finish(dealer, lengths) / least - 1)
        passes.append(count_passes(dealt))
    late = quantiles(over, n=20)[-1]
    figures = (median(over), late, median(over_rows), median(over_random))
    cells = (f"{100 * figure:.1f} %" for figure in figures)
    return f"| {ranks} | {100 * fixed:.1f} % | {median(passes):.0f} | " + " | ".join(cells) + " |"


def time_row(ranks: int, rows: int, sigma: float, batches: int) -> str:
    """One line of the second, in seconds of this process."""
    over, each = time_deals(ranks, rows, sigma, batches)
    return f"| {ranks} | {rows} | {100 * over:.1f} % | {1e3 * each:.1f} | {1e3 * each:.1f} |"


def time_deals(ranks: int, rows: int, sigma: float, batches: int) -> tuple[float, float]:
    """The latest finish less 1 over the bound, the median of some batches; and the CPU seconds of
    dealing one.
    """
    draws = random.Random(ranks)
    drawn = [draw(draws, ranks, rows, 0.01, sigma) for _ in range(batches)]
    started = time.process_time()
    dealt = [dealer.deal(lengths) for lengths, dealer in drawn]
    each = (time.process_time() - started) / batches
    over = median(
        max(deal.seconds) / least_seconds(lengths, dealer.ranks) - 1
        for deal, (lengths, dealer) in zip(dealt[:20], drawn, strict=False)
    )
    return over, each


def draw(
    draws: random.Random, ranks: int, rows: int, fixed: float, sigma: float
) -> tuple[list[int], Dealer]:
    """Lengths of a batch, and ranks with speeds of 1 to 4 whose passes cost `fixed` of a rank's
    mean share.
    """
    lengths = [max(1, round(LENGTH * math.exp(draws.gauss(0, sigma)))) for _ in range(rows)]
    speeds = [1.0, *(draws.uniform(0.25, 1) for _ in range(ranks - 1))]
    share = sum(length * (1 + BEND * length) for length in lengths) / ranks
    costs = tuple(
        RankCost(Cost(fixed * share / speed, 1 / speed, BEND / speed)) for speed in speeds
    )
    return lengths, Dealer(costs, tuple(speeds))


def random_finish(dealer: Dealer, lengths: list[int]) -> float:
    """The last rank's finish where rows come as they are drawn, by row shares, and each rank takes
    one pass.
    """
    slices = bounds(apportion(len(lengths), dealer.ratios))
    return max(
        rank.cost.seconds(stop - start, max(lengths[start:stop]))
        for rank, (start, stop) in zip(dealer.ranks, slices, strict=True)
    )


def count_passes(dealt: Deal) -> int:
    """Of all ranks."""
    return sum(map(len, dealt.passes))


if __name__ == "__main__":
    main()
