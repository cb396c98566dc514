"""Each private name of Lightning that evener uses exists and does what is expected."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not all(map(find_spec, ("torch", "lightning"))):
    pytest.skip("Lightning isn't installed", allow_module_level=True)

import torch
from torch.utils.data import DataLoader

from evener import lightning_private as private

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_each_private_name_does_what_it_is_used_for(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.tuner.lr_finder import _LRCallback

    seen: dict[str, Any] = {}

    class Model(pl.LightningModule):
        """A model with manual optimization."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.layer = torch.nn.Linear(2, 1)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch + 1

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch * 2

        def on_train_epoch_start(self) -> None:
            seen["given"] = list(private.loaders(self.trainer.fit_loop))
            private.replace_loader(self.trainer.fit_loop, other)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            trainer, loop = self.trainer, self.trainer.fit_loop
            self.log("loss", torch.tensor(3.0), batch_size=2)
            (name, metric), *_ = private.logged(trainer).items()
            seen["logged"] = name, float(metric.value), set(private.default_states(metric))
            seen["loaders"] = list(private.loaders(loop))
            seen["moved"] = private.move_batch(self, torch.ones(1), torch.device("cpu"))
            own = private.signal_connector(trainer)
            seen["signals"] = own.received_sigterm, private.sigterm_handler(trainer).__self__ is own
            seen["shares"] = private.divides_rows(trainer)
            optimizer = self.optimizers()
            seen["wrapped"] = private.wrapped_optimizers(trainer.strategy) == [optimizer]
            for each in private.AROUND_STEPS:
                setattr(
                    optimizer, each, lambda each=each: seen.setdefault("around", []).append(each)
                )
            optimizer.step()
            seen["asks"] = callable(getattr(loop.epoch_loop, private.ASKS))
            private.set_strategy(trainer, trainer.strategy)
            seen["strategy"] = trainer.strategy is optimizer._strategy.__repr__.__self__

    trainer = pl.Trainer(
        max_epochs=1,
        limit_train_batches=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    loader, other = (DataLoader(torch.ones(2, 2)) for _ in range(2))
    trainer.fit(Model(), loader)
    assert seen["given"] == [loader]
    assert seen["loaders"] == [other]
    assert seen["logged"] == ("training_step.loss", 3.0, {"value", "cumulated_batch_size"})
    assert seen["moved"].tolist() == [4.0]
    assert seen["signals"] == (False, True)
    assert seen["shares"] is True
    assert seen["wrapped"]
    assert seen["around"] == list(private.AROUND_STEPS)
    assert seen["asks"]
    assert seen["strategy"]
    assert private.searches_rate(_LRCallback(1))
    assert not private.searches_rate(pl.Callback())
