"""The noise scale as trainers measure it, at weights that stay; rank_server.py runs `huggingface` and `lightning`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch._dynamo  # so that ranks needn't
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses

from evener.learning.noise_scale import NoiseWindow
from tests.support.torch_noise_programs import STEPS, data, network

SHARES = (40, 24)


class Classifier(nn.Module):
    """As transformers' trainers take it: it computes its loss, a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, inputs: Any, labels: Any) -> dict[str, Any]:
        outputs = self.network(inputs)
        return {"loss": F.cross_entropy(outputs, labels), "logits": outputs}


def set_up(noise: Any) -> None:
    """Look at every step, and let all count alike."""
    noise.window, noise.every = NoiseWindow(1), 1


def huggingface(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    torch.save([train_huggingface(1, STEPS), train_huggingface(2, STEPS // 2)], folder / f"{rank}.pt")


def train_huggingface(accumulated: int, steps: int) -> Any:
    from transformers import Trainer, TrainingArguments

    from evener.huggingface import with_plan

    rows = [{"inputs": each, "labels": label} for each, label in zip(*data().tensors, strict=True)]
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output,
            use_cpu=True,
            max_steps=steps,
            learning_rate=0.0,
            optim="sgd",
            max_grad_norm=1e-3,
            gradient_accumulation_steps=accumulated,
            dataloader_drop_last=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
        )
        planned = with_plan(Trainer, ratios=SHARES, global_batch=sum(SHARES), noise=True)
        trainer = planned(model=Classifier(), args=arguments, train_dataset=rows)
        set_up(trainer._planned.noise)
        trainer.train()
        return msgspec.to_builtins(trainer._planned.noise.scale())


def lightning(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    torch.save([train_lightning(1), train_lightning(2)], folder / f"{rank}.pt")


def train_lightning(accumulated: int) -> Any:
    import lightning

    from evener.torch_split import Split

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Any, _: int) -> Any:
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.0)

    split = Split(ratios=SHARES, global_batch=sum(SHARES), noise=True)
    assert split._planned.noise is not None
    set_up(split._planned.noise)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=split.world,
        strategy=split.strategy(),
        use_distributed_sampler=False,
        max_steps=STEPS // accumulated,
        accumulate_grad_batches=accumulated,
        gradient_clip_val=1e-3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), split.loader(data(), drop_last=True))
    return msgspec.to_builtins(split.noise_scale)
