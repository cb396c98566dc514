"""A transformers Trainer program as a user writes it, which doesn't mention evener."""

import argparse
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("out")
given = parser.parse_args()
set_seed(0)
sizes = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)).double()
drawn = torch.Generator().manual_seed(1)
rows = []
for _ in range(32):
    length = int(torch.randint(4, 13, (1,), generator=drawn))
    tokens, padding = torch.randint(3, 50, (length,), generator=drawn).tolist(), 12 - length
    rows.append(
        {
            "input_ids": tokens + [0] * padding,
            "attention_mask": [1] * length + [0] * padding,
            "labels": tokens + [-100] * padding,
        }
    )


class SumTrainer(Trainer):
    """A Trainer whose loss is a sum over rows."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(input_ids=inputs["input_ids"]).logits.square().sum()


arguments = TrainingArguments(
    f"{given.out}trainer",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    learning_rate=0.1,
    optim="sgd",
    report_to=[],
    use_cpu=True,
    save_strategy="no",
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=rows)
trainer.train()
weights = {name: value.tolist() for name, value in model.state_dict().items()}
last = SumTrainer(model=model, args=arguments, train_dataset=rows)
last.train()
kept = {"weights": weights, "last trainer": type(last).__name__}
torch.save(kept, f"{given.out}{arguments.process_index}.pt")
