"""A training that fills the memory of a GPU slice, run as a rank of a RankServer."""

from __future__ import annotations

from pathlib import Path

import torch

from evener.system.cores import cap_address_space

MOST = 8192  # rows


def grow(folder: Path, _rank: int, room_bytes: int) -> None:
    """Double the batch until PyTorch raises, and save the last size that fitted and the first that
    didn't.
    """
    torch.set_num_threads(1)
    layer = torch.nn.Conv2d(8, 64, 3, padding=1)
    cap_address_space(room_bytes)
    fitted, rows = 0, 128
    while rows < MOST:
        try:
            layer(torch.ones(rows, 8, 28, 28)).mean().backward()
        except RuntimeError:
            break
        fitted, rows = rows, rows * 2
    layer(torch.ones(128, 8, 28, 28)).mean().backward()
    torch.save((fitted, rows), folder / "0.pt")
