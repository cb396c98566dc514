"""Train with DeepSpeed in a plain loop under torchrun; ZERO_STAGE is the stage (2 unless set)."""

import os

import deepspeed
import torch
from deepspeed.ops import __compatible_ops__

# a module in this folder
from model import ROWS, make_data, make_model  # type: ignore[import-not-found]
from torch.utils.data import DataLoader, DistributedSampler

__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled at the first start
cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
deepspeed.init_distributed("nccl" if cuda else "gloo")
model = make_model()
engine, _, _, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    config={
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": int(os.environ.get("ZERO_STAGE", "2"))},
        "zero_allow_untested_optimizer": True,
    },
)
data = make_data()
loader = DataLoader(data, batch_size=ROWS, sampler=DistributedSampler(data), pin_memory=cuda)
for (tokens,) in loader:
    tokens = tokens.to(engine.device, non_blocking=True)
    logits = engine(input_ids=tokens).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 1024), tokens[:, 1:].reshape(-1))
    engine.backward(loss)
    engine.step()
    if cuda:
        torch.cuda.synchronize()
