"""Trainings side by side on one GPU, by hand and as `evener compare` chooses them.

    python -m benchmarks.gpu_packs [decoder] [mnist] [maxer] [--budget 90s] [--json FILE]

By hand: twelve processes of one model have begun and trained a little; then 1, 2, 4, 6, 8 and 12 of
them train for some seconds at a time, in turns, and the samples of all are added up. The choice
should be within 2 % of the best number, and no more than 1.5 times the fewest trainings that are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

SIZES = (1, 2, 4, 6, 8, 12)
SECONDS, TURNS = 2.5, 3


class Kind(NamedTuple):
    """A model's batch and the build() that evener's probes and the trainings by hand take."""

    batch: int
    build: str


class Decoder(nn.Module):  # type: ignore[misc]  # torch isn't followed
    """A decoder-only model of width 64 with two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(256, 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(2)
        )
        self.last = nn.Linear(64, 256)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], words.device)
        hidden = self.words(words)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        made: torch.Tensor = self.last(hidden)
        return made


def next_word(made: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of the words that follow."""
    return nn.functional.cross_entropy(made[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def build_decoder() -> Any:
    """Rows of 128 words."""
    model = Decoder()
    words = torch.randint(0, 256, (4096, 128), generator=torch.Generator().manual_seed(0))
    return (
        model,
        torch.optim.AdamW(model.parameters(), 1e-3),
        next_word,
        TensorDataset(words, words),
    )


def build_mnist() -> Any:
    """A small convolutional network."""
    layers = (
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.Flatten(),
    )
    return pictures(
        nn.Sequential(*layers, nn.LazyLinear(64), nn.ReLU(), nn.Linear(64, 10)), (1, 28, 28)
    )


def build_maxer() -> Any:
    """A wider one, which fills more of the GPU."""
    layers = (
        nn.Conv2d(3, 128, 3),
        nn.ReLU(),
        nn.Conv2d(128, 128, 3),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
    )
    return pictures(
        nn.Sequential(*layers, nn.LazyLinear(256), nn.ReLU(), nn.Linear(256, 10)), (3, 32, 32)
    )


def pictures(model: nn.Module, shape: tuple[int, int, int]) -> Any:
    """What build() returns for a network of pictures."""
    numbers = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(8192, *shape, generator=numbers),
        torch.randint(0, 10, (8192,), generator=numbers),
    )
    model(data.tensors[0][:1])  # sizes of the lazy layer
    return model, torch.optim.Adam(model.parameters(), 1e-3), nn.CrossEntropyLoss(), data


KINDS = {
    "decoder": Kind(8, "build_decoder"),
    "mnist": Kind(256, "build_mnist"),
    "maxer": Kind(64, "build_maxer"),
}


def train_by_hand(name: str) -> None:
    """One training: for each line with an end (in the clock's seconds), the steps it takes until
    then.
    """
    kind = KINDS[name]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    model, optimizer, loss, data = globals()[kind.build]()
    model.to(device)
    batches = endless(data, kind.batch)

    def step() -> None:
        inputs, targets = (each.to(device, non_blocking=True) for each in next(batches))
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()

    for _ in range(20):
        step()
    synchronize()
    print("ready", flush=True)
    for line in sys.stdin:
        begins, ends = map(float, line.split())
        while time.time() < begins:
            step()  # warms up beside the others
        synchronize()
        began, steps = time.time(), 0
        while time.time() < ends:
            step()
            steps += 1
        synchronize()
        print(steps * kind.batch / (time.time() - began), flush=True)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def endless(data: TensorDataset, batch: int) -> Iterator[list[torch.Tensor]]:
    """Batches in random order, pinned."""
    gpu = torch.cuda.is_available()
    tensors = [each.pin_memory() if gpu else each for each in data.tensors]
    while True:
        for rows in torch.randperm(len(data)).split(batch):
            if len(rows) == batch:
                picked = [each[rows] for each in tensors]
                yield [each.pin_memory() for each in picked] if gpu else picked


def sweep(name: str) -> dict[int, list[float]]:
    """Samples/s of all trainings together, for each number of them, of each turn."""
    command = [sys.executable, "-m", "benchmarks.gpu_packs", "--train", name]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    children = [subprocess.Popen(command, **pipes) for _ in range(max(SIZES))]  # type: ignore[call-overload]
    found: dict[int, list[float]] = {size: [] for size in SIZES}
    try:
        for child in children:
            assert child.stdout.readline().strip() == "ready"
        for turn in range(TURNS):
            for size in SIZES[:: 1 if turn % 2 else -1]:
                begins = time.time() + 0.7
                for child in children[:size]:
                    child.stdin.write(f"{begins} {begins + SECONDS}\n")
                found[size].append(sum(float(child.stdout.readline()) for child in children[:size]))
    finally:
        for child in children:
            child.kill()
            child.wait()
    return found


def choose(name: str, budget: str) -> dict[str, Any]:
    """What `evener compare` finds for the same build()."""
    kind = KINDS[name]
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.toml"
        command = [
            *(
                sys.executable,
                "-m",
                "evener",
                "compare",
                "--devices",
                "gpu" if torch.cuda.is_available() else "cpu",
            ),
            *(
                "--workload",
                f"{__file__}:{kind.build}",
                "--global-batch",
                str(kind.batch),
                "--layouts",
                "solo,pack",
            ),
            *("--budget", budget, "--json", "--export", str(plan)),
        ]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    found: dict[str, Any] = json.loads(made.stdout)
    return found


def main() -> None:
    """Print both for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(KINDS))
    parser.add_argument("--budget", default="90s", help="of evener compare")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", choices=list(KINDS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train_by_hand(options.train)
        return
    found: dict[str, Any] = {}
    for name in options.models:
        rates = {size: statistics.median(each) for size, each in sweep(name).items()}
        print(name, {size: round(rate) for size, rate in rates.items()}, flush=True)
        found[name] = {"by hand": rates}
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
        found[name]["evener"] = choose(name, options.budget)
        print(
            json.dumps(
                {key: found[name]["evener"].get(key) for key in ("verdict", "rows", "layouts")}
            )[:1500],
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
