"""A model of many small blocks, as a workload, and as trainings of it in shards.

Memory is what evener's ledger counts, in place of the process's: a slice's cap is one of the
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
from evener.torch.shards.whole import count_gathered
from evener.workloads.protocol import MemoryMeter

WIDTH, BLOCKS = 128, 16  # 2.1 million parameters, 33.7 MB with gradients and AdamW's state
SMALL, STEPS = 32, 3


class CappedLedger(Ledger):
    """A ledger that runs out of memory."""

    last: CappedLedger | None = None
    cap = float("inf")

    def __init__(self) -> None:
        super().__init__()
        CappedLedger.last = self

    def add(self, kind: str, size: int) -> None:
        super().add(kind, size)
        self.check()

    def check(self) -> None:
        if self.now.total() > self.cap:
            raise torch.OutOfMemoryError(
                f"The ledger has {self.now.total()} of {self.cap:.0f} bytes."
            )


class Block(torch.nn.Module):
    """Two layers beside their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.down(torch.nn.functional.gelu(self.up(rows)))


class Big(torch.nn.Module):
    """Figures in, figures out."""

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
    """The workload, whose memory in a probe is that of the ledger, or of the whole model's
    state.
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
        module.__dict__["cap_address_space"] = cap  # the worker may be __main__
    vars(sharded)["Ledger"] = CappedLedger
    MemoryMeter.read = read  # type: ignore[method-assign, assignment]
    return made


def train(folder: Path, rank: int, plan: str) -> None:
    """A rank of a training by a plan: whether its weights moved, and the bytes of its ledger beside
    the plan's.
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
        "held": model.exchange.held.peak,
        "planned": own.held_bytes,
        "measured": own.peak_bytes,
    }
    torch.save({**figures, "moved": moved}, folder / f"{rank}.pt")


def sweep(folder: Path, rank: int, caps: tuple[int, int]) -> None:
    """The bytes of state of the largest model that trains within each rank's cap, its parts as a
    plan's and equal.
    """
    split, found = Split(ratios=[3, 1], global_batch=4), dict[str, int]()
    first = 10
    for kind in ("equal", "planned"):  # the second begins with what the test asks for at least
        for blocks in count(first):
            if not (state := fit(split, Big(blocks, SMALL), caps, kind == "equal")):
                break
            first, found[kind] = 1 + 8 * blocks // 5, state
    beside = count_gathered(model := Big(2, SMALL), choose_units(model, None), None)
    torch.save({**found, "room": sum(caps) - 2 * beside}, folder / f"{rank}.pt")


def fit(split: Split, model: Big, caps: tuple[int, int], equal: bool) -> int:
    """The bytes of a model's state; 0 if a rank's ledger has more than its cap in a training of two
    steps.
    """
    state = 16 * sum(each.numel() for each in model.parameters())
    problem = Problem(
        2, caps, state=ModelState(state, count_gathered(model, choose_units(model, None), None))
    )
    needs = [RowDemand(problem.state.gathered_bytes if problem.state else 0, 0.0, 0.0, 1.0)] * 2
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
    fits = torch.tensor(float(model.exchange.held.peak <= caps[split.rank]))
    torch.distributed.all_reduce(fits, torch.distributed.ReduceOp.MIN)
    return state if fits else 0
