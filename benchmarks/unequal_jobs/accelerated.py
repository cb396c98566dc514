"""Train a Llama in a loop with accelerate, as in its examples, under torchrun."""

from __future__ import annotations

# modules in this folder; imported first, because they limit the GPU
from place import CUDA, SIZES, wait_for_start  # type: ignore[import-not-found]  # isort: skip
import torch
from accelerate import Accelerator
from llama import Rows, make_model  # type: ignore[import-not-found]
from torch.utils.data import DataLoader


def main() -> None:
    """Train COUNT steps."""
    wait_for_start()
    accelerator = Accelerator(cpu=not CUDA)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(Rows(), batch_size=SIZES["ROWS"], shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
