"""Time the phases of a step, with events on a GPU or with the host's clock."""

from __future__ import annotations

from typing import Any, Literal

import torch

Phase = Literal["input", "update"]
MOST_MARKED = 512  # maximum number of phases timed between two readings; they represent all phases
HIGHEST_CLOCK_HZ = (
    2e9  # upper bound of a GPU's clock, so that a pause is never shorter than requested
)
LONGEST_PAUSE_SECONDS = 2.0


class PhaseClock:
    """Adds up how long steps wait for input, and how long the optimizer's updates take.

    `clock` records points in time; on a GPU, they are events in its stream. Only the first 512
    phases between two calls of `read` are timed. The time of later phases is extrapolated.
    """

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self._marks: list[tuple[Phase, Any, Any]] = []
        self._counts: dict[Phase, int] = {"input": 0, "update": 0}
        self._added: dict[Phase, float] = {"input": 0.0, "update": 0.0}
        self._begun: tuple[Phase, Any] | None = None

    def enter(self, phase: Phase) -> None:
        """Start timing a phase."""
        self._counts[phase] += 1
        self._begun = None
        if len(self._marks) < MOST_MARKED:
            self._begun = phase, self._clock.mark()

    def leave(self) -> None:
        """Stop timing the phase that was entered last."""
        if self._begun is not None:
            self._marks.append((*self._begun, self._clock.mark()))
            self._begun = None

    def add(self, phase: Phase, seconds: float) -> None:
        """Add `seconds`, which were measured elsewhere, to a phase."""
        self._added[phase] += seconds

    def read(self) -> dict[Phase, float]:
        """Return how many seconds each phase took since the previous call.

        The device must have finished the steps.
        """
        found = dict(self._added)
        for phase, count in self._counts.items():
            own = [
                self._clock.seconds(start, end) for name, start, end in self._marks if name == phase
            ]
            if own:
                found[phase] += sum(own) * count / len(own)
        self._clock.reuse([mark for _, start, end in self._marks for mark in (start, end)])
        self._marks = []
        self._counts = {"input": 0, "update": 0}
        self._added = {"input": 0.0, "update": 0.0}
        return found


def enqueue_pause(seconds: float) -> None:
    """Enqueue a pause of at least this many seconds on the current GPU.

    It begins after the work that is already enqueued. `seconds` is capped at 2. The host doesn't
    wait for the pause.
    """
    torch.cuda._sleep(int(min(seconds, LONGEST_PAUSE_SECONDS) * HIGHEST_CLOCK_HZ))
