"""Run many small programs under `evener run` and check their weights.

  python -m benchmarks.run_programs [--only PATTERN]

Each program of tests.support.run_exact must train with shares 3:1 and end with its own weights;
each of the others must be caught, or end with its own weights. Prints every program, and counts
false alarms and misses.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from pathlib import Path

from tests.support.rank_server import RankServer, place_ranks
from tests.support.run_parts import judge
from tests.support.torch_start import free_port

PARTS, SECONDS = "tests.support.run_parts", 60
BY_SHARES, OTHER = (
    (
        "tests.support.run_exact",
        "tests.support.run_exact_loops",
        "tests.support.run_exchanges",
    ),
    (
        "tests.support.run_exchanged",
        "tests.support.run_losses",
        "tests.support.run_objects",
        "tests.support.run_other",
        "tests.support.run_sharded",
        "tests.support.run_sums",
        "tests.support.run_unlike",
    ),
)


def main() -> None:
    """Run the programs and print their outcomes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a pattern of names")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, RankServer(PARTS) as server:
        for module in (*BY_SHARES, *OTHER):
            names = [name for name in list_names(module) if re.search(options.only, name)]
            report(server, Path(place), module, names)


def list_names(module: str) -> list[str]:
    """Return the names of a module's programs."""
    from importlib import import_module

    return list(import_module(module).PROGRAMS)


def report(server: RankServer, place: Path, module: str, names: list[str]) -> None:
    """Run and print the programs of one module."""
    right = {"by shares"} if module in BY_SHARES else {"by shares", "even", "warned", "ended"}
    count: Counter[str] = Counter()
    wrong = []
    for number, name in enumerate(names):
        folder = place / f"{module}-{number}"
        try:
            server.run(
                f"{PARTS}.run_twice",
                folder,
                module,
                name,
                free_port(),
                ranks=place_ranks(2),
                seconds=SECONDS,
            )
            found = judge(folder, 3e-2 if "float16" in name else 1e-9)
            kind, words = found.kind, f"{found.difference:.0e} {found.words}"
        except AssertionError as error:
            kind, words = "BROKEN", str(error)[-300:]
        count[kind] += 1
        if kind not in right:
            wrong.append(name)
        print(f"{' ' if kind in right else '!'} {kind:10} {name:28} {words[:160]}", flush=True)
    print(f"{module}: {len(names)} programs, {dict(count)}; wrong: {', '.join(wrong) or 'none'}\n")


if __name__ == "__main__":
    main()
