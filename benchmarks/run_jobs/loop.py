"""Train in a plain DistributedDataParallel loop under torchrun."""

import os

import torch
import torch.distributed as dist

# a module in this folder
from model import ROWS, make_data, make_model  # type: ignore[import-not-found]
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
model = DistributedDataParallel(make_model().to(device))
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
