"""Trainings whose noise scale is known, since the gradient of each row is.

rank_server.py runs `measured` and `exact`.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch.utils.data import TensorDataset

from evener.errors import RequestError
from evener.torch import Split
from evener.training.noise_scale import NoiseWindow
from tests.support.fewer_audits import audit_first_step
from tests.support.scripted_shares import rotate_shares
from tests.support.torch_program_parts import shard
from tests.support.torch_ranks import example_plan

ROWS, STEPS = 12_000, 110
CASES: dict[str, dict[str, Any]] = {
    "6:2": {"shares": (60, 20)},
    "in passes": {"shares": (40, 24), "micros": (16, 24)},
    "accumulated": {"shares": (24, 8), "accumulate": 2},
    "by loss": {"shares": (60, 20), "weigh": "loss"},
    "rebalanced": {"shares": (60, 20), "changes": True},
}


def data() -> TensorDataset:
    torch.manual_seed(1)
    inputs = torch.randn(ROWS, 10)
    return TensorDataset(inputs, (inputs[:, :3] + torch.randn(ROWS, 3)).argmax(1))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))


def true_noise_scale(model: nn.Module, rows: TensorDataset) -> float:
    """Compute the noise scale from each row's own gradient."""
    gradients = row_gradients(model, rows)
    return float(gradients.var(0).sum() / gradients.mean(0).square().sum())


def row_gradients(model: nn.Module, rows: TensorDataset) -> torch.Tensor:
    """Return the gradients, of shape (rows, parameters)."""
    weights = {name: each.detach() for name, each in model.named_parameters()}

    def loss(weights: Any, inputs: Any, label: Any) -> Any:
        return F.cross_entropy(functional_call(model, weights, (inputs[None],)), label[None])

    each = vmap(grad(loss), (None, 0, 0))(weights, *rows.tensors)
    return torch.cat([part.flatten(1) for part in each.values()], 1).double()


def make_split(shares: tuple[int, ...], micros: tuple[int, ...] = (), **options: Any) -> Split:
    if not micros:
        return Split(ratios=shares, global_batch=sum(shares), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a plan for other devices
        return Split(example_plan(shares, micros=micros), **options)


def measure(
    case: dict[str, Any], every: int = 1, steps: int = STEPS, window: NoiseWindow | None = None
) -> Any:
    """Return the noise scale measured with constant weights."""
    case = dict(case)
    accumulate, changes = case.pop("accumulate", 1), case.pop("changes", False)
    split = make_split(**case, noise=True, rebalance=changes)
    noise = split.noise
    assert noise is not None
    noise.window, noise.every = window or NoiseWindow(1), every
    model = split.wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    if changes:
        rotate_shares(split.rebalancing)
    loader = split.loader(data(), drop_last=True)
    batches = chain.from_iterable(repeat(loader))
    for done, batch in enumerate(islice(batches, steps), 1):
        with nullcontext() if done % accumulate == 0 else split.no_sync(model):
            train(split, model, batch)
        if done % accumulate == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # after gradients are summed
            optimizer.step()
            optimizer.zero_grad()
    assert not changes or split.shares != case["shares"] or split.reporter.changes
    return msgspec.to_builtins(split.noise_scale), noise.describe()


def train(split: Split, model: nn.Module, batch: Any) -> None:
    if split.weigh == "loss":
        split.scale(F.cross_entropy(model(batch[0]), batch[1])).backward()
    else:
        split.step(batch, lambda part: F.cross_entropy(model(part.batch[0]), part.batch[1]))


def measured(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    audit_first_step()
    torch.save({name: measure(case) for name, case in CASES.items()}, folder / f"{rank}.pt")


def exact(folder: Path, rank: int) -> None:
    """Save the weights after 20 steps with and without noise, and the messages of
    refused programs.
    """
    torch.set_num_threads(1)
    audit_first_step()
    found: dict[str, Any] = {
        name: [learn(case, noise) for noise in (False, True)] for name, case in CASES.items()
    }
    torch.save(
        {"weights": found, "refused": [refusal(sharded=True), refusal(sharded=False)]},
        folder / f"{rank}.pt",
    )


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in case.items() if name in ("shares", "micros", "weigh")}


def learn(case: dict[str, Any], noise: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    split = make_split(**options_of(case), noise=noise)
    model = split.wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for done, batch in enumerate(islice(split.loader(data(), drop_last=True), 20), 1):
        train(split, model, batch)
        if done % case.get("accumulate", 1) == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [each.detach().clone() for each in model.parameters()]


def refusal(sharded: bool) -> str:
    split = Split(ratios=(3, 1), global_batch=8, weigh="loss", noise=True)
    try:
        model = split.wrap(shard(split, network()) if sharded else network())
        model = split.wrap(model.module)
        split.wrap(network())
    except RequestError as error:
        return str(error)
    return ""
