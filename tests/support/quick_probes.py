"""Probes of half a second, for tests that disturb a search and don't check what it measures.

The fixture `quick_probes` is for searches in the test's own process. `QUICK_EVENER` starts evener
with such probes, but with the final comparison as long as usual, so that a signal can interrupt it.
Tests that need a certain device in the comparison can't use them: noise may exclude it.
"""

from __future__ import annotations

import sys

from evener.__main__ import main
from evener.balancer.search import budget
from evener.balancer.search.observations import EXPLORATION

QUICK = dict.fromkeys(budget.BASE_SECONDS, 0.5)
QUICK_EVENER = (sys.executable, __file__)

if __name__ == "__main__":
    budget.BASE_SECONDS.update(dict.fromkeys(EXPLORATION, 0.5))
    main()
