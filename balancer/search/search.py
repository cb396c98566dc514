"""The search: a problem in, probes out, observations back, and at every moment the best layout
measured so far.
"""

from __future__ import annotations

import msgspec

from ..types import Belief, End, Facts, Observation, Probe, Problem, Result
from .evaluation import Evaluation
from .layouts import BALANCE, LayoutOptions
from .observations import Observations
from .report import SearchReport
from .solo_stage import SMALL

# of an epoch, that a free global batch leaves: an optimizer learns nothing in fewer
LEAST_STEPS = 20


class Search:
    """Finds the layout that trains fastest; see `evener.balancer.search` for the theory.

    Time comes in by observations alone: what is spent is the sum of their `elapsed_seconds`. Solo
    probes of one turn run at the same time, so only the longest counts.
    """

    def __init__(self, problem: Problem, options: LayoutOptions = BALANCE) -> None:
        self.problem = problem
        self.options = options
        self._seen = Observations(problem)
        self._evaluation = Evaluation(problem, options, self._seen)

    @property
    def evaluation(self) -> Evaluation:
        """All that follows from the observations so far."""
        return self._evaluation

    def tell(self, seen: Observation) -> None:
        """Take an observation: in any order, asked for or not, more than once."""
        self._seen.add(seen)
        self._evaluation = Evaluation(self.problem, self.options, self._seen)

    def learn_data(self, facts: Facts) -> None:
        """Note the facts of the data and the model.

        By its rows a free global batch leaves 20 steps, unless a largest one is given; by their
        lengths they are assigned by what they cost. The number of the longest row is named if no
        device can hold it.
        """
        problem = self.problem
        free = problem.global_batch is None and problem.max_global_batch is None
        if facts.rows and free:
            most = _largest_batch_of(facts.rows, problem)
            problem = msgspec.structs.replace(problem, max_global_batch=most)
        if facts.lengths:
            problem = msgspec.structs.replace(
                problem, lengths=facts.lengths, longest_row=facts.longest_row
            )
        if facts.state is not None:
            problem = msgspec.structs.replace(problem, shards=True, state=facts.state)
        if problem != self.problem:
            self.problem = problem
            self._evaluation = Evaluation(problem, self.options, self._seen)

    def ask(self) -> tuple[Probe, ...]:
        """The probes to run now, at the same time; empty when the search is over. Asking changes
        nothing.
        """
        return self._evaluation.next_probes

    def ended(self) -> End | None:
        """Why nothing more is asked; None while something is."""
        return self._evaluation.ended()

    def why_stopped(self) -> str | None:
        """The same in words."""
        end = self.ended()
        return None if end is None else end.words

    def belief(self) -> Belief:
        """The search's view between two probes, to be drawn."""
        return self._evaluation.belief()

    def best(self) -> Result | None:
        """The layout to take, of everything that was measured and may still run; None before
        anything was.
        """
        return self._evaluation.best

    def report(self, own_batch: int | None = None) -> SearchReport | None:
        """All that a plan, a verdict and tables are made of; None before anything was measured.

        `own_batch` is that of the user's script today, whose samples/s are predicted.
        """
        return self._evaluation.report(own_batch)


def _largest_batch_of(rows: int, problem: Problem) -> int:
    """The largest batch, in whole quanta, with which an epoch of these rows has enough steps."""
    quantum = problem.multiple_of
    wanted = max(rows // LEAST_STEPS, problem.devices * quantum, SMALL)
    return max(quantum, min(rows, wanted) // quantum * quantum)
