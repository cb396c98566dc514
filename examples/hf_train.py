"""Train a small, untrained Llama with transformers' Trainer and a plan; two lines differ.

evener balance --framework torch --workload examples/hf_train.py:build --export plan.toml
evener launch plan.toml examples/hf_train.py --planned
python examples/hf_train.py                                # one device, without a plan
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from evener.huggingface import with_plan  # 1

WORDS = 1_000
LENGTH = 64
ROWS = 4096


class Texts(torch.utils.data.Dataset[dict[str, Any]]):
    """Generated texts in which each word depends on the previous one."""

    def __init__(self, rows: int) -> None:
        start = torch.randint(0, WORDS, (rows, 1), generator=torch.Generator().manual_seed(0))
        self.texts = (start + 7 * torch.arange(LENGTH)) % WORDS

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.texts[row], "labels": self.texts[row]}


def network() -> LlamaForCausalLM:
    """Return a Llama with four layers."""
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes))


def make_trainer(kind: Any, rows: int, epochs: float) -> Any:
    """Return a trainer with its model and data; `kind` is Trainer or a planned subclass of it."""
    torch.manual_seed(0)
    arguments = TrainingArguments(
        "hf_train_output",
        num_train_epochs=epochs,
        learning_rate=1e-3,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        ddp_find_unused_parameters=False,  # the default searches in each step
        use_cpu=not torch.cuda.is_available(),
    )
    return kind(model=network(), args=arguments, train_dataset=Texts(rows))


def build() -> Any:
    """Return what `--workload examples/hf_train.py:build` measures: this trainer's own steps."""
    return make_trainer(Trainer, ROWS, 1.0)


def main() -> None:
    """Train, with a plan if `--planned` is given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--planned", action="store_true", help="by the plan of evener launch")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--epochs", type=float, default=1.0)
    options = parser.parse_args()
    kind = with_plan(Trainer) if options.planned else Trainer  # 2
    trainer = make_trainer(kind, options.rows, options.epochs)
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(
            f"{result.metrics['train_samples_per_second']:,.0f} samples/s, loss "
            f"{result.training_loss:.4f}"
        )


if __name__ == "__main__":
    main()
