"""Models, losses and cases of the training matrix, for tests/support/matrix_trainings.py.

A case has a name: "decoder | own | transformers | passes | tail | 2" has two batches in each
optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import msgspec
import torch
from torch.nn.functional import cross_entropy, one_hot

from tests.support.tiny_models import make_model
from tests.support.tiny_rows import Recipe, Rows, collate

IGNORED = -100
MODELS: dict[str, tuple[str, Recipe]] = {
    "decoder": ("LlamaForCausalLM", Recipe("text", "tokens", "widened")),
    "encoder": ("BertForSequenceClassification", Recipe("text", "class")),
    "encoder by token": ("BertForTokenClassification", Recipe("text", "token classes")),
    "masked encoder": ("BertForMaskedLM", Recipe("text", "masked tokens")),
    "encoder-decoder": ("T5ForConditionalGeneration", Recipe("text", "target", "widened")),
    "vision": ("ViTForImageClassification", Recipe("image", "class")),
    "speech": ("Wav2Vec2ForSequenceClassification", Recipe("sound", "class", "widened", even=True)),
    "speech, padded": ("Wav2Vec2ForSequenceClassification", Recipe("sound", "class", "widened")),
    "CLIP": ("CLIPModel", Recipe("text and image", "return_loss")),
    "experts": ("MixtralForCausalLM", Recipe("text", "tokens", "widened")),
    "experts' auxiliary loss": ("MixtralForCausalLM", Recipe("text", "tokens", "widened")),
}
SHIFTED = ("decoder", "experts", "experts' auxiliary loss")
BY_LABEL = (
    *SHIFTED,
    "encoder by token",
    "masked encoder",
    "encoder-decoder",
)  # rows have several labels
TRL = ("sft", "dpo", "reward")
TRAINERS = ("transformers", "Lightning", "accelerate", "PyTorch")
# takes flat logits, flat labels and the number of items
Loss = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]


class Case(msgspec.Struct, frozen=True):
    """One training."""

    model: str
    loss: str = "own"
    trainer: str = "transformers"
    passes: bool = True
    tail: bool = True
    window: int = 1  # batches per optimizer step

    @property
    def name(self) -> str:
        """The name by which a command can ask for it."""
        ends = (
            "passes" if self.passes else "at once",
            "tail" if self.tail else "even",
            str(self.window),
        )
        return " | ".join((self.model, self.loss, self.trainer, *ends))

    @property
    def rows(self) -> int:
        """The number of rows; with a tail, the last batch has 5 rows instead of 8."""
        if not self.tail:
            return 8 * 2 * self.window
        return 13 if self.window == 1 else 21

    @property
    def by_label(self) -> bool:
        """True if the loss is a mean over labels and rows have several labels."""
        return self.model in BY_LABEL and self.loss != "row mean"


def parse(name: str) -> Case:
    """Return the case with this name."""
    model, loss, trainer, passes, tail, window = name.split(" | ")
    return Case(model, loss, trainer, passes == "passes", tail == "tail", int(window))


LAYOUTS = (
    (True, True, 1),
    (True, True, 2),
    (False, True, 1),
    (False, False, 2),
)  # passes, tail, window


def list_cases(layouts: Sequence[tuple[bool, bool, int]] = LAYOUTS) -> Iterator[Case]:
    """Yield every case with these layouts."""
    for model, layout in product(MODELS, layouts):
        for loss in (
            ("own",)
            if model == "CLIP" or "," in model or "auxiliary" in model
            else ("own", *LOSSES, "label smoothing")
        ):
            yield Case(model, loss, "transformers", *layout)
    for model, trainer, layout in product(
        ("decoder", "encoder", "vision", "CLIP"), TRAINERS[1:], layouts
    ):
        for loss in ("own",) if model == "CLIP" else ("own", "focal", "class weights", "sum"):
            yield Case(model, loss, trainer, *layout)
    for model, layout in product(TRL, layouts):
        yield Case(model, "own", "TRL", *layout)


def build(case: Case) -> tuple[Any, Rows, Callable[[list[Any]], Any]]:
    """Return the model, its rows and their collate function."""
    name, recipe = MODELS[case.model]
    model = make_model(name, recipe.dtype)
    if "auxiliary" in case.model:
        model.config.output_router_logits = True
        model.config.router_aux_loss_coef = 0.1

    def with_decoder(rows: list[Any]) -> Any:
        batch = collate(rows)
        return {**batch, "decoder_input_ids": model._shift_right(batch["labels"])}

    return (
        model,
        Rows(model, recipe, case.rows),
        with_decoder if case.model == "encoder-decoder" else collate,
    )


# ---------------------------------------------------------------------- losses


def flatten(case: Case, outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits and labels of all positions, with shapes (N, C) and (N,)."""
    logits = outputs["logits"]
    if case.model in SHIFTED:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)


def count_labels(case: Case, batch: Any) -> torch.Tensor:
    """Return the number of labels that a mean divides by."""
    labels = batch["labels"]
    return (labels[:, 1:] if case.model in SHIFTED else labels).ne(IGNORED).sum()


def _mean(logits: torch.Tensor, labels: torch.Tensor, _: Any) -> torch.Tensor:
    return cross_entropy(logits, labels)


def _by_items(logits: torch.Tensor, labels: torch.Tensor, items: Any) -> torch.Tensor:
    total = cross_entropy(logits, labels, reduction="sum")
    return total / (items if items is not None else labels.ne(IGNORED).sum())


def _focal(logits: torch.Tensor, labels: torch.Tensor, _: Any) -> torch.Tensor:
    kept = labels != IGNORED
    chosen = (logits[kept].log_softmax(-1) * one_hot(labels[kept], logits.shape[-1])).sum(-1)
    return -((1 - chosen.exp()) ** 2 * chosen).mean()


def _weighted(logits: torch.Tensor, labels: torch.Tensor, _: Any) -> torch.Tensor:
    weights = torch.linspace(0.1, 3.0, logits.shape[-1], dtype=logits.dtype)
    return cross_entropy(logits, labels, weight=weights)


def _smooth(logits: torch.Tensor, labels: torch.Tensor, _: Any) -> torch.Tensor:
    return cross_entropy(logits, labels, label_smoothing=0.1)


def _sum(logits: torch.Tensor, labels: torch.Tensor, _: Any) -> torch.Tensor:
    return cross_entropy(logits, labels, reduction="sum")


def _negatives(logits: torch.Tensor, _: torch.Tensor, __: Any) -> torch.Tensor:
    near = torch.nn.functional.normalize(logits, dim=-1)
    return cross_entropy(5 * near @ near.T.roll(1, 0), torch.arange(len(near)))


LOSSES: dict[str, Loss] = {
    "compute_loss_func, a mean": _mean,
    "compute_loss_func by items": _by_items,
    "cross entropy that smooths": _smooth,
    "focal": _focal,
    "class weights": _weighted,
    "sum": _sum,
    "in-batch negatives": _negatives,
}


def compute_loss(case: Case, model: Any, batch: Any, items: Any = None) -> tuple[torch.Tensor, Any]:
    """Return the loss of a case and the model's outputs."""
    outputs = model(**batch)
    if case.loss == "own":
        return outputs["loss"], outputs
    return LOSSES[case.loss](*flatten(case, outputs, batch["labels"]), items), outputs
