"""Train with transformers.Trainer on blocks of tokens, like run_clm.py."""

import os

import torch

# a module in this folder
from model import ROWS, STEPS, make_model, make_rows  # type: ignore[import-not-found]
from transformers import Trainer, TrainingArguments

rows = [{"input_ids": row, "labels": row} for row in make_rows()]
arguments = TrainingArguments(
    os.environ.get("FOLDER", "trained"),
    per_device_train_batch_size=ROWS,
    max_steps=STEPS,
    use_cpu=not torch.cuda.is_available(),
    report_to=[],
    save_strategy="no",
    logging_steps=50,
    disable_tqdm=True,
)
trainer = Trainer(model=make_model(), args=arguments, train_dataset=rows)
trainer.train()
