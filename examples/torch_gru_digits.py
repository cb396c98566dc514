"""Compare four recurrent layers on one device and on several unequal ones: time and accuracy.

  python examples/torch_gru_digits.py            # 4 x GRU 512 and Dense 128, batch 128 to 1024
  python examples/torch_gru_digits.py --units 64 --ratios 3 1    # smaller; two devices at 3:1

The digits are scikit-learn's 1797, each a sequence of 8 rows of 8 dots. Two devices take a
different time than one but learn the same: the columns (2) would be worse if the split changed what
is learned. On a CPU, a device is one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from evener.torch import Split

COLUMNS = ("acc", "val_acc", "Time")


class Digits(nn.Module):
    """Recurrent layers, a dense layer, and logits."""

    def __init__(self, units: int, layers: int, dense: int) -> None:
        super().__init__()
        self.recurrent = nn.GRU(8, units, layers, batch_first=True)
        self.head = nn.Sequential(nn.Linear(units, dense), nn.ReLU(), nn.Linear(dense, 10))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(rows)[0][:, -1])


def data() -> tuple[torch.utils.data.TensorDataset, torch.utils.data.TensorDataset]:
    """Return digits for training and for testing, four to one."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        images.reshape(-1, 8, 8) / 16.0, labels, test_size=0.2, random_state=0, stratify=labels
    )
    train_x, test_x, train_y, test_y = (torch.as_tensor(part) for part in parts)
    dataset = torch.utils.data.TensorDataset
    return dataset(train_x.float(), train_y), dataset(test_x.float(), test_y)


def accuracy(split: Split, model: Any, loader: Any) -> float:
    """Return the fraction of rows, over all ranks, that are classified correctly."""
    right = rows = 0
    model.eval()
    with torch.no_grad():
        for images, labels in loader:
            found = model(images.to(split.device)).argmax(1) == labels.to(split.device)
            right += int(found[: split.rows].sum())
            rows += split.rows
    model.train()
    return split.total(right) / split.total(rows)


def train(
    options: argparse.Namespace, ratios: list[float], batch: int, seed: int
) -> dict[str, float]:
    """Run the training for one cell of the table."""
    split = Split(ratios=ratios, global_batch=batch)
    training, testing = data()
    loader = split.loader(training, seed=seed)
    torch.manual_seed(seed)
    model = split.wrap(Digits(options.units, options.layers, options.dense))
    optimizer = torch.optim.Adam(model.parameters())
    started = time.monotonic()
    for _ in range(options.epochs):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(
                model(images.to(split.device)), labels.to(split.device)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    seconds = time.monotonic() - started
    found = [
        accuracy(split, model, split.loader(part, shuffle=False, training=False))
        for part in (training, testing)
    ]
    return dict(zip(COLUMNS, [*found, seconds], strict=True))


def column(options: argparse.Namespace, ratios: list[float]) -> Iterator[dict[str, float]]:
    """Yield the results of all cells for the devices of this process group."""
    for batch in options.batches:
        for seed in range(options.seeds):
            yield {"batch": batch, **train(options, ratios, batch, seed)}


def several_devices(count: int) -> list[dict[str, float]]:
    """Return the cells of the column for several devices, from one process per device."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(count),
    ]
    command += [__file__, "--column", *sys.argv[1:]]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def cell(cells: list[dict[str, float]], batch: int, name: str) -> str:
    """Return the mean over seeds as text, with the range if there are several."""
    values = [each[name] for each in cells if each["batch"] == batch]
    mean = sum(values) / len(values)
    if name == "Time":
        return f"{mean:.1f}"
    return (
        f"{mean:.2f}" if len(values) == 1 else f"{mean:.2f} ({min(values):.2f}–{max(values):.2f})"
    )


def verdict(one: list[dict[str, float]], several: list[dict[str, float]], batch: int) -> str:
    """Return whether accuracies on several devices lie within the range of one device's seeds.

    The mean over the seeds is compared.
    """
    found = []
    for name in ("acc", "val_acc"):
        alone, together = (
            [cell[name] for cell in cells if cell["batch"] == batch] for cells in (one, several)
        )
        mean = sum(together) / len(together)
        inside = "inside" if min(alone) <= mean <= max(alone) else "OUTSIDE"
        found.append(
            f"{name} {mean:.3f} is {inside} one device's {min(alone):.3f} to {max(alone):.3f}"
        )
    return f"Batch {batch}, several devices: {'; '.join(found)}."


def main() -> None:
    """Print the table; with --column, run one rank of one column."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=[2.0, 1.0], help="of the several devices"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--units", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dense", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=1, help="trainings for each cell")
    parser.add_argument("--column", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.column:
        for found in column(options, options.ratios):
            if os.environ["RANK"] == "0":
                print(json.dumps(found), flush=True)
        return

    torch.set_num_threads(1)
    one, several = list(column(options, [1.0])), several_devices(len(options.ratios))
    columns = {1: one, len(options.ratios): several}
    titles = [f"{name} ({count})" for count in columns for name in COLUMNS]
    print("|".join(["", "Epochs", "Batch size", *titles, ""]))
    print("|".join(["", "---", *["---:"] * (1 + len(titles)), ""]))
    for batch in options.batches:
        figures = [cell(cells, batch, name) for cells in columns.values() for name in COLUMNS]
        print("|".join(["", str(options.epochs), str(batch), *figures, ""]))
    if options.seeds > 1:
        print(*(verdict(one, several, batch) for batch in options.batches), sep="\n")


if __name__ == "__main__":
    main()
