"""Train by a plan with any `transformers.Trainer`: uneven shares of each batch, and what is learned stays the same.

    trainer = with_plan(Trainer, "plan.toml")(model=model, args=args, train_dataset=data)

Start it with torchrun or accelerate launch, one process for each active device of the plan.
docs/training_huggingface.md says what is exact.
"""

from ..errors import RequestError

try:
    import transformers as _transformers  # noqa: F401 - a missing package is said in a sentence
except ImportError as error:
    raise RequestError(
        f"transformers can't be imported ({error}).", 'Install it: pip install "evener[huggingface]".'
    ) from error

from .trainer import with_plan

__all__ = ["with_plan"]
