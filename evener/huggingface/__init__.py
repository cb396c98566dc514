"""Train with a plan in transformers' Trainer, TRL's trainers and other subclasses.

    trainer = with_plan(Trainer, "plan.toml")(model=model, args=args, train_dataset=data)

Start the script with torchrun or accelerate launch, one process per device of the plan.
docs/training_huggingface.md lists the supported losses and features.

Raises RequestError on import if transformers is missing or older than 4.56.
"""

from ..errors import RequestError

try:
    import transformers as _transformers
except ImportError as error:
    raise RequestError(
        f"transformers can't be imported ({error}).",
        'Install it: pip install "evener[huggingface]".',
    ) from error

if tuple(map(int, _transformers.__version__.split(".")[:2])) < (4, 56):
    raise RequestError(
        f"with_plan works with transformers from 4.56, and here is {_transformers.__version__}.",
        'Update it: pip install "evener[huggingface]".',
    )
from .report import report
from .trainer import with_plan

__all__ = ["report", "with_plan"]
