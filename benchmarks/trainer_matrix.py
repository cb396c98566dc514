"""Train models, losses and trainers by a plan and without one, and compare them.

`python -m benchmarks.trainer_matrix` takes a quarter of an hour and writes
docs/benchmarks/trainer_matrix.md, which says which cases are exact, which are refused, and which
logged values differ. `--only PATTERN` trains the cases whose names match ("decoder | own |
transformers | passes | tail | 2") and prints them; `--all` has all layouts of each case, twice as
many.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from benchmarks.chunks import Chunks, Found
from tests.support.matrix_parts import LAYOUTS, Case, list_cases, parse
from tests.support.rank_server import RankServer

RANKS = "benchmarks.matrix_ranks"
CHUNK = 30
PAGE = Path(__file__).parents[1] / "docs/benchmarks/trainer_matrix.md"
EXACT, EXACT_FLOAT32 = 1e-9, 1e-6
FLOAT32 = ("loss", "train_loss", "eval_loss")  # values that transformers sums in float32
PACKAGES = ("transformers", "trl", "lightning", "accelerate", "torch")
TEXT = """\
Each case is trained in float64 by a plan on two ranks, shares 6:2, and bare in one process on the same rows: in passes
of two rows with one or two batches in each optimizer step, at once, and at once with two batches and no short last one
(the others end in five of eight rows). `weights` is the largest difference of a weight over these layouts, in parts of
the largest change of one. Beside it are the trainer's figures (logged loss, gradient norm, learning rate, epoch,
tokens, evaluation) that differ by more than 1e-9, or by more than 1e-6 where the trainer sums them in float32.
`refused` is a sentence before the first step. TRL computes in float32 itself."""  # noqa: E501


def main() -> None:
    """Write the page, or print the requested cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="a pattern of names; nothing is written")
    parser.add_argument(
        "--all",
        action="store_true",
        help="passes or not, a tail or not, one batch or two: eight layouts",
    )
    parser.add_argument(
        "--minutes", type=float, default=1000.0, help="minutes after which no training is started"
    )
    options = parser.parse_args()
    layouts = tuple(product((True, False), (True, False), (1, 2))) if options.all else LAYOUTS
    began, found = time.monotonic(), dict[str, Any]()
    names = [
        case.name
        for case in list_cases(layouts)
        if not options.only or re.search(options.only, case.name)
    ]
    with tempfile.TemporaryDirectory() as folder, RankServer(RANKS) as server:
        for name, each in run(
            Chunks(server, Path(folder), RANKS), names, began + 60 * options.minutes
        ):
            found[name] = each
            if options.only or judge(parse(name), each) not in ("exact", "refused"):
                print(judge(parse(name), each), name, each, flush=True)
    if not options.only:
        PAGE.write_text("\n".join(write_page(found, len(names), time.monotonic() - began)) + "\n")


def run(chunks: Chunks, names: Sequence[str], until: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the result of each case, in random order until the time is over.

    Cases with and without passes share a run without a plan.
    """
    ordered = sorted(names, key=lambda name: crc32(name.encode()))
    for start in range(0, len(names), CHUNK):
        if time.monotonic() > until:
            return
        chunk = ordered[start : start + CHUNK]
        references = {
            name: msgspec.structs.replace(parse(name), passes=True).name for name in chunk
        }
        bare: Found = chunks.run("reference_all", list(dict.fromkeys(references.values())), None)
        broken = {
            name: bare[references[name]]
            for name in chunk
            if "seconds" not in bare[references[name]]
        }
        left = [name for name in chunk if name not in broken]
        planned = chunks.run("plan_all", left, references, world=2)
        for name in chunk:
            yield name, {**broken, **planned}[name]


def judge(case: Case, found: dict[str, Any]) -> str:
    """Return the verdict of a case: exact, refused, figures, different or failed."""
    if "refused" in found:
        return "refused"
    if "weights" not in found:
        return "failed"
    if found["weights"] > bound(case, "weights"):
        return "different"
    return "figures" if list_figures(case, found) else "exact"


def bound(case: Case, name: str) -> float:
    """Return the largest difference of a value that counts as equal."""
    return (
        EXACT_FLOAT32
        if case.trainer == "TRL" or case.loss == "label smoothing" or name in FLOAT32
        else EXACT
    )


def list_figures(case: Case, found: dict[str, Any]) -> dict[str, float]:
    """Return the values that differ."""
    left = {
        name: value
        for name, value in found.items()
        if name not in ("name", "seconds", "weights", "change")
    }
    return {name: value for name, value in left.items() if value > bound(case, name)}


# ---------------------------------------------------------------------- the page


def write_page(found: dict[str, dict[str, Any]], cases: int, seconds: float) -> list[str]:
    """Return the lines of the page."""
    counted = Counter(judge(parse(name), each) for name, each in found.items())
    groups: dict[tuple[str, str, str], list[tuple[Case, dict[str, Any]]]] = defaultdict(list)
    for name, each in sorted(found.items()):
        case = parse(name)
        groups[case.trainer, case.model, case.loss].append((case, each))
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    tally = ", ".join(f"{count} {verdict}" for verdict, count in counted.most_common())
    lines = ["# Is every trainer exact under a plan?", "", *TEXT.splitlines(), ""]
    lines += ["```", "python -m benchmarks.trainer_matrix", "```", ""]
    lines += [
        (
            f"{packages}; {len(found)} of {cases} trainings: {tally}; {seconds / 60:.0f} minutes "
            f"on two cores."
        )
    ]
    for trainer in dict.fromkeys(trainer for trainer, _, _ in groups):
        lines += [
            "",
            f"## {trainer}",
            "",
            "| model | loss | weights | figures that differ |",
            "| --- | --- | --- | --- |",
        ]
        for (own, model, loss), members in groups.items():
            if own == trainer:
                lines.append(
                    f"| {model} | {loss} | {write_verdicts(members)} | {write_figures(members)} |"
                )
    return [*lines, *write_sentences(found)]


def write_verdicts(members: Sequence[tuple[Case, dict[str, Any]]]) -> str:
    """Return one verdict for all layouts, or each verdict with its layouts."""
    by_verdict: dict[str, list[Case]] = defaultdict(list)
    largest: dict[str, float] = defaultdict(float)
    for case, each in members:
        verdict = judge(case, each).replace("figures", "exact")
        by_verdict[verdict].append(case)
        largest[verdict] = max(largest[verdict], each.get("weights", 0.0))
    words = []
    for verdict, cases in by_verdict.items():
        figure = f", {largest[verdict]:.0e}" if largest[verdict] else ""
        where = (
            "" if len(by_verdict) == 1 else f" ({'; '.join(write_layout(case) for case in cases)})"
        )
        words.append(f"{verdict if verdict != 'different' else '**different**'}{figure}{where}")
    return ", ".join(words)


def write_layout(case: Case) -> str:
    """Return the layout part of a case's name."""
    return case.name.split(" | ", 3)[3].replace(" | ", " ")


def write_figures(members: Sequence[tuple[Case, dict[str, Any]]]) -> str:
    """Return the largest difference of each logged value, for cases with exact weights."""
    largest: dict[str, float] = {}
    for case, each in members:
        if judge(case, each) == "figures":
            for name, value in list_figures(case, each).items():
                largest[name] = max(largest.get(name, 0.0), value)
    return ", ".join(f"{name} {value:.0e}" for name, value in largest.items()) or "-"


def write_sentences(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of a table with one message of each kind, including failures."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, each in found.items():
        words = each.get("refused") or each.get("raised") or each.get("ended")
        if words:
            groups[str(words)].append(name)
    kinds: dict[str, tuple[int, str, str]] = {}
    for words, names in groups.items():
        kind = re.sub(r"-?\d[\d.e+-]*", "N", words)
        count, first, text = kinds.get(kind, (0, names[0], words))
        kinds[kind] = (count + len(names), first, text)
    rows = [
        f"| {count} | {text.replace('|', '/')} | {first.replace(' | ', ', ')} |"
        for count, first, text in kinds.values()
    ]
    return [
        "",
        "## Sentences",
        "",
        "| trainings | sentence of the first | which |",
        "| ---: | --- | --- |",
        *rows,
    ]


if __name__ == "__main__":
    main()
