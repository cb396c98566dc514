"""A typical script for one GPU, run as `python one_gpu_program.py LOG CODE`.

Its training loop is in a function that gets the loader by another name, and its optimizer trains
two models.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(body: nn.Module, head: nn.Module, opt: torch.optim.Optimizer, loader: Any) -> None:
    for inputs, labels in loader:
        opt.zero_grad()
        nn.functional.cross_entropy(head(body(inputs)), labels).backward()
        opt.step()


def main(log: str, code: str) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    data = TensorDataset(torch.randn(24, 6), torch.randint(0, 3, (24,)))
    encoder = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
    net = nn.Linear(16, 3)
    opt = torch.optim.SGD([*encoder.parameters(), *net.parameters()], lr=0.1)
    train_rows = DataLoader(data, batch_size=8)
    # the training loop
    for _ in range(2):
        train(encoder, net, opt, train_rows)
    weights = [*encoder.parameters(), *net.parameters()]
    with Path(log).open("a") as file:
        file.write(f"{sum(float(each.detach().sum()) for each in weights)}\n")
    print("has trained")
    sys.exit(int(code))


if __name__ == "__main__":
    main(*sys.argv[1:])
