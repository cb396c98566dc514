"""End a script that `evener launch` started but that never opens its plan."""

from __future__ import annotations

import os
import sys
from typing import Any

from ..errors import RequestError
from ..plan.use import PLAN_USED, describe_unused, explain_once, is_used

FIRST_STEPS = 5  # number of optimizer steps after which the plan must have been read

_steps = 0


def count_step(*_: Any) -> None:
    """Optimizer hook: after the fifth step, check that the script has opened its plan."""
    global _steps
    _steps += 1
    if _steps == FIRST_STEPS:
        check_use()


def begin_fit(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Hook of Keras' `Model.fit`: check that the script has opened its plan."""
    check_use()
    return wrapped(*arguments, **keywords)


def check_use() -> None:
    """Exit with an explanation if no process of this launch has opened a plan.

    Raises SystemExit with exit code 2. Only one of the processes prints the explanation.
    """
    if is_used(os.environ[PLAN_USED]):
        return
    words = describe_unused(sys.modules, program="torch" in sys.modules)
    explain_once(os.environ[PLAN_USED], f"evener: {words}")
    raise SystemExit(RequestError.exit_code)
