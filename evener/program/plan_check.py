"""Stop a script, started by `evener launch`, that doesn't read its plan.

Without the plan, all devices would get equal shares. A PyTorch script is checked after its first
optimizer steps, and a Keras script when it calls `fit`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ..errors import RequestError
from ..plan.use import PLAN_USED, describe_unused, explain_once, is_used

FIRST_STEPS = 5  # number of optimizer steps after which the plan must have been read

_steps = 0


def count_step(*_: Any) -> None:
    """Count a PyTorch optimizer's step; after FIRST_STEPS steps, check that the plan was read."""
    global _steps
    _steps += 1
    if _steps == FIRST_STEPS:
        check_use()


def begin_fit(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Check that the plan was read, then fit the Keras model; this wraps `keras.Model.fit`."""
    check_use()
    return wrapped(*arguments, **keywords)


def check_use() -> None:
    """Raise SystemExit if no process of this launch has read a plan.

    One of the processes first prints how a script can read the plan.
    """
    if is_used(os.environ[PLAN_USED]):
        return
    words = describe_unused(sys.modules, program="torch" in sys.modules)
    explain_once(os.environ[PLAN_USED], f"evener: {words}")
    raise SystemExit(RequestError.exit_code)
