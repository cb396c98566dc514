"""Fuzz every parser of evener.

  python -m benchmarks.fuzz [--minutes 5] [--target plan] [--output fuzz.md]

Each input must give a value or a one-sentence error, never a traceback. If atheris is installed
(`pip install atheris`), fuzzing is guided by coverage and each target has its own process;
otherwise hypothesis mutates the same seeds. atheris writes its findings to fuzz-TARGET-*; `--target
TARGET --replay FILE` runs such a file again.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

from hypothesis import HealthCheck, given, settings

from tests.support.fuzz_targets import TARGETS, Target, call, environment, mutations, seeds

MOST_MEMORY_BYTES = 4 << 30  # memory limit of a fuzzing process
LONGEST_INPUT_BYTES = 16 << 10
SLOWEST_SECONDS = 20  # time limit for one input


def main() -> int:
    """Fuzz one target or all in turn; return 1 if anything was found."""
    options = _options()
    if options.replay is not None:
        call(TARGETS[options.target], options.replay.read_bytes())
        return 0
    if options.target is not None:
        return fuzz_one(options.target, options.minutes * 60, options.engine)
    rows = [_in_a_process(name, options.minutes / len(TARGETS), options.engine) for name in TARGETS]
    text = (
        "\n".join(["| target | inputs | seconds | found |", "| --- | ---: | ---: | --- |", *rows])
        + "\n"
    )
    print(text)
    if options.output is not None:
        options.output.write_text(text)
    return 0 if all(row.endswith("| nothing |") for row in rows) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="for all targets together")
    parser.add_argument("--target", choices=tuple(TARGETS), help="this one alone, in this process")
    parser.add_argument(
        "--engine", choices=("atheris", "hypothesis"), help="atheris unless it is missing"
    )
    parser.add_argument(
        "--replay", type=Path, help="give this file to the target and let the error through"
    )
    parser.add_argument("--output", type=Path, help="write the table here")
    options: argparse.Namespace = parser.parse_args()
    return options


def _in_a_process(name: str, minutes: float, engine: str | None) -> str:
    """Fuzz a target in a process of its own and return its row of the table.

    atheris can fuzz only one target per process, and exits at the first finding.
    """
    started = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.fuzz", "--target", name, "--minutes", str(minutes)]
    command += ["--engine", engine] if engine else []
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    text = done.stdout.decode(errors="replace")
    counted = [
        line.split()[1] for line in text.splitlines() if line.startswith(("Done ", "inputs "))
    ]
    if done.returncode:
        sys.stderr.write(text[-4000:])
    found = "nothing" if done.returncode == 0 else f"exit code {done.returncode}"
    return (
        f"| {name} | {counted[-1] if counted else '?'} | {time.monotonic() - started:.0f} "
        f"| {found} |"
    )


def fuzz_one(name: str, seconds: float, engine: str | None = None) -> int:
    """Fuzz one target until the time is over or an input fails."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))
    target = TARGETS[name]
    first = seeds(name)
    with tempfile.TemporaryDirectory() as home, environment("XDG_STATE_HOME", home):
        for data in first:
            call(target, data)
        if engine == "atheris" or (engine is None and find_spec("atheris") is not None):
            _with_atheris(name, target, first, seconds, home)  # does not return
        return _with_hypothesis(target, first, seconds)


def _with_atheris(
    name: str, target: Target, first: tuple[bytes, ...], seconds: float, home: str
) -> None:
    import atheris

    corpus = Path(home) / "corpus"
    corpus.mkdir()
    for number, data in enumerate(first):
        (corpus / str(number)).write_bytes(data)
    for function in _own_functions():
        atheris.instrument_func(function)
    arguments = [
        f"-max_total_time={max(1, round(seconds))}",
        f"-max_len={LONGEST_INPUT_BYTES}",
        "-close_fd_mask=1",
    ]
    arguments += [
        f"-timeout={SLOWEST_SECONDS}",
        "-rss_limit_mb=2048",
        f"-artifact_prefix=fuzz-{name}-",
    ]
    atheris.BalanceForm([sys.argv[0], *arguments, str(corpus)], lambda data: call(target, data))
    atheris.Fuzz()


def _own_functions() -> Iterator[FunctionType]:
    """Yield all loaded functions and methods of evener, for which coverage is counted."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "evener"]
    owners: list[Any] = [*modules]
    for module in modules:
        owners += [kind for kind in vars(module).values() if isinstance(kind, type)]
    found = {}
    for owner in owners:
        for one in vars(owner).values():
            if isinstance(one, FunctionType):
                found[id(one)] = one
    return (one for one in found.values() if one.__module__.partition(".")[0] == "evener")


def _with_hypothesis(target: Target, first: tuple[bytes, ...], seconds: float) -> int:
    """Run mutated seeds and arbitrary inputs, in rounds, until the time is over."""
    until, count = time.monotonic() + seconds, 0

    @settings(
        max_examples=2000, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(mutations(first))
    def attempt(data: bytes) -> None:
        nonlocal count
        count += 1
        if time.monotonic() < until:
            call(target, data)

    while time.monotonic() < until:
        attempt()
    print(f"inputs {count}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
