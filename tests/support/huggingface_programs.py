"""Trainings by transformers' and TRL's trainers that one process and several ranks must end with the same weights.

    RANK=0 WORLD_SIZE=2 ... python huggingface_programs.py result.pt SHARE[:MICRO] ...

The script trains every program by `with_plan`; `reference` trains it with the bare trainer in one process, with nothing
of the adapter but the order of rows.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from evener.huggingface import with_plan
from evener.plan import Fingerprint, Plan, SearchSummary, Share, Throughput, make_layout
from evener.torch_split.sampler import UnevenBatchSampler

GLOBAL_BATCH = 8
WORDS = 64
SEED = 3


class Program(msgspec.Struct, frozen=True):
    """One training; `arguments` are of TrainingArguments."""

    model: str = "llama"
    rows: int = 41  # five full batches and one of a single row
    arguments: dict[str, Any] = {}
    resume_after: int = 0  # steps: stop there, and go on from the checkpoint


ADAM = {"optim": "adamw_torch", "learning_rate": 1e-2, "max_grad_norm": 0.5}
PROGRAMS = {
    "tokens": Program(arguments=ADAM),
    "tokens, 45 rows, cosine": Program(rows=45, arguments={**ADAM, "lr_scheduler_type": "cosine"}),
    "tokens, accumulated": Program(rows=45, arguments={**ADAM, "gradient_accumulation_steps": 2}),
    "tokens by length": Program(rows=45, arguments={**ADAM, "train_sampling_strategy": "group_by_length"}),
    "rows": Program("plain", arguments=ADAM),
    "rows, accumulated, drop last": Program(
        "plain", 45, {**ADAM, "gradient_accumulation_steps": 2, "dataloader_drop_last": True}
    ),
    "rows by a compute_loss": Program("own loss", 45, ADAM),
    "resumed": Program(rows=45, arguments=ADAM, resume_after=8),
}


class Texts(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of 4 to 16 tokens."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(4, 17, (rows,), generator=generator).tolist()
        self.texts = [torch.randint(0, WORDS, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"input_ids": self.texts[row], "labels": self.texts[row].clone()}


def pad_texts(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows as one batch, padded to the longest."""
    padded = torch.nn.utils.rnn.pad_sequence
    ids = padded([row["input_ids"] for row in rows], batch_first=True)
    labels = padded([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


class Points(torch.utils.data.Dataset[dict[str, Any]]):
    """Five figures and a target for each row."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
        self.y = torch.randn(rows, 1, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"x": self.x[row], "y": self.y[row]}


class Plain(torch.nn.Module):
    """A model that takes no `num_items_in_batch`: its loss is a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layers(x), y)}


class OwnLoss(Trainer):
    """A mean over rows, of a model that takes `num_items_in_batch`."""

    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        tokens = inputs["attention_mask"]
        loss = ((outputs.logits.square().mean(2) * tokens).sum(1) / tokens.sum(1)).mean()
        return (loss, outputs) if return_outputs else loss


class Ordered(UnevenBatchSampler):
    """The rows of whole global batches."""

    def __init__(self, length: int, **options: Any) -> None:
        super().__init__(length, (GLOBAL_BATCH,), 0, seed=SEED, **options)


class OrderedLoader(DataLoader[Any]):
    """Hands the epoch on, as a prepared loader does."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)


def make_plan(batches: tuple[int, ...], micros: tuple[int, ...] | None = None) -> Plan:
    """A plan for CPU slices."""
    devices = tuple(Share(f"cpu-{i}-of-{len(batches)}", i, "a device", 0, 0.0) for i in range(len(batches)))
    kind: Any = "split" if len(batches) > 1 else "solo"
    return Plan(
        created="2026-11-22T12:00:00Z",
        workload="texts",
        framework="torch",
        precision="float32",
        xla=False,
        layout=make_layout(kind, devices, batches, micros=micros),
        throughput=Throughput(100.0, 99.0, 101.0),
        evidence=(),
        search=SearchSummary(1, 0, 1.0, 0, "test"),
        fingerprint=Fingerprint((), "", {}, ""),
    )


def compute_in_float64(model: Any) -> Any:
    """The model without the float32 that transformers has inside: in its RMS norm and its loss."""
    for module in list(model.modules()):
        for name, norm in module.named_children():
            if type(norm).__name__ == "LlamaRMSNorm":
                setattr(module, name, torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon))
    model.loss_function = token_loss
    return model.double()


def token_loss(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> torch.Tensor:
    """As transformers computes it for a causal model."""
    labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    flat = logits.reshape(-1, vocab_size), labels.reshape(-1)
    loss = torch.nn.functional.cross_entropy(*flat, ignore_index=-100, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def make_parts(program: Program) -> dict[str, Any]:
    """Model, data and collator of a program."""
    torch.manual_seed(0)
    if program.model == "plain":
        return {"model": Plain(), "train_dataset": Points(program.rows)}
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = compute_in_float64(LlamaForCausalLM(config))
    return {"model": model, "train_dataset": Texts(program.rows), "data_collator": pad_texts}


def make_arguments(program: Program, folder: str, **changes: Any) -> TrainingArguments:
    """Three epochs in float64 on the CPU, a logged loss every five steps."""
    options: dict[str, Any] = {
        "use_cpu": True,
        "num_train_epochs": 3,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 5,
        "seed": SEED,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "label_names": ["y"] if program.model == "plain" else None,
        "include_num_input_tokens_seen": "non_padding" if program.model != "plain" else "no",
    }
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        options["ddp_backend"] = "gloo"
    return TrainingArguments(folder, **{**options, **program.arguments, **changes})


def describe(trainer: Any, output: Any) -> dict[str, Any]:
    """What a training ended with."""
    return {
        "weights": [tensor.detach().clone() for tensor in trainer.model.state_dict().values()],
        "losses": [round(entry["loss"], 6) for entry in trainer.state.log_history if "loss" in entry],
        "steps": trainer.state.global_step,
        "tokens": trainer.state.num_input_tokens_seen,
        "samples": round(output.metrics["train_samples_per_second"] * output.metrics["train_runtime"], 1),
        "total": trainer.get_total_train_batch_size(trainer.args),
    }


def train(program: Program, plan: Plan, folder: str, resumed_by: Plan | None = None) -> dict[str, Any]:
    """By the adapter; if it stops on the way, the rest is trained by `resumed_by`."""
    kind = with_plan(OwnLoss if program.model == "own loss" else Trainer, plan)
    if not program.resume_after:
        trainer = kind(args=make_arguments(program, folder), **make_parts(program))
        return describe(trainer, trainer.train())
    saves = {"save_strategy": "steps", "save_steps": program.resume_after}
    trainer = kind(args=make_arguments(program, folder, **saves), **make_parts(program))
    trainer.train()
    again = with_plan(Trainer, resumed_by or plan)(args=make_arguments(program, folder), **make_parts(program))
    return describe(again, again.train(resume_from_checkpoint=f"{folder}/checkpoint-{program.resume_after}"))


def reference(program: Program) -> dict[str, Any]:
    """By the bare trainer in this process, in the order of rows that the adapter has."""
    base = OwnLoss if program.model == "own loss" else Trainer

    class Reference(base):  # type: ignore[misc, valid-type]
        def get_train_dataloader(self) -> DataLoader[Any]:
            own = self._get_train_sampler(self.train_dataset)
            order = None
            if type(own).__name__ == "LengthGroupedSampler":
                from evener.torch_split.row_order import RowOrder

                own.batch_size = GLOBAL_BATCH
                order = RowOrder(own, program.rows, SEED)
            sampler = Ordered(program.rows, drop_last=self.args.dataloader_drop_last, order=order)
            return OrderedLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)

    with tempfile.TemporaryDirectory() as folder:
        arguments = make_arguments(program, folder, per_device_train_batch_size=GLOBAL_BATCH)
        trainer = Reference(args=arguments, **make_parts(program))
        return describe(trainer, trainer.train())


def main() -> None:
    """Train every program as one rank."""
    torch.set_num_threads(1)
    result, *given = sys.argv[1:]
    pairs = [tuple(map(int, one.split(":"))) for one in given]
    plan = make_plan(tuple(pair[0] for pair in pairs), tuple(pair[-1] for pair in pairs))
    other = make_plan(tuple(pair[0] for pair in reversed(pairs)))
    folder = Path(result).parent
    found = {
        name: train(program, plan, str(folder / name.replace(",", "").replace(" ", "_")), other)
        for name, program in PROGRAMS.items()
    }
    torch.save(found, result)


if __name__ == "__main__":
    main()
