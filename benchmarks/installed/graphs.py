"""PyG's multi-GPU examples on random graphs.

The default is the loop of distributed_batching.py; with `split`, each rank selects its rows itself,
as in distributed_sampling.py.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool


class Net(torch.nn.Module):
    """A classifier for graphs, or for the nodes of one graph."""

    def __init__(self, pools: bool) -> None:
        super().__init__()
        self.first, self.second = GCNConv(6, 16), GCNConv(16, 16)
        self.head, self.pools = torch.nn.Linear(16, 3), pools

    def forward(self, data: Data) -> torch.Tensor:
        """Return the logits of each graph or node."""
        x = self.first(data.x, data.edge_index).relu()
        x = self.second(x, data.edge_index).relu()
        return self.head(global_mean_pool(x, data.batch) if self.pools else x)


def draw_graph(drawn: torch.Generator, nodes: int, labels: int) -> Data:
    """Return a random graph with two edges per node on average."""
    return Data(
        x=torch.randn(nodes, 6, generator=drawn),
        edge_index=torch.randint(0, nodes, (2, 2 * nodes), generator=drawn),
        y=torch.randint(0, 3, (labels,), generator=drawn),
    )


def train_graphs() -> None:
    """Train on batches of several graphs, joined into one large graph."""
    drawn = torch.Generator().manual_seed(1)
    graphs = [draw_graph(drawn, 5 + number % 4, 1) for number in range(96)]
    sampler = DistributedSampler(graphs, shuffle=True)  # type: ignore[var-annotated, arg-type]
    loader = DataLoader(graphs, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(Net(True))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for data in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(data), data.y)
            loss.backward()
            optimizer.step()


def train_nodes() -> None:
    """Train on one graph, each rank on its part of the nodes."""
    drawn = torch.Generator().manual_seed(1)
    graph = draw_graph(drawn, 96, 96)
    rank, world = dist.get_rank(), dist.get_world_size()
    own = torch.arange(96).split(96 // world)[rank]
    loader = torch.utils.data.DataLoader(own, batch_size=4, shuffle=True)  # type: ignore[arg-type, var-annotated]
    model = DistributedDataParallel(Net(False))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        for nodes in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(graph)[nodes], graph.y[nodes])
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    (train_nodes if sys.argv[1:] == ["split"] else train_graphs)()
    dist.destroy_process_group()
