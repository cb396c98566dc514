"""A Llama too large for one card, trained by transformers' Trainer, with or without a plan.

BIG_MODEL names a case of benchmarks.big_models, and TINY=1 makes its sizes small. GIB has the
memory limit of each rank in GiB, separated by commas. Prints a JSON line for each rank: the
seconds of its steps, and the peak of PyTorch's allocator.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.big_models import CASES, TINY, BigModel
from evener.huggingface import with_plan

ROOT = Path(__file__).parents[2]
CUDA = torch.cuda.device_count() > 0  # doesn't initialize CUDA, so the process can be forked
ROWS = 512  # different rows of tokens; they repeat
DRAWN = 1 << 20  # random numbers or bytes that fill the weights, over and over
HEAD = 128  # width of an attention head
BLOCK, OUTER_BLOCK = 64, 256  # packed weights per scale, and scales per scale of scales


def choose() -> BigModel:
    """Return the case of this process."""
    case = CASES[os.environ["BIG_MODEL"]]
    return TINY._replace(adapters=case.adapters) if os.environ.get("TINY") else case


def load_model() -> Any:
    """Return the model on the host, with random weights; 4-bit layers are packed already."""
    case, way = choose(), os.environ["BIG_MODEL"]
    heads = max(1, case.width // HEAD)
    config = LlamaConfig(
        vocab_size=case.words,
        hidden_size=case.width,
        intermediate_size=case.mlp,
        num_hidden_layers=case.layers,
        num_attention_heads=heads,
        num_key_value_heads=min(heads, case.key_heads),
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers aren't random
    if case.adapters:
        model = model.to(torch.bfloat16)
    if way == "qlora":
        packed = torch.randint(0, 256, (DRAWN,), dtype=torch.uint8)
        for block in model.model.layers:
            _pack_layers(block, packed)
    fill = _random_numbers()
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.is_meta:
                made = nn.Parameter(_fill(weight, fill), requires_grad=not case.adapters)
                setattr(module, name, made)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    if way == "qlora":
        model.is_loaded_in_4bit = True
    return model


def _random_numbers() -> torch.Tensor:
    drawn = torch.Generator().manual_seed(0)
    return 0.02 * torch.randn(DRAWN, generator=drawn)


def _fill(weight: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    if weight.dim() == 1:  # the scales of a normalization
        return torch.ones(weight.shape, dtype=weight.dtype)
    return _repeat(numbers.to(weight.dtype), weight.numel()).view(weight.shape)


def _repeat(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Return this many numbers: the given ones, over and over.

    Drawing 4 GB of random bytes instead takes 20 s, in each process that builds the model.
    """
    whole = count // len(numbers) * len(numbers)
    filled = torch.empty(count, dtype=numbers.dtype)
    filled[:whole].view(-1, len(numbers)).copy_(numbers)
    filled[whole:] = numbers[: count - whole]
    return filled


def _pack_layers(block: Any, numbers: torch.Tensor) -> None:
    """Replace a block's linear layers by bitsandbytes' 4-bit layers that hold these bytes."""
    import bitsandbytes

    for name, layer in list(block.named_modules()):
        if not isinstance(layer, nn.Linear):
            continue
        packed = bitsandbytes.nn.Linear4bit(
            1, 1, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
        )
        packed.in_features, packed.out_features = layer.in_features, layer.out_features
        shape = (layer.out_features, layer.in_features)
        packed.weight = bitsandbytes.nn.Params4bit.from_prequantized(
            _repeat(numbers, layer.weight.numel() // 2).unsqueeze(1),
            _make_statistics(shape, numbers),
            requires_grad=False,
            device="cpu",
            module=packed,
        )
        block.set_submodule(name, packed)


def _make_statistics(shape: tuple[int, int], numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the statistics of packed weights of this shape; their scales are these bytes."""
    from bitsandbytes.nn import Params4bit
    from bitsandbytes.utils import pack_dict_to_tensor, unpack_tensor_to_dict

    small = 0.02 * torch.randn(BLOCK, BLOCK, dtype=torch.bfloat16)
    quantized = Params4bit(
        small, requires_grad=False, quant_type="nf4", compress_statistics=True
    ).to("cpu")
    found: dict[str, torch.Tensor] = quantized.quant_state.as_dict(packed=True)
    scales = -(-shape[0] * shape[1] // BLOCK)
    found["absmax"] = _repeat(numbers, scales)
    found["nested_absmax"] = found["nested_absmax"][:1].repeat(-(-scales // OUTER_BLOCK))
    name = "quant_state.bitsandbytes__nf4"
    found[name] = pack_dict_to_tensor(unpack_tensor_to_dict(found[name]) | {"shape": list(shape)})
    return found


class Rows(Dataset[dict[str, torch.Tensor]]):  # type: ignore[misc]
    """Random tokens."""

    def __init__(self, case: BigModel) -> None:
        drawn = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(0, case.words, (ROWS, case.tokens), generator=drawn)

    def __len__(self) -> int:
        return 100 * ROWS

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens[row % ROWS]
        return {"input_ids": tokens, "labels": tokens}


def build(model: Any, trainer: Any = Trainer) -> Any:
    """Return the Trainer, which a search measures."""
    case = choose()
    if case.adapters:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    arguments = TrainingArguments(
        os.environ.get("FOLDER", "trained"),
        per_device_train_batch_size=1,
        max_steps=int(os.environ.get("STEPS", "30")),
        optim="adamw_torch_fused",
        bf16=CUDA,
        use_cpu=not CUDA,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        report_to=[],
        save_strategy="no",
        logging_steps=10,
        disable_tqdm=True,
    )
    return trainer(model=model, args=arguments, train_dataset=Rows(case))


class Clock(TrainerCallback):  # type: ignore[misc]
    """Records when each step ended."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Wait for the GPU, and record the time."""
        if CUDA:
            torch.cuda.synchronize()
        self._ends.append(time.monotonic())

    def seconds(self) -> Iterator[float]:
        """Yield the seconds of each step but the first."""
        for before, after in zip(self._ends, self._ends[1:], strict=False):
            yield after - before


def limit_memory(rank: int) -> None:
    """Limit PyTorch's allocator to this rank's part of GIB."""
    limits = [float(each) for each in os.environ.get("GIB", "").split(",") if each]
    if CUDA and limits:
        total = torch.cuda.get_device_properties(rank).total_memory
        torch.cuda.set_per_process_memory_fraction(limits[rank] * 2**30 / total, rank)


def main() -> None:
    """Train by the plan, and print what this rank measured."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    limit_memory(rank)
    clock, trainer = Clock(), build(load_model(), with_plan(Trainer))
    trainer.add_callback(clock)
    trainer.train()
    peak = torch.cuda.max_memory_allocated() if CUDA else 0
    found = {"rank": rank, "seconds": [round(each, 4) for each in clock.seconds()], "peak": peak}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
