"""Measure the cost of gradient audits, and whether they ever raise a false alarm.

  python -m benchmarks.torch_audits            # on a GPU, some minutes
  python -m benchmarks.torch_audits --tiny     # on a CPU, to try it
  python -m benchmarks.torch_audits --part work     # calls and bytecode, on a CPU
  torchrun --nproc-per-node 2 -m benchmarks.torch_audits --part ranks

Prints JSON lines: the peak memory of a training step with and without an audit, for a decoder with
a billion parameters; the time of both for a decoder with 100 million parameters and 64 rows, and
the fraction that audits take of 2,000 steps; how many audits of exact losses found a difference,
and the largest difference relative to an alarm (1: an alarm); and, with several processes, whether
the ranks' gradients seem to differ.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import msgspec
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import TensorDataset

from evener.errors import EvenerError
from evener.torch import Split, training_audits
from evener.torch.audit import step as step_audit
from evener.torch.audit.computations import Computations
from evener.torch.audit.compute import GradientSketcher, Piece
from evener.torch.audit.quick import KnownPasses
from evener.torch.audit.rows import FEWER, ROWS, FewRows, choose_few_rows
from evener.torch.audit.sketch import SIGNS, GradientSums, name_tensors
from evener.torch.audit.step import audit
from evener.training.audit import (
    EARLY,
    REPEATS,
    GradientDifference,
    Sketch,
    compare_ranks,
    find_largest,
    find_noises,
    is_audited,
)

from .exact_programs import CLASSES, EXACT_PROGRAMS, WIDTH

STEPS = 2000  # number of steps for which the audits' fraction is computed
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEAR = 0.5  # fraction of an alarm above which a program is printed
Loss = Callable[[Any], torch.Tensor]
Figures = dict[str, Any]


class Decoder(nn.Module):  # type: ignore[misc]  # torch isn't followed
    """A decoder for texts, with dropout."""

    def __init__(self, width: int, layers: int, words: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        one = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout, "gelu")
        self.layers = nn.TransformerEncoder(one, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next word: (rows, length, words)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        found = self.layers(self.embed(tokens).transpose(0, 1), mask=mask, is_causal=True)
        scores: torch.Tensor = self.head(found.transpose(0, 1))
        return scores


def loss_of_texts(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean loss of next-word prediction; all rows have the same length."""
    (tokens,) = batch
    scores = model(tokens[:, :-1]).float()
    return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def audit_rows(
    model: nn.Module,
    loss: Loss,
    few: FewRows,
    measures: bool = False,
    known: KnownPasses | None = None,
    moves: bool = False,
) -> bool:
    """True if the gradient of these rows on one device equals that of their two parts.

    `measures` and `known` are options of GradientSketcher, and `moves` is `add_noise` of `audit`.
    """
    sketcher = GradientSketcher(
        [model], name_tensors([model]), measures_rounding=measures, known_passes=known
    )
    return audit(sketcher, make_computations(loss, few), moves).difference is None


def make_computations(loss: Loss, few: FewRows) -> Computations:
    """Return the computations of the gradient of a few rows at once and in two parts."""
    parts = [
        Piece(partial(loss, part), size / few.rows)
        for part, size in zip(few.parts, few.sizes, strict=True)
    ]
    return Computations([Piece(partial(loss, few.whole))], parts, sizes=few.sizes)


def measure_cost(
    model: nn.Module, words: int, rows: int, length: int, amp: bool, turns: int = 5
) -> None:
    """Print a step's memory and time, and the additional cost of several kinds of audits.

    "first" is the first audit of all, with its one-time work; "early" an audit of the same number
    of rows, up to step 64; "late" one of fewer rows, after that; "thorough" one after a change;
    "measuring" one that measures rounding, too. Times are first of steps that don't wait for the
    GPU, as in a loop that doesn't read its loss in each step, and then of steps that do.
    """
    device = next(model.parameters()).device
    optimizer = _make_optimizer(model)
    read = [torch.randint(0, words, (rows, length + 1))]  # like a batch from a loader
    batch = [each.to(device) for each in read]
    loss_of = partial(loss_of_texts, model)
    known = KnownPasses()

    def step(most: int = 0, **options: Any) -> None:
        with torch.autocast(device.type, torch.bfloat16) if amp else nullcontext():
            loss = loss_of(batch)
        loss.backward()
        if most:
            few = _take_rows(read, device, min(most, rows // 2))
            audit_rows(model, loss_of, few, **options)
        optimizer.step()
        optimizer.zero_grad()

    kinds: dict[str, Callable[[], None]] = {
        "early": partial(step, ROWS, known=known),
        "late": partial(step, FEWER, known=known),
        "thorough": partial(step, ROWS),
        "measuring": partial(step, ROWS, measures=True),
    }
    for _ in range(3):
        step()
    step_peak = _measure_peak(step)
    first = _time_added(step, partial(step, ROWS, known=known, moves=True), device.type, turns=1)
    new_shapes = _time_added(step, kinds["late"], device.type, turns=1)
    peaks = {name: _measure_peak(kind) for name, kind in kinds.items()}
    figures: dict[str, Any] = {
        "parameters": sum(map(torch.numel, model.parameters())),
        "rows": rows,
        "first late audit ms": round(new_shapes * 1e3, 1),
        "peak beside a step's": {
            name: round(peak / (step_peak or 1), 4) for name, peak in peaks.items()
        },
    }
    print(json.dumps(figures), flush=True)
    for waits in (False, True):
        more = {
            name: _time_added(step, kind, device.type, waits, turns) for name, kind in kinds.items()
        }
        _print_part(_time_steps([step] * 8, device.type, waits) / 8, {"first": first} | more, waits)
    few = _take_rows(read, device, FEWER)
    measure_parts(model, loss_of, few, known)


def _print_part(step_seconds: float, more: Mapping[str, float], waits: bool) -> None:
    """Print the time that each kind of audit adds to a step, and all audits to STEPS steps."""
    early = sum(map(is_audited, range(2, EARLY + 1)))
    late = sum(map(is_audited, range(EARLY + 1, STEPS + 1)))
    spent = more["first"] + early * more["early"] + late * more["late"]
    figures = {
        "each step waits for the GPU": waits,
        "step ms": round(step_seconds * 1e3, 2),
        "audits ms": {name: round(each * 1e3, 1) for name, each in more.items()},
        f"audits: part of {STEPS} steps": round(spent / (STEPS * step_seconds), 5),
        "all but the first": round((spent - more["first"]) / (STEPS * step_seconds), 5),
    }
    print(json.dumps(figures), flush=True)


def _take_rows(read: list[torch.Tensor], device: torch.device, most: int) -> FewRows:
    """Copy a few rows of a loader's batch to the device, without waiting for the copy."""
    few = choose_few_rows(read, len(read[0]), max_rows=most)
    assert few is not None

    def move(rows: Any) -> Any:
        return [each.to(device, non_blocking=True) for each in rows]

    return msgspec.structs.replace(few, whole=move(few.whole), parts=tuple(map(move, few.parts)))


def measure_parts(model: nn.Module, loss: Loss, few: FewRows, known: KnownPasses) -> None:
    """Print the duration of each part of a quick audit in ms, for the host and in total."""
    device = next(model.parameters()).device.type
    figures: dict[str, Any] = {"parts of a quick audit": {}}
    computations = make_computations(loss, few)

    def note(name: str, part: Callable[[], Any]) -> None:
        part()
        host, whole = [], []
        for _ in range(3):
            _wait(device)
            began = time.perf_counter()
            part()
            host.append(time.perf_counter() - began)
            _wait(device)
            whole.append(time.perf_counter() - began)
        figures["parts of a quick audit"][name] = [
            round(min(each) * 1e3, 2) for each in (host, whole)
        ]

    tensors = name_tensors([model])
    sketcher = GradientSketcher([model], tensors, known_passes=known)

    def open_sketcher() -> None:
        with sketcher.open():
            pass

    def take(gradients: bool) -> None:
        made = loss(few.whole)
        if gradients:
            torch.autograd.grad(made, list(model.parameters()))

    note("rows", lambda: choose_few_rows(few.whole, few.rows))
    note("names of tensors", lambda: name_tensors([model]))
    note("open", open_sketcher)
    with sketcher.open():
        found = torch.autograd.grad(loss(few.whole), list(tensors.values()))
        gradients = dict(zip(tensors, found, strict=True))
        del found
        note("forward alone", lambda: take(False))
        note("forward and backward alone", lambda: take(True))
        note("projections", lambda: GradientSums(tensors, SIGNS, True).add_gradients(gradients))
        gradients.clear()
        note("reference", lambda: sketcher.sum_quickly(computations.reference))
        note("parts", lambda: sketcher.sum_quickly(computations.trained))
        note("reference, each operation looked at", lambda: sketcher.sketch(computations.reference))
    print(json.dumps(figures), flush=True)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _measure_peak(step: Callable[[], None]) -> int:
    """Return the peak GPU memory of a step in bytes; 0 without a GPU."""
    if DEVICE != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    step()
    return int(torch.cuda.max_memory_allocated())


def _time_steps(steps: Sequence[Callable[[], None]], device: str, waits: bool) -> float:
    """Return the duration of these steps in seconds.

    With `waits`, the host waits for the GPU after each step.
    """
    _wait(device)
    began = time.perf_counter()
    for step in steps:
        step()
        if waits:
            _wait(device)
    _wait(device)
    return time.perf_counter() - began


def _time_added(
    step: Callable[[], None],
    audited: Callable[[], None],
    device: str,
    waits: bool = False,
    turns: int = 5,
) -> float:
    """Return the seconds that an audit adds to a step: the median of some turns."""
    added = []
    for _ in range(turns):
        usual = _time_steps([step] * 6, device, waits)
        added.append(_time_steps([step, step, audited, step, step, step], device, waits) - usual)
    return median(added)


def _make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    on_gpu = next(model.parameters()).is_cuda
    return torch.optim.AdamW(model.parameters(), 1e-4, fused=on_gpu)


def audit_decoder(
    model: nn.Module, words: int, rows: int, length: int, mode: str, audits: int, seconds: float
) -> None:
    """Train a decoder for at most `seconds` with an audit per step; print the number of alarms.

    `mode` is "autocast", "float32" or "TF32".
    """
    device = next(model.parameters()).device
    optimizer = _make_optimizer(model)
    torch.backends.cuda.matmul.allow_tf32 = mode == "TF32"
    alarms = count = 0
    known = KnownPasses()
    began = time.monotonic()
    with noted_margins() as margins:
        while count < audits and time.monotonic() < began + seconds:
            batch = [torch.randint(0, words, (rows, length + 1), device=device)]
            autocast = torch.autocast(device.type, torch.bfloat16)
            with autocast if mode == "autocast" else nullcontext():
                loss = loss_of_texts(model, batch)
            loss.backward()
            few = choose_few_rows(batch, rows, max_rows=ROWS if count % 2 == 0 else FEWER)
            assert few is not None
            known = KnownPasses() if count % 2 == 0 else known
            alarms += not audit_rows(model, partial(loss_of_texts, model), few, known=known)
            count += 1
            optimizer.step()
            optimizer.zero_grad()
    torch.backends.cuda.matmul.allow_tf32 = False
    size = sum(map(torch.numel, model.parameters()))
    figures = {"decoder": size, "mode": mode, "audits": count, "alarms": alarms}
    print(json.dumps(figures | margins.summarize()), flush=True)


def count_alarms(
    audits: int, seconds: float, device: str, names: Sequence[str], processes: int
) -> None:
    """Train each program with an audit per step in several processes; print the alarms.

    Each program is trained in float32 and under autocast, for `audits` steps or at most `seconds`.
    Prints the total, and each program with an alarm or nearly one.
    """
    jobs = [(name, amp, audits, seconds, device) for amp in (False, True) for name in names]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        found = list(pool.map(_audit_program, *zip(*jobs, strict=True)))
    for figures in found:
        if figures["alarms"] or figures["largest by the measure"] > NEAR:
            print(json.dumps(figures), flush=True)
    nearest = max(found, key=lambda each: each["largest by the measure"])
    total = {
        "device": device,
        "programs": len(names),
        "audits": sum(each["audits"] for each in found),
        "alarms": sum(each["alarms"] for each in found),
        "fewest audits of a program": min(each["audits"] for each in found),
        "beyond a floor": sum(each["measured"] for each in found),
        "nearest to an alarm": [nearest["largest by the measure"], nearest["program"]],
    }
    print(json.dumps(total), flush=True)


def _audit_program(name: str, amp: bool, audits: int, seconds: float, device: str) -> Figures:
    """Train a program with an audit per step, and return the number of alarms."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    program = EXACT_PROGRAMS[name]
    points = torch.randn(256, WIDTH, device=device)
    classes = torch.randint(0, CLASSES, (256,), device=device)
    model = program.model().to(device)
    program.loss(model, [points[:2], classes[:2]])  # lazy layers
    trained = torch.compile(model, dynamic=True) if program.compiled else model
    sparse = name.startswith("sparse")
    optimizer = (torch.optim.SGD if sparse else torch.optim.Adam)(model.parameters(), 1e-3)
    alarms = count = 0
    known = KnownPasses()
    began = time.monotonic()
    with noted_margins() as margins:
        while count < audits and time.monotonic() < began + seconds:
            chosen = torch.randint(0, 256, (16,), device=device)
            batch = [points[chosen], classes[chosen]]
            with torch.autocast(device, torch.bfloat16) if amp else nullcontext():
                made = program.loss(trained, batch)
            made.backward()
            few = choose_few_rows(batch, 16, max_rows=ROWS if count % 2 == 0 else FEWER)
            assert few is not None
            known = KnownPasses() if count % 2 == 0 else known
            alarms += not audit_rows(model, partial(program.loss, trained), few, known=known)
            count += 1
            optimizer.step()
            optimizer.zero_grad()
    figures = {"program": name, "autocast": amp, "audits": count, "alarms": alarms}
    return figures | margins.summarize()


class Margins:
    """Records the differences that audits found, relative to what rounding may explain."""

    def __init__(self) -> None:
        self._first: list[float] = []  # relative to the floors
        # relative to the repeats, if the floors were exceeded
        self._measured: list[tuple[float, str, float]] = []

    def compare(
        self, reference: Sketch, trained: Sketch, repeats: Sequence[Sketch] = ()
    ) -> GradientDifference | None:
        """Compare like `evener.training.audit.compare`, and record the difference."""
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
        """Return the largest differences by floors and by repeats, and the number of repeats."""
        part, name, relative = max(self._measured, default=(0.0, "", 0.0))
        return {
            "largest by the floor": round(max(self._first, default=0.0), 3),
            "measured": len(self._measured),
            "largest by the measure": round(part, 3),
            "of": f"{name} {relative:.1e}" if name else "",
        }


@contextmanager
def noted_margins() -> Iterator[Margins]:
    """Return a context in which the margins of audits are recorded."""
    margins = Margins()
    with mock.patch.object(step_audit, "compare", margins.compare):
        yield margins


def compare_devices() -> None:
    """Compare the gradients of exact programs on a CPU and a GPU, and print the differences.

    They are compared by the floors, and by the rounding measured on both devices.
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
            computation = [Piece(partial(program.loss, model, [each.to(device) for each in batch]))]
            sketcher = GradientSketcher([model], name_tensors([model]))
            with sketcher.open():
                every = [sketcher.sketch(computation, number) for number in range(REPEATS + 1)]
            sketches.append(every[0])
            noises.append(find_noises(every[0], every[1:]))
        if compare_ranks(sketches):
            doubts.append(name)
        if compare_ranks(sketches, noises):
            alarms.append(name)
    figures = {"CPU beside GPU": len(EXACT_PROGRAMS) - 1, "by floors": doubts, "alarms": alarms}
    print(json.dumps(figures), flush=True)


def train_ranks(tiny: bool, steps: int = 40) -> None:
    """Train a decoder with shares 3:1 and the regular audits, and print the results.

    Also prints how often rounding had to be measured. The last rank uses other attention kernels
    than the first.
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


PLAN = """schema = 2
created = "2026-11-29T00:00:00Z"
workload = "decoder"
framework = "torch"
precision = "float32"
xla = false
evidence = []
[throughput]
samples_per_second = 1.0
low = 1.0
high = 1.0
[search]
probes = 1
out_of_memory = 0
seconds = 1.0
seed = 0
why_stopped = "measured"
[fingerprint]
devices = []
driver = ""
workload_digest = ""
[fingerprint.versions]
[layout]
kind = "solo"
global_batch = {rows}
[[layout.share]]
device = "{device}"
index = 0
name = "measured"
batch = {rows}
micro = {micro}
ratio = 1.0
"""


def train_passes(tiny: bool, steps: int = 70) -> None:
    """Train the decoder of 100 million parameters on one device by a plan with two passes.

    Prints the time that audits add to the first 64 steps; the time they add to 2,000 steps if all
    later ones take as long as the last; and the time of a step between audits, compared with
    training without audits.
    """
    words, length, rows = (500, 16, 8) if tiny else (32_000, 256, 64)
    data = torch.randint(0, words, (steps * rows, length + 1))
    device = "gpu-0" if DEVICE == "cuda" else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        path.write_text(PLAN.format(rows=rows, micro=rows // 2, device=device))
        taken = {check: _train_by(Split(path), check, data, tiny, words) for check in (False, True)}
    audited = [step for step in range(1, steps + 1) if is_audited(step)]
    usual = {check: median(seconds[2:]) for check, seconds in taken.items()}
    first = taken[False][0]
    more = [taken[True][step - 1] - (first if step == 1 else usual[True]) for step in audited]
    later = sum(map(is_audited, range(steps + 1, STEPS + 1)))
    part = (sum(more) + later * more[-1]) / (STEPS * usual[False])
    figures = {
        "training in two passes: step ms": round(usual[False] * 1e3, 2),
        "the same with audits, between them": round(usual[True] * 1e3, 2),
        "audits ms": {step: round(each * 1e3, 1) for step, each in zip(audited, more, strict=True)},
        f"audits: part of {STEPS} steps": round(part, 5),
    }
    print(json.dumps(figures), flush=True)


def _train_by(split: Split, check: bool, data: torch.Tensor, tiny: bool, words: int) -> list[float]:
    """Return the duration of each step of a training run by a plan; with `check`, it is audited."""
    torch.manual_seed(0)
    model = (Decoder(64, 2, words) if tiny else Decoder(768, 10, words)).to(split.device)
    model = split.wrap(model)
    optimizer = _make_optimizer(model)
    seconds = []
    for batch in split.loader(TensorDataset(data)):
        _wait(DEVICE)
        began = time.perf_counter()
        with torch.autocast(split.device.type, torch.bfloat16):
            split.step(batch, lambda part: loss_of_texts(model, part.batch), check=check)
        optimizer.step()
        optimizer.zero_grad()
        _wait(DEVICE)
        seconds.append(time.perf_counter() - began)
    return seconds


def measure_first(tiny: bool) -> None:
    """Print the duration of a first audit in float32, after plain passes.

    A run under autocast has loaded no float32 kernels before its first audit.
    """
    words, length = (500, 32) if tiny else (32_000, 256)
    torch.manual_seed(1)
    model = (Decoder(64, 2, words) if tiny else Decoder(768, 10, words)).to(DEVICE)
    optimizer = _make_optimizer(model)
    device = next(model.parameters()).device
    read = [torch.randint(0, words, (64, length + 1))]
    batch = [each.to(device) for each in read]
    loss_of = partial(loss_of_texts, model)

    def step(audited: Callable[[], Any] = lambda: None) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(batch)
        loss.backward()
        audited()
        optimizer.step()
        optimizer.zero_grad()

    few = _take_rows(read, device, ROWS)

    def compute_bare() -> None:
        for rows in (few.whole, *few.parts):
            torch.autograd.grad(loss_of(rows), list(model.parameters()))

    def audit_first() -> None:
        audit_rows(model, loss_of, few, moves=True)

    for _ in range(3):
        step()
    figures = {}
    for name, work in (
        ("bare passes", compute_bare),
        ("again", compute_bare),
        ("a first audit then", audit_first),
        ("another first audit", audit_first),
    ):
        added = _time_added(step, partial(step, work), device.type, turns=1)
        figures[name] = round(added * 1e3, 1)
    print(json.dumps({"ms": figures}), flush=True)


def measure_work() -> None:
    """Print the host's work for audits: their passes, and calls and bytecode relative to passes.

    The decoder has as many layers as the one with 100 million parameters, but is narrow. The counts
    don't depend on the machine's load.
    """
    words = 50
    model = Decoder(64, 10, words)
    read = [torch.randint(0, words, (16, 9))]
    loss = partial(loss_of_texts, model)
    known = KnownPasses()
    passes = intercepted = 0

    def count_pass(batch: Any) -> torch.Tensor:
        nonlocal passes, intercepted
        passes += 1
        intercepted += _get_current_dispatch_mode() is not None
        return loss(batch)

    def audit_some(most: int) -> None:
        few = choose_few_rows(read, 16, max_rows=most)
        assert few is not None
        audit_rows(model, count_pass, few, known=known)

    bare = count_work(lambda: loss(read).backward())
    for name, most in (("first", ROWS), ("early", ROWS), ("late", FEWER)):
        passes = intercepted = 0
        known = KnownPasses() if name == "first" else known
        audit_some(most)
        figures = {"audit": name, "passes": passes, "intercepted": intercepted}
        if name == "first":
            known = KnownPasses()
        calls, bytecode = count_work(partial(audit_some, most))
        figures |= {"calls": calls, "bytecode": bytecode}
        beside = [round(calls / bare[0] / 3, 2), round(bytecode / bare[1] / 3, 2)]
        print(json.dumps(figures | {"beside three bare passes": beside}), flush=True)


def count_work(work: Callable[[], Any]) -> tuple[int, int]:
    """Return the function calls and the bytecode instructions of this thread in `work`."""
    calls = bytecode = 0

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal bytecode
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        bytecode += event == "opcode"
        return trace

    for start, listen in ((sys.setprofile, note), (sys.settrace, trace)):
        start(listen)
        try:
            work()
        finally:
            start(None)
    return calls, bytecode


def measure_large(tiny: bool) -> None:
    """Measure alarms and memory of the decoder with a billion parameters."""
    words, rows, length = (500, 8, 32) if tiny else (32_000, 16, 256)
    torch.manual_seed(1)
    model = (Decoder(64, 2, words) if tiny else Decoder(2048, 20, words)).to(DEVICE)
    measure_cost(model, words, rows, length, amp=True, turns=1)
    for mode, audits, seconds in (("autocast", 13, 7.0), ("float32", 6, 4.0), ("TF32", 6, 4.0)):
        audit_decoder(model, words, rows, length, mode, audits, seconds)


def measure_small(tiny: bool) -> None:
    """Measure alarms and time of the decoder with 100 million parameters; compare CPU and GPU."""
    words, length = (500, 32) if tiny else (32_000, 256)
    torch.manual_seed(1)
    model = (Decoder(64, 2, words) if tiny else Decoder(768, 10, words)).to(DEVICE)
    measure_cost(model, words, rows=64, length=length, amp=True)
    for mode in ("autocast", "float32", "TF32"):
        audit_decoder(model, words, 32, length, mode, 5 if tiny else 60, 3.0)
    compare_devices()


def main() -> None:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument(
        "--part", choices=("large", "small", "passes", "programs", "ranks", "work", "first")
    )
    parser.add_argument("--audits", type=int, default=0, help="of each exact program")
    parser.add_argument("--seconds", type=float, default=60.0, help="at most, of each program")
    parser.add_argument("--processes", type=int, default=2, help="that train the programs")
    parser.add_argument("--device", default=DEVICE, help="that trains the programs")
    parser.add_argument("--programs", nargs="*", choices=EXACT_PROGRAMS, metavar="NAME")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.part in (None, "large"):
        measure_large(options.tiny)
    if options.part in (None, "small"):
        measure_small(options.tiny)
    if options.part in (None, "passes"):
        train_passes(options.tiny)
    if options.part in (None, "programs"):
        audits = options.audits or (10 if options.tiny else 400)
        names = options.programs or [
            name for name, each in EXACT_PROGRAMS.items() if not (options.tiny and each.compiled)
        ]
        count_alarms(audits, options.seconds, options.device, names, options.processes)
    if options.part == "first":
        measure_first(options.tiny)
    if options.part == "work":
        measure_work()
    if options.part == "ranks":
        train_ranks(options.tiny)


if __name__ == "__main__":
    main()
