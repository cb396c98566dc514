"""What an audit of gradients costs, and whether it ever differs without a reason.

    python -m benchmarks.torch_audits            # on a GPU, some minutes
    python -m benchmarks.torch_audits --tiny     # on a CPU, to try it
    torchrun --nproc-per-node 2 -m benchmarks.torch_audits --part ranks

Prints JSON lines: the peak of a training step's memory with and without an audit, for a decoder of
a billion parameters; the seconds of both for a decoder of 100 million at 64 rows, and what audits
then take of 2,000 steps; how many of many audits of exact losses found a difference, and how near
any was to it (1: an alarm); and, by several processes, whether ranks' gradients seem to differ.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from evener.errors import EvenerError
from evener.torch import Split, training_audits
from evener.torch.audit import step as step_audit
from evener.torch.audit.compute import Bench, Piece
from evener.torch.audit.rows import FewRows, cut_few
from evener.torch.audit.sketch import name_tensors
from evener.torch.audit.step import Ways, audit
from evener.training.audit import (
    REPEATS,
    GradientDifference,
    Sketch,
    compare_ranks,
    find_largest,
    find_noises,
    is_audited,
)

from .exact_programs import CLASSES, EXACT_PROGRAMS, WIDTH

STEPS = 2000  # of which audits take their part
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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


def audit_rows(model: nn.Module, loss: Loss, few: FewRows, measures: bool = False) -> bool:
    """True if one device's gradient of these rows is that of two parts; `measures` as in Bench."""
    rows = few.rows
    parts = [
        Piece(partial(loss, part), size / rows)
        for part, size in zip(few.parts, few.sizes, strict=True)
    ]
    ways = Ways([Piece(partial(loss, few.whole))], parts, sizes=few.sizes)
    bench = Bench([model], name_tensors([model]), measures=measures)
    return audit(bench, ways).difference is None


def measure_cost(model: nn.Module, words: int, rows: int, length: int, amp: bool) -> None:
    """Print a step's memory and time, and an audit's, whose rows are at most half of the step's:
    a usual one, and one that measures rounding too.
    """
    device = next(model.parameters()).device
    optimizer = _make_optimizer(model)
    batch = [torch.randint(0, words, (rows, length + 1), device=device)]
    few = cut_few([batch[0][: max(2, rows // 2)]], max(2, rows // 2))
    assert few is not None

    def step(audits: bool, measures: bool = False) -> None:
        with torch.autocast(device.type, torch.bfloat16) if amp else nullcontext():
            loss = loss_of_texts(model, batch)
        loss.backward()
        if audits:
            audit_rows(model, partial(loss_of_texts, model), few, measures)
        optimizer.step()
        optimizer.zero_grad()

    kinds = {"step": (False,), "audit": (True,), "measuring audit": (True, True)}
    found = {}
    for name, kind in kinds.items():
        step(*kind)
        found[name] = _time(partial(step, *kind), device.type)
    step_seconds, step_peak = found.pop("step")
    count = sum(map(is_audited, range(1, STEPS + 1)))
    figures: dict[str, Any] = {
        "parameters": sum(map(torch.numel, model.parameters())),
        "rows": rows,
        "rows of the audit": few.rows,
        "step ms": round(step_seconds * 1e3, 2),
        f"audits in {STEPS} steps": count,
    }
    for name, (seconds, peak) in found.items():
        more = max(0.0, seconds - step_seconds)
        figures[f"{name} ms"] = round(more * 1e3, 2)
        figures[f"{name}s: part of the time"] = round(count * more / (STEPS * step_seconds), 5)
        if step_peak:
            figures[f"{name}: peak beside a step's"] = round(peak / step_peak, 4)
    print(json.dumps(figures), flush=True)


def _time(step: Callable[[], None], device: str) -> tuple[float, int]:
    """The seconds of the fastest of some steps, and the peak of memory."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds), torch.cuda.max_memory_allocated() if device == "cuda" else 0


def _make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    on_gpu = next(model.parameters()).is_cuda
    return torch.optim.AdamW(model.parameters(), 1e-4, fused=on_gpu)


def audit_decoder(
    model: nn.Module, words: int, rows: int, length: int, mode: str, audits: int, seconds: float
) -> None:
    """Train a decoder for `seconds` at most, audit each step, and print the number of alarms.

    `mode` is "autocast", "float32" or "TF32".
    """
    device = next(model.parameters()).device
    optimizer = _make_optimizer(model)
    torch.backends.cuda.matmul.allow_tf32 = mode == "TF32"
    alarms = count = 0
    began = time.monotonic()
    with noted_margins() as margins:
        while count < audits and time.monotonic() < began + seconds:
            batch = [torch.randint(0, words, (rows, length + 1), device=device)]
            autocast = torch.autocast(device.type, torch.bfloat16)
            with autocast if mode == "autocast" else nullcontext():
                loss = loss_of_texts(model, batch)
            loss.backward()
            few = cut_few(batch, rows)
            assert few is not None
            alarms += not audit_rows(model, partial(loss_of_texts, model), few)
            count += 1
            optimizer.step()
            optimizer.zero_grad()
    torch.backends.cuda.matmul.allow_tf32 = False
    size = sum(map(torch.numel, model.parameters()))
    figures = {"decoder": size, "mode": mode, "audits": count, "alarms": alarms}
    print(json.dumps(figures | margins.summarize()), flush=True)


def count_alarms(audits: int, seconds: float, device: str, names: Sequence[str]) -> None:
    """Train each program with an audit in each step, and print the number of alarms.

    Also prints the largest difference, as a part of what rounding may cause. A program takes
    `audits` steps, or `seconds` at most.
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
        self._measured: list[tuple[float, str, float]] = []  # by the repeats, where those didn't do

    def compare(
        self, reference: Sketch, trained: Sketch, repeats: Sequence[Sketch] = ()
    ) -> GradientDifference | None:
        """Compare as `evener.training.audit.compare`."""
        worst = find_largest(reference, trained, find_noises(reference, repeats))
        if worst is None:
            return None
        part = worst.relative / worst.allowed
        if repeats:
            self._measured.append((part, worst.name, worst.relative))
        else:
            self._first.append(part)
        return worst if part > 1.0 else None

    def summarize(self) -> dict[str, Any]:
        """The largest of both kinds, with its tensor, and how many were measured."""
        part, name, relative = max(self._measured, default=(0.0, "", 0.0))
        return {
            "largest by the floor": round(max(self._first, default=0.0), 3),
            "measured": len(self._measured),
            "largest by the measure": round(part, 3),
            "of": f"{name} {relative:.1e}" if name else "",
        }


@contextmanager
def noted_margins() -> Iterator[Margins]:
    """A context in which audits note how near each was to an alarm."""
    margins = Margins()
    with mock.patch.object(step_audit, "compare", margins.compare):
        yield margins


def compare_devices() -> None:
    """Print which exact programs seem to have another gradient on a GPU than on a CPU by the
    floors, and by what is measured on both.
    """
    doubts, alarms = [], []
    for name, program in EXACT_PROGRAMS.items():
        if program.compiled:
            continue
        torch.manual_seed(1)
        batch = [torch.randn(16, WIDTH), torch.randint(0, CLASSES, (16,))]
        first = program.model()
        program.loss(first, batch)  # lazy layers
        sketches, noises = [], []
        for device in ("cpu", DEVICE):
            model = copy.deepcopy(first).to(device)
            way = [Piece(partial(program.loss, model, [each.to(device) for each in batch]))]
            bench = Bench([model], name_tensors([model]))
            with bench.open():
                every = [bench.sketch(way, number) for number in range(REPEATS + 1)]
            sketches.append(every[0])
            noises.append(find_noises(every[0], every[1:]))
        if compare_ranks(sketches):
            doubts.append(name)
        if compare_ranks(sketches, noises):
            alarms.append(name)
    figures = {"CPU beside GPU": len(EXACT_PROGRAMS) - 1, "by floors": doubts, "alarms": alarms}
    print(json.dumps(figures), flush=True)


def train_ranks(tiny: bool, steps: int = 40) -> None:
    """Train a decoder by shares of 3:1 with an audit where one is due, and print what audits said
    and how often ranks' gradients had to be measured. The last rank computes attention by other
    kernels than the first.
    """
    split = Split(ratios=(3, 1), global_batch=8 if tiny else 32)
    if split.rank:
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    words, length = (500, 16) if tiny else (32_000, 256)
    torch.manual_seed(0)
    model = split.wrap(
        (Decoder(64, 2, words) if tiny else Decoder(768, 10, words)).to(split.device)
    )
    optimizer = _make_optimizer(model)
    rows = torch.randint(0, words, (steps * split.ranks.global_batch, length + 1))
    compared: list[tuple[bool, bool]] = []  # whether rounding was measured; whether ranks differ

    def compare(every: Any, noises: Any = ()) -> Any:
        found = compare_ranks(every, noises)
        compared.append((bool(noises), found is not None))
        return found

    said = ""
    began = time.monotonic()
    with (
        mock.patch.object(training_audits, "compare_ranks", compare),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        try:
            for batch in split.loader(TensorDataset(rows)):
                with torch.autocast(split.device.type, torch.bfloat16):
                    split.step(batch, lambda part: loss_of_texts(model, part.batch))
                optimizer.step()
                optimizer.zero_grad()
        except EvenerError as error:
            said = str(error)
    figures = {
        "rank": split.rank,
        "seconds": round(time.monotonic() - began, 1),
        "ranks compared": len(compared),
        "doubts": sum(differs for measured, differs in compared if not measured),
        "alarms": sum(differs for measured, differs in compared if measured),
        "said": said,
        "warned": [str(each.message)[:200] for each in caught if each.category is UserWarning],
    }
    print(json.dumps(figures), flush=True)


def measure_large(tiny: bool) -> None:
    """The decoder of a billion parameters: alarms, memory."""
    words, rows, length = (500, 8, 32) if tiny else (32_000, 16, 256)
    torch.manual_seed(1)
    model = (Decoder(64, 2, words) if tiny else Decoder(2048, 20, words)).to(DEVICE)
    for mode, audits, seconds in (("autocast", 13, 16.0), ("float32", 6, 8.0), ("TF32", 6, 8.0)):
        audit_decoder(model, words, rows, length, mode, audits, seconds)
    measure_cost(model, words, rows, length, amp=True)


def measure_small(tiny: bool) -> None:
    """The decoder of 100 million parameters: alarms, time; and a CPU beside a GPU."""
    words, length = (500, 32) if tiny else (32_000, 256)
    torch.manual_seed(1)
    model = (Decoder(64, 2, words) if tiny else Decoder(768, 10, words)).to(DEVICE)
    measure_cost(model, words, rows=64, length=length, amp=True)
    for mode in ("autocast", "float32", "TF32"):
        audit_decoder(model, words, 32, length, mode, 5 if tiny else 60, 3.0)
    compare_devices()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--part", choices=("large", "small", "programs", "ranks"), default="")
    parser.add_argument("--audits", type=int, default=0, help="of each exact program")
    parser.add_argument("--seconds", type=float, default=60.0, help="at most, of each program")
    parser.add_argument("--programs", nargs="*", choices=EXACT_PROGRAMS, metavar="NAME")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.part in ("", "large"):
        measure_large(options.tiny)
    if options.part in ("", "small"):
        measure_small(options.tiny)
    if options.part in ("", "programs"):
        audits = options.audits or (10 if options.tiny else 400)
        names = options.programs or [
            name for name, each in EXACT_PROGRAMS.items() if not (options.tiny and each.compiled)
        ]
        count_alarms(audits, options.seconds, DEVICE, names)
    if options.part == "ranks":
        train_ranks(options.tiny)


if __name__ == "__main__":
    main()
