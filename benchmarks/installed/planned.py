"""Train with `with_plan` as users do: `planned.py t5|bert|drawn [RATIO RATIO]`.

t5 generates during evaluation, loads its best model and may stop early. bert stops in the middle of
an epoch and resumes. The loss of drawn has random numbers, drawn as diffusers draws them. Without
ratios, drawn uses transformers' own Trainer, and the others have even ratios: `with_plan` doesn't
multiply the losses of their models by the number of processes, as transformers does. Prints how
many rows each process has computed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from hf_trainer import (
    BEST,
    SETTINGS,
    SMALL,
    STILL,
    Rows,
    draw_images,
    draw_pairs,
    draw_texts,
    make_t5,
)
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
    set_seed,
)

from evener.huggingface import with_plan

MIDDLE = 8  # the step after which bert is interrupted, in an epoch of 12


COLLATED = [0]  # number of rows that this process has collated for training


def collate(rows: Any) -> Any:
    """Make a batch of rows, and count them."""
    COLLATED[0] += len(rows) * torch.is_grad_enabled()
    return default_data_collator(rows)


class Drawn(Trainer):
    """Adds noise to images before the model classifies them."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any
    ) -> Any:
        pixels = inputs["pixel_values"]
        noise = torch.randn(pixels.shape, generator=None, device=pixels.device)
        noisy = {**inputs, "pixel_values": pixels + 0.1 * noise}
        return super().compute_loss(model, noisy, return_outputs, **given)


class Interrupted(TrainerCallback):
    """Saves a checkpoint after some steps and ends the training."""

    def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == MIDDLE:
            control.should_save = control.should_training_stop = True


def plan(kind: Any, ratios: list[float] | None) -> Any:
    """Return a trainer class with these ratios; `kind` itself without them."""
    return kind if ratios is None else with_plan(kind, ratios=ratios)


def train_t5(ratios: list[float] | None) -> None:
    """Train a text-to-text model with everything that transformers does at an epoch's end."""
    settings = Seq2SeqTrainingArguments(
        **{**SETTINGS, "num_train_epochs": 3},
        **BEST,
        predict_with_generate=True,
        gradient_accumulation_steps=2,
        metric_for_best_model="loss",
    )
    trainer = plan(Seq2SeqTrainer, ratios or [1, 1])(
        make_t5(),
        settings,
        train_dataset=Rows(draw_pairs(128)),
        eval_dataset=Rows(draw_pairs(24)),
        data_collator=collate,
        callbacks=[EarlyStoppingCallback(3)],
    )
    trainer.train()


def train_bert(ratios: list[float] | None) -> None:
    """Train a classifier up to the middle of an epoch, and resume it with a new model."""
    make_bert(ratios, [Interrupted()]).train()
    make_bert(ratios).train(resume_from_checkpoint=True)


def make_bert(ratios: list[float] | None, callbacks: Any = ()) -> Any:
    """Return a trainer of a small classifier."""
    set_seed(3)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=64, intermediate_size=64, **SMALL, **STILL)
    )
    return plan(Trainer, ratios or [1, 1])(
        model,
        TrainingArguments(**SETTINGS, save_strategy="no"),
        train_dataset=Rows(draw_texts(96)),
        data_collator=collate,
        callbacks=list(callbacks),
    )


def train_drawn(ratios: list[float] | None) -> None:
    """Train a vision transformer on noisy images."""
    model = ViTForImageClassification(
        ViTConfig(image_size=16, patch_size=8, intermediate_size=64, **SMALL, **STILL)
    )
    settings = TrainingArguments(**SETTINGS, save_strategy="no")
    rows = Rows(draw_images(96))
    plan(Drawn, ratios)(model, settings, train_dataset=rows, data_collator=collate).train()


if __name__ == "__main__":
    set_seed(3)
    chosen = [float(each) for each in sys.argv[2:]] or None
    globals()[f"train_{sys.argv[1]}"](chosen)
    print(f"observed: a process computed {COLLATED[0]} rows")
