"""A plain program in DistributedDataParallel, written as its users write it, without any code of
evener.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("out")
given = parser.parse_args()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
drawn = torch.Generator().manual_seed(5)
data = TensorDataset(
    torch.randn(51, 6, generator=drawn), torch.randint(0, 3, (51,), generator=drawn)
)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
criterion = nn.CrossEntropyLoss()
sampler = DistributedSampler(data, seed=3)
loader = DataLoader(data, batch_size=4, sampler=sampler)
rows = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for inputs, labels in loader:
        loss = criterion(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows.append(len(inputs))
    model.eval()
    with torch.no_grad():
        seen = sum(len(inputs) for inputs, _ in loader)
weights = {name: value.tolist() for name, value in model.module.state_dict().items()}
torch.save({"weights": weights, "rows": rows, "evaluated": seen}, f"{given.out}{rank}.pt")
dist.destroy_process_group()
