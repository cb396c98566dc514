"""Probes of half a second: for tests that disturb a search of real children, and read none of its figures.

Where something strikes in the race, only exploration is quick: a probe that is struck must last until that is noticed,
and a search must not be over by then. `QUICK_EVENER` starts evener so; for searches in the test's own process there are
the fixtures `quick_probes` and `quick_exploration`.
"""

from __future__ import annotations

import sys

from evener.__main__ import main
from evener.balancer.search import budget
from evener.balancer.search.observations import EXPLORATION

QUICK = dict.fromkeys(budget.BASE_SECONDS, 0.5)
QUICK_EXPLORATION = {**budget.BASE_SECONDS, **dict.fromkeys(EXPLORATION, 0.5)}
QUICK_EVENER = (sys.executable, __file__)

if __name__ == "__main__":
    budget.BASE_SECONDS = QUICK_EXPLORATION
    main()
