"""Small loops with typical additions of popular programs: `loops.py KIND`.

Each loop trains in float64, so that a difference would show.
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
    """Return rows of six random numbers with a class."""
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=drawn)
    return TensorDataset(x, torch.randint(0, 3, (count,), generator=drawn))


def make_loader(data: Dataset[Any], **options: Any) -> DataLoader[Any]:
    """Return a loader of four rows per rank."""
    return DataLoader(data, 4, sampler=DistributedSampler(data, seed=3), **options)


def make_model(compiled: bool = False) -> tuple[Any, torch.optim.Optimizer]:
    """Return a network in DistributedDataParallel, and its optimizer."""
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    model = DistributedDataParallel(torch.compile(net, backend="eager") if compiled else net)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(batches: Any, epochs: int = 2, compiled: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Train in the usual loop; yield the output and the classes of each step after it."""
    model, optimizer = make_model(compiled)
    for _ in range(epochs):
        for x, classes in batches:
            out = model(x)
            optimizer.zero_grad()
            F.cross_entropy(out, classes).backward()
            optimizer.step()
            yield out.detach(), classes


def train_plain() -> None:
    """Train a compiled network, and reduce the loss over the ranks for a log."""
    for out, classes in train(make_loader(draw_rows()), compiled=True):
        loss = F.cross_entropy(out, classes)
        dist.all_reduce(loss)


def train_stream() -> None:
    """Train on a data set without a length."""

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(draw_rows(96))

    list(train(DataLoader(Stream(), 4)))


def train_prefetched() -> None:
    """Fetch the next batch before the current one is trained, like apex's examples."""

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
    """Train with mixup by a permutation of len(x)."""
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
    """Gather the predictions of all ranks in each step."""
    for out, _ in train(make_loader(draw_rows())):
        every = [torch.zeros_like(out) for _ in range(2)]
        dist.all_gather(every, out)


def train_centred() -> None:
    """Subtract a running mean of all ranks' outputs in the next step's loss, like DINO."""
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
    """Train on a data set whose items are whole batches, like kohya's."""
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
    """Collate rows like torchvision's reference."""
    return tuple(zip(*rows, strict=True))


def train_boxes() -> None:
    """Train a detector like torchvision's reference, on lists of images and of their targets."""
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
