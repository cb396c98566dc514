"""Print the limits that evener names for training runs without any.

  python -m benchmarks.plain_limits

A DistributedDataParallel loop, transformers' Trainer, Lightning and accelerate train a small
network under `evener run` on two CPU slices. Prints one line per program, which should name no
limit; a lack of cores is right if other programs run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HEAD = """
import torch
torch.set_num_threads(1)
from torch import nn
WIDTH, ROWS, STEPS = 640, 32, 150

def make_model():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)], nn.Linear(WIDTH, 10))

data = torch.utils.data.TensorDataset(
    torch.randn(2 * ROWS * STEPS, WIDTH), torch.randint(10, (2 * ROWS * STEPS,))
)
"""
PROGRAMS = {
    "loop": """
import torch.distributed as dist
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(make_model())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
sampler = torch.utils.data.DistributedSampler(data)
for inputs, labels in torch.utils.data.DataLoader(data, ROWS, sampler=sampler):
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
""",
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = torch.utils.data.DataLoader(data, ROWS, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inputs, labels in loader:
    accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
    optimizer.step()
    optimizer.zero_grad()
""",
    "Trainer": """
import tempfile
from transformers import Trainer, TrainingArguments

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = make_model()

    def forward(self, inputs, labels):
        return {"loss": nn.functional.cross_entropy(self.layers(inputs), labels)}

def collate(rows):
    inputs, labels = zip(*rows)
    return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}

options = TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=ROWS, max_steps=STEPS, use_cpu=True,
    report_to=[], save_strategy="no", remove_unused_columns=False, disable_tqdm=True,
)
Trainer(Model(), options, train_dataset=data, data_collator=collate).train()
""",
    "Lightning": """
import lightning

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = make_model()

    def training_step(self, batch, index):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_steps=STEPS, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(data, ROWS, shuffle=True))
""",
}
LONGEST_SECONDS = 120


def run(name: str, devices: str, folder: Path) -> str:
    """Train one program; return the limits that are named, or the reason why there is no result."""
    script = folder / f"plain_{name}.py"  # must not be a package's name
    script.write_text(HEAD + PROGRAMS[name])
    command = [sys.executable, "-m", "evener", "run", "-d", devices, "--json", "--"]
    try:
        done = subprocess.run(
            [*command, sys.executable, str(script)],
            capture_output=True,
            text=True,
            timeout=LONGEST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "MISS took too long"
    if done.returncode:
        return f"MISS exit code {done.returncode}: {done.stderr[-300:]}"
    summary = json.loads(done.stdout.splitlines()[-1])
    found = summary.get("summary", summary)
    named = [
        f"{each['kind']} {100 * each['share']:.0f} %, +{100 * each['gain']:.0f} % "
        f"({100 * each['gain_low']:.0f} to {100 * each['gain_high']:.0f})"
        for each in found["limits"]
    ]
    word = "MISS" if named else "ok  "
    return (
        f"{word} {'; '.join(named) or 'nothing'}; {found['steps']} steps of "
        f"{1e3 * found['step_s']:.1f} ms"
    )


def main() -> None:
    """Run the named programs, or all of them, and print their limits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("programs", nargs="*", choices=[*PROGRAMS, []])
    parser.add_argument("--devices", default="cpu/2")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in given.programs or PROGRAMS:
            print(f"plain {name}: {run(name, given.devices, Path(folder))}", flush=True)


if __name__ == "__main__":
    main()
