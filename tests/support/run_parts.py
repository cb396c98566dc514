"""What the programs of run_exact, run_other and similar modules share, and how a rank runs one.

Each program runs twice: first without evener, then with its hooks.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import evener.program.guard

# imported once, before ranks are forked, as evener.program patches it
import evener.torch.planned  # noqa: F401
import tests.support.torch_imports  # noqa: F401 - before they are forked, too
from evener.training import launched
from tests.support.launched_plan import UNEVEN

ROWS, BATCH = 50, 4
Loss = Callable[[Any, Tensor, Tensor, Tensor], Tensor]  # (model, x, classes, targets)
Programs = dict[str, Callable[[], Any]]  # each returns what it has trained: one module or several


def points(rows: int = ROWS) -> TensorDataset:
    """Return rows of (x (6,), one of three classes, targets (2,))."""
    drawn = torch.Generator().manual_seed(5)
    x, targets = torch.randn(rows, 6, generator=drawn), torch.randn(rows, 2, generator=drawn)
    return TensorDataset(x, torch.randint(0, 3, (rows,), generator=drawn), targets)


def load(data: Dataset[Any] | None = None, **options: Any) -> DataLoader[Any]:
    """Return a loader with a DistributedSampler."""
    chosen = points() if data is None else data
    sampler = options.pop("sampler", None) or DistributedSampler(chosen, seed=3)
    options.setdefault("batch_size", BATCH)
    return DataLoader(chosen, sampler=sampler, **options)


def net(width: int = 16, out: int = 3) -> nn.Module:
    """Return a small network with 6 inputs."""
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, out))


def ddp(model: nn.Module | None = None, **options: Any) -> Any:
    """Return a model (default: a small network) in DistributedDataParallel."""
    return DistributedDataParallel(net() if model is None else model, **options)


def start(model: Any = None, rate: float = 0.1) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model (default: a small network in DistributedDataParallel) and its optimizer."""
    chosen = ddp() if model is None else model
    return chosen, torch.optim.SGD(chosen.parameters(), lr=rate)


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Do one optimizer step for this loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def epochs(loader: Any, count: int = 2) -> Iterator[Any]:
    """Yield the batches of several epochs, each in a different order."""
    for epoch in range(count):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        yield from loader


def fit(model: Any, loss: Loss, loader: Any = None, optimizer: Any = None, **options: Any) -> Any:
    """Train a model in the usual loop, on `loader` or one with these options, and return it."""
    chosen = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, classes, targets in epochs(load(**options) if loader is None else loader):
        update(chosen, loss(model, x, classes, targets))
    return model


def naming(programs: Programs) -> Callable[[Any], Any]:
    """Return a decorator that adds a function to the programs under its own name."""

    def name(made: Any) -> Any:
        programs[made.__name__.strip("_").replace("_", " ")] = made
        return made

    return name


def mean(model: Any, x: Tensor, classes: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(model(x), classes)


class Seen(msgspec.Struct):
    """The result of a program on one rank: its weights and evener's messages.

    `broke` has the error if it raised one.
    """

    weights: list[list[float]] = []
    hooks: str = ""
    why: str = ""
    broke: str = ""
    warned: bool = False


def run_twice(
    folder: Path, rank: int, module: str, name: str, port: int, noise: bool = False
) -> None:
    """Run a program without evener and then with it, with shares of 3:1, and save both results."""
    warnings.simplefilter("ignore")
    program = import_module(module).PROGRAMS[name]
    bare = _run(program)
    (folder / "plan.toml").write_text(UNEVEN) if rank == 0 else None
    os.environ["MASTER_PORT"] = str(port)
    hooked = _run_hooked(folder, rank, name, program, noise)
    (folder / f"{rank}.json").write_bytes(msgspec.json.encode([bare, hooked]))


def _run_hooked(
    folder: Path, rank: int, name: str, program: Callable[[], Any], noise: bool
) -> Seen:
    from evener.program.install import install
    from evener.program.notes import ProgramSettings

    settings = ProgramSettings("", name, rebalance=False, noise=noise)
    os.environ[launched.PROGRAM] = msgspec.json.encode(settings).decode()
    os.environ[launched.PLAN] = str(folder / "plan.toml")
    os.environ[launched.DEVICE] = f"cpu-{rank}-of-2"
    install()
    from evener.program import program as hooks

    hooks.EXCHANGE_SECONDS = 5.0
    seen = _run(program)
    notebook = hooks.PROGRAM.notebook
    seen.warned = bool(notebook.warned)
    seen.hooks, seen.why = (
        notebook.hooks,
        notebook.why or ("" if notebook.hooks else notebook.pending_reason),
    )
    return seen


# kept models keep their process group alive: PyTorch may hang when they are destroyed together
_kept: list[Any] = []


def _run(program: Callable[[], Any]) -> Seen:
    seen = Seen()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    random.seed(0)
    dist.init_process_group("gloo")
    try:
        trained = program()
        _kept.append(trained)
        modules = trained if isinstance(trained, tuple) else (trained,)
        seen.weights = [
            each.detach().double().flatten().tolist()
            for one in modules
            for each in one.parameters()
        ]
    except Exception as error:
        seen.broke = f"{type(error).__name__}: {error}"
    with suppress(Exception):
        dist.destroy_process_group()
    return seen


class Verdict(msgspec.Struct, frozen=True):
    """How a program's two runs compare.

    `kind` is "by shares", "even", "warned", "ended", "BROKEN" or "DIFFERENT".
    """

    kind: str
    difference: float  # relative to the largest weight
    words: str


def judge(folder: Path, near: float = 1e-9) -> Verdict:
    """Compare the saved results of both ranks."""
    ranks = [
        msgspec.json.decode((folder / f"{rank}.json").read_bytes(), type=list[Seen])
        for rank in (0, 1)
    ]
    (bare, hooked), broke = ranks[0], next((each[1].broke for each in ranks if each[1].broke), "")
    if any(each[0].broke for each in ranks):
        return Verdict("BROKEN", 0.0, next(each[0].broke for each in ranks if each[0].broke))
    if broke:
        return Verdict("ended" if broke.startswith("RequestError") else "BROKEN", 0.0, broke)
    pairs = [
        (abs(mine - its), abs(mine))
        for one, other in zip(bare.weights, hooked.weights, strict=True)
        for mine, its in zip(one, other, strict=True)
    ]
    difference = max(pair[0] for pair in pairs) / max(pair[1] for pair in pairs)
    by_shares = bool(hooked.hooks)
    if not difference <= (near if by_shares else 1e-12):
        return Verdict(
            "warned" if hooked.warned else "DIFFERENT", difference, hooked.hooks or hooked.why
        )
    return Verdict("by shares" if by_shares else "even", difference, hooked.why)
