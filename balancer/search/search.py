"""The search for the fastest layout.

`ask` returns the probes to run, and `tell` takes what they observed.
"""

from __future__ import annotations

import msgspec

from ..types import Belief, End, Facts, Observation, Probe, Problem, Result
from .evaluation import Evaluation
from .layouts import BALANCE, LayoutOptions
from .observations import Observations
from .report import SearchReport
from .solo_stage import SMALL

# minimum number of steps per epoch if the global batch is free: with fewer updates, an optimizer
# hardly learns anything
LEAST_STEPS = 20


class Search:
    """Finds the fastest way to train a workload on the given devices.

    The caller runs the probes that `ask` returns, and passes what they observed to `tell`, until
    `ask` returns no more probes. The answers depend only on the set of observations, not on their
    order. The search has no clock: elapsed seconds come from the observations.
    """

    def __init__(self, problem: Problem, options: LayoutOptions = BALANCE) -> None:
        self.problem = problem
        self.options = options
        self._seen = Observations(problem)
        self._evaluation = Evaluation(problem, options, self._seen)

    @property
    def evaluation(self) -> Evaluation:
        """The conclusions from all observations so far."""
        return self._evaluation

    def tell(self, observation: Observation) -> None:
        """Add an observation, which is the result of a probe."""
        self._seen.add(observation)
        self._evaluation = Evaluation(self.problem, self.options, self._seen)

    def learn_data(self, facts: Facts) -> None:
        """Add facts about the workload that only its first probes could find out.

        If the global batch is free, it is limited so that an epoch still has enough steps.
        """
        problem = self.problem
        free = problem.global_batch is None and problem.max_global_batch is None
        if facts.rows and free:
            most = _largest_batch_of(facts.rows, problem)
            problem = msgspec.structs.replace(problem, max_global_batch=most)
        if facts.lengths:
            # the longest row is only for the message that no device can hold it
            problem = msgspec.structs.replace(
                problem,
                lengths=facts.lengths,
                longest_row=facts.longest_row,
            )
        if facts.state is not None:
            problem = msgspec.structs.replace(problem, shards=True, state=facts.state)
        if facts.link is not None:
            problem = msgspec.structs.replace(
                problem,
                link=facts.link,
                gradient_bytes=facts.gradient_bytes,
                parameter_bytes=facts.parameter_bytes,
            )
        if problem != self.problem:
            self.problem = problem
            self._evaluation = Evaluation(problem, self.options, self._seen)

    def ask(self) -> tuple[Probe, ...]:
        """Return the probes to run now, all at the same time; empty if the search is over."""
        return self._evaluation.next_probes

    def ended(self) -> End | None:
        """Return why the search ended, or None if it goes on."""
        return self._evaluation.ended()

    def why_stopped(self) -> str | None:
        """Return a sentence that says why the search ended, or None if it goes on."""
        end = self.ended()
        return None if end is None else end.words

    def belief(self) -> Belief:
        """Return the predicted step times and what is measured next, for display."""
        return self._evaluation.belief()

    def best(self) -> Result | None:
        """Return the layout to recommend so far, with its throughput; None if nothing ran."""
        return self._evaluation.best

    def report(self, own_batch: int | None = None) -> SearchReport | None:
        """Return the data from which the result is written, or None if nothing ran.

        `own_batch` is the global batch of the user's script. Its speed is predicted for the result.
        """
        return self._evaluation.report(own_batch)


def _largest_batch_of(rows: int, problem: Problem) -> int:
    """Return the largest global batch to allow, so that an epoch has enough steps.

    `rows` is the number of rows in the data set. If there are few rows, a larger batch is allowed,
    although an epoch then has fewer steps.
    """
    quantum = problem.multiple_of
    # with few rows, an epoch may have fewer steps
    wanted = max(rows // LEAST_STEPS, problem.devices * quantum, SMALL)
    return max(quantum, min(rows, wanted) // quantum * quantum)
