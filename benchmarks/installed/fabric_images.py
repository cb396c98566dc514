"""Train with Lightning Fabric, like its image classifier example."""

from __future__ import annotations

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Train a small convolutional network on images of the size of MNIST's."""
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    lightning.seed_everything(3)
    drawn = torch.Generator().manual_seed(1)
    rows = TensorDataset(
        torch.randn(96, 1, 12, 12, generator=drawn), torch.randint(0, 10, (96,), generator=drawn)
    )
    loader = fabric.setup_dataloaders(DataLoader(rows, batch_size=4, shuffle=True))
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(200, 10)
    )
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
    model, optimizer = fabric.setup(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(2):
        model.train()
        for number, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
            if number % 5 == 0:
                fabric.print(f"loss {loss.item():.4f}")
        schedule.step()


if __name__ == "__main__":
    main()
