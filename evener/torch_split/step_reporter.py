"""Reports of one rank's steps to the monitor: samples/s, the times within a step, changes of shares."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from ..live.files import MOST_CHANGES, ShareChange, clean
from ..live.journal import TrainingJournal
from ..live.reporter import Details, Reporter
from ..plan.check import describe
from .memory import say
from .own_work import make_timer
from .rank_shares import RankShares
from .retry import Retreat


class StepReporter:
    """Reports the steps of one rank, which computes its shares on `device`; `timer` is marked in each step.

    `on_step` is called after a step that was trained on, with the rows of each rank. With `journal`, rank 0 keeps one.
    """

    def __init__(self, shares: RankShares, device: Any, journal: bool = False) -> None:
        self.timer = make_timer(device, alone=shares.world == 1)
        self.shares = shares
        self.changes: deque[ShareChange] = deque(maxlen=MOST_CHANGES)
        self.retreats, self.retreat = 0, ""  # passes that ran out of memory, and the last of them in words
        self.on_step: Callable[[tuple[int, ...]], None] = lambda _: None
        self._reporter = Reporter(self._describe, keep_journal(shares) if journal else None, self.timer.now)

    def note_retreat(self, retreat: Retreat) -> None:
        """A pass ran out of memory, and smaller ones follow."""
        self.retreats += 1
        self.retreat = retreat.describe(self.shares.share.name or self.shares.share.device)
        say(self.retreat)

    def finish(self) -> None:
        """The loop asks for its next batch."""
        if self.timer.finish():
            self.on_step(self.timer.sizes)

    def report(self, rows: int, tokens: tuple[int, int] = (0, 0)) -> None:
        """A step on this rank's rows is done; `tokens` are those of the rows, without and with padding."""
        shares = self.shares
        self._reporter.report(rows, devices=(shares.share,), framework="torch", workload=shares.workload, tokens=tokens)

    def close(self) -> None:
        """The monitor forgets this training."""
        self._reporter.close()

    def _describe(self) -> Details:
        shares, times = self.shares, self.timer.medians()
        return Details(
            shares.training,
            shares.rank,
            shares.world,
            shares.samples_per_second,
            times.step_s,
            times.step_spread,
            times.input_s,
            (times.work,),
            tuple(self.changes),
            times.between_s,
            self.retreats,
            clean(self.retreat),
        )


def keep_journal(shares: RankShares) -> TrainingJournal | None:
    """The journal of the whole training, for its first rank."""
    return None if shares.rank else TrainingJournal(tuple(map(describe, shares.shares)), shares.batches)
