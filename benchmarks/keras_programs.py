"""Check that typical Keras programs learn the same with unequal shares.

  python -m benchmarks.keras_programs [--only WORDS] [--page]

All losses and models of tests/support/keras_program_*.py are trained by plain Keras and with shares
6:2, in float64, in each engine, with batches of 8 and a shorter last one. The table says which
programs are exact, which are refused before the first step, and what else happened; `--page` writes
it into docs/benchmarks/keras_programs.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.keras_start import make_configs
from tests.support.rank_server import RankServer

PROCESSES = {1: ("towers", "passes"), 2: ("multiworker", "multiworker in passes")}
ENGINES = [engine for engines in PROCESSES.values() for engine in engines]
TAILS = ("one row", "three rows", "whole batches")
SAME, SAME_IN_FLOAT32 = 1e-9, 1e-6
GROUP = 10  # programs per process, so that one that hangs affects few others
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "keras_programs.md"
Found = dict[tuple[str, str], dict[str, Any]]  # results by (engine and kind of tail, program)


def main() -> int:
    """Print the table; return 1 if a program silently differs or crashes."""
    options = parse()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = run_everything(options, Path(folder))
    table = write_table(found)
    bad = {
        key: answer
        for key, answer in found.items()
        if mark(answer).startswith(("differs", "crash"))
    }
    for (engine, name), answer in bad.items():
        print(f"{engine}: {name}: {mark(answer)} {answer.get('said', '')}", file=sys.stderr)
    counts = Counter(mark(answer).split()[0] for answer in found.values())
    summary = f"{len(found)} programs: " + ", ".join(
        f"{count} {word}" for word, count in sorted(counts.items())
    )
    print(f"{table}\n\n{summary}; {time.monotonic() - began:.0f} s")
    if options.page:
        head = PAGE.read_text().partition("<!-- table -->")[0]
        PAGE.write_text(
            f"{head}<!-- table -->\n{summary}.\n\n{table}\n\n{write_sentences(found)}\n"
        )
    return int(bool(bad))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only",
        default="",
        help="programs whose names have one of these words, separated by commas",
    )
    parser.add_argument("--engines", nargs="*", default=ENGINES, choices=ENGINES)
    parser.add_argument("--tails", nargs="*", default=TAILS[:1], choices=TAILS)
    parser.add_argument(
        "--found", type=Path, help="a file of what was found, from which an interrupted run goes on"
    )
    parser.add_argument("--page", action="store_true", help="write the table into the page")
    return parser.parse_args()


def run_everything(options: argparse.Namespace, folder: Path) -> Found:
    """Run each program in each engine and return the results."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    found: Found = read(options.found)
    with RankServer("tests.support.keras_programs") as server:
        names = ask(server, folder, 1, "name_all", seconds=300)
        words = [word.strip() for word in options.only.split(",") if word]
        chosen = [name for name in names if not words or any(word in name for word in words)]
        for processes, engines in PROCESSES.items():
            wanted = [engine for engine in engines if engine in options.engines]
            for tail in options.tails if wanted else ():
                left = [
                    name
                    for name in chosen
                    if any((f"{each}, {tail}", name) not in found for each in wanted)
                ]
                for start in range(0, len(left), GROUP):
                    group = left[start : start + GROUP]
                    for engine, answers in run_engines(
                        server, folder, processes, wanted, tail, group
                    ).items():
                        found |= {
                            (f"{engine}, {tail}", name): answer for name, answer in answers.items()
                        }
                    write(options.found, found)
                    print(
                        f"{wanted}, {tail}: {len(left) - start - len(group)} left",
                        file=sys.stderr,
                        flush=True,
                    )
    return found


def read(path: Path | None) -> Found:
    """Return the results of an interrupted run."""
    if path is None or not path.exists():
        return {}
    return {(engine, name): answer for engine, name, answer in json.loads(path.read_text())}


def write(path: Path | None, found: Found) -> None:
    """Save the results so far, from which an interrupted run continues."""
    if path is not None:
        path.write_text(json.dumps([[*key, answer] for key, answer in found.items()]))


def run_engines(
    server: RankServer,
    folder: Path,
    processes: int,
    engines: list[str],
    tail: str,
    names: list[str],
) -> dict[str, dict[str, Any]]:
    """Run the programs in these engines, all in the same processes.

    If something fails, each program runs again on its own.
    """
    try:
        found: dict[str, Any] = ask(
            server,
            folder,
            processes,
            "run_all",
            dict.fromkeys(engines, names),
            tail,
            seconds=120 + 60 * len(names),
        )
        return found
    except AssertionError as error:
        if len(names) == 1:
            return {
                engine: {names[0]: {"verdict": "crash", "said": str(error)[-600:]}}
                for engine in engines
            }
    parts = [run_engines(server, folder, processes, engines, tail, [name]) for name in names]
    return {
        engine: {name: each for part in parts for name, each in part[engine].items()}
        for engine in engines
    }


def ask(
    server: RankServer, folder: Path, processes: int, function: str, *given: Any, seconds: int
) -> Any:
    """Run a function in one or more processes and return the answer of the first."""
    own = folder / str(len(list(folder.iterdir())))
    ranks = (
        [{"TF_CONFIG": config} for config in make_configs(("worker",) * 2)]
        if processes > 1
        else [{}]
    )
    path = f"tests.support.keras_programs.{function}"
    server.run("tests.support.keras_start.save", own, path, *given, ranks=ranks, seconds=seconds)
    return json.loads((own / "0.json").read_text())


def mark(answer: dict[str, Any]) -> str:
    """Return the table's word for a result, with the difference if there is one."""
    if answer["verdict"] != "trained":
        return str(answer["verdict"])
    gap = answer["gap"]
    if gap <= SAME:
        return "exact"
    if answer["random"]:
        return "random"
    if answer["float32"] and gap <= SAME_IN_FLOAT32:
        return f"float32 {gap:.0e}"
    return f"{'warned' if answer['said'] else 'differs'} {gap:.1e}"


def write_table(found: Found) -> str:
    """Return a table with a row per program and a column per engine and kind of tail."""
    columns = list(dict.fromkeys(engine for engine, _ in found))
    lines = [f"| program | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    names = dict.fromkeys(name for _, name in found)
    lines += [
        f"| {name} | {' | '.join(mark(found[column, name]) for column in columns)} |"
        for name in names
    ]
    return "\n".join(lines)


def write_sentences(found: Found) -> str:
    """Return a table of the messages for refused programs and programs with a warning."""
    said: dict[str, list[str]] = {}
    for (_, name), answer in found.items():
        if answer.get("said") and mark(answer) != "exact":
            said.setdefault(answer["said"].splitlines()[0], []).append(name)
    rows = [f"| {', '.join(dict.fromkeys(names))} | {words} |" for words, names in said.items()]
    return "\n".join(["| programs | what is said |", "| --- | --- |", *rows])


if __name__ == "__main__":
    raise SystemExit(main())
