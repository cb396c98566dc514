"""A script for one GPU, as most are written: `python one_gpu_program.py LOG CODE`."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
data = TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
train_rows = DataLoader(data, batch_size=8)
# the loop
for inputs, labels in train_rows:
    opt.zero_grad()
    nn.functional.cross_entropy(net(inputs), labels).backward()
    opt.step()
with Path(sys.argv[1]).open("a") as log:
    log.write(f"{sum(float(each.detach().sum()) for each in net.parameters())}\n")
print("has trained")
sys.exit(int(sys.argv[2]))
