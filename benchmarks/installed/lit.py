"""Pretrain a small GPT with litgpt's own loop over Fabric.

litgpt uses FSDP for several devices, which Lightning supports on GPUs only; here it gets a Fabric
with DistributedDataParallel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from litgpt import Config, pretrain
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from torch.utils.data import DataLoader, TensorDataset


class Tokens(DataModule):  # type: ignore[misc]  # litgpt is not followed
    """Random tokens; rows have one token more than the model reads, as litgpt's loop expects."""

    rows = 0

    def connect(
        self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int = -1, **_: Any
    ) -> None:
        """Do nothing; litgpt calls this before it asks for loaders."""
        self.rows = batch_size

    def train_dataloader(self) -> Any:
        """Return a loader of 96 rows."""
        drawn = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, 64, (96, 17), generator=drawn)
        return DataLoader(Rows(tokens), batch_size=self.rows, shuffle=True)

    def val_dataloader(self) -> Any:
        """Return a loader of 8 rows."""
        return DataLoader(Rows(torch.randint(0, 64, (8, 17))), batch_size=self.rows)


class Rows(TensorDataset):
    """A tensor data set whose rows aren't tuples."""

    def __getitem__(self, number: int) -> torch.Tensor:  # type: ignore[override]
        return self.tensors[0][number]


if __name__ == "__main__":
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    settings = TrainArgs(
        save_interval=None,
        log_interval=5,
        global_batch_size=16,
        micro_batch_size=4,
        max_tokens=16 * 16 * 16,
        max_seq_length=16,
        max_norm=1.0,
        min_lr=1e-4,
        lr_warmup_steps=2,
        tie_embeddings=False,
    )
    pretrain.save_hyperparameters = lambda *_, **__: (
        None
    )  # it would parse litgpt's own command line
    pretrain.main(
        fabric=fabric,
        devices=2,
        seed=3,
        initial_checkpoint_dir=None,
        resume=False,
        config=Config(
            n_layer=2, n_embd=32, n_head=4, block_size=16, padded_vocab_size=64, vocab_size=64
        ),
        data=Tokens(),
        out_dir=Path("out"),
        tokenizer_dir=None,
        tokenizer=None,
        train=settings,
        eval=EvalArgs(interval=100, max_iters=2, initial_validation=False, final_validation=False),
        optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
    )
