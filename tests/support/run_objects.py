"""Programs whose batches are objects of special classes, as some libraries make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from .run_parts import Programs, ddp, epochs, load, naming, net, start, update

PROGRAMS: Programs = {}
name = naming(PROGRAMS)


class Padded:
    """Rows as attributes of an object, with their names and, for some, their lengths."""

    def __init__(self, rows: list[Any]) -> None:
        self.names = [f"row {number}" for number in range(len(rows))]
        x = torch.stack([each[0] for each in rows])
        self.signal = (x, torch.full((len(rows),), 6))
        self.kind = torch.stack([each[1] for each in rows])

    def to(self, *_: Any) -> Padded:
        """Move the tensors in place."""
        self.kind = self.kind.clone()
        return self


class Graphs:
    """Graphs of several sizes in one batch: all nodes, and the graph of each node."""

    def __init__(self, rows: list[Any]) -> None:
        counts = [2 + int(kind) for _, kind, _ in rows]
        self.nodes = torch.cat(
            [x.repeat(count, 1) for (x, _, _), count in zip(rows, counts, strict=True)]
        )
        self.owner = torch.arange(len(rows)).repeat_interleave(torch.tensor(counts))
        self.kind = torch.stack([each[1] for each in rows])
        self.graphs = len(rows)
        # a reference back to the batch, as in PyTorch Geometric's stores
        self.inner = {"graphs": self}


class GraphNet(nn.Module):
    """Takes the batch object and returns logits for each graph or node."""

    def __init__(self, pools: bool = True) -> None:
        super().__init__()
        self.layers, self.pools = net(), pools

    def forward(self, batch: Graphs) -> Tensor:
        out: Tensor = self.layers(batch.nodes)
        if not self.pools:
            return out
        sums = out.new_zeros(batch.graphs, 3).index_add(0, batch.owner, out)
        return sums / batch.owner.bincount(minlength=batch.graphs)[:, None]


def fit(model: Any, collate: Any, loss: Callable[[Any, Any], Tensor]) -> Any:
    model, optimizer = start(model)
    for batch in epochs(load(collate_fn=collate)):
        update(optimizer, loss(model, batch))
    return model


@name
def rows_in_an_object() -> Any:
    def loss(model: Any, batch: Padded) -> Tensor:
        batch.to("cpu")
        signal, lengths = batch.signal
        return F.cross_entropy(model(signal / lengths[:, None]), batch.kind)

    return fit(ddp(), Padded, loss)


@name
def graphs() -> Any:
    return fit(
        ddp(GraphNet()), Graphs, lambda model, batch: F.cross_entropy(model(batch), batch.kind)
    )


@name
def nodes_of_graphs() -> Any:
    """Takes a mean over nodes, of which graphs have different numbers."""

    def loss(model: Any, batch: Graphs) -> Tensor:
        return F.cross_entropy(model(batch), batch.kind[batch.owner])

    return fit(ddp(GraphNet(pools=False)), Graphs, loss)


@name
def stopped_by_a_flag() -> Any:
    """Each rank decides by its own mean loss, and one that decides to stop tells the others."""
    model, optimizer = start()
    least = 10.0
    for x, classes, _ in epochs(load(), 4):
        loss = F.cross_entropy(model(x), classes)
        update(optimizer, loss)
        flag = torch.tensor(int(loss.item() > least + 0.05))
        least = min(least, loss.item())
        dist.all_reduce(flag)
        if flag.item():
            break
    return model
