"""Lightning trainings in which passes run out of memory, and the same trainings with
enough memory.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import msgspec
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch.utils.data import DataLoader, default_collate

from evener.errors import EvenerError
from evener.torch import Split
from evener.torch.step import recovery
from evener.torch.step.step import Passes
from evener.training import passes as pass_limits
from tests.support import torch_oom_programs as bombed
from tests.support.fewer_audits import audit_first_step
from tests.support.huggingface_programs import SEED, Texts, make_plan, pad_texts
from tests.support.last_words import last_words
from tests.support.lightning_options import Figures, Lbfgs, Tokens, Weighted, count_labels
from tests.support.lightning_programs import Epochs, Module, Program, describe, make_trainer, points

SAME_PASSES = {  # names of cases in torch_oom_programs
    name: msgspec.structs.replace(bombed.CASES[name], bombs=0.9, steps=8)
    for name in ("normalized", "dropout in passes, accumulated")
}


class Bombs(pl.Callback):
    """Plants out-of-memory errors in three of four batches, one or two, at any linear layer of any
    pass.
    """

    def __init__(self, module: Any, seed: int) -> None:
        self.fuse, self._numbers = bombed.Fuse(), random.Random(seed)
        self.calls: list[Any] = []
        self._layers = [each for each in module.modules() if isinstance(each, torch.nn.Linear)]
        for number, layer in enumerate(self._layers):
            layer.register_forward_hook(
                lambda *given, number=number: bombed.Bomb.apply(given[2], self.fuse, number)
            )
        self._layers[0].register_forward_pre_hook(
            lambda *_: self.fuse.begin() if torch.is_grad_enabled() else None
        )

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        draw = self._numbers
        self.calls.append(("start", batch_idx))
        self.fuse.passes, self.fuse.at = -1, []
        for _ in range(draw.choice((0, 1, 1, 2))):
            way = draw.choice(("forward", "backward"))
            self.fuse.at.append((way, draw.randrange(1, len(self._layers)), draw.randrange(3)))

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.calls.append(("end", batch_idx))
        self.fuse.at = []


# ------------------------------------------------------------------- compared with the same passes


class Counted(pl.LightningModule):
    """The network of torch_oom_programs, with seeded random numbers and new errors for
    each batch.
    """

    def __init__(self, case: bombed.Case, rank: int) -> None:
        super().__init__()
        self.case, self.rank, self.fuse = case, rank, bombed.Fuse()
        self.net = bombed.Net(case, self.fuse).double()
        self.numbers = random.Random(100 * case.seed + rank)
        self.tried: list[int] = []
        self.kept: list[list[int]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.fuse.at, self.fuse.passes = bombed.place_bombs(self.case, self.numbers), -1
        bombed.seed(self.case, self.rank, batch_idx)
        self.kept.append([])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.tried.append(len(batch[0]))
        loss = F.cross_entropy(
            self.net(batch[0]), batch[1], ignore_index=1 if self.case.counted else -100
        )
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        # Lightning divides the loss by the number of accumulated batches
        return loss * self.case.accumulate

    def on_train_batch_end(self, *_: Any) -> None:
        self.fuse.at = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def train_counted(case: bombed.Case, shares: list[int]) -> dict[str, Any]:
    split = bombed.make_split(case, shares)
    module = Counted(case, split.rank)
    options = {
        "gradient_clip_val": 1.0,
        "accumulate_grad_batches": case.accumulate,
        "max_epochs": 1,
    }
    count = (lambda part: (part.batch[1] != 1).sum()) if case.counted else None
    trainer = make_trainer(
        Program(), "", devices=split.world, strategy=split.strategy(count=count), **options
    )
    close = Passes.close

    def note(passes: Passes) -> None:
        close(passes)
        module.kept[-1].append(module.tried[-1])

    with patch.object(Passes, "close", note):
        trainer.fit(module, split.loader(bombed.data(case, shares), shuffle=False))
    state = [each.detach().clone() for each in (*module.net.parameters(), *module.net.buffers())]
    loss = float(trainer.callback_metrics["loss_epoch"])
    return {"state": state, "kept": module.kept, "burst": module.fuse.burst, "loss": loss}


# ------------------------------------------ compared with one process that has enough memory


class Named(Module):
    """Takes its batch apart, returns more than the loss, and logs without regard to ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        targets = batch.pop("y")
        self.last = self.layers(batch["x"])
        loss = F.mse_loss(self.last, targets)
        self.log("loss", loss, prog_bar=True)
        return {"loss": loss, "predicted": self.last.detach(), "rows": len(targets)}


def name_columns(items: Any) -> dict[str, torch.Tensor]:
    return dict(zip("xy", default_collate(items), strict=True))


class Skips(Module):
    """Returns no loss for every third batch, after computing it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self.layers(batch[0]), batch[1])
        return None if batch_idx % 3 == 1 else loss


class Silent(Module):
    """Logs nothing, since Dynamo can't compile Lightning's log."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.layers(batch[0]), batch[1])


class Case(msgspec.Struct, frozen=True):
    """One training; `options` are passed to the trainer."""

    module: Callable[[], Any]
    options: dict[str, Any] = {}
    rows: int = 29
    loader: dict[str, Any] = {}
    texts: bool = False
    validate: bool = False
    compiled: bool = False
    resume_after: int = 0
    within: float = 1e-12


CASES = {
    "figures": Case(Figures, {"gradient_clip_val": 0.5}, rows=25),
    "columns": Case(lambda: Named(False), loader={"collate_fn": name_columns}),
    "tokens": Case(
        Tokens, {"accumulate_grad_batches": 2}, loader={"collate_fn": pad_texts}, texts=True
    ),
    "validated": Case(lambda: Module(False), {"val_check_interval": 2}, validate=True),
    "compiled": Case(lambda: Silent(False), rows=17, compiled=True),
    "skipped": Case(lambda: Skips(False), rows=45),
    "resumed": Case(lambda: Module(False), resume_after=6),
    "bf16": Case(lambda: Module(False).float(), {"precision": "bf16-mixed"}, within=0.05),
    "fp16": Case(lambda: Module(False).float(), {"plugins": "fp16"}, within=0.05),
}


ALONE = ("figures", "columns", "skipped")  # also trained on one device
AT_ONCE = (
    "figures",
    "columns",
    "compiled",
    "bf16",
)  # trained on two devices, with each share in one pass at first
# trained on two devices, in several passes from the start
IN_PASSES = ("figures", "tokens", "validated", "resumed", "fp16")


def fit(case: Case, split: Any, folder: str, rank: int = 0) -> dict[str, Any]:
    """Train with a split and planted errors, or with Lightning alone."""
    module = case.module()
    data: Any = Texts(case.rows) if case.texts else points(case.rows)
    if case.within > 1e-6:
        data = [tuple(each.float() for each in data[row]) for row in range(case.rows)]
    bombs = [Bombs(module, rank)] if split else []
    own = dict(case.options)
    if own.get("plugins") == "fp16":
        own["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 4.0))]
    count = count_labels if case.texts else None
    held_out: Any = DataLoader(points(16), batch_size=8) if case.validate else None
    if split and held_out:
        held_out = split.loader(points(16), shuffle=False, training=False)

    def run(path: str | None = None, **more: Any) -> pl.Trainer:
        given = (
            {"devices": split.world, "strategy": split.strategy(count=count)}
            if split
            else {"devices": 1}
        )
        callbacks = [*bombs, *more.pop("callbacks", [])]
        trainer = make_trainer(Program(options=own), folder, callbacks=callbacks, **given, **more)
        order = Epochs(case.rows)
        loader = split.loader(data, seed=SEED, **case.loader) if split else None
        loader = loader or DataLoader(data, batch_sampler=order, **case.loader)
        trained = torch.compile(module, backend="eager") if case.compiled and split else module
        trainer.fit(trained, loader, held_out, ckpt_path=path)
        return trainer

    if case.resume_after and split:
        saves = pl.callbacks.ModelCheckpoint(
            folder, "half", every_n_train_steps=case.resume_after, save_top_k=-1
        )
        run(enable_checkpointing=True, callbacks=[saves])
        module.load_state_dict({name: each * 0 for name, each in module.state_dict().items()})
        trainer = run(f"{folder}/half.ckpt")
    else:
        trainer = run()
    shown = {name: float(value) for name, value in trainer.logged_metrics.items()}
    calls = bombs[0].calls if bombs else []
    return {
        **describe(module, trainer),
        "shown": shown,
        "burst": bombs[0].fuse.burst if bombs else 0,
        "unpaired": [
            one for one, other in zip(calls[::2], calls[1::2], strict=True) if one[1] != other[1]
        ],
        "batches": len(calls) // 2,
    }


def train_all(folder: Path, rank: int, shares: list[int], micros: list[int]) -> None:
    """Train every program as one rank."""
    torch.set_num_threads(1)
    audit_first_step()
    pass_limits.CLEAN_STEPS = 1
    names: Sequence[str] = AT_ONCE if shares == micros else IN_PASSES
    if len(shares) == 1:
        names = ALONE
    found = {
        name: fit(CASES[name], Split(make_plan(shares, micros)), str(folder / name), rank)
        for name in names
    }
    pass_limits.CLEAN_STEPS = 0
    if shares == micros:
        larger = [4 * each for each in shares]
        found["same passes"] = {
            name: train_counted(case, larger) for name, case in SAME_PASSES.items()
        }
    torch.save(found, folder / f"{rank}.pt")


def reference_all(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    torch.save(
        {name: fit(case, None, str(folder)) for name, case in CASES.items()}, folder / f"{rank}.pt"
    )


# ------------------------------------------------------- trainings that end in an error message


class Sums(Weighted):
    def __init__(self) -> None:
        super().__init__(summed=True)


class Gathers(Module):
    """Gathers the losses of all ranks in its training step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.mse_loss(self.layers(batch[0]), batch[1])
        self.all_gather(loss.detach())
        return loss


SENTENCES: dict[str, Callable[[], Any]] = {
    "manual": lambda: Module(True),
    "LBFGS": Lbfgs,
    "a sum": Sums,
    "no room": lambda: Module(False),
    "gathered": lambda: Gathers(False),
}


HELD: deque[Any] = deque(maxlen=1)  # a weak reference to an intermediate result of a pass


class Holds(Module):
    """Keeps an intermediate result in an attribute."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept = self.layers[:2](batch[0])
        HELD.append(weakref.ref(self.kept))
        return {"loss": F.mse_loss(self.layers[2:](self.kept), batch[1])}


def look_at_memory(folder: Path, rank: int) -> None:
    """Save whether a failed pass's intermediate results are freed before smaller passes begin."""
    torch.set_num_threads(1)
    split, module, seen = Split(make_plan([8])), Holds(False), []
    bombs, free = Bombs(module, 0), recovery.free_memory

    def look(device: Any, **options: Any) -> None:
        free(device, **options)
        seen.append(HELD[-1]() is None)

    trainer = make_trainer(
        Program(), str(folder), devices=1, strategy=split.strategy(), callbacks=[bombs]
    )
    with patch.object(recovery, "free_memory", look):
        trainer.fit(module, split.loader(points(45), seed=SEED))
    torch.save(seen, folder / f"{rank}.pt")


def end(folder: Path, rank: int, name: str, shares: list[int]) -> None:
    """Save the error message of a training whose second batch doesn't fit on its last rank."""
    torch.set_num_threads(1)
    split = Split(make_plan(shares))
    module = SENTENCES[name]()
    bombs = Bombs(module, 0)

    def lay(trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        bombs.fuse.passes, bombs.fuse.at = -1, []
        if batch_idx == 1 and rank == split.world - 1:
            bombs.fuse.at = [("backward", 1, 0)]

    bombs.on_train_batch_start = lay  # type: ignore[method-assign]
    trainer = make_trainer(
        Program(),
        str(folder),
        devices=split.world,
        strategy=split.strategy(check=name != "a sum"),
        callbacks=[bombs],
    )
    empty = torch.empty_like

    def allocate(like: Any, **options: Any) -> torch.Tensor:
        if not isinstance(like, torch.nn.Parameter):
            return empty(like, **options)
        raise torch.OutOfMemoryError("CUDA out of memory (injected).")

    try:
        with patch.object(torch, "empty_like", allocate if name == "no room" else empty):
            trainer.fit(module, split.loader(points(45), seed=SEED))
        said = "learned"
    except (EvenerError, RuntimeError) as error:
        said = last_words(error)
    torch.save(said, folder / f"{rank}.pt")
