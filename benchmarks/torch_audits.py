"""What an audit of gradients costs, and whether it ever differs without a reason.

    python -m benchmarks.torch_audits            # on a GPU, under four minutes
    python -m benchmarks.torch_audits --tiny     # on a CPU, to try it

Prints JSON lines: the peak of a training step's memory with and without an audit, for a decoder of
a billion parameters; the seconds of both for a decoder of 100 million at 64 rows, and what audits
then take of 2,000 steps; and how many of many audits of exact losses found a difference.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from evener.torch.audit.compute import Bench, Piece
from evener.torch.audit.rows import FewRows, cut_few
from evener.torch.audit.sketch import name_tensors
from evener.torch.audit.step import Ways, audit
from evener.training.audit import is_audited

STEPS = 2000  # of which audits take their part
Loss = Callable[[Any], torch.Tensor]


class Decoder(nn.Module):  # type: ignore[misc]  # torch isn't followed
    """A decoder of texts, with dropout."""

    def __init__(self, width: int, layers: int, words: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        one = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout, "gelu")
        self.layers = nn.TransformerEncoder(one, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next word: (rows, length, words)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        found = self.layers(self.embed(tokens).transpose(0, 1), mask=mask, is_causal=True)
        scores: torch.Tensor = self.head(found.transpose(0, 1))
        return scores


def loss_of_texts(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over words of what comes next; all rows have as many."""
    (tokens,) = batch
    scores = model(tokens[:, :-1]).float()
    return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def audit_rows(model: nn.Module, loss: Loss, few: FewRows) -> bool:
    """True if one device's gradient of these rows is that of two parts."""
    rows = few.rows
    parts = [
        Piece(partial(loss, part), size / rows)
        for part, size in zip(few.parts, few.sizes, strict=True)
    ]
    ways = Ways([Piece(partial(loss, few.whole))], parts, sizes=few.sizes)
    return audit(Bench([model], name_tensors([model])), ways).difference is None


def measure_cost(width: int, layers: int, words: int, rows: int, length: int, amp: bool) -> None:
    """Print a step's memory and time, and an audit's, whose rows are at most half of the step's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Decoder(width, layers, words).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=device == "cuda")
    batch = [torch.randint(0, words, (rows, length + 1), device=device)]
    few = cut_few([batch[0][: max(2, rows // 2)]], max(2, rows // 2))
    assert few is not None

    def compute() -> None:
        with torch.autocast(device, torch.bfloat16) if amp else nullcontext():
            loss = loss_of_texts(model, batch)
        loss.backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def step(audits: bool) -> None:
        compute()
        if audits:
            assert audit_rows(model, partial(loss_of_texts, model), few)
        update()

    found = {}
    for audits in (False, True):
        step(audits)
        seconds, peak = _time(partial(step, audits), device)
        found[audits] = seconds, peak
    audit_seconds = max(0.0, found[True][0] - found[False][0])
    count = sum(map(is_audited, range(1, STEPS + 1)))
    figures = {
        "parameters": sum(map(torch.numel, model.parameters())),
        "rows": rows,
        "rows of the audit": few.rows,
        "step ms": round(found[False][0] * 1e3, 2),
        "audit ms": round(audit_seconds * 1e3, 2),
        f"audits in {STEPS} steps": count,
        "part of the time": round(count * audit_seconds / (STEPS * found[False][0]), 5),
        "peak with an audit / without": round(found[True][1] / found[False][1], 4)
        if found[False][1]
        else None,
    }
    print(json.dumps(figures), flush=True)


def _time(step: Callable[[], None], device: str) -> tuple[float, int]:
    """The seconds of the fastest of some steps, and the peak of memory."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds), torch.cuda.max_memory_allocated() if device == "cuda" else 0


def exact_programs(device: str) -> Iterator[tuple[str, nn.Module, Callable[[nn.Module, Any], Any]]]:
    """Models with losses that are means over rows, by name; each takes (points, classes)."""

    def classify(model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def regress(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) - functional.one_hot(batch[1], 4)).square().mean()

    def net(*layers: nn.Module) -> nn.Module:
        return nn.Sequential(*layers).to(device)

    image = nn.Unflatten(1, (1, 8, 8))
    yield (
        "dropout",
        net(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 4)),
        classify,
    )
    yield "squares", net(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)), regress
    yield (
        "batch normalization",
        net(
            image,
            nn.Conv2d(1, 16, 3),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.LazyLinear(4),
        ),
        classify,
    )
    yield (
        "max pooling",
        net(
            image,
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.LazyLinear(4),
        ),
        classify,
    )
    yield (
        "layer normalization",
        net(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4)),
        classify,
    )
    yield (
        "deep",
        net(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)], nn.Linear(64, 4)),
        classify,
    )
    yield "compiled", net(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 4)), classify


def count_alarms(audits: int, compiled: bool) -> None:
    """Print how many of so many audits, one in each step of each program, found a difference."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for amp in (False, True):
        for name, model, loss in exact_programs(device):
            if name == "compiled" and not compiled:
                continue
            points = torch.randn(64, 64, device=device)
            classes = torch.randint(0, 4, (64,), device=device)
            loss(model, [points[:2], classes[:2]])  # lazy layers
            trained = torch.compile(model, dynamic=True) if name == "compiled" else model
            optimizer = torch.optim.Adam(model.parameters(), 1e-3)
            alarms = 0
            for _ in range(audits):
                chosen = torch.randint(0, 64, (16,), device=device)
                batch = [points[chosen], classes[chosen]]
                with torch.autocast(device, torch.bfloat16) if amp else nullcontext():
                    made = loss(trained, batch)
                made.backward()
                few = cut_few(batch, 16)
                assert few is not None
                alarms += not audit_rows(model, partial(loss, trained), few)
                optimizer.step()
                optimizer.zero_grad()
            figures = {"program": name, "autocast": amp, "audits": audits, "alarms": alarms}
            print(json.dumps(figures), flush=True)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--audits", type=int, default=0, help="of each exact program")
    parser.add_argument("--only-alarms", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    if not options.only_alarms:
        if options.tiny:
            measure_cost(64, 2, 500, rows=16, length=32, amp=False)
            measure_cost(128, 2, 500, rows=64, length=32, amp=False)
        else:
            measure_cost(2048, 20, 32_000, rows=16, length=512, amp=True)
            measure_cost(768, 10, 32_000, rows=64, length=512, amp=True)
    count_alarms(options.audits or (10 if options.tiny else 400), compiled=not options.tiny)


if __name__ == "__main__":
    main()
