"""Train a small decoder in a plain DistributedDataParallel loop under torchrun."""

from __future__ import annotations

import os
import time

# a module in this folder; imported first, because it limits the GPU
from place import CUDA, SIZES, slow_down, wait_for_start  # type: ignore[import-not-found]  # isort: skip
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LENGTH, WORDS = SIZES["LENGTH"], SIZES["WORDS"]
INPUT_SECONDS = float(os.environ.get("INPUT_SECONDS", "0"))  # of a row, in a worker
KEPT = 4096


class Rows(Dataset[torch.Tensor]):  # type: ignore[misc]  # torch isn't followed
    """Random tokens; reading a row may take some time."""

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, WORDS, (KEPT, LENGTH), generator=drawn)

    def __len__(self) -> int:
        return int(SIZES["COUNT"] * SIZES["ROWS"] * dist.get_world_size())

    def __getitem__(self, row: int) -> torch.Tensor:
        if INPUT_SECONDS:
            time.sleep(INPUT_SECONDS)
        return self.tokens[row % KEPT]


class Decoder(nn.Module):  # type: ignore[misc]  # torch isn't followed
    """A decoder without dropout."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        heads = max(1, width // 64)
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True)
            for _ in range(layers)
        )
        self.last = nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next words."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        hidden = self.words(tokens)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        made: torch.Tensor = self.last(hidden)
        return made


def main() -> None:
    """Train COUNT steps."""
    wait_for_start()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if CUDA else "gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Decoder(SIZES["WIDTH"], SIZES["LAYERS"]).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = Rows()
    loader = DataLoader(
        rows,
        batch_size=SIZES["ROWS"],
        sampler=DistributedSampler(rows),
        num_workers=2 if INPUT_SECONDS else 0,
        pin_memory=CUDA,
    )
    for tokens in loader:
        tokens = tokens.to(device, non_blocking=True)
        logits = model(tokens)[:, :-1]
        slow_down(len(tokens))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
