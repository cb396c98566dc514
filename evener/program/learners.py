"""Hooks of fastai for a script that runs on one device without a process group."""

from __future__ import annotations

from typing import Any

from .advice import advise_fastai
from .program import PROGRAM


def gather(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Hook of `maybe_gather` that returns the tensor unchanged if only one rank trains."""
    if PROGRAM.is_single_rank:
        return arguments[0] if arguments else keywords["x"]
    return wrapped(*arguments, **keywords)


def fit(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Hook of `Learner.fit` that prints how to train on all devices if only one rank trains."""
    if PROGRAM.is_single_rank:
        PROGRAM.report_single_device(advise_fastai())
    return wrapped(*arguments, **keywords)
