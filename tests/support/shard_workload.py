"""A model of many small blocks, as a workload, and as the script that trains it by a plan in shards."""

from __future__ import annotations

import sys

import torch

from evener.torch_split import Split

WIDTH, BLOCKS = 512, 45  # 94 million parameters, 1.5 GB with gradients and AdamW's state


class Block(torch.nn.Module):
    """Two layers beside their input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.down(torch.nn.functional.gelu(self.up(rows)))


class Big(torch.nn.Module):
    """Figures in, figures out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows)
        return rows


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(*torch.randn(2, 256, WIDTH, generator=generator))


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.nn.Module, torch.utils.data.Dataset[object]]:
    model = Big()
    return model, torch.optim.AdamW(model.parameters()), torch.nn.MSELoss(), data()


def main() -> None:
    torch.manual_seed(0)
    split = Split()
    model = split.shard(Big())
    update = torch.optim.AdamW(model.parameters())
    for step, batch in enumerate(split.loader(data())):
        for part in split.parts(batch):
            inputs, targets = part.batch
            part.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        update.step()
        update.zero_grad()
        if step == 2:
            break
    held = model.exchange.held
    print(f"rank {split.rank} held {held.most['shards']} of {split.global_batch}", file=sys.stderr)


if __name__ == "__main__":
    main()
