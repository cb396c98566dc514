"""Find out whether other shares can make the steps of a training run faster.

Moving rows helps only if the slowest rank then computes for less time. It doesn't help if a GPU
waits for its host to start kernels, or a rank for rows that other processes load. The speed of a
CPU that other programs use changes within seconds, so shares then change only after longer
measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from .rebalance import FEWEST_WINDOWS, MOST_WINDOWS

Bottleneck = Literal["own work", "shared core", "host", "input"]

INPUT_PART = 0.1  # input is the limit if waiting for rows takes this fraction of a step
BEHIND_PART = 0.5  # the GPU is the limit if it is behind its host in this fraction of steps
# below this fraction of own work, another program uses the core, or the rank sleeps
COMPUTING_PART = 0.8
EVIDENCE_SECONDS: dict[Bottleneck, float] = {"own work": 0.5, "shared core": 5.0}


class RankTimes(NamedTuple):
    """Median times of one rank's steps in seconds, and how busy its GPU and core were.

    NaN stands for an unknown value.
    """

    own_work_s: float
    input_s: float  # idle time while other threads or processes fetch its rows
    step_s: float
    behind: float = math.nan  # fraction of the steps in which the GPU was behind its host
    computing: float = math.nan  # fraction of own work in which the CPU computed for this rank


def find_bottleneck(ranks: Sequence[RankTimes]) -> Bottleneck:
    """Return what limits the speed: "own work", "shared core", "host" or "input".

    "own work" is the compute time of the ranks. "shared core" means that other programs use the
    slowest rank's CPU core, "host" that its GPU waits for kernels to start, and "input" that a rank
    waits for rows.
    """
    # Rows that the training loop prepares itself are a part of its compute time (own work).
    last = max(ranks, key=lambda rank: _zero_for_nan(rank.own_work_s + rank.input_s))
    if last.input_s > INPUT_PART * last.step_s:
        return "input"
    slowest = max(ranks, key=lambda rank: _zero_for_nan(rank.own_work_s))
    if slowest.behind < BEHIND_PART:
        return "host"
    if slowest.computing < COMPUTING_PART:
        return "shared core"
    return "own work"


def fewest_windows(bottleneck: Bottleneck, window_s: float) -> int:
    """Return how many measuring windows to observe before the shares may change.

    0 means that they may not change. `window_s` is the duration of a window in seconds.
    """
    # with 0, shares don't change at all, because that wouldn't help
    seconds = EVIDENCE_SECONDS.get(bottleneck)
    if seconds is None:
        return 0
    if window_s * MOST_WINDOWS <= seconds:
        return MOST_WINDOWS
    return max(math.ceil(seconds / window_s), FEWEST_WINDOWS)


def _zero_for_nan(seconds: float) -> float:
    return 0.0 if math.isnan(seconds) else seconds
