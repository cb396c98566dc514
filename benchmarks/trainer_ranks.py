"""One process of a training that benchmarks.trainers starts: a Llama in transformers, Lightning or accelerate.

The three `build_` functions are for `--workload benchmarks/trainer_ranks.py:build_lightning`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812 - as its documentation writes it
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from evener.huggingface import with_plan
from evener.plan import Plan, load_plan
from evener.torch_split import Split
from evener.torch_split.process import settle
from evener.workloads.protocol import Place
from evener.workloads.torch_backend.user_model import build

WORDS = 8192
SIZES = {"small": (128, 4, 64), "large": (768, 12, 512)}  # hidden size, layers, tokens of a row
ROWS = 1 << 16
ENDLESS = 1 << 40
CLIP = 1.0
Done = Callable[[], bool]  # called after each optimizer step: whether the training is over


class Texts(Dataset[dict[str, Any]]):
    """Random tokens."""

    def __init__(self, size: str) -> None:
        self.texts = torch.randint(0, WORDS, (4096, SIZES[size][2]), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        text = self.texts[row % len(self.texts)]
        return {"input_ids": text, "labels": text}


def network(size: str) -> LlamaForCausalLM:
    """A Llama; `large` has about 100 million parameters."""
    torch.manual_seed(0)
    hidden, layers, length = SIZES[size]
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_attention_heads": hidden // 64}
    config = LlamaConfig(vocab_size=WORDS, num_hidden_layers=layers, max_position_embeddings=length, **sizes)
    return LlamaForCausalLM(config)


# ---------------------------------------------------------------------- transformers


class EachStep(TrainerCallback):
    """Asks after each optimizer step whether to stop."""

    def __init__(self, done: Done) -> None:
        self._done = done

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """As transformers calls it."""
        control.should_training_stop = self._done()


def make_trainer(kind: Any, size: str, bf16: bool, **arguments: Any) -> Any:
    """A trainer of this class; what it would write to disk is off."""
    common = TrainingArguments(
        tempfile.mkdtemp(),
        bf16=bf16,
        max_grad_norm=CLIP,
        use_cpu=not torch.cuda.is_available(),
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        **arguments,
    )
    return kind(model=network(size), args=common, train_dataset=Texts(size))


def train_huggingface(plan: Plan | None, rows: int, size: str, bf16: bool, done: Done) -> None:
    """With `Trainer`."""
    kind = with_plan(Trainer, plan) if plan else Trainer
    trainer = make_trainer(kind, size, bf16, per_device_train_batch_size=rows, num_train_epochs=1000)
    trainer.add_callback(EachStep(done))
    trainer.train()


def build_huggingface(size: str = "small", bf16: bool = False) -> Any:
    """The Trainer."""
    return make_trainer(Trainer, size, bf16)


# ---------------------------------------------------------------------- Lightning


class Module(L.LightningModule):
    """The same model."""

    def __init__(self, size: str, done: Done = lambda: False) -> None:
        super().__init__()
        self.model = network(size)
        self._done = done

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The mean loss over tokens."""
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, as the others."""
        return torch.optim.AdamW(self.parameters(), 5e-5)

    def on_train_batch_end(self, *_: Any) -> None:
        """Ask whether to stop."""
        self.trainer.should_stop = self._done()


def train_lightning(plan: Plan | None, rows: int, size: str, bf16: bool, done: Done) -> None:
    """With `lightning.Trainer`."""
    split = Split(plan) if plan else None
    world = int(os.environ.get("WORLD_SIZE", 1))
    trainer = L.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=world,
        strategy=split.strategy() if split else "ddp" if world > 1 else "auto",
        use_distributed_sampler=split is None,
        precision="bf16-mixed" if bf16 else "32-true",
        max_epochs=1000,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Texts(size)
    loader = split.loader(data) if split else DataLoader(data, batch_size=rows, shuffle=True)
    trainer.fit(Module(size, done), loader)


def build_lightning(size: str = "small") -> Any:
    """The module and its data."""
    return Module(size), Texts(size)


# ---------------------------------------------------------------------- accelerate


def train_accelerate(plan: Plan | None, rows: int, size: str, bf16: bool, done: Done) -> None:
    """With a loop of one's own."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="bf16" if bf16 else "no")
    model: Any = network(size)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 5e-5))
    data, loader = Texts(size), None
    if plan:
        split = Split(plan)
        model, loader = split.wrap(model), split.loader(data)
    loader = loader or accelerator.prepare(DataLoader(data, batch_size=rows, shuffle=True))
    loop(model, optimizer, loader, accelerator.backward, done)


def loop(model: Any, optimizer: Any, loader: Any, backward: Callable[[Any], None], done: Done) -> None:
    """Train until it is done; both libraries clip by PyTorch's function."""
    while True:
        for batch in loader:
            backward(model(**batch).loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            if done():
                return


# ---------------------------------------------------------------------- PyTorch


def train_torch(plan: Plan | None, rows: int, size: str, bf16: bool, done: Done) -> None:
    """With PyTorch's DistributedDataParallel, on CPUs in float32."""
    if bf16 or torch.cuda.is_available():
        raise SystemExit("The trainer torch is for CPUs, in float32.")
    model, data = network(size), Texts(size)
    loader: Any
    if plan:
        split = Split(plan)
        model, loader = split.wrap(model), split.loader(data)
    else:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
        loader = DataLoader(data, batch_size=rows, sampler=DistributedSampler(data))
    loop(model, torch.optim.AdamW(model.parameters(), 5e-5), loader, torch.Tensor.backward, done)


class NextWords(torch.nn.Module):
    """The same model, from tokens to the scores of each next one."""

    def __init__(self, size: str) -> None:
        super().__init__()
        self.model = network(size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, words)."""
        return self.model(input_ids=tokens).logits[:, :-1]


def next_word_loss(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """The mean over tokens, laid out as transformers does."""
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), words.flatten())


def build_torch(size: str = "small") -> Any:
    """Model, optimizer, loss and data."""
    model, texts = NextWords(size), Texts(size).texts
    optimizer = torch.optim.AdamW(model.parameters(), 5e-5)
    return model, optimizer, next_word_loss, torch.utils.data.TensorDataset(texts, texts[:, 1:])


build_accelerate = build_torch


# ---------------------------------------------------------------------- a probe


def step_as_probe(trainer: str, rows: int, size: str, done: Done) -> None:
    """The steps that a probe of this trainer times."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    peers = (f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",) * world
    device = f"GPU:{rank}" if torch.cuda.is_available() else "CPU:0"
    place = Place((device,), rank=rank, peers=peers if world > 1 else (), threads=1)
    workload = build(f"{__file__}:build_{trainer}", place, {"size": size})
    workload.prepare((rows,) * world)
    while not done():
        workload.step()
        workload.synchronize()


# ---------------------------------------------------------------------- a rank

TRAININGS = {
    "huggingface": train_huggingface,
    "lightning": train_lightning,
    "accelerate": train_accelerate,
    "torch": train_torch,
}


class Turns:
    """Waits for a line from the parent before each step, and says how long the step took."""

    def __init__(self) -> None:
        self._began = _clocks()

    def __call__(self) -> bool:
        print(*(now - then for now, then in zip(_clocks(), self._began, strict=True)), flush=True)
        stop = sys.stdin.readline() == ""
        self._began = _clocks()
        return stop


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class Clock:
    """Times the steps after a warm-up of so many."""

    def __init__(self, warm_up: int, steps: int) -> None:
        self._left, self._steps = warm_up + steps, steps
        self._began = time.perf_counter()

    def __call__(self) -> bool:
        if self._left == self._steps:
            self._began = time.perf_counter()
        self._left -= 1
        if self._left < 0:
            print(json.dumps(self._steps / (time.perf_counter() - self._began)), flush=True)
        return self._left < 0


def main() -> None:
    """Train until all steps are made, or the parent closes the pipe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trainer", choices=list(TRAININGS))
    parser.add_argument("--plan", required=True)
    parser.add_argument("--bare", type=int, help="without the plan, with so many rows in each process")
    parser.add_argument("--probe", type=int, help="steps as a probe makes them, of so many rows in each process")
    parser.add_argument("--size", default="small")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="0: in turns")
    options = parser.parse_args()
    plan = load_plan(options.plan)
    if (options.bare or options.probe) and not torch.cuda.is_available():  # the same cores and memory as by the plan
        settle(torch.device("cpu"), plan.layout.active[int(os.environ.get("RANK", 0))])
    done = Clock(options.warm_up, options.steps) if options.steps else Turns()
    if options.probe:
        step_as_probe(options.trainer, options.probe, options.size, done)
    else:
        given = None if options.bare else plan
        TRAININGS[options.trainer](given, options.bare or 1, options.size, options.bf16, done)
    os._exit(0)  # a process group that is left at different times would wait


if __name__ == "__main__":
    main()
