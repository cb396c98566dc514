"""Small loops of what popular programs do beside plain training: `loops.py KIND`.

Each trains in float64, so that a difference would show.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset


def draw_rows(count: int = 192) -> TensorDataset:
    """Rows of six numbers, with a class."""
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=drawn)
    return TensorDataset(x, torch.randint(0, 3, (count,), generator=drawn))


def make_loader(data: Dataset[Any], **options: Any) -> DataLoader[Any]:
    """A loader of four rows a rank."""
    return DataLoader(data, 4, sampler=DistributedSampler(data, seed=3), **options)


def make_model(compiled: bool = False) -> tuple[Any, torch.optim.Optimizer]:
    """A network in DistributedDataParallel, and its optimizer."""
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    model = DistributedDataParallel(torch.compile(net, backend="eager") if compiled else net)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(batches: Any, epochs: int = 2, compiled: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """The usual loop; gives each step's output and classes once it is taken."""
    model, optimizer = make_model(compiled)
    for _ in range(epochs):
        for x, classes in batches:
            out = model(x)
            optimizer.zero_grad()
            F.cross_entropy(out, classes).backward()
            optimizer.step()
            yield out.detach(), classes


def train_plain() -> None:
    """A compiled network, with the mean of ranks' losses for the log."""
    for out, classes in train(make_loader(draw_rows()), compiled=True):
        loss = F.cross_entropy(out, classes)
        dist.all_reduce(loss)


def train_stream() -> None:
    """A data set without a length."""

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(draw_rows(96))

    list(train(DataLoader(Stream(), 4)))


def train_prefetched() -> None:
    """The next batch is taken while one is trained, as by apex's examples."""

    class Prefetcher:
        def __init__(self, loader: Any) -> None:
            self.loader = loader

        def __iter__(self) -> Iterator[Any]:
            batches = iter(self.loader)
            ready = next(batches)
            for each in batches:
                now, ready = ready, each
                yield now
            yield ready

    list(train(Prefetcher(make_loader(draw_rows()))))


def train_mixed() -> None:
    """Mixup by a permutation of len(x)."""
    model, optimizer = make_model()
    for _ in range(2):
        for x, classes in make_loader(draw_rows()):
            other = torch.randperm(len(x))
            out = model(0.7 * x + 0.3 * x[other])
            loss = F.cross_entropy(out, classes) * 0.7 + F.cross_entropy(out, classes[other]) * 0.3
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def train_gathered() -> None:
    """Predictions of all ranks, gathered in each step."""
    for out, _ in train(make_loader(draw_rows())):
        every = [torch.zeros_like(out) for _ in range(2)]
        dist.all_gather(every, out)


def train_centred() -> None:
    """A centre of all ranks' outputs, as DINO's, which the next step's loss subtracts."""
    model, optimizer = make_model()
    centre = torch.zeros(3)
    for _ in range(2):
        for x, _ in make_loader(draw_rows()):
            out = model(x)
            target = ((out.detach() - centre) / 0.1).softmax(1)
            loss = -(target * out.log_softmax(1)).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums = out.detach().sum(0)
            dist.all_reduce(sums)
            centre = 0.9 * centre + 0.1 * sums / (len(out) * dist.get_world_size())


def train_whole() -> None:
    """Items that are whole batches, as kohya's data sets have them."""
    data = draw_rows()

    class Batches(Dataset[Any]):
        def __len__(self) -> int:
            return 48

        def __getitem__(self, number: int) -> Any:
            return data[4 * number : 4 * number + 4]

    batches = Batches()
    sampler: Any = DistributedSampler(batches, seed=3)
    list(train(DataLoader(batches, 1, sampler=sampler, collate_fn=lambda items: items[0])))


def split_columns(rows: Any) -> Any:
    """The collate_fn of torchvision's reference."""
    return tuple(zip(*rows, strict=True))


def train_boxes() -> None:
    """torchvision's reference loop of detection: lists of pictures, and of their targets."""
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn as make

    drawn = torch.Generator().manual_seed(1)
    rows = []
    for number in range(32):
        boxes = torch.tensor([[4.0, 4, 20, 20], [8, 8, 30, 28]])[: 1 + number % 2]
        labels = torch.ones(len(boxes), dtype=torch.int64)
        rows.append((torch.rand(3, 32, 40, generator=drawn), {"boxes": boxes, "labels": labels}))
    model = DistributedDataParallel(
        make(weights=None, weights_backbone=None, num_classes=2, min_size=32, max_size=40)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for images, targets in make_loader(rows, collate_fn=split_columns):  # type: ignore[arg-type]
        losses = sum(model(list(images), list(targets)).values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    globals()[f"train_{sys.argv[1]}"]()
    dist.destroy_process_group()
