"""Let a fastai Learner train alone in a single process under `evener run`.

If WORLD_SIZE names several ranks, a Learner gathers metrics from all of them, even without a
process group. A hook prevents that.
"""

from __future__ import annotations

from typing import Any

from .advice import advise_fastai
from .program import PROGRAM


def gather(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Gather a tensor from all ranks, or return it if this process trains alone.

    This wraps `fastai.torch_core.maybe_gather`.
    """
    if PROGRAM.is_single_rank:
        return arguments[0] if arguments else keywords["x"]
    return wrapped(*arguments, **keywords)


def fit(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Train a Learner; if it trains alone, suggest how to train on all devices.

    This wraps `Learner.fit`.
    """
    if PROGRAM.is_single_rank:
        PROGRAM.report_single_device(advise_fastai())
    return wrapped(*arguments, **keywords)
