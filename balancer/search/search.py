"""Searches for the fastest layout: requests probes, gets their observations, reports the best."""

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
    """Finds the layout that trains fastest.

    The caller runs the probes that `ask` returns, and passes each observation to `tell`. The search
    has no clock: the time spent is the sum of the observations' `elapsed_seconds`. Solo probes of
    one turn run at the same time, so only the longest counts. The docstring of this package
    explains the theory.
    """

    def __init__(self, problem: Problem, options: LayoutOptions = BALANCE) -> None:
        self.problem = problem
        self.options = options
        self._seen = Observations(problem)
        self._evaluation = Evaluation(problem, options, self._seen)

    @property
    def evaluation(self) -> Evaluation:
        """All conclusions from the observations so far."""
        return self._evaluation

    def tell(self, seen: Observation) -> None:
        """Add an observation.

        Observations may come in any order, more than once, and from probes that weren't requested.
        """
        self._seen.add(seen)
        self._evaluation = Evaluation(self.problem, self.options, self._seen)

    def learn_data(self, facts: Facts) -> None:
        """Add facts about the data and the model from child processes.

        If the request has neither a global nor a largest batch, the number of rows limits the
        batch. An epoch must have at least 20 steps. If row lengths are known, rows are assigned by
        their cost.
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
        """Return the probes to run now, all at the same time.

        The result is empty when the search is over. Calling `ask` doesn't change the search.
        """
        return self._evaluation.next_probes

    def ended(self) -> End | None:
        """Return why the search is over; None if there are more probes to run."""
        return self._evaluation.ended()

    def why_stopped(self) -> str | None:
        """Return a message that says why the search is over; None if it isn't over."""
        end = self.ended()
        return None if end is None else end.words

    def belief(self) -> Belief:
        """Return the search's current curves and its next step, to be drawn between two probes."""
        return self._evaluation.belief()

    def best(self) -> Result | None:
        """Return the best layout that ran and may run again; None before any measurement."""
        return self._evaluation.best

    def report(self, own_batch: int | None = None) -> SearchReport | None:
        """Return all data for a plan, a verdict and tables.

        Return None before any measurement. `own_batch` is the batch that the user's script uses
        today, if known. The report then has the samples/s that are predicted for it.
        """
        return self._evaluation.report(own_batch)


def _largest_batch_of(rows: int, problem: Problem) -> int:
    """Return the largest batch that leaves an epoch `LEAST_STEPS` steps."""
    quantum = problem.multiple_of
    # with few rows, an epoch may have fewer steps
    wanted = max(rows // LEAST_STEPS, problem.devices * quantum, SMALL)
    return max(quantum, min(rows, wanted) // quantum * quantum)
