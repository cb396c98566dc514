"""Find out whether other shares can make the steps of a training run faster.

Moving rows to other ranks helps only if the slowest rank then computes for less time. It doesn't
help if a GPU waits for its host to start kernels, or if a rank waits for rows that other processes
load. If other programs use a rank's CPU core, its speed changes within seconds, so the shares
change only after longer measurements.
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
    """Median times of one rank's steps in seconds, and how busy its GPU and CPU core were.

    Unknown values are NaN.
    """

    own_work_s: float
    input_s: float  # idle time while other threads or processes fetch its rows
    step_s: float
    behind: float = math.nan  # fraction of the steps in which the GPU was behind its host
    computing: float = math.nan  # fraction of own work in which the CPU computed for this rank


def find_bottleneck(ranks: Sequence[RankTimes]) -> Bottleneck:
    """Return what limits the speed of training: "own work", "shared core", "host" or "input".

    - "own work": the ranks compute all the time.
    - "shared core": other programs use the slowest rank's CPU core.
    - "host": the slowest rank's GPU waits for its host to start kernels.
    - "input": a rank waits for the rows of its next batch.
    """
    # rows that the training loop prepares itself are a part of its compute time (own work)
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
    """Return how many windows of steps to measure before the shares may change.

    `window_s` is the duration of a window in seconds. The result is 0 if other shares wouldn't help
    with this bottleneck.
    """
    seconds = EVIDENCE_SECONDS.get(bottleneck)
    if seconds is None:
        return 0
    if window_s * MOST_WINDOWS <= seconds:
        return MOST_WINDOWS
    return max(math.ceil(seconds / window_s), FEWEST_WINDOWS)


def _zero_for_nan(seconds: float) -> float:
    return 0.0 if math.isnan(seconds) else seconds
