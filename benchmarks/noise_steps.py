"""The noise scale by two steps in a row, beside that by the two halves of each step: what comparing
steps would give.

    python -m benchmarks.noise_steps

The three trainings of benchmarks/learning_tasks.py, at the batch of their own scripts and their
first rate, until they reach their target. Between two steps the weights move, which counts as
noise.
"""

from __future__ import annotations

import sys

import torch
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks import learning_tasks as tasks
from evener.training.noise_scale import NoiseScale, NoiseWindow, separate


def measure(name: str) -> tuple[NoiseScale | None, NoiseScale | None]:
    """The noise scale by halves of a step, and by pairs of steps."""
    task, data = tasks.TASKS[name], tasks.load(name)
    torch.manual_seed(0)
    model, rows = task.make(), task.own_batch
    parameters = list(model.parameters())
    optimizer, course = (
        task.optimizer(parameters, task.rate),
        tasks.Course(model, data, task.target),
    )
    halves, pairs, before = NoiseWindow(1), NoiseWindow(1), None
    for step, places in enumerate(tasks._batches(len(data.inputs), rows, 0), 1):
        parts = []
        for part in places.split(rows // 2):
            loss = functional.cross_entropy(model(data.inputs[part]), data.labels[part])
            parts.append(parameters_to_vector(torch.autograd.grad(loss, parameters)))
        compare(halves, rows // 2, *parts)
        whole = (parts[0] + parts[1]) / 2
        if step % 2:
            before = whole
        elif before is not None:
            compare(pairs, rows, before, whole)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        vector_to_parameters(whole, [each.grad for each in parameters])
        optimizer.step()
        if course.reached(step) is not False:
            break
    return halves.scale(), pairs.scale()


def compare(window: NoiseWindow, rows: int, first: torch.Tensor, second: torch.Tensor) -> None:
    """Add the sample of two gradients of as many rows."""
    weighted = rows * float(first.square().sum() + second.square().sum())
    window.add(separate((rows, rows), weighted, float(((first + second) / 2).square().sum())))


def main() -> None:
    """Print both."""
    torch.set_num_threads(1)
    for name in tasks.TASKS:
        found = [
            "too few steps"
            if each is None
            else f"{each.rows:.4g} rows ({each.low:.4g} - {each.high:.4g})"
            for each in measure(name)
        ]
        print(
            f"{name}: {found[0]} by halves of a step, {found[1]} by two steps",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    main()
