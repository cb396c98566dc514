"""Trainings that must end with the same weights on one process and on several ranks.

Ranks of a RankServer train every case with evener; `reference` trains it in a plain loop that
shares only the order of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from evener.plan.file import Kind, Plan, Share, load_plan, make_layout
from evener.torch import Split
from evener.torch.rows.sampler import UnevenBatchSampler
from tests.support.launched_plan import make_plan

STEPS = 14  # of a training that is launched, and continues after a rank is lost
OVER_AN_EPOCH = 6  # steps of all other trainings, most of which have 4 per epoch
# class weights; the second class is ignored
CLASSES = torch.tensor([1.0, 0.0, 5.0], dtype=torch.float64)
WIDTH = 7


class TrainingCase(msgspec.Struct, frozen=True):
    """One training."""

    optimizer: str = "sgd"
    rows: int = 25  # three full batches of 8 and one of a single row
    clip: float | None = None
    accumulate: int = 1
    no_sync: bool = True
    penalty: float = 0.0  # weight of the sum of squared weights in the loss
    weigh: Literal["gradients", "loss"] = "gradients"
    options: dict[str, Any] = {}
    auxiliary: bool = False  # the model keeps another loss as an attribute
    normalize: bool = False  # BatchNorm over the global batch: only on GPUs
    ignore: bool = False  # ignore one class and weight the others
    validate: bool = False  # within each step
    # number on each rank: with split.parts and a plan of five times the shares
    passes: tuple[int, ...] = ()

    def global_batch(self, planned: int) -> int:
        """The rows of a step, given those of the test's plan."""
        return 5 * planned if self.passes else planned


CASES = {
    "sgd": TrainingCase(),
    "momentum": TrainingCase("momentum"),
    "adam": TrainingCase("adam"),
    "adamw": TrainingCase("adamw"),
    "short tail": TrainingCase("momentum", rows=27),
    "whole batches": TrainingCase("adam", rows=24),
    "less than a batch": TrainingCase("momentum", rows=5),
    "clip": TrainingCase("momentum", clip=0.05),
    "clip adamw": TrainingCase("adamw", rows=50, clip=0.05),  # also launched, over two epochs
    "penalty": TrainingCase("sgd", penalty=1e-2),
    "accumulate": TrainingCase("momentum", accumulate=3),
    "accumulate adamw, short tail, clip": TrainingCase("adamw", rows=27, accumulate=3, clip=0.05),
    "accumulate with sync": TrainingCase("momentum", accumulate=3, no_sync=False),
    "accumulate, bucket view": TrainingCase(
        "momentum", accumulate=3, options={"gradient_as_bucket_view": True}
    ),
    "small buckets": TrainingCase("adam", options={"bucket_cap_mb": 0.0001}),
    "static graph": TrainingCase("momentum", options={"static_graph": True}),
    "auxiliary": TrainingCase("momentum", auxiliary=True),
    "loss": TrainingCase("momentum", weigh="loss"),
    "ignored and weighted classes": TrainingCase("momentum", rows=27, ignore=True),
    "the same, by loss, accumulated": TrainingCase(
        "adam", rows=27, ignore=True, weigh="loss", accumulate=2
    ),
    "validation in each step": TrainingCase("momentum", validate=True),
    "the same, by loss": TrainingCase("momentum", validate=True, weigh="loss"),
    "loss, accumulate, penalty": TrainingCase("adamw", accumulate=3, weigh="loss", penalty=1e-2),
    "passes 3:1:2": TrainingCase("momentum", rows=97, passes=(3, 1, 2)),
    "passes 2:5:1, clip, fewer rows than ranks": TrainingCase(
        "adamw", rows=82, passes=(2, 5, 1), clip=0.05
    ),
    "passes 1:1:1, validation": TrainingCase("adam", rows=97, passes=(1, 1, 1), validate=True),
    "passes, counted, accumulated": TrainingCase(
        "adam", rows=91, passes=(3, 1, 2), ignore=True, accumulate=2
    ),
    "passes, by loss": TrainingCase(
        "momentum", rows=97, passes=(2, 5, 1), weigh="loss", penalty=1e-2, ignore=True
    ),
    "passes, accumulated with sync": TrainingCase(
        "momentum",
        rows=97,
        passes=(2, 5, 1),
        accumulate=3,
        no_sync=False,
        options={"gradient_as_bucket_view": True},
    ),
}
# a rank without own rows would distort the statistics, so every rank has rows in each step
GPU_CASES = {
    "synchronized normalization": TrainingCase("momentum", rows=24, weigh="loss", normalize=True),
    "the same, short tail": TrainingCase(
        "momentum", rows=27, weigh="loss", normalize=True, accumulate=2
    ),
}


class Net(torch.nn.Module):
    """Two layers; it stores the mean square of the hidden values."""

    def __init__(self, normalize: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, 11)
        self.normal = torch.nn.BatchNorm1d(11) if normalize else torch.nn.Identity()
        self.second = torch.nn.Linear(11, 3)
        self.auxiliary = torch.tensor(0.0)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.normal(self.first(rows)))
        self.auxiliary = (hidden**2).mean()
        return self.second(hidden)


def data(case: TrainingCase) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(case.rows, WIDTH, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(
        inputs, torch.randint(0, 3, (case.rows,), generator=generator)
    )


def model(case: TrainingCase) -> Net:
    torch.manual_seed(3)
    net: Net = Net(case.normalize).double()
    return net


def optimizer(case: TrainingCase, net: torch.nn.Module) -> torch.optim.Optimizer:
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, 0.1),
        "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-2),
        "adam": lambda p: torch.optim.Adam(p, 1e-2),
        "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    }
    return makers[case.optimizer](net.parameters())


def objective(
    case: TrainingCase, net: Net, outputs: torch.Tensor, labels: torch.Tensor, split: Any = None
) -> torch.Tensor:
    weights = CLASSES.to(outputs.device)
    how = {"weight": weights if case.ignore else None, "ignore_index": 1 if case.ignore else -100}
    if case.ignore and split is not None:
        total = torch.nn.functional.cross_entropy(outputs, labels, reduction="sum", **how)
        loss = split.loss(total, weights[labels].sum())
    else:
        loss = torch.nn.functional.cross_entropy(outputs, labels, **how)
    if case.auxiliary:
        loss = loss + net.auxiliary
    return loss + case.penalty * sum((weights**2).sum() for weights in net.parameters())


def batches(case: TrainingCase, global_batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what one device sees, epoch after epoch."""
    sampler = UnevenBatchSampler(case.rows, [global_batch], 0, seed=2)
    inputs, labels = data(case).tensors
    for epoch in range(STEPS):
        sampler.set_epoch(epoch)
        for rows in sampler:
            yield inputs[rows], labels[rows]


def reference(
    case: TrainingCase, global_batch: int, steps: int = STEPS
) -> tuple[list[torch.Tensor], list[float]]:
    """Return the final weights and the losses of one process that doesn't use evener."""
    net = model(case)
    update = optimizer(case, net)
    losses = []
    for step, (inputs, labels) in zip(range(steps), batches(case, global_batch), strict=False):
        loss = objective(case, net, net(inputs), labels)
        losses.append(float(loss.detach()))
        (loss / case.accumulate).backward()
        finish(case, step, net, update)
    return [weights.detach() for weights in net.parameters()], losses


def finish(
    case: TrainingCase, step: int, net: torch.nn.Module, update: torch.optim.Optimizer
) -> None:
    if (step + 1) % case.accumulate == 0:
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), case.clip)
        update.step()
        update.zero_grad()


def example_plan(
    batches: tuple[int, ...], device: str = "sim-{}", micros: tuple[int, ...] | None = None
) -> Plan:
    """Return a plan for invented devices, which any device may stand for, in passes of `micros`
    rows.
    """
    devices = tuple(Share(device.format(i), i, "a device", 0, 0.0) for i in range(len(batches)))
    kind: Kind = "split" if sum(map(bool, batches)) > 1 else "solo"
    return make_plan(make_layout(kind, devices, batches, micros=micros))


def plan_for(case: TrainingCase, path: str) -> Plan:
    """Return the plan, or one with five times its shares in the case's passes."""
    plan = load_plan(path)
    if not case.passes:
        return plan
    batches = tuple(5 * batch for batch in plan.batches)
    passes = iter(case.passes)
    micros = tuple(-(-batch // next(passes)) if batch else 0 for batch in batches)
    layout = make_layout("split", plan.layout.share, batches, micros=micros)
    return msgspec.structs.replace(plan, layout=layout)


def compute(case: TrainingCase, split: Split, net: Any, batch: Any) -> float:
    """Do the forward and backward pass of a step, and return the loss of the whole batch."""
    bare = getattr(net, "module", net)
    if not case.passes:
        inputs, labels = batch
        loss = objective(case, bare, net(inputs), labels, split)
        mean = split.mean(loss)
        loss = loss / case.accumulate
        (split.scale(loss) if case.weigh == "loss" else loss).backward()
        return mean
    classes = CLASSES.to(split.device)
    total = 0.0
    for part in split.parts(
        batch, (lambda part: classes[part.batch[1]].sum()) if case.ignore else None
    ):
        inputs, labels = part.batch
        total += part.backward(objective(case, bare, net(inputs), labels) / case.accumulate)
    return split.mean(total) * case.accumulate


def train(case: TrainingCase, path: str) -> tuple[list[torch.Tensor], list[float]]:
    """Train the same with evener; return this rank's weights and the global losses."""
    split = Split(plan_for(case, path), weigh=case.weigh)
    net = split.wrap(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model(case)), **case.options)
    update = optimizer(case, net)
    losses: list[float] = []
    loader = split.loader(data(case), seed=2)
    while len(losses) < OVER_AN_EPOCH:
        for rows, classes in loader:
            step = len(losses)
            last = (step + 1) % case.accumulate == 0
            if case.validate:
                for _ in split.loader(data(case), training=False):
                    pass
            with nullcontext() if last or not case.no_sync else split.no_sync(net):
                losses.append(
                    compute(case, split, net, (rows.to(split.device), classes.to(split.device)))
                )
            finish(case, step, net, update)
            if len(losses) == OVER_AN_EPOCH:
                break
    return [weights.detach().cpu() for weights in net.parameters()], losses


def train_cases(folder: Path, rank: int, shares: Sequence[int]) -> dict[str, Any]:
    """Return what this rank learns in every case, with a plan of these shares."""
    plan = folder / f"plan{rank}.json"
    example_plan(tuple(shares)).save(plan)
    cases = {**CASES, **GPU_CASES} if torch.cuda.is_available() else CASES
    return {name: train(case, str(plan)) for name, case in cases.items()}


def train_all(folder: Path, rank: int, shares: Sequence[int]) -> None:
    """Train every case as one rank."""
    torch.save(train_cases(folder, rank, shares), folder / f"{rank}.pt")
