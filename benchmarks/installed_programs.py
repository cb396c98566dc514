"""Run unchanged, published training programs by their own launcher and by evener.

  python -m benchmarks.installed_programs --environments FOLDER --inputs FOLDER NAME...

evener trains each program with shares 3:1, and again with changing shares. Each program needs its
environment (which includes evener) in FOLDER/ENVIRONMENT, its script in FOLDER/src/..., and the
output of `python -m benchmarks.installed.inputs`. Prints the outcome of each program: how far its
weights are from those by its own launcher, relative to how far training moved them, or why its
shares stayed equal. Results are kept in FOLDER/results; `--table` prints them as the table in
docs/run.md. Trains on two CPU slices, without a network.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import re
import shutil
import signal
import subprocess
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from .installed_table import PROGRAMS, Program

SECONDS = 240  # time limit of a run
NEAR = 1e-5  # largest difference of float32 weights, relative to how far training moved them
PLAN = """
[[layout.share]]
device = "cpu-0-of-2"
batch = 3
[[layout.share]]
device = "cpu-1-of-2"
batch = 1
"""


class Result(msgspec.Struct, frozen=True):
    """The outcome of a program with one optimizer."""

    name: str
    optimizer: str
    versions: str
    date: str
    outcome: str  # "by shares", "even", "can't run", or an error in capitals
    difference: float | None = None
    reason: str = ""  # why shares stayed equal, or why the program can't run here


def main() -> None:
    """Run the programs, or print the table of outcomes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", default=[*PROGRAMS], metavar="NAME", help=", ".join(PROGRAMS)
    )
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--ways", default="plan,moved", help="plan, moved")
    parser.add_argument("--table", action="store_true", help="print what is known, run nothing")
    options = parser.parse_args()
    kept = options.environments / "results"
    if options.table:
        print_table(kept, options.names)
        return
    kept.mkdir(exist_ok=True)
    for name in options.names:
        for optimizer, rate in PROGRAMS[name].optimizers:
            result = report(name, optimizer, rate, options)
            (kept / f"{name}-{optimizer}.json").write_bytes(msgspec.json.encode(result))


def report(name: str, optimizer: str, rate: str, options: argparse.Namespace) -> Result:
    """Train a program with one optimizer by its own launcher and by evener; return the outcome."""
    program = PROGRAMS[name]
    places = {
        "inputs": options.inputs,
        "src": options.environments / "src",
        "jobs": Path(__file__).parent / "installed",
        "rate": rate,
        "optimizer": optimizer,
    }
    own = Start(program, options, places, f"{name}-{optimizer}-own").run()
    known = (name, optimizer, own.versions(), datetime.date.today().isoformat())
    print(f"{name} {optimizer}: {own.versions()}; own launcher: {own.ended()}", flush=True)
    if own.failed:
        return Result(*known, "can't run", None, own.ended())
    worst = Result(*known, "by shares", 0.0)
    for way in options.ways.split(","):
        ours = Start(program, options, places, f"{name}-{optimizer}-{way}", way).run()
        found = judge(known, own, ours)
        print(f"  {way}: {found.outcome} {found.difference} {found.reason}; {ours.ended()}")
        print(*(f"    {line}" for line in ours.logged_messages()), sep="\n", flush=True)
        if found.outcome != worst.outcome or (found.difference or 0) > (worst.difference or 0):
            worst = found
    return worst


def judge(known: tuple[str, str, str, str], own: Start, ours: Start) -> Result:
    """Return the outcome of a program from a run by its own launcher and one by evener."""
    difference = own.compare(ours)
    if ours.failed:
        return Result(*known, "ENDED", difference, ours.ended())
    reason = ours.why_even()
    if reason:
        is_seen = own.weights() is not None  # weights are recorded for PyTorch's optimizers only
        if is_seen and not is_near(difference):
            return Result(*known, "CHANGED", difference, reason)
        return Result(*known, "even" if ours.logged_early() else "LATE", difference, reason)
    if not ours.by_shares():
        return Result(*known, "SILENT", difference)
    if not is_near(difference):
        return Result(*known, "CHANGED", difference)
    return Result(*known, "by shares", difference)


def is_near(difference: float | None) -> bool:
    """True if a difference is known and no more than rounding; False if weights aren't numbers."""
    return difference is not None and difference <= NEAR


def print_table(kept: Path, names: list[str]) -> None:
    """Print the rows of docs/run.md, and the number of programs with each outcome."""
    counts: dict[str, int] = {}
    print("| program | shares | difference | why even | on |")
    print("| --- | --- | ---: | --- | --- |")
    for name in names:
        paths = sorted(kept.glob(f"{name}-*.json"))
        found = [msgspec.json.decode(path.read_bytes(), type=Result) for path in paths]
        for each in found:
            print_row(each)
        outcome = found[-1].outcome if found else "not run"
        counts[outcome] = counts.get(outcome, 0) + 1
    print(*(f"{count} {outcome}" for outcome, count in counts.items()), sep=", ")


def print_row(result: Result) -> None:
    """Print a program's outcome with one optimizer, and the version of its first package."""
    version = result.versions.partition(",")[0]
    title = ", ".join(filter(None, [PROGRAMS[result.name].title, result.optimizer]))
    away = "" if result.difference is None else f"{result.difference:.0e}"
    why = result.reason.partition(". ")[0][:160]
    print(f"| {title} ({version}) | {result.outcome} | {away} | {why} | {result.date} |")


class Start:
    """One run of a program in its own folder.

    `way` is "plan" or "moved" for evener, and empty for the program's own launcher.
    """

    def __init__(
        self,
        program: Program,
        options: argparse.Namespace,
        places: dict[str, Any],
        name: str,
        way: str = "",
    ) -> None:
        self._program, self._way, self._inputs = program, way, options.inputs
        self._home = options.environments / program.environment
        self._folder = options.environments / "runs" / name
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        for each in ("bert-base-cased", "nyu-mll", "glue", "stabilityai"):
            (self._folder / each).symlink_to(options.inputs / each)
        for name, target in program.links:
            (self._folder / name).parent.mkdir(exist_ok=True)
            (self._folder / name).symlink_to(target.format(**places))
        (self._folder / "x.yaml").write_text(program.settings.format(**places))
        (self._folder / "plan.toml").write_text(PLAN)
        self._words = program.words.format(**places)
        self._own = program.own.format(words=self._words, **places).split()
        self._code, self._is_late = -1, False

    def run(self) -> Start:
        """Train, and return this run."""
        words = self._own
        if self._way and self._program.ratios:
            words = [*words, *self._program.ratios.split()]
        elif self._way:
            words = words if self._program.launcher else self._words.split()
            python = ["python"] if words[0] == "-m" else []
            shares = ["--plan", "plan.toml"] if self._way == "plan" else ["--devices", "cpu/2"]
            words = ["evener", "run", *shares, "--", *python, *words]
        with (self._folder / "log.txt").open("w") as log:
            outputs: Any = {"stdout": log, "stderr": log, "start_new_session": True}
            with subprocess.Popen(
                words, cwd=self._folder, env=self._environment(), **outputs
            ) as process:
                try:
                    self._code = process.wait(SECONDS)
                except subprocess.TimeoutExpired:
                    self._is_late = True
                    os.killpg(process.pid, signal.SIGKILL)
        return self

    def _environment(self) -> dict[str, str]:
        program = self._program
        keep = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        offline = dict.fromkeys(
            ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1"
        )
        return {
            **keep,
            **offline,
            **({} if self._way and not program.launcher else dict(program.variables)),
            **dict(program.always),
            **({"MOVED": "1"} if self._way == "moved" else {}),
            **({"BY_ROW": "1"} if program.by_row else {}),
            **({"ON_CPU": "1"} if program.on_cpu else {}),
            "PATH": f"{self._home / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parent / "observed"),
            "OBSERVED": str(self._folder),
            "HF_HOME": str(self._folder / "home"),
            "TORCH_HOME": str(self._inputs),
            "XDG_STATE_HOME": str(self._folder / "state"),
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
            "DISABLE_MLFLOW_INTEGRATION": "true",
            "WANDB_MODE": "disabled",
        }

    def versions(self) -> str:
        """Return the versions of the program's packages."""
        code = (
            "import sys, importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in "
            "sys.argv[1:]), sep=', ')"
        )
        words = [str(self._home / "bin/python"), "-c", code, *self._program.packages]
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()

    @property
    def failed(self) -> bool:
        """True if the program failed or was killed after its time limit."""
        return self._code != 0

    def ended(self) -> str:
        """Return "ended", or the exit code and the last error in the log."""
        if not self._code:
            return "ended"
        if self._is_late:
            return f"it didn't end within {SECONDS} s"
        lines = [line for line in self._lines() if re.search(r"\b\w*(Error|Exception)\b:", line)]
        return f"exit code {self._code}: {(lines or ['?'])[-1].strip()[:300]}"

    def _lines(self) -> list[str]:
        text: str = (self._folder / "log.txt").read_text(errors="replace")
        return text.splitlines()

    def logged_messages(self) -> list[str]:
        """Return the messages that evener logged."""
        found = [line for line in self._lines() if re.search(r"evener: |rows change", line)]
        return list(dict.fromkeys(found))[:8]

    def why_even(self) -> str:
        """Return why evener kept or restored equal shares; empty if it didn't."""
        return find_reason("\n".join(self._lines()))

    def logged_early(self) -> bool:
        """True if evener logged that within the first few steps."""
        text = "\n".join(self._lines())
        shares = text.find("evener: shares ")
        counted = text.find("observed: ")
        return counted < 0 or shares < counted

    def by_shares(self) -> bool:
        """True if evener moved rows between the ranks."""
        text = "\n".join(self._lines())
        if self._program.ratios:
            rows = map(int, re.findall(r"observed: a process computed (\d+) rows", text))
            return len(set(rows)) > 1
        moved = self._way == "plan" or re.search(r"changed (once|\d+ times)|rows change", text)
        return "rows a step, with" in text and bool(moved)

    def weights(self) -> dict[str, Any] | None:
        """Return rank 0's weights before and after training; None if they weren't recorded."""
        import torch

        path = self._folder / "weights.pt"
        return torch.load(path, weights_only=True) if path.exists() else None

    def compare(self, other: Start) -> float | None:
        """Return how far the final weights are from another run's.

        The distance is relative to the change by training; None if the runs can't be compared.
        """
        return compare_weights(self.weights(), other.weights())


def find_reason(log: str) -> str:
    """Return why evener kept or restored equal shares, from a run's log; empty if it didn't."""
    for line in log.splitlines():
        for words in ("shares stay equal: ", "shares go back to equal for good: "):
            if words in line:
                return line.partition(words)[2]
    return ""


def compare_weights(mine: dict[str, Any] | None, its: dict[str, Any] | None) -> float | None:
    """Return how far two runs' final weights are from each other.

    The arguments are what benchmarks/observed has recorded of each run, or None. The distance is
    relative to the change by training; None if the runs can't be compared.
    """
    if mine is None or its is None:
        return None
    before = [*chain(*mine["before"])]
    after, ended = ([*chain(*each["after"])] for each in (mine, its))
    if [each.shape for each in after] != [each.shape for each in ended]:
        return None
    firsts = zip(mine["before"][0], its["before"][0], strict=True)
    if any(not one.equal(other) for one, other in firsts):
        return None  # a later optimizer may begin with weights that were trained before
    change, away = measure(before, after), measure(after, ended)
    if away == 0:
        return 0.0
    return away / change if change else None


def measure(some: list[Any], others: list[Any]) -> float:
    """Return the norm of the difference between two lists of tensors."""
    pairs = zip(some, others, strict=True)
    return math.sqrt(sum(float((a.double() - b.double()).square().sum()) for a, b in pairs))


if __name__ == "__main__":
    main()
