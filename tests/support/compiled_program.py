"""A program that compiles its whole step, and another model's optimizer step.

It prints, for each, the operations in each graph that was compiled, the trained weights, and
evener's functions that were compiled, as JSON. A graph that is compiled again is there again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import get_compilation_metrics
from torch.utils.data import DataLoader

EVENER = Path(__file__).resolve().parents[2] / "evener"
graphs: list[int] = []  # operations of each graph


def count(graph: Any, _: Any) -> Any:
    """Compile nothing, and count the operations."""
    graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
    return graph.forward


def train(compile_step: Callable[[Any, Any], Callable[[torch.Tensor], None]]) -> dict[str, Any]:
    """Train two epochs; `compile_step` returns the step of a model and its optimizer."""
    torch._dynamo.reset()
    graphs.clear()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    step = compile_step(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))
    loader = DataLoader(torch.randn(80, 8), 8)
    for _ in range(2):
        for rows in loader:
            step(rows)
    compiled = {(frame.co_filename or "", frame.co_name) for frame in get_compilation_metrics()}
    own = [name for file, name in compiled if Path(file).is_relative_to(EVENER)]
    return {"graphs": sorted(graphs), "weights": model.weight.tolist(), "own": own}


def compile_whole(model: Any, optimizer: Any) -> Callable[[torch.Tensor], None]:
    """Return a compiled step."""

    def step(rows: torch.Tensor) -> None:
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return torch.compile(step, backend=count)


def compile_update(model: Any, optimizer: Any) -> Callable[[torch.Tensor], None]:
    """Return a step whose optimizer's step is compiled."""
    update = torch.compile(optimizer.step, backend=count)

    def step(rows: torch.Tensor) -> None:
        model(rows).square().mean().backward()
        update()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    print(json.dumps([train(compile_whole), train(compile_update)]))
