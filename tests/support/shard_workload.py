"""A model of many small blocks, as a workload and for trainings in which it is sharded.

Its memory is what evener's ledger counts, not that of the process: memory limits apply to the
ledger.
"""

from __future__ import annotations

import sys
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from evener.balancer.search.sharding import RowDemand, divide_state
from evener.balancer.types import ModelState, Problem
from evener.torch import Split
from evener.torch.shards import sharded
from evener.torch.shards.unit import Ledger, choose_units
from evener.torch.shards.whole import estimate_gathered_bytes
from evener.workloads.protocol import MemoryMeter

WIDTH, BLOCKS = 128, 16  # 2.1 million parameters: 33.7 MB with gradients and AdamW's state
SMALL, STEPS = 32, 3


class CappedLedger(Ledger):
    """A ledger that raises an out-of-memory error above its limit."""

    last: CappedLedger | None = None
    cap = float("inf")

    def __init__(self) -> None:
        super().__init__()
        CappedLedger.last = self

    def add(self, category: str, size: int) -> None:
        super().add(category, size)
        self.check()

    def check(self) -> None:
        if self.now.total() > self.cap:
            raise torch.OutOfMemoryError(
                f"The ledger has {self.now.total()} of {self.cap:.0f} bytes."
            )


class Block(torch.nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.down(torch.nn.functional.gelu(self.up(rows)))


class Big(torch.nn.Module):
    """A stack of blocks with inputs and outputs of the same width."""

    def __init__(self, blocks: int = 0, width: int = 0) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width or WIDTH) for _ in range(blocks or BLOCKS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows)
        return rows


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(*torch.randn(2, 256, WIDTH, generator=generator))


def make() -> tuple[
    torch.nn.Module, torch.optim.Optimizer, torch.nn.Module, torch.utils.data.Dataset[object]
]:
    model = Big()
    return model, torch.optim.AdamW(model.parameters()), torch.nn.MSELoss(), data()


def build() -> Any:
    """Return the workload, and let probes report the ledger's memory.

    Without a ledger they report that of the whole model's state.
    """
    made = make()
    whole = 16 * sum(each.numel() for each in made[0].parameters())

    def cap(size: int) -> None:
        CappedLedger.cap = size
        if CappedLedger.last is not None:
            CappedLedger.last.check()
        elif whole > size:
            raise torch.OutOfMemoryError(f"The model has {whole} of {size} bytes.")

    def read(_: MemoryMeter) -> tuple[int | None, ...]:
        return (CappedLedger.last.peak if CappedLedger.last is not None else whole,)

    for module in [
        each for each in list(sys.modules.values()) if hasattr(each, "cap_address_space")
    ]:
        # sets it by dictionary, as the worker may be __main__
        module.__dict__["cap_address_space"] = cap
    vars(sharded)["Ledger"] = CappedLedger
    MemoryMeter.read = read  # type: ignore[method-assign, assignment]
    return made


def train(folder: Path, rank: int, plan: str) -> None:
    """Train as one rank with a plan.

    Saves whether its weights changed, and its ledger's bytes beside those in the plan.
    """
    vars(sharded)["Ledger"] = CappedLedger
    split = Split(plan)
    assert split.plan is not None
    own = split.plan.layout.share[rank]
    CappedLedger.cap = int(own.limit.removesuffix("MiB")) << 20
    model = split.shard(Big())
    before = [each.detach().clone() for each in model.parameters()]
    update = torch.optim.AdamW(model.parameters())
    for batch in islice(split.loader(data()), STEPS):
        for part in split.parts(batch):
            part.backward(torch.nn.functional.mse_loss(model(part.batch[0]), part.batch[1]))
        update.step()
        update.zero_grad()
    vars(sharded)["Ledger"] = Ledger
    moved = all(
        not torch.equal(*pair)
        for pair in zip(before, model.parameters(), strict=True)
        if pair[0].numel()
    )
    figures = {
        "held": model.exchange.ledger.peak,
        "planned": own.held_bytes,
        "measured": own.peak_bytes,
    }
    torch.save({**figures, "moved": moved}, folder / f"{rank}.pt")


def sweep(folder: Path, rank: int, caps: tuple[int, int]) -> None:
    """Save the state bytes of the largest model that trains within each rank's limit.

    The model is divided as a plan would, and equally.
    """
    split, found = Split(ratios=[3, 1], global_batch=4), dict[str, int]()
    first = 10
    # the second starts with the smallest size that the test demands
    for kind in ("equal", "planned"):
        for blocks in count(first):
            if not (state := fit(split, Big(blocks, SMALL), caps, kind == "equal")):
                break
            first, found[kind] = 1 + 8 * blocks // 5, state
    beside = estimate_gathered_bytes(model := Big(2, SMALL), choose_units(model, None), None)
    torch.save({**found, "room": sum(caps) - 2 * beside}, folder / f"{rank}.pt")


def fit(split: Split, model: Big, caps: tuple[int, int], equal: bool) -> int:
    """Return the bytes of a model's state; 0 if two steps exceed a rank's limit."""
    state = 16 * sum(each.numel() for each in model.parameters())
    problem = Problem(
        2,
        caps,
        state=ModelState(state, estimate_gathered_bytes(model, choose_units(model, None), None)),
    )
    gathered = problem.state.gathered_bytes if problem.state else 0
    needs = [RowDemand(((1, gathered),), 0.0, 0.0, 1.0)] * 2
    division = divide_state(caps, needs, problem)
    if division is None:
        return 0
    model = split.shard(model, state=(0.5, 0.5) if equal else division.parts)
    update = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        split.begin((3, 1))
        model(torch.ones(split.shares[split.rank], SMALL)).sum().backward()
        update.step()
        update.zero_grad()
    fits = torch.tensor(float(model.exchange.ledger.peak <= caps[split.rank]))
    torch.distributed.all_reduce(fits, torch.distributed.ReduceOp.MIN)
    return state if fits else 0
