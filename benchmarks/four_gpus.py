"""Measure what evener does on four GPUs of one host, in parts of a few minutes.

  python -m benchmarks.four_gpus PART... --out FOLDER [--seconds 570] [--percent 100,60,40,25]

MPS limits the GPUs to 100, 60, 40 and 25 % of their multiprocessors; `--percent` names others, such
as 100,40 on two GPUs. The parts run one after the other in the given order, each by the benchmark
named here:

  plan      a search for a decoder, trainings by its plan, and its neighbours by hand (gpu_loops)
  trainer   a search for transformers' Trainer and a training by its plan (trainers)
  accelerate, lightning  the same for a loop by accelerate, and for Lightning's Trainer (trainers)
  run       five programs by `evener run` without a plan, by torchrun, by a plan (gpu_unequal)
  no-p2p    the search and training of `plan` without peer-to-peer access (gpu_loops)
  sockets   the same over sockets (gpu_loops)
  links     `evener doctor --links` beside an all-reduce by hand, equal GPUs (gpu_limits)
  watch     monitors beside nvidia-smi and pictures, while a program trains (gpu_watch, gpu_screen)
  tests     the test suite's tests that need GPUs

Each line is printed as soon as a part prints it, and kept in FOLDER/PART.txt. A part that takes
longer than its time is killed, and the next one begins. `--kind cpu` tries it with small sizes on
two slices of the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import psutil

from benchmarks.gpu_bench import mps_daemon
from benchmarks.gpu_exchanges import TESTS

ROOT = Path(__file__).parents[1]
SLICES = "cpu/2"
NO_P2P = {"NCCL_P2P_DISABLE": "1"}
SOCKETS = {**NO_P2P, "NCCL_SHM_DISABLE": "1"}
TRAINS_AFTER = 25.0  # seconds from the start of `evener run` until its program trains


class Command(NamedTuple):
    """A module to run, its arguments, its own variables, and the seconds before it starts."""

    words: Sequence[str]
    variables: dict[str, str] = {}  # noqa: RUF012 - never changed
    after: float = 0.0


class Part(NamedTuple):
    """Commands that run side by side, their time limit, and whether GPUs are made unequal."""

    commands: Sequence[Command]
    seconds: float
    unequal: bool = True


class Parts:
    """The parts, for GPUs of these percentages or for a CPU, with a folder for their files."""

    def __init__(self, kind: str, percentages: Sequence[str], out: Path) -> None:
        self._kind, self._gpu, self._out = kind, kind == "gpu", out
        self._percentages = ",".join(percentages)
        self._unequal, self._equal = SLICES, SLICES
        self._pairs = ("", "")  # GPUs for the two halves of the tests
        if self._gpu:
            limited = [
                f"gpu:{i}" if percent == "100" else f"gpu:{i}@{percent}%"
                for i, percent in enumerate(percentages)
            ]
            self._unequal = ",".join(limited)
            self._equal = ",".join(f"gpu:{i}" for i in range(len(percentages)))
            self._pairs = ("0,1", "2,3" if len(percentages) > 3 else "0,1")

    def plan(self) -> Part:
        """Search, train by the plan in both kinds of loops, and time its neighbours by hand."""
        return Part([self._loops("plan", "512", "--sweep", "--budget", "60s")], 215)

    def no_p2p(self) -> Part:
        """Search and train without peer-to-peer access, as on consumer boards."""
        more = ("--ways", "wrap", "--budget", "45s")
        return Part([self._loops("no-p2p", "256", *more, **NO_P2P)], 110)

    def sockets(self) -> Part:
        """Search and train over sockets, as between hosts."""
        more = ("--ways", "wrap", "--budget", "60s")
        return Part([self._loops("sockets", "256", *more, **SOCKETS)], 130)

    def trainer(self) -> Part:
        """Search and train with transformers' Trainer."""
        return Part([self._variants("huggingface")], 130)

    def accelerate(self) -> Part:
        """Search and train with a loop by accelerate."""
        return Part([self._variants("accelerate")], 130)

    def lightning(self) -> Part:
        """Search and train with Lightning."""
        return Part([self._variants("lightning")], 130)

    def run(self) -> Part:
        """Train five programs by `evener run` without a plan."""
        return Part([self._programs("loop,trainer,accelerated,lit,sft", 330)], 340)

    def links(self) -> Part:
        """Measure the links between all GPUs."""
        words = ("benchmarks.gpu_limits", "links", "--devices", self._equal)
        return Part([Command(words)], 90, unequal=False)

    def watch(self) -> Part:
        """Watch a program that trains by `evener run`, and draw the app beside it."""
        devices = "gpu" if self._gpu else SLICES
        look = ("benchmarks.gpu_watch", "--out", str(self._out / "watch"), "--devices", devices)
        draw = ("benchmarks.gpu_screen", str(self._out / "pictures"), "--devices", devices)
        seen = {"EVENER_LIVE_DIR": str(self._out / "live")}
        return Part(
            [
                self._programs("watched:run", 100, **seen),
                Command(look, seen, after=TRAINS_AFTER),
                Command(draw, seen, after=TRAINS_AFTER),
            ],
            115,
        )

    def tests(self) -> Part:
        """Run the tests that need GPUs, one half of them on two GPUs and the other half on two."""
        options = ("-q", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider")
        chosen = ("-k", "gpus or kernels_of_a_gpu")
        halves = (TESTS[0], [file for group in TESTS[1:] for file in group])
        commands = [
            Command(("pytest", *options, *chosen, *files), {"CUDA_VISIBLE_DEVICES": pair})
            for files, pair in zip(halves, self._pairs, strict=True)
        ]
        return Part(commands, 130, unequal=False)

    def _loops(self, name: str, batch: str, *more: str, **variables: str) -> Command:
        folder = self._out / name
        folder.mkdir(exist_ok=True)
        where = ("--devices", self._unequal, "--kinds", "decoder", "--keep", str(folder))
        sizes = (
            ("--seconds", "10", "--batch", batch) if self._gpu else ("--seconds", "4", "--small")
        )
        return Command(("benchmarks.gpu_loops", *where, *sizes, *more), variables)

    def _variants(self, trainer: str) -> Command:
        size, batch, budget = ("middle", "512", "45s") if self._gpu else ("small", "8", "60s")
        where = ("--variants", "plan", "--devices", self._unequal, "--size", size)
        lengths = ("--budget", budget, "--seconds", "10", "--balance", "global-batch", batch)
        return Command(("benchmarks.trainers", "variants", *where, *lengths, "--trainers", trainer))

    def _programs(self, cases: str, seconds: float, **variables: str) -> Command:
        parts = self._percentages if self._gpu else "100,50"
        where = ("--out", str(self._out / "programs"), "--kind", self._kind, "--parts", parts)
        limits = ("--cases", cases, "--seconds", f"{seconds:g}")
        return Command(("benchmarks.gpu_unequal", *where, *limits), variables)


NAMES = (
    *("plan", "trainer", "run", "accelerate", "lightning"),
    *("no-p2p", "sockets", "links", "watch", "tests"),
)
SHORTEST_SECONDS = 70.0  # a part doesn't begin if less time is left


def main() -> None:
    """Run the named parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=NAMES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=570.0, help="for all parts together")
    parser.add_argument("--percent", default="100,60,40,25", help="of each GPU")
    parser.add_argument("--kind", choices=("gpu", "cpu"), default="gpu")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the daemon, too
    parts = Parts(options.kind, options.percent.split(","), out)
    ends = time.monotonic() + options.seconds
    for name in options.parts:
        part: Part = getattr(parts, name.replace("-", "_"))()
        left = ends - time.monotonic()
        if left < SHORTEST_SECONDS:
            print(f"{name}: no time left", flush=True)
            continue
        with contextlib.ExitStack() as stack:
            variables = {}
            if part.unequal and options.kind == "gpu":
                # the path must be short for a socket
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mps-"))
                variables = stack.enter_context(mps_daemon(Path(folder)))
            run_part(name, part, min(left, part.seconds), variables, out)


def run_part(name: str, part: Part, seconds: float, variables: dict[str, str], out: Path) -> None:
    """Run a part's commands side by side, print their output, and kill what takes too long."""
    began = time.monotonic()
    print(f"=== {name}, at most {seconds:.0f} s", flush=True)
    with (out / f"{name}.txt").open("w") as log:
        threads = [
            threading.Thread(target=_run_command, args=(name, command, seconds, variables, log))
            for command in part.commands
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(f"=== {name} took {time.monotonic() - began:.0f} s", flush=True)


def _run_command(
    name: str, command: Command, seconds: float, variables: dict[str, str], log: TextIO
) -> None:
    """Run a command and print each of its lines; kill it and its children at the time limit."""
    time.sleep(command.after)
    module = command.words[0]
    child = subprocess.Popen(
        [sys.executable, "-m", *command.words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=_environment(variables, command.variables),
        start_new_session=True,
    )
    late = threading.Timer(max(1.0, seconds - command.after), _kill, (child,))
    late.start()
    assert child.stdout is not None
    for line in child.stdout:
        print(f"{name}: {line[:600].rstrip()}", flush=True)
        log.write(line)
    code = child.wait()
    late.cancel()
    if code:
        print(f"{name}: {module} exited with {code}", flush=True)


def _environment(*more: dict[str, str]) -> dict[str, str]:
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    common = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
        "NCCL_NVLS_ENABLE": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment = {**os.environ, **common}
    for variables in more:
        environment |= variables
    return environment


def _kill(child: subprocess.Popen[str]) -> None:
    """Terminate a command, so that it stops its ranks; after ten seconds, kill what is left."""
    children = psutil.Process(child.pid).children(recursive=True)
    child.terminate()
    _, alive = psutil.wait_procs([psutil.Process(child.pid), *children], timeout=10)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    main()
