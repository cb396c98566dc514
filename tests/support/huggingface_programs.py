"""Trainings by transformers' Trainer that must end with the same weights in one process and several
ranks.

Ranks train by `with_plan`. A reference is trained by the bare trainer in one process, with only the
adapter's order of rows. tests/support/rank_server.py runs the functions that take a folder and a
rank.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings, filterwarnings

import msgspec
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from evener.huggingface import trainer as adapter
from evener.huggingface import with_plan
from evener.huggingface.rows import PassSampler
from evener.plan.file import Plan, Share, make_layout
from evener.shares.curves import Cost
from evener.torch.audit.rows import fetch_rows
from evener.torch.rows.sampler import RowOrder, UnevenBatchSampler
from evener.torch.shards.sharded import Sharded
from tests.support import launched_plan
from tests.support.fewer_audits import audit_first_step
from tests.support.scripted_shares import rotate_shares
from tests.support.torch_shard_programs import whole

# made once for all ranks, as it takes half a second; transformers 4 has none
with suppress(ImportError):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")

GLOBAL_BATCH = 8
WORDS = 64
SEED = 3


class Program(msgspec.Struct, frozen=True):
    """One training. `arguments` are for TrainingArguments."""

    model: str = "llama"
    rows: int = 17  # two full batches and one of a single row
    arguments: dict[str, Any] = {}
    resume_after: int = 0  # steps: stop there, and go on from the checkpoint
    three_ranks: bool = False  # also in passes by three
    sharded: bool = False
    by_memory: bool = False  # a plan in shards
    without_rows: bool = False  # the first rank only holds state
    resumed_whole: bool = False  # goes on from a checkpoint of shards without shards
    by_cost: bool = False
    adapters: dict[str, Any] = {}  # options of PEFT's LoRA
    rebalance: bool = False


ADAM = {"optim": "adamw_torch", "learning_rate": 1e-2, "max_grad_norm": 0.5}
BEST = {  # evaluation, and at the end the weights of the best one, which is the first
    **ADAM,
    "greater_is_better": True,
    "max_steps": 4,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "per_device_eval_batch_size": 3,
}
REENTRANT = {"use_reentrant": True}
TWICE = {"num_train_epochs": 2}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
PROGRAMS = {
    "tokens": Program(arguments={**ADAM, **TWICE}, three_ranks=True),
    "tokens, accumulated, cosine": Program(
        rows=21, arguments={**ADAM, "lr_scheduler_type": "cosine", "gradient_accumulation_steps": 2}
    ),
    "tokens by length": Program(
        rows=21, arguments={**ADAM, **TWICE, "train_sampling_strategy": "group_by_length"}
    ),
    "tokens, in reentrant checkpoints": Program(
        rows=21,
        arguments={
            **ADAM,
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": REENTRANT,
        },
    ),
    "rows": Program("plain", arguments=ADAM),
    "rows, accumulated, drop last": Program(
        "plain",
        29,
        {**ADAM, **TWICE, "gradient_accumulation_steps": 2, "dataloader_drop_last": True},
    ),
    "rows, compiled": Program("plain", 21, {**ADAM, **COMPILED}),
    "rows by a compute_loss": Program("own loss", 21, ADAM),
    "rows by a compute_loss that has tensors": Program("own tensors", 21, ADAM),
    "rows by a compute_loss that doesn't say so": Program(
        "unmarked loss", 21, {**ADAM, "gradient_accumulation_steps": 2}
    ),
    "tokens without a mean over ranks": Program(
        rows=21, arguments={**ADAM, "average_tokens_across_devices": False}
    ),
    "bf16": Program("float32", 21, {**ADAM, "optim": "sgd", "bf16": True}),
    "resumed": Program(rows=29, arguments={**ADAM, **TWICE}, resume_after=6),
    "tokens by cost": Program(
        rows=21, arguments={**ADAM, "gradient_accumulation_steps": 2}, by_cost=True
    ),
    "rows by cost": Program("own loss", 17, ADAM, by_cost=True),
    "tokens, rebalanced": Program(
        rows=37,
        arguments={**ADAM, "gradient_accumulation_steps": 2, "num_train_epochs": 3},
        rebalance=True,
    ),
    "rows, rebalanced": Program("plain", 29, {**ADAM, **TWICE}, rebalance=True),
    "tokens, in shards": Program(
        rows=21, arguments={**ADAM, "gradient_accumulation_steps": 2}, by_memory=True
    ),
    "resumed in other shards": Program(
        rows=29, arguments={**ADAM, **TWICE}, resume_after=6, three_ranks=True, by_memory=True
    ),
    "in shards, resumed whole": Program(
        rows=29,
        arguments={**ADAM, **TWICE},
        resume_after=6,
        by_memory=True,
        resumed_whole=True,
    ),
    "the best, in shards": Program(arguments=BEST, by_memory=True),
    "a rank without rows, in shards": Program(
        rows=37,
        arguments={**ADAM, "gradient_accumulation_steps": 2},
        by_memory=True,
        without_rows=True,
    ),
    "bf16, in shards": Program(
        "float32", 21, {**ADAM, "optim": "sgd", "bf16": True}, by_memory=True
    ),
    "LoRA, in shards": Program(
        rows=21,
        arguments={**ADAM, "gradient_accumulation_steps": 2, "gradient_checkpointing": True},
        by_memory=True,
        adapters={"r": 1},
    ),
    "LoRA, resumed in other shards": Program(
        rows=29,
        arguments={**ADAM, **TWICE},
        resume_after=6,
        three_ranks=True,
        by_memory=True,
        adapters={"r": 1, "use_dora": True},
    ),
    "LoRA and a whole layer, the best, in shards": Program(
        arguments={
            **BEST,
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": REENTRANT,
        },
        by_memory=True,
        adapters={"r": 2, "modules_to_save": ["lm_head"]},
    ),
    "tokens, FSDP2": Program(rows=21, arguments=ADAM, sharded=True),
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
    """Five features and a target for each row."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
        self.y = torch.randn(rows, 1, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"x": self.x[row], "y": self.y[row]}


class Plain(torch.nn.Module):
    """A model without `num_items_in_batch`: its loss is a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)
        ).double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        predicted = self.layers(x)
        return {"loss": torch.nn.functional.mse_loss(predicted, y), "predicted": predicted}


class OwnLoss(Trainer):
    """A mean over rows, for a model that accepts `num_items_in_batch`."""

    loss_is_scaled_for_ga: bool | None = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        tokens = inputs["attention_mask"]
        loss = ((outputs.logits.square().mean(2) * tokens).sum(1) / tokens.sum(1)).mean()
        return (loss, outputs) if return_outputs else loss


class UnmarkedLoss(OwnLoss):
    """A mean over rows whose class doesn't declare support for `num_items_in_batch`."""

    loss_is_scaled_for_ga = None


class OwnTensors(OwnLoss):
    """A trainer whose loss has a variance that is a plain tensor, trained by its optimizer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log_var = torch.zeros(1, dtype=torch.float64, requires_grad=True)

    def create_optimizer(self, model: Any = None) -> Any:
        made: Any = vars(self).get("optimizer")
        if made is None:
            self.optimizer = torch.optim.AdamW([*self.model.parameters(), self.log_var], 1e-2)
        return self.optimizer

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True)
        loss = (torch.exp(-self.log_var) * loss + self.log_var).sum()
        return (loss, outputs) if return_outputs else loss


class Ordered(UnevenBatchSampler):
    """The rows of whole global batches."""

    def __init__(self, length: int, **options: Any) -> None:
        super().__init__(length, (GLOBAL_BATCH,), 0, seed=SEED, **options)


class OrderedLoader(DataLoader[Any]):
    """Passes the epoch on, as a prepared loader does."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)


def make_plan(batches: Sequence[int], micros: Sequence[int] | None = None) -> Plan:
    """Return a plan for CPU slices, or for GPUs if PyTorch sees some."""
    name = "sim-{}" if torch.cuda.is_available() else f"cpu-{{}}-of-{len(batches)}"
    devices = tuple(Share(name.format(i), i, "a device", 0, 0.0) for i in range(len(batches)))
    kind: Any = "split" if len(batches) > 1 else "solo"
    layout = make_layout(kind, devices, tuple(batches), micros=tuple(micros) if micros else None)
    return launched_plan.make_plan(layout, workload="texts")


def plan_by_cost(plan: Plan) -> Plan:
    """Return the plan with shares by cost.

    Each device is as fast as its rows say, and a pass costs as much as a few tokens.
    """
    shares = tuple(
        msgspec.structs.replace(
            share,
            micro=share.batch,
            cost=Cost(3 / share.batch, 1 / share.batch, 0.01 / share.batch),
            tokens=40,
        )
        for share in plan.layout.share
    )
    return msgspec.structs.replace(plan, layout=msgspec.structs.replace(plan.layout, share=shares))


def plan_by_memory(plan: Plan) -> Plan:
    """Return the plan in shards. Devices with fewer rows hold more of the model."""
    held = [1 / max(1, share.batch) for share in plan.layout.share]
    shares = tuple(
        msgspec.structs.replace(share, state=each / sum(held))
        for share, each in zip(plan.layout.share, held, strict=True)
    )
    return msgspec.structs.replace(
        plan, layout=msgspec.structs.replace(plan.layout, kind="shard", share=shares)
    )


def tiny_llama(kind: Any = LlamaForCausalLM, **options: Any) -> Any:
    """Return a Llama of one layer, with the same weights each time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return kind(LlamaConfig(vocab_size=WORDS, **sizes, **heads, **options))


def compute_in_float64(model: Any) -> Any:
    """Return the model without transformers' internal float32, in its RMS norm and its loss."""
    for module in list(model.modules()):
        for name, norm in module.named_children():
            if type(norm).__name__ == "LlamaRMSNorm":
                setattr(
                    module, name, torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon)
                )
    model.loss_function = token_loss
    return model.double()


def token_loss(
    logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **_: Any
) -> torch.Tensor:
    """Return the loss as transformers computes it for a causal model."""
    labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    flat = logits.reshape(-1, vocab_size), labels.reshape(-1)
    loss = torch.nn.functional.cross_entropy(*flat, ignore_index=-100, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def make_parts(program: Program) -> dict[str, Any]:
    """Return the model, data and collator of a program."""
    if program.model == "plain":
        torch.manual_seed(0)
        return {"model": Plain(), "train_dataset": Points(program.rows)}
    model = tiny_llama() if program.model == "float32" else compute_in_float64(tiny_llama())
    if program.adapters:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        options = {"lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj", "down_proj"]}
        model = get_peft_model(model, LoraConfig(**{**options, **program.adapters})).double()
    watched = {"eval_dataset": Texts(11)} if "eval_strategy" in program.arguments else {}
    return {
        "model": model,
        "train_dataset": Texts(program.rows),
        "data_collator": pad_texts,
        **watched,
    }


def make_arguments(program: Program, folder: str, **changes: Any) -> TrainingArguments:
    """Return arguments for one epoch in float64 that log the loss of each step."""
    on_cpu = not torch.cuda.is_available()
    options: dict[str, Any] = {
        "use_cpu": on_cpu,
        "num_train_epochs": 1,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "seed": SEED,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "label_names": ["y"] if program.model == "plain" else None,
        "include_num_input_tokens_seen": "non_padding" if program.model != "plain" else "no",
    }
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and on_cpu:
        options["ddp_backend"] = "gloo"
    if program.sharded:
        options |= {
            "fsdp": True,
            "fsdp_config": {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
        }
    made = TrainingArguments(
        folder, **_of_this_version({**options, **program.arguments, **changes})
    )
    # accelerate shards on GPUs only: it takes these CPUs for some
    if program.sharded and on_cpu and made.device:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return made


def _of_this_version(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments under transformers 4's names if that is installed."""
    if hasattr(TrainingArguments, "train_sampling_strategy"):
        return options
    given = dict(options)
    strategy, fsdp = given.pop("train_sampling_strategy", ""), given.pop("fsdp", None)
    counts = given.pop("include_num_input_tokens_seen") != "no"
    given |= {
        "group_by_length": strategy == "group_by_length",
        "include_num_input_tokens_seen": counts,
    }
    return given | ({"fsdp": "full_shard"} if fsdp else {})


def describe(trainer: Any, output: Any) -> dict[str, Any]:
    """Return the state at the end of a training."""
    sharded = isinstance(getattr(trainer.model, "exchange", None), Sharded)
    named = whole(trainer.model) if sharded else trainer.model.state_dict()
    weights = [named[name].detach().clone() for name, _ in trainer.model.named_parameters()]
    if isinstance(trainer, OwnTensors):
        weights.append(trainer.log_var.detach().clone())
    return {
        "weights": [
            (each.full_tensor() if hasattr(each, "full_tensor") else each).cpu() for each in weights
        ],
        "losses": [
            round(entry["loss"], 6) for entry in trainer.state.log_history if "loss" in entry
        ],
        "mean loss": output.training_loss,
        "steps": trainer.state.global_step,
        "tokens": trainer.state.num_input_tokens_seen,
        "samples": output.metrics["train_samples_per_second"] * output.metrics["train_runtime"],
        "total": trainer.get_total_train_batch_size(trainer.args),
        "predicted": predict(trainer),
        "evaluated": [
            entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry
        ],
        "gathered in": gathered_types(trainer.model),
        "saved": save(trainer) if trainer.state.best_model_checkpoint else {},
    }


def gathered_types(model: Any) -> set[torch.dtype]:
    """Return the types in which a sharded model's parameters are gathered."""
    sharded = getattr(model, "exchange", None)
    units = [sharded.root, *sharded.units] if isinstance(sharded, Sharded) else []
    return {slot.whole.dtype for unit in units for slot in unit.slots}


def save(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the weights in the folder that the trainer saves, as in a plain model."""
    folder = Path(trainer.args.output_dir, "saved")
    trainer.save_model(str(folder))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    if hasattr(trainer.model, "peft_config"):
        from peft import PeftModel

        base = compute_in_float64(tiny_llama())
        saved = PeftModel.from_pretrained(base, folder).double()
        return {name: each.detach() for name, each in saved.named_parameters()}
    saved = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return {name: each.detach().cpu() for name, each in saved.named_parameters()}


def predict(trainer: Any) -> Any:
    """Return predictions for rows that don't divide evenly into batches or ranks."""
    if not isinstance(trainer.train_dataset, Points) or trainer.args.dataloader_drop_last:
        return None
    return torch.tensor(trainer.predict(Points(21)).predictions)


def choose_class(program: Program) -> Any:
    """Return the trainer class of a program."""
    own = {"own loss": OwnLoss, "unmarked loss": UnmarkedLoss, "own tensors": OwnTensors}
    return own.get(program.model, Trainer)


def train(program: Program, plan: Plan, folder: Path, resumed_by: Plan) -> dict[str, Any]:
    """Train by the adapter.

    If it stops on the way, the rest is trained by `resumed_by`, unless a checkpoint is there.
    """
    if program.without_rows:
        plan = make_plan([0] * (len(plan.batches) - 1) + [GLOBAL_BATCH])
    if program.by_memory:
        plan = plan_by_memory(plan)
        resumed_by = resumed_by if program.resumed_whole else plan_by_memory(resumed_by)
    chosen, path = plan_by_cost(plan) if program.by_cost else plan, str(folder)
    kind = with_plan(choose_class(program), chosen, rebalance=program.rebalance)
    checkpoint = folder / f"checkpoint-{program.resume_after}"
    if not program.resume_after:
        trainer = kind(args=make_arguments(program, path), **make_parts(program))
        if program.rebalance:
            rotate_shares(trainer._planned.rebalancing)
        with patch.object(adapter, "fetch_rows", wraps=fetch_rows) as fetch, catch_warnings():
            filterwarnings("error", "A loss wasn't checked")
            output = trainer.train()
        return {
            **describe(trainer, output),
            "changes": len(trainer._planned.reporter.changes),
            "most rows checked": max((call.args[3] for call in fetch.call_args_list), default=0),
        }
    if not checkpoint.exists():
        saves = {
            "save_strategy": "steps",
            "save_steps": program.resume_after,
            "max_steps": program.resume_after,
        }
        kind(args=make_arguments(program, path, **saves), **make_parts(program)).train()
    again = with_plan(Trainer, resumed_by)(
        args=make_arguments(program, path), **make_parts(program)
    )
    return describe(again, again.train(resume_from_checkpoint=str(checkpoint)))


def reference(program: Program) -> dict[str, Any]:
    """Train with the bare trainer in this process, uncompiled."""

    class Reference(choose_class(program)):  # type: ignore[misc]
        def get_train_dataloader(self) -> DataLoader[Any]:
            own: Any = self._get_train_sampler(self.train_dataset)
            if type(own).__name__ != "LengthGroupedSampler":
                return super().get_train_dataloader()
            # the bare trainer draws its groups from numbers that nobody else has
            own.batch_size = GLOBAL_BATCH
            order = RowOrder(own, program.rows, SEED)
            sampler = Ordered(program.rows, drop_last=self.args.dataloader_drop_last, order=order)
            return OrderedLoader(
                self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator
            )

    uncompiled = {name: each for name, each in program.arguments.items() if name not in COMPILED}
    whole = msgspec.structs.replace(program, sharded=False, arguments=uncompiled)
    with tempfile.TemporaryDirectory() as folder:
        arguments = make_arguments(whole, folder, per_device_train_batch_size=GLOBAL_BATCH)
        trainer = Reference(args=arguments, **make_parts(program))
        return describe(trainer, trainer.train())


def train_all(
    folder: Path,
    rank: int,
    shares: list[int],
    micros: list[int],
    names: Sequence[str] = tuple(PROGRAMS),
) -> None:
    """Train the programs of these names as one rank.

    Three ranks continue from the checkpoints of two.
    """
    torch.set_num_threads(1)
    audit_first_step()
    plan, other = make_plan(shares, micros), make_plan(shares[::-1])
    found: dict[str, Any] = {
        name: train(program, plan, folder.parent / "checkpoints" / name, other)
        for name, program in PROGRAMS.items()
        if name in names and (len(shares) == 2 or program.three_ranks)
    }
    found["threads"] = {
        str(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")
    }
    torch.save(found, folder / f"{rank}.pt")


def reference_all(folder: Path, rank: int, names: Sequence[str] = tuple(PROGRAMS)) -> None:
    """Train these programs in one process."""
    torch.set_num_threads(1)
    torch.save({name: reference(PROGRAMS[name]) for name in names}, folder / f"{rank}.pt")


def assign_passes(folder: Path, rank: int) -> None:
    """Save (rows, for each of two ranks its batches of passes and the rows of each), for 9 to 33
    rows.
    """
    found = []
    for rows in range(9, 34):
        assigned = []
        for place, passes in enumerate((3, 1)):
            sampler = PassSampler(UnevenBatchSampler(rows, (6, 2), place), passes)
            batches = list(sampler)
            assert len(batches) == len(sampler)
            assigned.append(
                [(batch, sampler.pass_sizes(step)) for step, batch in enumerate(batches)]
            )
        found.append((rows, assigned))
    torch.save(found, folder / f"{rank}.pt")
