"""Keep shares equal in a library trainer's first steps, and check whether they may differ.

In a user's plain loop, evener can compute a loss again to test whether unequal shares change it. In
the trainer of a library such as Lightning, it can't. Therefore the first steps under `evener run`
have equal shares, and two checks are made. An audit computes the gradient of a few rows twice, and
compares the results: the rows are first divided equally, and then in proportion to the plan's
shares. The user's own collectives are watched, because their results may affect a later loss. If
neither check finds a problem, the plan's shares take effect.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from ..torch.audit.same_data import RankData, find_difference
from .exchanges import FROM_ONE, LIBRARIES, is_between, is_installed, name_package
from .views import DIFFERENCES

# Optimizer steps, and batches, after which missing results of the first audit aren't waited for.
# Ranks read each other's results in the fourth step.
MOST_STEPS, MOST_BATCHES = 12, 200
# libraries that call the program's code during a training
_TRAINERS = {"transformers", "trl", "lightning", "pytorch_lightning"}
# Lightning may also stand between that code and a collective
_LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}


class RankStart(msgspec.Struct):
    """One rank's observations in the first steps, sent to all ranks before shares may differ."""

    exchanged: str  # a collective and its line in the program's own code; "" if it called none
    ahead: int  # number of batches that the rank's loader has fetched ahead
    data: list[RankData] = []  # summaries of its training data sets


class EvenStart:
    """Keeps shares equal in a trainer's first steps, until all ranks decide if they may differ.

    - `exchange`: gathers one `RankStart` from each rank.
    - `stay`: called with the reason if shares have to stay equal.
    - `leave`: called when unequal shares begin.

    All ranks call the same one of `stay` and `leave`, after the same batch. Neither is called if an
    audit has found a difference, because the audit itself then keeps shares equal.
    """

    def __init__(
        self,
        training: Any,
        exchange: Callable[[RankStart], list[RankStart]],
        stay: Callable[[str], None],
        leave: Callable[[], None],
    ) -> None:
        self.is_over = False
        self._training = training
        self._exchange = exchange
        self._stay, self._leave = stay, leave
        self._batches = 0
        self._exchanged = ""
        training.begin_even()
        training.listeners.append(self._after_batch)

    @property
    def is_training(self) -> bool:
        """Whether any model is in training mode."""
        return any(model.training for model in self._training.weights.models)

    @property
    def shares(self) -> tuple[int, ...]:
        """Current row count of each rank in a full batch."""
        shares: tuple[int, ...] = self._training.ranks.batches
        return shares

    def note_collective(self, name: str, line: str) -> None:
        """Record the first collective that a callback of the user calls, and its line."""
        if not self._exchanged:
            self._exchanged = f"{name} ({line})"

    def _after_batch(self, _: Sequence[int]) -> None:
        """Count a batch; once the audits are over or take too long, decide about unequal shares."""
        if self.is_over:
            return
        self._batches += 1
        audits = self._training.audits
        is_late = audits.judge.step >= MOST_STEPS or self._batches >= MOST_BATCHES
        if not (audits.have_agreed or audits.judge.over or is_late):
            return
        self.is_over = True
        if audits.judge.over:  # an audit has found a difference
            return
        every = self._exchange(self._describe())
        fault = _find_fault(every)
        if fault:
            self._training.stay_even()
            self._stay(fault)
        else:
            self._training.leave_even(max(each.ahead for each in every))
            self._leave()

    def _describe(self) -> RankStart:
        training = self._training
        return RankStart(self._exchanged, training.ahead, training.summarize_data())


def _find_fault(observations: list[RankStart]) -> str:
    """Return why shares have to stay equal, or "" if they may differ.

    `observations` has one item per rank.
    """
    words = next((each.exchanged for each in observations if each.exchanged), "")
    if words:
        return (
            f"its ranks exchange values by {words} between its steps, which may go into what is"
            " learned"
        )
    have_other_rows = any(
        find_difference(loaded)
        for loaded in zip(*(each.data for each in observations), strict=False)
    )
    return DIFFERENCES["row"] if have_other_rows else ""


def find_callback() -> str:
    """Return the line of the user's callback that is calling a collective, such as "train.py:12".

    A callback is the user's code, called by a trainer such as Lightning's. The result is "" if no
    callback is running. Call this from the collective's hook.
    """
    # evener counts as a library, too. A trainer runs if it is on the call stack.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (is_between(frame) or name_package(frame) in _LIGHTNING):
        frame = frame.f_back
    if frame is None or name_package(frame) in LIBRARIES | _TRAINERS:
        return ""
    if is_installed(frame.f_code.co_filename):
        return ""
    line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    caller = frame.f_back
    while caller is not None:
        if name_package(caller) in _TRAINERS:
            return line
        caller = caller.f_back
    return ""


def comes_from_rows(name: str) -> bool:
    """Return whether a collective combines data of several ranks, unlike a broadcast."""
    return name not in FROM_ONE
