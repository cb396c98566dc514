"""Train in a plain loop a model that FSDP2 shards, under torchrun."""

import os

import torch
import torch.distributed as dist

# a module in this folder
from model import ROWS, make_data, make_model  # type: ignore[import-not-found]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
kind = "cuda" if cuda else "cpu"
dist.init_process_group("nccl" if cuda else "gloo")
device = torch.device(kind, torch.cuda.current_device()) if cuda else torch.device(kind)
mesh = init_device_mesh(kind, (dist.get_world_size(),))
model = make_model().to(device)
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = make_data()
loader = DataLoader(data, batch_size=ROWS, sampler=DistributedSampler(data), pin_memory=cuda)
for (tokens,) in loader:
    tokens = tokens.to(device, non_blocking=True)
    logits = model(input_ids=tokens).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 1024), tokens[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if cuda:
        torch.cuda.synchronize()
dist.destroy_process_group()
