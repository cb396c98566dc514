"""Trains adapters on 4-bit layers of bitsandbytes, by several ranks and in one process.

The model is a small Llama in nf4 with double quantization, run by bitsandbytes' CPU kernels, with
LoRA from PEFT.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import bitsandbytes
import msgspec
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer

from evener.huggingface import with_plan
from evener.torch import Split
from evener.torch.packed import is_packed
from tests.support.huggingface_programs import (
    ADAM,
    GLOBAL_BATCH,
    WORDS,
    Program,
    Texts,
    make_arguments,
    make_plan,
    pad_texts,
    plan_by_memory,
    tiny_llama,
)
from tests.support.torch_shard_programs import last_sentence, whole

STEPS = 3
SHARES = (6, 2)


class PackedCase(msgspec.Struct, frozen=True):
    """One training."""

    way: str = "shards"  # "shards" (weights cut over ranks) or "wrap"
    micro: int = 0  # rows of a pass; 0: the whole share
    reentrant: bool | None = None  # for gradient checkpointing; None: without it
    autocast: bool = False
    dtype: str = "float32"  # of the layers that aren't in 4 bits
    packs_later: bool = False  # the layers aren't quantized yet when the model is sharded
    storage: str = "uint8"  # the dtype of the tensors that hold quantized bytes


CASES = {
    "shards": PackedCase(),
    "shards, in passes, checkpointed": PackedCase(micro=2, reentrant=False),
    "shards, checkpointed, reentrant, autocast": PackedCase(reentrant=True, autocast=True),
    "shards, in bfloat16": PackedCase(dtype="bfloat16", reentrant=False),
    "shards, packed later": PackedCase(packs_later=True, storage="bfloat16"),
    "wrapped": PackedCase(way="wrap"),
    "wrapped, in passes": PackedCase(way="wrap", micro=2, storage="bfloat16"),
}


def make_model(case: PackedCase, quantize: Any = bitsandbytes.nn.Linear4bit) -> Any:
    """Return the model with LoRA, in which all linear layers but the head are 4-bit."""
    base = tiny_llama().to(getattr(torch, case.dtype))
    for module in list(base.model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, torch.nn.Linear):
                setattr(module, name, _quantize(case, layer, quantize))
    if case.reentrant is not None:
        base.gradient_checkpointing_enable({"use_reentrant": case.reentrant})
        base.enable_input_require_grads()
    torch.manual_seed(1)
    options = LoraConfig(r=1, lora_dropout=0.0, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(base, options)
    if not case.packs_later:
        model = model.to("cpu")  # bitsandbytes quantizes the layers when they are moved
    return model.train()


def _quantize(case: PackedCase, layer: Any, quantize: Any) -> Any:
    options = {
        "compute_dtype": getattr(torch, case.dtype),
        "quant_type": "nf4",
        "quant_storage": getattr(torch, case.storage),
    }
    if quantize is not bitsandbytes.nn.Linear4bit:
        options = {"has_fp16_weights": False}
    made = quantize(layer.in_features, layer.out_features, bias=False, **options)
    made.load_state_dict({"weight": layer.weight.data})
    made.weight.requires_grad_(False)
    made.support_avx512bf16_for_cpu = False
    return made


def batches() -> Iterator[list[int]]:
    """Yield the rows of each step."""
    for step in range(STEPS):
        yield list(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH))


def compute(case: PackedCase, model: Any, rows: Any) -> Any:
    """Return the mean loss over rows."""
    texts = torch.stack(list(rows))
    with (
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
        if case.autocast
        else nullcontext()
    ):
        logits = model(input_ids=texts).logits.float()
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, WORDS), texts[:, 1:].flatten()
    )


def texts() -> torch.Tensor:
    """Return random rows of eight words."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, WORDS, (STEPS * GLOBAL_BATCH, 8), generator=generator)


def reference(case: PackedCase) -> dict[str, Any]:
    """Train in one process, which computes each rank's rows in a batch of their own.

    In bfloat16, gradients depend on which rows are computed together, and on whether a loss is
    multiplied before or after the backward pass.
    """
    model = make_model(msgspec.structs.replace(case, packs_later=False))
    update = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 1.0)
    first = None
    for rows in batches():
        summed: dict[str, torch.Tensor] = {}
        for own in (rows[: SHARES[0]], rows[SHARES[0] :]):
            compute(case, model, texts()[own]).backward()
            for name, gradient in gradients(model).items():
                summed[name] = summed.get(name, 0.0) + gradient * (len(own) / GLOBAL_BATCH)
            update.zero_grad()
        for name, each in model.named_parameters():
            each.grad = summed.get(name)
        first = first or summed
        update.step()
        update.zero_grad()
    return {"first": first, "weights": trained(model)}


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of the first step; only LoRA's B has any, as A's are 0."""
    named = model.named_parameters()
    return {name: each.grad.clone() for name, each in named if each.grad is not None}


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad
    }


def train(case: PackedCase, folder: Path) -> dict[str, Any]:
    """Train as one rank; with shards, save PEFT's files at the end."""
    plan = make_plan(SHARES, [case.micro] * 2 if case.micro else None)
    split = Split(plan_by_memory(plan) if case.way == "shards" else plan)
    model = make_model(case)
    held = sum(each.numel() for each in model.parameters() if is_packed(each))
    model = split.shard(model) if case.way == "shards" else split.wrap(model)
    inner = getattr(model, "module", model)
    update = torch.optim.SGD([each for each in inner.parameters() if each.requires_grad], 1.0)
    first, data = None, torch.utils.data.TensorDataset(texts())
    for (rows,) in split.loader(data, shuffle=False):
        for part in split.parts((rows,)) if case.micro else ():
            part.backward(compute(case, model, part.batch[0]))
        if not case.micro:
            compute(case, model, rows).backward()
        first = first or gradients(inner)
        update.step()
        update.zero_grad()
    found: dict[str, Any] = {"first": first, "weights": trained(inner)}
    if case.way == "shards":
        split.save(folder, model, update)
        found["ledger"], found["packed"] = dict(model.exchange.ledger.now), held
        found["bytes"] = {
            name: each for name, each in whole(model).items() if each.dtype == torch.uint8
        }
        torch.distributed.barrier()
        saved = PeftModel.from_pretrained(tiny_llama(), folder, is_trainable=True)
        found["saved"] = trained(saved)
    return found


def train_by_trainer(folder: Path) -> dict[str, torch.Tensor]:
    """Train with transformers' Trainer, in shards on several ranks."""
    several = torch.distributed.is_initialized()
    kind = with_plan(Trainer, plan_by_memory(make_plan(SHARES))) if several else Trainer
    program = Program("float32", 24, ADAM)
    rows = {} if several else {"per_device_train_batch_size": GLOBAL_BATCH}
    trainer = kind(
        model=make_model(PackedCase(reentrant=False)),
        args=make_arguments(program, str(folder), gradient_checkpointing=True, **rows),
        train_dataset=Texts(24),
        data_collator=pad_texts,
    )
    trainer.train()
    return trained(trainer.model)


def train_all(folder: Path, rank: int) -> None:
    """Train every case as one rank, and collect the refusals."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        name: train(case, folder / "saved" / name) for name, case in CASES.items()
    }
    found["trainer"] = train_by_trainer(folder / "trainer")
    plan = plan_by_memory(make_plan(SHARES))
    eight = bitsandbytes.nn.Linear8bitLt
    found["8 bits"] = last_sentence(lambda: Split(plan).shard(make_model(PackedCase(), eight)))
    torch.save(found, folder / f"{rank}.pt")


def reference_all(folder: Path, rank: int) -> None:
    """Train every case in one process."""
    torch.set_num_threads(1)
    found = {name: reference(case) for name, case in CASES.items()}
    found["trainer"] = train_by_trainer(folder)
    torch.save(found, folder / f"{rank}.pt")
