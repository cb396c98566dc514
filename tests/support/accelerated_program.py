"""A program with accelerate, written as its users write it, without any code of evener."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--dispatch", action="store_true", help="have one process read all rows")
given = parser.parse_args()
set_seed(0)
torch.set_default_dtype(torch.float64)
accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(dispatch_batches=given.dispatch),
)
drawn = torch.Generator().manual_seed(5)
data = TensorDataset(torch.randn(53, 6, generator=drawn), torch.arange(53) % 3)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
model, optimizer, loader, schedule = accelerator.prepare(
    model, optimizer, DataLoader(data, batch_size=4, shuffle=True), schedule
)
held = accelerator.prepare(DataLoader(data, batch_size=4))
rows, correct, gathered = [], 0, 0
for _ in range(2):
    model.train()
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            found = model(inputs)
            accelerator.backward(nn.functional.cross_entropy(found, labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        rows.append(len(inputs))
        gathered += len(accelerator.gather_for_metrics((found.argmax(1), labels))[0])
    model.eval()
    for inputs, labels in held:
        with torch.no_grad():
            found, labels = accelerator.gather_for_metrics((model(inputs).argmax(1), labels))
        correct += int((found == labels).sum())
state = accelerator.unwrap_model(model).state_dict()
seen = {"rows": rows, "gathered": gathered, "correct": correct, "rate": schedule.get_last_lr()}
torch.save(
    {"weights": {name: value.tolist() for name, value in state.items()}, **seen},
    f"{given.out}{accelerator.process_index}.pt",
)
