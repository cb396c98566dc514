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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from evener.torch.audit import step as step_audit
from evener.torch.audit.compute import Bench, Piece
from evener.torch.audit.rows import FewRows, cut_few
from evener.torch.audit.sketch import name_tensors
from evener.torch.audit.step import Ways, audit
from evener.training.audit import (
    GradientDifference,
    Sketch,
    find_largest,
    find_noises,
    is_audited,
)

from .exact_programs import CLASSES, EXACT_PROGRAMS, WIDTH

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


def count_alarms(audits: int, seconds: float, device: str, names: Sequence[str]) -> None:
    """Print how many of so many audits, one in each step of each program, found a difference, and
    the largest part of what rounding may make of a gradient that any was.

    A program has at most these seconds.
    """
    for amp in (False, True):
        for name in names:
            program = EXACT_PROGRAMS[name]
            points = torch.randn(256, WIDTH, device=device)
            classes = torch.randint(0, CLASSES, (256,), device=device)
            model = program.model().to(device)
            program.loss(model, [points[:2], classes[:2]])  # lazy layers
            trained = torch.compile(model, dynamic=True) if program.compiled else model
            sparse = name.startswith("sparse")
            optimizer = (torch.optim.SGD if sparse else torch.optim.Adam)(model.parameters(), 1e-3)
            alarms = count = 0
            began = time.monotonic()
            with noted_margins() as margins:
                while count < audits and time.monotonic() < began + seconds:
                    chosen = torch.randint(0, 256, (16,), device=device)
                    batch = [points[chosen], classes[chosen]]
                    with torch.autocast(device, torch.bfloat16) if amp else nullcontext():
                        made = program.loss(trained, batch)
                    made.backward()
                    few = cut_few(batch, 16)
                    assert few is not None
                    alarms += not audit_rows(model, partial(program.loss, trained), few)
                    count += 1
                    optimizer.step()
                    optimizer.zero_grad()
            figures = {"program": name, "autocast": amp, "audits": count, "alarms": alarms}
            print(json.dumps(figures | margins.summarize()), flush=True)


class Margins:
    """The comparisons that audits made: how large a difference was, as a part of what rounding may
    make of it.
    """

    def __init__(self) -> None:
        self._first: list[float] = []  # by the floors
        self._measured: list[float] = []  # by the repeats, where the floors didn't do

    def compare(
        self, reference: Sketch, trained: Sketch, repeats: Sequence[Sketch] = ()
    ) -> GradientDifference | None:
        """Compare as `evener.training.audit.compare`."""
        worst = find_largest(reference, trained, find_noises(reference, repeats))
        if worst is None:
            return None
        part = worst.relative / worst.allowed
        (self._measured if repeats else self._first).append(part)
        return worst if part > 1.0 else None

    def summarize(self) -> dict[str, float]:
        """The largest of both kinds, and how many were measured."""
        return {
            "largest by the floor": round(max(self._first, default=0.0), 3),
            "measured": len(self._measured),
            "largest by the measure": round(max(self._measured, default=0.0), 3),
        }


@contextmanager
def noted_margins() -> Iterator[Margins]:
    """A context in which audits note how near each was to an alarm."""
    margins = Margins()
    with mock.patch.object(step_audit, "compare", margins.compare):
        yield margins


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--audits", type=int, default=0, help="of each exact program")
    parser.add_argument("--only-alarms", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0, help="at most, of each program")
    parser.add_argument("--programs", nargs="*", choices=EXACT_PROGRAMS, metavar="NAME")
    options = parser.parse_args()
    torch.manual_seed(0)
    if not options.only_alarms:
        if options.tiny:
            measure_cost(64, 2, 500, rows=16, length=32, amp=False)
            measure_cost(128, 2, 500, rows=64, length=32, amp=False)
        else:
            measure_cost(2048, 20, 32_000, rows=16, length=512, amp=True)
            measure_cost(768, 10, 32_000, rows=64, length=512, amp=True)
    audits = options.audits or (10 if options.tiny else 400)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = options.programs or [
        name for name, each in EXACT_PROGRAMS.items() if not (options.tiny and each.compiled)
    ]
    count_alarms(audits, options.seconds, device, names)


if __name__ == "__main__":
    main()
