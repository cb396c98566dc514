"""Trainings whose models ignore num_items_in_batch, without any use of evener.

transformers then multiplies their losses by the number of processes.
"""

import argparse
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("out")
given = parser.parse_args()
config = BertConfig(
    vocab_size=60,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=8,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
drawn = torch.Generator().manual_seed(1)
texts = [torch.randint(3, 60, (8,), generator=drawn) for _ in range(32)]
classified = [{"input_ids": text, "labels": int(text[0]) % 2} for text in texts]


def mask(text: torch.Tensor, count: int) -> dict[str, Any]:
    """Return a text whose first tokens are masked in the labels."""
    labels, inputs = torch.full((8,), -100), text.clone()
    labels[:count], inputs[:count] = text[:count], 2
    return {"input_ids": inputs, "labels": labels}


TRAININGS: dict[str, tuple[Any, list[Any]]] = {
    "classes": (BertForSequenceClassification, classified),
    "masked": (BertForMaskedLM, [mask(text, 3) for text in texts]),
    "masked unevenly": (
        BertForMaskedLM,
        [mask(text, 1 + number % 5) for number, text in enumerate(texts)],
    ),
}
kept: dict[str, Any] = {}
for name, (kind, rows) in TRAININGS.items():
    set_seed(0)
    model = kind(config).double()
    arguments = TrainingArguments(
        f"{given.out}trainer",
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        num_train_epochs=2,
        learning_rate=0.1,
        optim="sgd",
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:8])
    trainer.train()
    names = ("loss", "grad_norm", "eval_loss")
    history = trainer.state.log_history
    kept[name] = {
        "weights": {each: value.tolist() for each, value in model.state_dict().items()},
        "logged": [one[each] for one in history for each in names if each in one],
    }
torch.save(kept, f"{given.out}{arguments.process_index}.pt")
