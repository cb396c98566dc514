"""Train every class of transformers that computes a loss, by a plan and without one.

`python -m benchmarks.transformers_classes` takes 15 to 40 minutes on two cores and writes
docs/benchmarks/transformers_classes.md, which says which classes are exact, which are refused and
which are wrong. `--only PATTERN` trains the classes whose names match and prints them.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from benchmarks.chunks import Chunks, Found
from benchmarks.transformers_page import EXACT, judge, write_page
from tests.support.rank_server import RankServer, place_ranks

RANKS = "benchmarks.transformers_ranks"
CHUNK = 30  # classes per pair of processes
NARROW = 1e-3
FINE = ("exact", "float32", "not tiny")
PAGE = Path(__file__).parents[1] / "docs/benchmarks/transformers_classes.md"


def main() -> None:
    """Write the page, or print the requested classes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="a pattern of names; nothing is written")
    parser.add_argument(
        "--raw",
        type=Path,
        help="a file with a line of JSON for each class; those in it aren't trained again",
    )
    parser.add_argument(
        "--minutes", type=float, default=1000.0, help="minutes after which no class is started"
    )
    options = parser.parse_args()
    began = time.monotonic()
    found = (
        [json.loads(line) for line in options.raw.open()]
        if options.raw and options.raw.exists()
        else []
    )
    with tempfile.TemporaryDirectory() as folder, RankServer(RANKS) as server:
        server.run(f"{RANKS}.list_classes", Path(folder), ranks=place_ranks(1))
        names: list[str] = json.loads((Path(folder) / "names.json").read_text())
        known = {each["name"] for each in found}
        chosen = [
            name for name in names if name not in known and re.search(options.only or "", name)
        ]
        # random order, so that the first ones are a sample
        chosen.sort(key=lambda name: crc32(name.encode()))
        for each in run(Chunks(server, Path(folder), RANKS), chosen, began + 60 * options.minutes):
            found.append(each)
            if options.raw:
                with options.raw.open("a") as file:
                    file.write(json.dumps(each) + "\n")
            if options.only or judge(each) in ("different", "hangs"):
                print(judge(each), json.dumps(each), flush=True)
    if not options.only:
        write_page(PAGE, found, len(names))


def run(chunks: Chunks, names: Sequence[str], until: float = math.inf) -> Iterator[dict[str, Any]]:
    """Yield the result of each class.

    Classes that aren't exact are trained again in other ways. "reordered": without a plan and with
    the rows of each batch in reverse order, which shows the class's own rounding; "widened":
    without the float32 that a class uses internally; "even": with rows of one length.
    """
    for start in range(0, len(names), CHUNK):
        if time.monotonic() > until:
            return
        began = time.monotonic()
        found = train(chunks, names[start : start + CHUNK], {})
        again(
            chunks,
            found,
            "reordered",
            {},
            lambda each: EXACT < each.get("weights", 0.0) < NARROW,
            "reorder_all",
        )
        again(chunks, found, "widened", {"dtype": "widened"}, is_narrow)
        again(
            chunks,
            found,
            "even",
            {"even": True},
            lambda each: each.get("uneven") and judge(each) not in FINE,
        )
        took = (time.monotonic() - began) / len(found)
        yield from ({**each, "took": took} for each in found.values())


def is_narrow(found: dict[str, Any]) -> bool:
    """True if the class may differ only because it computes in float32."""
    return (
        bool(found.get("float32"))
        and found["weights"] < NARROW
        and found["recipe"]["dtype"] == "float64"
    )


def again(
    chunks: Chunks,
    found: Found,
    kind: str,
    changes: dict[str, Any],
    chosen: Callable[[Any], Any],
    function: str = "",
) -> None:
    """Train the chosen classes again with changed recipes, or by another function."""
    names = [name for name, each in found.items() if chosen(each)]
    if not names:
        return
    given = {name: {**found[name]["recipe"], **changes} for name in names}
    seen = chunks.run(function, names, given) if function else train(chunks, names, given)
    for name in names:
        found[name][kind] = seen[name]


def train(chunks: Chunks, names: Sequence[str], given: dict[str, Any]) -> Found:
    """Train without a plan and, if that works, by a plan; `given` has the recipes, if known."""
    bare = chunks.run("reference_all", names, given)
    recipes = {name: each["recipe"] for name, each in bare.items() if "recipe" in each}
    planned = chunks.run("plan_all", list(recipes), recipes, world=2)
    return {name: {**each, **planned.get(name, {})} for name, each in bare.items()}


if __name__ == "__main__":
    main()
