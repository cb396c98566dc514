"""Measure the host's work per training step, by evener and by DistributedDataParallel.

  python -m benchmarks.step_work [--ranks 1 2] [--models host-bound] [--rounds 40]
  python -m benchmarks.step_work --trees /tmp/old --ranks 1     # compares with another tree
  python -m benchmarks.step_work --instructions --ranks 1       # valgrind, a minute for each

Three variants train the same model: `ddp` (DataLoader and DistributedDataParallel; with one rank
the bare model), `loop` (split.loader, split.wrap and a loop that calls backward itself) and `step`
(split.step). Each variant has its own processes for each tree, which take turns of a few steps: A B
C C B A. A busy machine slows neighbouring turns alike, so the result is the median ratio of a turn
to the first variant's turn in the same half round, with its 95 % interval.

Two counts per step don't depend on the machine's load: the Python bytecode instructions, and the
calls of Python and C functions by the first rank's thread. Each is the median of five means over 16
steps, so that a step with an audit doesn't count. With `--instructions`, callgrind counts all
machine instructions of that rank.

Without a GPU, a turn's time is the CPU time of the first rank's process. With one, it is wall time
until the GPU has finished; ranks then communicate over NCCL.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GPU = torch.cuda.is_available()
WAYS = ("ddp", "loop", "step")
CLASSES, BATCHES = 8, 64
COUNTED_STEPS = 16  # steps per count; the median of COUNTS counts is taken
COUNTS = 5
WARM_STEPS = 40
REPO = Path(__file__).parents[1]


class Size(NamedTuple):
    """A model: its width and number of layers, the rows per rank and the tokens per row."""

    width: int
    layers: int
    rows: int
    tokens: int


SIZES = {"host-bound": Size(8, 24, 2, 2), "device-bound": Size(256, 4, 32, 16)}
if GPU:
    SIZES = {"host-bound": Size(288, 24, 2, 2), "device-bound": Size(4096, 6, 64, 16)}


class Net(nn.Module):  # type: ignore[misc]  # torch isn't followed
    """An embedding of tokens with layers on top, and the mean over tokens."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Embedding(256, size.width)]
        for _ in range(size.layers):
            layers += [nn.Linear(size.width, size.width), nn.GELU()]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(size.width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layers(tokens).mean(1))
        return found


class Variant:
    """A training loop in this process that runs step by step."""

    def __init__(self, name: str, size: Size) -> None:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._name = name
        self._device = torch.device("cuda", rank) if GPU else torch.device("cpu")
        rows = size.rows * world * BATCHES
        data = TensorDataset(
            torch.randint(256, (rows, size.tokens)), torch.randint(CLASSES, (rows,))
        )
        model: Any = Net(size)
        self._split: Any = None
        if name == "ddp":
            model.to(self._device)
            if world > 1:
                model = DistributedDataParallel(model, device_ids=[rank] if GPU else None)
            sampler = DistributedSampler(data, world, rank)
            loader: Any = DataLoader(data, size.rows, sampler=sampler, pin_memory=GPU)
        else:
            from evener.torch import Split  # from the tree in PYTHONPATH

            self._split = Split(global_batch=size.rows * world)
            loader, model = self._split.loader(data, seed=0), self._split.wrap(model)
        self._model, self._batches = model, _endless(loader)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        self._criterion = nn.CrossEntropyLoss()

    def step(self) -> None:
        """Train on one batch."""
        batch = next(self._batches)
        self._optimizer.zero_grad()
        if self._name == "step":
            self._split.step(batch, self._part_loss)
        else:
            tokens, classes = (each.to(self._device, non_blocking=True) for each in batch)
            self._criterion(self._model(tokens), classes).backward()
        self._optimizer.step()

    def _part_loss(self, part: Any) -> Any:
        tokens, classes = part.batch
        return self._criterion(self._model(tokens), classes)

    def steps(self, count: int) -> None:
        """Train on some batches."""
        for _ in range(count):
            self.step()


def _endless(loader: Any) -> Iterator[Any]:
    epoch = 0
    while True:
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


# ------------------------------------------------------------------ in a rank


def take_turn(variant: Variant, count: int) -> float:
    """Train for some steps; return the mean time of a step in seconds."""
    if dist.is_initialized():
        dist.barrier()
    if not GPU:
        began = time.process_time()
        variant.steps(count)
        return (time.process_time() - began) / count
    torch.cuda.synchronize()
    began = time.perf_counter()
    variant.steps(count)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def count_instructions(variant: Variant, count: int) -> float:
    """Return the number of bytecode instructions per step in this thread."""
    seen = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal seen
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        seen += event == "opcode"
        return trace

    sys.settrace(trace)
    variant.steps(count)
    sys.settrace(None)
    return seen / count


def count_calls(variant: Variant, count: int) -> float:
    """Return the number of calls of Python and C functions per step in this thread."""
    seen = 0

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    sys.setprofile(note)
    variant.steps(count)
    sys.setprofile(None)
    return seen / count


COMMANDS: dict[str, Callable[[Variant, int], float]] = {
    "turn": take_turn,
    "instructions": count_instructions,
    "calls": count_calls,
}


def run_commands(name: str, size: str) -> None:
    """Run the commands on standard input and answer each with a number."""
    if GPU:
        torch.cuda.set_device(int(os.environ["RANK"]))
    else:
        torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("nccl" if GPU else "gloo")
    way = Variant(name, SIZES[size])
    way.steps(WARM_STEPS)
    print("ready", flush=True)
    for line in sys.stdin:
        command, count = line.split()
        print(json.dumps(COMMANDS[command](way, int(count))), flush=True)
    sys.stdout.flush()
    os._exit(0)


# ------------------------------------------------------------------ beside the ranks


class Training:
    """The processes of one variant of one tree, which train on request."""

    def __init__(self, tree: Path, way: str, model: str, ranks: int, prefix: Sequence[str]) -> None:
        with socket.socket() as door:
            door.bind(("127.0.0.1", 0))
            port = door.getsockname()[1]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(tree), os.getenv("PYTHONPATH")))),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
            "PYTHONHASHSEED": "0",
        }
        command = [sys.executable, "-P", "-W", "ignore", __file__, "--as", way, "--models", model]
        self._ranks = [
            subprocess.Popen(
                [*(prefix if rank == 0 else ()), *command],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=tree,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def wait(self) -> None:
        """Wait until the ranks have trained their first steps."""
        for each in self._ranks:
            assert each.stdout is not None
            said = each.stdout.readline()
            if said != "ready\n":
                raise SystemExit(f"a rank ended early: {said}")

    def ask(self, command: str, count: int) -> float:
        """Run a command on all ranks and return the first rank's answer."""
        for each in self._ranks:
            assert each.stdin is not None
            each.stdin.write(f"{command} {count}\n")
            each.stdin.flush()
        lines = [each.stdout.readline() for each in self._ranks if each.stdout is not None]
        return float(json.loads(lines[0]))

    def count(self, command: str) -> float:
        """Return the median of several counts per step."""
        return statistics.median(self.ask(command, COUNTED_STEPS) for _ in range(COUNTS))

    def control(self, option: str) -> None:
        """Control callgrind, in which the first rank runs."""
        command = ["callgrind_control", option, str(self._ranks[0].pid)]
        subprocess.run(command, check=True, capture_output=True)

    def close(self) -> None:
        """Let the processes exit and wait for them."""
        for each in self._ranks:
            if each.stdin is not None:
                each.stdin.close()
        for each in self._ranks:
            each.wait()


def find_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and the limits of its 95 % interval by bootstrap."""
    numbers = random.Random(0)
    drawn = sorted(statistics.median(numbers.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), drawn[50], drawn[-51]


def compare(trainings: dict[str, Training], rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the step times in seconds of each turn by variant.

    Turns at the same position are neighbours in time.
    """
    took: dict[str, list[float]] = {name: [] for name in trainings}
    for _ in range(rounds):
        for order in (list(trainings), list(trainings)[::-1]):
            for name in order:
                took[name].append(trainings[name].ask("turn", steps))
    return took


def describe(
    trainings: dict[str, Training], took: dict[str, list[float]], pairs: Sequence[tuple[str, str]]
) -> Iterator[str]:
    """Yield a line for each variant, and for each pair of variants."""
    for name, training in trainings.items():
        calls = training.count("calls")
        instructions = training.count("instructions")
        seconds = statistics.median(took[name])
        yield (
            f"  {name:14} {1e3 * seconds:8.3f} ms a step, {calls:8.1f} calls,"
            f" {instructions:9.1f} bytecode instructions"
        )
    for one, other in pairs:
        ratios = [mine / its for mine, its in zip(took[one], took[other], strict=True)]
        middle, low, high = find_interval(ratios)
        yield f"  {one} / {other}: {middle:.4f} [{low:.4f} {high:.4f}]"


def run(model: str, ranks: int, trees: dict[str, Path], given: argparse.Namespace) -> None:
    """Train with each variant of each tree and print the results."""
    names = {f"{way}": (trees["new"], way) for way in WAYS if way in given.ways}
    for label, tree in trees.items():
        if label != "new":
            names |= {f"{way} {label}": (tree, way) for way in given.ways if way != "ddp"}
    print(f"{model}, {ranks} rank{'s' if ranks > 1 else ''}", flush=True)
    if given.instructions:
        for name, (tree, way) in names.items():
            found = count_machine_instructions(tree, way, model, ranks)
            print(f"  {name:14} {found / 1e3:10.1f} thousand machine instructions", flush=True)
        return
    with ExitStack() as stack:
        trainings = {}
        for name, (tree, way) in names.items():
            trainings[name] = Training(tree, way, model, ranks, ())
            stack.callback(trainings[name].close)
        for each in trainings.values():
            each.wait()
        took = compare(trainings, given.rounds, given.steps)
        pairs = [(name, "ddp") for name in names if name != "ddp" and "ddp" in names]
        pairs += [(way, name) for name, (_, way) in names.items() if name != way]
        for line in describe(trainings, took, pairs):
            print(line, flush=True)


def count_machine_instructions(tree: Path, way: str, model: str, ranks: int) -> float:
    """Return the machine instructions per step in the first rank's process, by callgrind."""
    with tempfile.TemporaryDirectory() as made:
        kept = f"--callgrind-out-file={made}/counts"
        callgrind = ["valgrind", "--tool=callgrind", "-q", "--instr-atstart=no", kept]
        training = Training(tree, way, model, ranks, callgrind)
        training.wait()
        training.control("--instr=on")
        training.ask("turn", COUNTED_STEPS)
        training.control("--dump")
        training.close()
        found = re.search(r"^summary: (\d+)", Path(made, "counts.1").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit("callgrind counted nothing.")
    return int(found[1]) / COUNTED_STEPS


def main() -> None:
    """Run the comparisons that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=["host-bound"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--trees", type=Path, nargs="*", default=[], help="of other versions")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20, help="in a turn")
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--as", dest="way", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        run_commands(given.way, given.models[0])
        return
    trees = {"new": REPO, **{each.name: each.resolve() for each in given.trees}}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EVENER_LIVE_DIR"] = folder
        for model in given.models:
            for ranks in given.ranks:
                run(model, ranks, trees, given)


if __name__ == "__main__":
    main()
