"""Three small real workloads for benchmarks/learning.py, trained up to a target loss of the first
rows of their data.

- `digits`: a convolutional network on scikit-learn's handwritten digits; SGD with momentum
- `text`: a decoder-only model of characters, on the text of Python's own documentation
  (`pydoc_data`); AdamW
- `table`: a multilayer perceptron on scikit-learn's breast cancer measurements; plain SGD
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from evener.shares.whole_rows import apportion
from evener.training.noise_scale import NoiseScale, NoiseWindow, separate

CONTEXT, WIDTH, WORDS = 16, 32, 64
LOOKED_AT = 512  # rows whose loss must reach the target
SHARES = (5, 2, 1)  # of the training in which the noise scale is measured
GROWTH = 1.02  # of the steps from one look at the loss to the next
SMOOTH = 0.5  # of the loss before, in the mean that must reach the target
EARLY = 0.25  # of the steps to the target: what a short training before the search would see


class Task(NamedTuple):
    """A workload: its batches, the one that its own script has in the middle, and a rate to start
    from there.
    """

    make: Callable[[], nn.Module]
    optimizer: Callable[[Any, float], torch.optim.Optimizer]
    batches: tuple[int, ...]
    rate: float  # at the batch in the middle
    power: float  # by which rates to try follow the batch
    target: float  # loss
    most_steps: int  # at the batch in the middle

    @property
    def own_batch(self) -> int:
        """The batch of its own script."""
        return self.batches[len(self.batches) // 2]

    def rates(self, batch: int) -> list[float]:
        """Rates to try at a batch."""
        middle = self.rate * (batch / self.own_batch) ** self.power
        return [middle * 2.0**step for step in range(-2, 3)]

    def limit(self, batch: int) -> int:
        """Steps after which a training is given up."""
        return int(self.most_steps * (0.25 + self.own_batch / batch))


class Decoder(nn.Module):  # type: ignore[misc]
    """Two blocks of causal attention over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = (
            nn.Embedding(WORDS, WIDTH),
            nn.Parameter(torch.zeros(CONTEXT, WIDTH)),
        )
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 2, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer(
            "mask", torch.full((CONTEXT, CONTEXT), float("-inf")).triu(1), persistent=False
        )

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Scores of the next character at each place: (rows, words, places)."""
        hidden = self.words(text) + self.places
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        return self.head(hidden).transpose(1, 2)


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(30, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 2)
    )


TASKS = {
    "digits": Task(
        _convolutions,
        lambda parameters, rate: torch.optim.SGD(parameters, rate, momentum=0.9),
        (4, 8, 16, 32, 64, 128, 256),
        0.06,
        0.8,
        0.03,
        800,
    ),
    "text": Task(
        Decoder,
        lambda parameters, rate: torch.optim.AdamW(parameters, rate, (0.9, 0.99)),
        (4, 8, 16, 32, 64, 128, 256),
        0.008,
        0.5,
        1.9,
        1200,
    ),
    "table": Task(
        _perceptron,
        torch.optim.SGD,
        (2, 4, 8, 16, 32, 64, 128),
        0.4,
        0.8,
        0.025,
        1500,
    ),
}


class Data(NamedTuple):
    """Rows to train on, in an order by chance."""

    inputs: torch.Tensor
    labels: torch.Tensor


def load(name: str, saved: Path | None = None) -> Data:
    """A workload's data, from a file of `save` or from the packages that have it."""
    arrays = dict(np.load(saved)) if saved else read_packages()
    if name == "text":
        windows = torch.from_numpy(arrays["text"].astype(np.int64)).unfold(0, CONTEXT + 1, CONTEXT)
        inputs, labels = windows[:, :-1], windows[:, 1:]
    else:
        inputs = torch.from_numpy(arrays[f"{name}_inputs"].astype(np.float32))
        labels = torch.from_numpy(arrays[f"{name}_labels"].astype(np.int64))
        inputs = (
            (inputs - inputs.mean(0)) / (inputs.std(0) + 1e-6)
            if name == "table"
            else inputs[:, None] / 16
        )
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(inputs)))
    return Data(inputs[order], labels[order])


def read_packages() -> dict[str, np.ndarray]:
    """The three data sets as arrays, from scikit-learn and Python's own documentation."""
    from pydoc_data import topics

    from sklearn.datasets import load_breast_cancer, load_digits

    text = (
        "".join(topics.topics[name] for name in sorted(topics.topics))
        .lower()
        .encode("ascii", "ignore")
    )
    letters = np.frombuffer(text, np.uint8)
    common = np.argsort(-np.bincount(letters, minlength=256))[: WORDS - 1]
    numbers = np.full(256, WORDS - 1, np.uint8)
    numbers[common] = np.arange(WORDS - 1)
    digits, table = load_digits(), load_breast_cancer()
    return {
        "text": numbers[letters],
        "digits_inputs": digits.images.astype(np.uint8),
        "digits_labels": digits.target.astype(np.uint8),
        "table_inputs": table.data.astype(np.float32),
        "table_labels": table.target.astype(np.uint8),
    }


def _batches(rows: int, batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Batches of row numbers from one shuffled epoch after another, none of which is cut."""
    chosen, left = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.long)
    while True:
        while len(left) < batch:
            left = torch.cat([left, torch.randperm(rows, generator=chosen)])
        yield left[:batch]
        left = left[batch:]


class Course:
    """The loss of the first rows, at looks that get rarer, and when its mean reached the target."""

    def __init__(self, model: nn.Module, data: Data, target: float) -> None:
        self._model, self._data, self._target = model, data, target
        self._next, self._mean = 1.0, float("nan")
        self.start = self._look()

    def reached(self, step: int) -> bool | None:
        """True once the loss is there, None where it never will be."""
        if step < self._next:
            return False
        self._next = max(step + 1, step * GROWTH)
        loss = self._look()
        self._mean = loss if self._mean != self._mean else SMOOTH * self._mean + (1 - SMOOTH) * loss
        return None if not loss < 4 * self.start + 4 else self._mean <= self._target

    def _look(self) -> float:
        with torch.no_grad():
            inputs, labels = (each[:LOOKED_AT] for each in self._data)
            return float(functional.cross_entropy(self._model(inputs), labels))


def train(name: str, data: Data, batch: int, rate: float, seed: int) -> int | None:
    """Steps to the target; None where it isn't reached."""
    task = TASKS[name]
    torch.manual_seed(seed)
    model = task.make()
    optimizer = task.optimizer(model.parameters(), rate)
    course = Course(model, data, task.target)
    for step, rows in zip(
        range(1, task.limit(batch) + 1), _batches(len(data.inputs), batch, seed), strict=False
    ):
        optimizer.zero_grad()
        functional.cross_entropy(model(data.inputs[rows]), data.labels[rows]).backward()
        optimizer.step()
        if (reached := course.reached(step)) is not False:
            return step if reached else None
    return None


def measure(name: str, data: Data, rate: float, seed: int) -> dict[str, Any]:
    """The noise scale of a training at the workload's own batch, in shares, until the target: of
    the whole, of its end and of its beginning, plainly and preconditioned by the optimizer's second
    moments.
    """
    task, taken = TASKS[name], []
    sizes = apportion(task.own_batch, [one / sum(SHARES) for one in SHARES])
    torch.manual_seed(seed)
    model = task.make()
    parameters = list(model.parameters())
    optimizer = task.optimizer(parameters, rate)
    course = Course(model, data, task.target)
    steps = zip(
        range(1, 4 * task.limit(task.own_batch)),
        _batches(len(data.inputs), task.own_batch, seed),
        strict=False,
    )
    for step, rows in steps:
        parts = []
        for part in rows.split(list(sizes)):
            loss = functional.cross_entropy(model(data.inputs[part]), data.labels[part])
            parts.append(torch.autograd.grad(loss, parameters))
        whole = [
            sum(n * g for n, g in zip(sizes, own, strict=True)) / sum(sizes)
            for own in zip(*parts, strict=True)
        ]
        scales = [_second_moment(optimizer, each) for each in parameters]
        taken.append(
            [
                _sample(sizes, parts, whole, by)
                for by in ([torch.tensor(1.0)] * len(parameters), scales)
            ]
        )
        for parameter, gradient in zip(parameters, whole, strict=True):
            parameter.grad = gradient
        optimizer.step()
        if course.reached(step) is not False:
            break
    return {
        kind: _summarize([each[place] for each in taken])
        for place, kind in enumerate(("plain", "preconditioned"))
    }


def _second_moment(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """What Adam divides the parameter's gradient by; 1 for another optimizer, and before its first
    step.
    """
    state = optimizer.state.get(parameter, {})
    if "exp_avg_sq" not in state:
        return torch.tensor(1.0)
    group = optimizer.param_groups[0]
    return (state["exp_avg_sq"] / (1 - group["betas"][1] ** int(state["step"]))).sqrt() + group[
        "eps"
    ]


def _sample(sizes: Any, parts: Any, whole: Any, scales: Any) -> Any:
    def squared(gradients: Any) -> float:
        return sum(float((g / by).square().sum()) for g, by in zip(gradients, scales, strict=True))

    return separate(
        sizes, sum(n * squared(own) for n, own in zip(sizes, parts, strict=True)), squared(whole)
    )


def _summarize(samples: list[Any]) -> dict[str, Any]:
    early = samples[: max(56, int(EARLY * len(samples)))]
    found = {"whole": (samples, 1.0), "end": (samples, 0.97), "early": (early, 1.0)}
    return {name: _scale(*each) for name, each in found.items()} | {"steps": len(samples)}


def _scale(samples: list[Any], kept: float) -> list[float] | None:
    window = NoiseWindow(kept)
    for sample in samples:
        window.add(sample)
    found: NoiseScale | None = window.scale()
    return None if found is None else [found.rows, found.low, found.high]
