"""The noise scale that trainers measure with constant weights.

rank_server.py runs `huggingface` and `lightning`.
"""

from __future__ import annotations

import tempfile
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses

from evener.torch import Split
from evener.training.noise_scale import NoiseWindow
from tests.support.fewer_audits import audit_first_step
from tests.support.torch_noise_programs import data, network

SHARES = (40, 24)


class Classifier(nn.Module):
    """A model as transformers expects it: it computes its loss, a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, inputs: Any, labels: Any) -> dict[str, Any]:
        outputs = self.network(inputs)
        return {"loss": F.cross_entropy(outputs, labels), "logits": outputs}


EXACT, STEPS = 6, 110
Learned = tuple[Any, list[torch.Tensor]]  # the noise scale and the weights


def set_up(noise: Any) -> None:
    """Measure in every step, with equal weight."""
    if noise is not None:
        noise.window, noise.every = NoiseWindow(1), 1


def save(folder: Path, rank: int, train: Any, *exact: Any) -> None:
    """Save what a trainer measures with one batch per step and with two accumulated ones.

    Also saves whether the weights of `exact`, which are functions that train, are the same with and
    without the measurement.
    """
    same = [all(map(torch.equal, learn(False)[1], learn(True)[1])) for learn in exact]
    torch.save(([train(1, STEPS)[0], train(2, STEPS // 2)[0]], same), folder / f"{rank}.pt")


def huggingface(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    audit_first_step()
    exact = partial(train_huggingface, 1, EXACT, 0.1)
    save(folder, rank, train_huggingface, exact, train_accelerate)


def train_huggingface(
    accumulated: int, steps: int, rate: float = 0.0, noise: bool = True
) -> Learned:
    from transformers import Trainer, TrainingArguments

    from evener.huggingface import with_plan

    rows = [{"inputs": each, "labels": label} for each, label in zip(*data().tensors, strict=True)]
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output,
            use_cpu=True,
            max_steps=steps,
            learning_rate=rate,
            optim="sgd",
            max_grad_norm=1e-3,
            gradient_accumulation_steps=accumulated,
            dataloader_drop_last=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
        )
        planned = with_plan(Trainer, ratios=SHARES, global_batch=sum(SHARES), noise=noise)
        trainer = planned(model=Classifier(), args=arguments, train_dataset=rows)
        set_up(trainer._planned.noise)
        torch.manual_seed(0)
        trainer.train()
        measured = trainer._planned.noise and msgspec.to_builtins(trainer._planned.noise.scale())
        return measured, [each.detach() for each in trainer.model.parameters()]


def train_accelerate(noise: bool) -> Learned:
    from accelerate import Accelerator

    split = Split(ratios=SHARES, global_batch=sum(SHARES), noise=noise)
    set_up(split.noise)
    torch.manual_seed(0)
    loader, model = split.loader(data()), split.wrap(Accelerator(cpu=True).prepare(network()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for inputs, labels in islice(loader, EXACT):
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return None, [each.detach() for each in model.parameters()]


def lightning(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    audit_first_step()
    save(folder, rank, train_lightning, partial(train_lightning, 1, EXACT, 0.1))


def train_lightning(accumulated: int, steps: int, rate: float = 0.0, noise: bool = True) -> Learned:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Any, _: int) -> Any:
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), rate)

    split = Split(ratios=SHARES, global_batch=sum(SHARES), noise=noise)
    set_up(split.noise)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=split.world,
        strategy=split.strategy(),
        use_distributed_sampler=False,
        max_steps=steps,
        accumulate_grad_batches=accumulated,
        gradient_clip_val=1e-3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, split.loader(data(), drop_last=True))
    return msgspec.to_builtins(split.noise_scale), [each.detach() for each in module.parameters()]
