"""A transformers.Trainer, as in run_clm.py once its texts are in blocks of tokens."""

import os

import torch

# beside this script
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
