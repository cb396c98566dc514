"""Train with TRL's SFTTrainer on tokenized texts, as in its documentation."""

import os

import torch
from datasets import Dataset

# a module in this folder
from model import LENGTH, ROWS, STEPS, make_model, make_rows  # type: ignore[import-not-found]
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = Tokenizer(WordLevel({str(word): word for word in range(1024)}, unk_token="0"))
arguments = SFTConfig(
    os.environ.get("FOLDER", "trained"),
    per_device_train_batch_size=ROWS,
    max_steps=STEPS,
    max_length=LENGTH,
    use_cpu=not torch.cuda.is_available(),
    bf16=False,
    gradient_checkpointing=False,
    report_to=[],
    save_strategy="no",
    logging_steps=50,
    disable_tqdm=True,
)
trainer = SFTTrainer(
    model=make_model(),
    args=arguments,
    train_dataset=Dataset.from_dict({"input_ids": make_rows().tolist()}),
    processing_class=PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="0", pad_token="1", eos_token="2"
    ),
)
trainer.train()
