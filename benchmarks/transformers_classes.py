"""Trains every class of transformers that has a loss by a plan and bare: which are exact, which refused, which wrong.

`python -m benchmarks.transformers_classes` takes 15 to 40 minutes on two cores and writes
docs/benchmarks/transformers_classes.md. `--only PATTERN` trains the classes whose names match and prints them.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.transformers_page import judge, write_page
from tests.support.rank_server import RankServer, place_ranks

RANKS = "benchmarks.transformers_ranks"
CHUNK = 40  # classes of one pair of processes
CHUNK_SECONDS = 1800
FINE = ("exact", "float32", "not tiny")
PAGE = Path(__file__).parents[1] / "docs/benchmarks/transformers_classes.md"
Found = dict[str, dict[str, Any]]


def main() -> None:
    """Write the page, or print the classes that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="a pattern of names; nothing is written")
    parser.add_argument("--raw", type=Path, help="a file for a line of JSON of each class, as soon as it is known")
    options = parser.parse_args()
    began, found = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder, RankServer(RANKS) as server:
        scan = Scan(server, Path(folder))
        names = [name for name in scan.names() if not options.only or re.search(options.only, name)]
        for each in scan.run(names):
            found.append(each)
            if options.raw:
                with options.raw.open("a") as file:
                    file.write(json.dumps(each) + "\n")
            if options.only or judge(each) in ("different", "hangs"):
                print(judge(each), json.dumps(each), flush=True)
    if not options.only:
        write_page(PAGE, found, time.monotonic() - began)


class Scan:
    """Runs classes in chunks; one that ends its processes is noted, and the rest of its chunk runs in others."""

    def __init__(self, server: RankServer, folder: Path) -> None:
        self._server, self._folder = server, folder

    def names(self) -> list[str]:
        """Of the classes, as the processes that train them find them."""
        self._server.run(f"{RANKS}.list_classes", self._folder, ranks=place_ranks(1))
        found: list[str] = json.loads((self._folder / "names.json").read_text())
        return found

    def run(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """What was found of each class; "even" is that of rows of one length, where those of several aren't exact."""
        for start in range(0, len(names), CHUNK):
            found = self._train(names[start : start + CHUNK], {})
            again = [name for name, each in found.items() if each.get("uneven") and judge(each) not in FINE]
            if again:
                even = self._train(again, {name: {**found[name]["recipe"], "even": True} for name in again})
                for name in again:
                    found[name]["even"] = even[name]
            yield from found.values()

    def _train(self, names: Sequence[str], given: dict[str, Any]) -> Found:
        """Bare, and by a plan where that worked; with rows that are given, or found."""
        bare = self._each("reference_all", "bare.jsonl", names, given, 1)
        recipes = {name: each["recipe"] for name, each in bare.items() if "recipe" in each}
        planned = self._each("plan_all", "planned0.jsonl", list(recipes), recipes, 2)
        return {name: {**each, **planned.get(name, {})} for name, each in bare.items()}

    def _each(self, function: str, file: str, names: Sequence[str], recipes: dict[str, Any], world: int) -> Found:
        found: Found = {}
        path = self._folder / file
        path.unlink(missing_ok=True)
        while left := [name for name in names if name not in found]:
            reason = ""
            options: dict[str, Any] = {"ranks": place_ranks(world), "seconds": CHUNK_SECONDS}
            try:
                self._server.run(f"{RANKS}.{function}", self._folder, left, recipes, **options)
            except AssertionError as error:
                reason = last_error(str(error))
            found = {each["class"]: each for each in map(json.loads, path.open())} if path.exists() else {}
            if reason and function == "plan_all":
                reason = self._raised(left, found) or reason
            if reason and (stuck := next((name for name in left if name not in found), "")):
                with path.open("a") as file_:
                    file_.write(json.dumps({"class": stuck, "ended": reason[:300]}) + "\n")
                found[stuck] = {"class": stuck, "ended": reason[:300]}
        return found

    def _raised(self, names: Sequence[str], found: Found) -> str:
        """What another rank than the first said of the class that ended them."""
        path, stuck = self._folder / "planned1.jsonl", next((name for name in names if name not in found), "")
        lines = [json.loads(line) for line in path.open()] if path.exists() else []
        return next((str(each["raised"]) for each in lines[::-1] if each["class"] == stuck and "raised" in each), "")


def last_error(log: str) -> str:
    """The last line of a log that names one; a process that was ended by its alarm wrote none."""
    lines = [line for line in log.splitlines() if re.match(r"[\w.]*(Error|Exception)\b|RuntimeError|terminate", line)]
    return lines[-1] if lines else "it took too long"


if __name__ == "__main__":
    main()
