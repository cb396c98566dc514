r"""A decoder that no memory-capped GPU can hold, as a workload and as a training script.

  evener balance --workload benchmarks/shard_program.py:build --framework torch \
      -d gpu:0@24GiB,gpu:1@8GiB --max-global-batch 64 --export plan.toml
  evener launch plan.toml benchmarks/shard_program.py

The script trains sharded by the plan. It keeps each GPU within the limit of the plan, and prints
its samples/s and the plan's.
"""

from __future__ import annotations

import json
import os
import re
import time
from typing import Any

import torch
from torch import nn

from evener.torch import Split

WORDS, LENGTH, HEADS = 32_000, 256, 16
# 1.6e9 parameters
WIDTH, LAYERS = (int(os.environ.get("WIDTH", 2048)), int(os.environ.get("LAYERS", 30)))
STEPS, WARM_UP = 12, 3


class Layer(nn.Module):  # type: ignore[misc]  # torch isn't followed
    """Attention and two linear layers, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.normal, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows after causal attention and the linear layers."""
        batch, length, _ = rows.shape
        parts = (
            self.mixed(self.normal(rows)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        )
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        rows = rows + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return rows + self.down(nn.functional.gelu(self.up(self.second(rows))))


class Decoder(nn.Module):  # type: ignore[misc]
    """A decoder that predicts the next word.

    Its weights repeat a million random numbers, because drawing all of them takes long.
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
            self.layers, self.normal = (
                nn.ModuleList(Layer() for _ in range(LAYERS)),
                nn.LayerNorm(WIDTH),
            )
        self.to_empty(device="cpu")
        drawn = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02
        for each in self.parameters():
            flat = each.data.view(-1)
            for start in range(0, len(flat), len(drawn)):
                flat[start : start + len(drawn)] = drawn[: len(flat) - start]

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return a score for each word at each position."""
        rows = self.words(words)
        for layer in self.layers:
            rows = layer(rows)
        return self.head(self.normal(rows))


def data() -> torch.utils.data.TensorDataset:
    """Return random words with the words that follow them."""
    words = torch.randint(0, WORDS, (4096, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(words[:, :-1].clone(), words[:, 1:].clone())


def loss(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over all positions."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), words.flatten())


def build() -> Any:
    """Return the workload."""
    model = Decoder()
    return model, make_optimizer(model), loss, data()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return a fused AdamW; the other implementations need a fourth of the state temporarily."""
    return torch.optim.AdamW(model.parameters(), 1e-4, fused=True)


def hold_to_limit(split: Split) -> float:
    """Cap the allocator at the plan's limit; return the limit in GiB, 0 without one."""
    share = split.ranks.share
    found = re.search(r"([\d.]+)GiB", share.limit)
    if found is None or split.device.type != "cuda":
        return 0.0
    total = torch.cuda.get_device_properties(split.device).total_memory
    torch.cuda.set_per_process_memory_fraction(float(found[1]) * 2**30 / total)
    return float(found[1])


def main() -> None:
    """Train for some steps and print their speed."""
    split = Split()
    cap, model = hold_to_limit(split), split.shard(Decoder())
    update = make_optimizer(model)
    started = 0.0
    for step, batch in enumerate(split.loader(data())):
        if step == WARM_UP:
            started = time.perf_counter()
        for part in split.parts(batch):
            part.backward(loss(model(part.batch[0]), part.batch[1]))
        update.step()
        update.zero_grad()
        if split.device.type == "cuda":
            torch.cuda.synchronize()
        if step == WARM_UP + STEPS - 1:
            break
    rate = STEPS * split.global_batch / (time.perf_counter() - started)
    allocated = torch.cuda.max_memory_allocated() if split.device.type == "cuda" else 0
    share, held = split.ranks.share, model.exchange.ledger.peak
    found = {
        "rank": split.rank,
        "rows": split.shares[split.rank],
        "cap GiB": cap,
        "allocated GiB": round(allocated / 2**30, 2),
        "to the plan's peak": round(allocated / max(1, share.peak_bytes), 4),
        "ledger GiB": round(held / 2**30, 2),
        "to the plan's ledger": round(held / max(1, share.held_bytes), 4),
        "samples/s": round(rate, 2),
        "plan": round(split.plan.throughput.samples_per_second, 2) if split.plan else 0.0,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
