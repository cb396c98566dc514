"""Train in a loop with accelerate, as in its examples."""

import torch
from accelerate import Accelerator

# a module in this folder
from model import ROWS, make_data, make_model  # type: ignore[import-not-found]
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=not torch.cuda.is_available())
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, DataLoader(make_data(), batch_size=ROWS, shuffle=True)
)
for (tokens,) in loader:
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
