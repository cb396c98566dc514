"""Measure the phases of a step with the clock of the workload's device."""

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
    """Measures the total duration of each phase of the steps, in seconds.

    `clock` is the clock of the workload's device. On a GPU, a phase begins only when the GPU has
    finished the kernels that were enqueued earlier, so that these aren't counted.
    """

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self._marks: list[tuple[Phase, Any, Any]] = []
        self._counts: dict[Phase, int] = {"input": 0, "update": 0}
        self._added: dict[Phase, float] = {"input": 0.0, "update": 0.0}
        self._begun: tuple[Phase, Any] | None = None

    def enter(self, phase: Phase) -> None:
        """Begin a phase of the current step."""
        self._counts[phase] += 1
        self._begun = None
        if len(self._marks) < MOST_MARKED:
            self._begun = phase, self._clock.mark()

    def leave(self) -> None:
        """End the current phase."""
        if self._begun is not None:
            self._marks.append((*self._begun, self._clock.mark()))
            self._begun = None

    def add(self, phase: Phase, seconds: float) -> None:
        """Add time that the host itself measured for a phase while the device was idle."""
        self._added[phase] += seconds

    def read(self) -> dict[Phase, float]:
        """Return the total seconds of each phase since the last reading.

        The device must have finished the phases. Only the first `MOST_MARKED` phases are timed; the
        total is extrapolated from them.
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
    """Keep the current GPU idle for at least `seconds`, while the host continues."""
    torch.cuda._sleep(int(min(seconds, LONGEST_PAUSE_SECONDS) * HIGHEST_CLOCK_HZ))
