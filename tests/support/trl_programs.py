"""TRL's trainers and PEFT's adapters, trained as in tests/support/huggingface_programs.py."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from evener.huggingface import with_plan
from tests.support.fewer_audits import audit_first_step
from tests.support.huggingface_programs import (
    ADAM,
    GLOBAL_BATCH,
    SEED,
    WORDS,
    make_plan,
    plan_by_memory,
    tiny_llama,
)
from tests.support.torch_shard_programs import whole

ROWS = 21  # two full batches and one of five rows
KINDS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "sft": (SFTTrainer, SFTConfig, {}),
    "sft, LoRA": (SFTTrainer, SFTConfig, {"peft_config": LoraConfig(r=2, lora_dropout=0.0)}),
    "sft, DoRA, in shards": (
        SFTTrainer,
        SFTConfig,
        {"peft_config": LoraConfig(r=2, lora_dropout=0.0, use_dora=True)},
    ),
    "sft, packed": (SFTTrainer, SFTConfig, {}),
    "dpo": (DPOTrainer, DPOConfig, {}),
    "reward": (RewardTrainer, RewardConfig, {}),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words are numbers."""
    vocabulary = {str(word): word for word in range(WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="0", pad_token="1", eos_token="2"
    )


def make_rows(kind: str) -> Dataset:
    """Return tokenized rows of unequal length."""
    generator = torch.Generator().manual_seed(4)

    def text(least: int, most: int) -> list[int]:
        length = int(torch.randint(least, most, (1,), generator=generator))
        return torch.randint(3, WORDS, (length,), generator=generator).tolist()

    if kind.startswith("sft"):
        return Dataset.from_list([{"input_ids": text(4, 14)} for _ in range(ROWS)])
    names = ("prompt", "chosen", "rejected")
    return Dataset.from_list(
        [{name: " ".join(map(str, text(3, 9))) for name in names} for _ in range(ROWS)]
    )


def make_parts(kind: str, folder: str, **changes: Any) -> dict[str, Any]:
    """Return the arguments from which a program's trainer is made."""
    head = LlamaForSequenceClassification if kind == "reward" else LlamaForCausalLM
    model = tiny_llama(head, pad_token_id=1, num_labels=1).double()
    _, options, more = KINDS[kind]
    arguments = options(
        folder,
        use_cpu=True,
        bf16=False,
        num_train_epochs=1,
        lr_scheduler_type="constant",
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        seed=SEED,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        gradient_checkpointing="in shards" in kind,
        **{"packing": True, "max_length": 14} if kind == "sft, packed" else {},
        **{"disable_dropout": True} if kind in ("dpo", "reward") else {},
        **{**ADAM, **changes},
    )
    if kind == "dpo":
        more = {"ref_model": copy.deepcopy(model)}
    rows = make_rows(kind)
    return {
        "model": model,
        "args": arguments,
        "train_dataset": rows,
        "processing_class": make_tokenizer(),
        **more,
    }


def describe(trainer: Any) -> dict[str, Any]:
    """Return the weights and metrics at the end of a training."""
    sharded = hasattr(trainer.model, "exchange")
    state = whole(trainer.model) if sharded else dict(trainer.model.named_parameters())
    weights = {name: state[name].detach().clone() for name, _ in trainer.model.named_parameters()}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"weights": list(weights.values()), "losses": losses, "steps": trainer.state.global_step}


def reference(kind: str) -> dict[str, Any]:
    """Train with the original trainer in this process."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = KINDS[kind][0](
            **make_parts(kind, folder, per_device_train_batch_size=GLOBAL_BATCH)
        )
        trainer.train()
        return describe(trainer)


def train_all(folder: Path, rank: int, shares: list[int], micros: list[int]) -> None:
    """Train every program as one rank."""
    torch.set_num_threads(1)
    audit_first_step()
    plan, found = make_plan(shares, micros), {}
    for kind, (trainer_class, _, _) in KINDS.items():
        chosen = plan_by_memory(plan) if "in shards" in kind else plan
        trainer = with_plan(trainer_class, chosen)(**make_parts(kind, str(folder / kind)))
        trainer.train()
        found[kind] = describe(trainer)
    torch.save(found, folder / f"{rank}.pt")


def reference_all(folder: Path, rank: int) -> None:
    """Train every program in one process."""
    torch.set_num_threads(1)
    torch.save({kind: reference(kind) for kind in KINDS}, folder / f"{rank}.pt")
