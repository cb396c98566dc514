"""Train with SentenceTransformerTrainer as documented: `sentences.py INPUTS cosine|mnrl`."""

from __future__ import annotations

import sys

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    models,
)
from sentence_transformers.losses import CosineSimilarityLoss, MultipleNegativesRankingLoss
from transformers import set_seed

if __name__ == "__main__":
    set_seed(3)
    inputs, loss = sys.argv[1:]
    words = models.Transformer(f"{inputs}/bert-base-cased", max_seq_length=32)
    model = SentenceTransformer(
        modules=[words, models.Pooling(words.get_word_embedding_dimension())], device="cpu"
    )
    rows = {
        "sentence1": [f"the {number % 7} cats like {number}" for number in range(96)],
        "sentence2": [f"{number} is liked by {number % 7} dogs" for number in range(96)],
    }
    if loss == "cosine":
        rows["score"] = [number % 3 / 2 for number in range(96)]  # type: ignore[misc]
    trainer = SentenceTransformerTrainer(
        model,
        SentenceTransformerTrainingArguments(
            "out",
            per_device_train_batch_size=4,
            num_train_epochs=2,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=5,
            optim="sgd",
            learning_rate=0.05,
        ),
        train_dataset=Dataset.from_dict(rows),
        loss={"cosine": CosineSimilarityLoss, "mnrl": MultipleNegativesRankingLoss}[loss](model),
    )
    trainer.train()
