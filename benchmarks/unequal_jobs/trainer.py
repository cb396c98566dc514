"""Train a Llama with transformers.Trainer on rows of tokens under torchrun."""

from __future__ import annotations

import os

# modules in this folder; imported first, because they limit the GPU
from place import CUDA, SIZES, wait_for_start  # type: ignore[import-not-found]  # isort: skip
from llama import Rows, make_model  # type: ignore[import-not-found]
from transformers import Trainer, TrainingArguments


def main() -> None:
    """Train COUNT steps."""
    wait_for_start()
    arguments = TrainingArguments(
        os.path.join(os.environ["FOLDER"], "trained"),
        per_device_train_batch_size=SIZES["ROWS"],
        max_steps=SIZES["COUNT"],
        use_cpu=not CUDA,
        report_to=[],
        save_strategy="no",
        logging_steps=50,
        disable_tqdm=True,
    )
    Trainer(model=make_model(), args=arguments, train_dataset=Rows()).train()


if __name__ == "__main__":
    main()
