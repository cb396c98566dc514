"""Compares what the ranks of tests/support/launched_training.py learned with one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest


def check_ranks(folder: Path, hosts: Sequence[str]) -> None:
    """Check three ranks with 1, 5 and 2 rows on these hosts: weights and losses to 1e-12."""
    import torch

    from tests.support import launched_training, torch_ranks

    weights, losses = torch_ranks.reference(torch_ranks.CASES[launched_training.NAME], 8)
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(3)]
    assert sorted((rank["host"], rank["rows"]) for rank in ranks) == sorted(
        zip(hosts, (1, 5, 2), strict=True)
    )
    for rank in ranks:
        assert rank["said"][0].startswith("Ranks 0 and 1 and 2 all train on ")
        assert rank["said"][1].startswith(
            "Rank 1 trains with another plan, or another global batch, than rank 0."
        )
        assert "nowhere.toml" in rank["said"][2], "also where the plan can be read"
        assert rank["losses"] == pytest.approx(losses, abs=1e-12)
        for mine, expected in zip(rank["weights"], weights, strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
