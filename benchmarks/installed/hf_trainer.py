"""Train with transformers' trainers as users do: `hf_trainer.py bert|t5|vit|clip|stream`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    EarlyStoppingCallback,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
STILL: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SETTINGS: dict[str, Any] = {
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "num_train_epochs": 2,
    "use_cpu": True,
    "report_to": "none",
    "logging_steps": 5,
    "optim": "sgd",
    "learning_rate": 0.05,
    "seed": 3,
}
BEST: dict[str, Any] = {
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "load_best_model_at_end": True,
}


class Rows(Dataset[Any]):
    """A data set of rows in memory."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.rows[number]


class Stream(IterableDataset[Any]):
    """A data set that yields its rows one by one."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def draw_texts(count: int) -> list[dict[str, Any]]:
    """Return random texts of two classes."""
    drawn = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(4, 60, (8,), generator=drawn) // (1 + number % 2),
            "labels": number % 2,
        }
        for number in range(count)
    ]


def draw_pairs(count: int) -> list[dict[str, Any]]:
    """Return random texts with themselves as targets."""
    drawn = torch.Generator().manual_seed(1)
    texts = [torch.randint(4, 60, (8,), generator=drawn) for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in texts]


def draw_images(count: int, texts: bool = False) -> list[dict[str, Any]]:
    """Return random images of two classes, or with texts."""
    drawn = torch.Generator().manual_seed(1)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        row = {"pixel_values": torch.randn(3, 16, 16, generator=drawn) + number % 2}
        if texts:
            row["input_ids"] = torch.randint(4, 60, (8,), generator=drawn)
        else:
            row["labels"] = torch.tensor(number % 2)
        rows.append(row)
    return rows


def train_bert() -> None:
    """Train a classifier that ignores num_items_in_batch, with evaluation, and resume it."""
    model = BertForSequenceClassification(
        BertConfig(vocab_size=64, intermediate_size=64, **SMALL, **STILL)
    )
    settings = TrainingArguments(**SETTINGS, save_steps=8, eval_strategy="epoch")
    trainer = Trainer(
        model,
        settings,
        train_dataset=Rows(draw_texts(96)),
        eval_dataset=Rows(draw_texts(24)),
    )
    trainer.train()
    trainer.evaluate()


def make_t5() -> Any:
    """Return a tiny text-to-text model that can generate."""
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )
    model.generation_config = GenerationConfig(
        max_new_tokens=4, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0
    )
    return model


def train_t5() -> None:
    """Train a text-to-text model.

    With generation during evaluation, gradient accumulation and early stopping.
    """
    settings = Seq2SeqTrainingArguments(
        **{**SETTINGS, "num_train_epochs": 3},
        **BEST,
        predict_with_generate=True,
        gradient_accumulation_steps=2,
        metric_for_best_model="loss",
    )
    trainer = Seq2SeqTrainer(
        make_t5(),
        settings,
        train_dataset=Rows(draw_pairs(128)),
        eval_dataset=Rows(draw_pairs(24)),
        callbacks=[EarlyStoppingCallback(3)],
    )
    trainer.train()


def train_vit() -> None:
    """Train a vision transformer and load its best weights at the end."""
    model = ViTForImageClassification(
        ViTConfig(image_size=16, patch_size=8, intermediate_size=64, **SMALL, **STILL)
    )
    settings = TrainingArguments(**SETTINGS, **BEST)
    trainer = Trainer(
        model,
        settings,
        train_dataset=Rows(draw_images(96)),
        eval_dataset=Rows(draw_images(24)),
    )
    trainer.train()


def train_clip() -> None:
    """Train CLIP, whose loss compares the rows of a batch with each other."""
    text = {"vocab_size": 64, "intermediate_size": 64, "max_position_embeddings": 16, **SMALL}
    vision = {"image_size": 16, "patch_size": 8, "intermediate_size": 64, **SMALL}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        made = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return {**made, "return_loss": True}

    settings = TrainingArguments(**SETTINGS, save_strategy="no", remove_unused_columns=False)
    rows = Rows(draw_images(96, texts=True))
    Trainer(model, settings, train_dataset=rows, data_collator=collate).train()


def train_stream() -> None:
    """Train on a data set without a length."""
    model = BertForSequenceClassification(
        BertConfig(vocab_size=64, intermediate_size=64, **SMALL, **STILL)
    )
    settings = TrainingArguments(**SETTINGS, save_strategy="no", max_steps=12)
    Trainer(model, settings, train_dataset=Stream(draw_texts(96))).train()


if __name__ == "__main__":
    set_seed(3)
    globals()[f"train_{sys.argv[1]}"]()
