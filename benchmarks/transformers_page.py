"""The page of benchmarks.transformers_classes: the classes by their verdicts."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

EXACT, EXACT_FLOAT32 = 1e-9, 1e-6
ALIKE = 30.0  # largest ratio of two differences of about the same size
LOGGED_LOSS = 1e-6  # the trainer sums logged values in float32
PADDED = (
    "its loss changes a little with the padding of its rows, by less than the check "
    "can tell from rounding"
)
KNOWN = {  # explanations for classes that differ
    "ConvBertForSequenceClassification": PADDED,
    "NystromformerForSequenceClassification": PADDED,
    "Speech2TextForConditionalGeneration": PADDED,
    "LevitForImageClassification": (
        "not by a plan: without one, too, a row alone has another gradient than with others"
    ),
}
VERDICTS = {
    "exact": "exact: weights, logged loss and gradient norm differ by at most 1e-9",
    "float32": (
        "exact to float32: the class computes in float32 by itself; at most 1e-6, or 1e-9 "
        "in float64 instead"
    ),
    "refused": "refused before the first step",
    "rounding": (
        "as far from the bare trainer as that is from itself with the rows of a batch the "
        "other way round"
    ),
    "random": "draws random numbers by itself, so no two processes compute the same loss",
    "different": "silently different",
    "hangs": "hangs, or ends with an error that isn't a sentence of evener's",
    "not tiny": (
        "no small model, or no rows, were found automatically, or the bare trainer can't train it"
    ),
}


TEXT = """\
Every class whose forward computes a loss, with a tiny configuration that is made from its default one: two steps of
SGD by `with_plan(Trainer, plan)`, 13 rows in batches of 8 (a tail of 5), shares 6:2 in passes of 2 rows, against the
bare `Trainer` in one process on the same rows. Rows are of several lengths where the class takes a mask; there is no
dropout; BatchNorm keeps its statistics; float64. A difference is the largest of any weight, in parts of the largest
change of one; the trainer sums the loss that it logs in float32, so that is held to 1e-6."""  # noqa: E501


def judge(found: dict[str, Any]) -> str:
    """Return the verdict of a class."""
    if "not_tiny" in found or "recipe" not in found:
        return "not tiny"
    if "refused" in found:
        return "refused"
    if "weights" not in found:
        return "hangs"
    if not math.isfinite(found["change"]):
        return "not tiny"
    largest = max(found["weights"], found["grad_norm"], found["learning_rate"], found["epoch"])
    if found["loss"] > LOGGED_LOSS:
        largest = found["loss"]
    if largest <= EXACT:
        return "exact"
    narrow = found.get("float32", True) and largest <= EXACT_FLOAT32
    if narrow or ("widened" in found and judge(found["widened"]) == "exact"):
        return "float32"
    if found.get("random"):
        return "random"
    return (
        "rounding"
        if found["weights"] <= ALIKE * found.get("reordered", {}).get("weights", 0.0)
        else "different"
    )


def write_page(path: Path, found: Sequence[dict[str, Any]], classes: int) -> None:
    """Write the whole page."""
    by_verdict: dict[str, list[dict[str, Any]]] = {name: [] for name in VERDICTS}
    for each in found:
        by_verdict[judge(each)].append(each)
    for members in by_verdict.values():
        members.sort(key=lambda each: str(each["name"]))
    path.write_text("\n".join([*_head(by_verdict, classes), *_details(by_verdict)]) + "\n")


def _head(by_verdict: dict[str, list[dict[str, Any]]], classes: int) -> list[str]:
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("transformers", "torch", "accelerate")
    )
    tiny = sum(len(each) for name, each in by_verdict.items() if name != "not tiny")
    seconds = sum(each.get("took", 0.0) for members in by_verdict.values() for each in members)
    tried = sum(map(len, by_verdict.values()))
    return [
        "# Is every class of transformers exact under a plan?",
        "",
        *TEXT.splitlines(),
        "",
        "```",
        "python -m benchmarks.transformers_classes",
        "python -m benchmarks.transformers_classes --only '^Bert'",
        "python -m benchmarks.transformers_classes --minutes 20   # a sample",
        "```",
        "",
        (
            f"{packages}; {tried} of {classes} classes that have a loss were tried, {tiny} of "
            f"them could be made tiny;"
        ),
        f"{seconds / 60:.0f} minutes on two cores.",
        "",
        "| verdict | classes |",
        "| --- | ---: |",
        *(f"| {VERDICTS[name]} | {len(each)} |" for name, each in by_verdict.items()),
    ]


def _details(by_verdict: dict[str, list[dict[str, Any]]]) -> list[str]:
    return [
        *_section("Silently different", _different(by_verdict["different"])),
        *_section(
            "Hangs, or fails",
            _listed(by_verdict["hangs"], lambda each: each.get("raised") or each.get("ended")),
        ),
        *_section("Refused", _refused(by_verdict["refused"])),
        *_section(
            "Rounding", _listed(by_verdict["rounding"], lambda each: f"{each['weights']:.0e}")
        ),
        *_section("Random", _listed(by_verdict["random"], lambda _: "draws random numbers")),
        *_section("Exact to float32", _listed(by_verdict["float32"], _narrow)),
        *_section("Exact", _listed(by_verdict["exact"], _rows)),
        *_section("Not made tiny", _listed(by_verdict["not tiny"], _why)),
    ]


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", f"## {title}", "", *lines] if lines else []


def _different(found: list[dict[str, Any]]) -> list[str]:
    if not found:
        return []
    rows = [
        f"| {each['name']} | {_rows(each)} | {each['weights']:.1e} | {each['loss']:.1e} | "
        f"{each['grad_norm']:.1e} |"
        f" {_even(each)} | {'; '.join(each['warned']) or KNOWN.get(each['name'], '')} |"
        for each in found
    ]
    head = "| class | rows | weights | loss | gradient norm | with rows of one length | why |"
    return [head, "| --- | --- | ---: | ---: | ---: | --- | --- |", *rows]


def _refused(found: list[dict[str, Any]]) -> list[str]:
    """Return the refused classes by message, where numbers don't count."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for each in found:
        groups[re.sub(r"-?\d[\d.e+-]*\d|\d", "N", each["refused"]), _even(each)].append(each)
    rows = []
    for (_, even), members in sorted(groups.items(), key=lambda pair: -len(pair[1])):
        names = ", ".join(each["name"] for each in members)
        sentence = members[0]["refused"].replace("|", "/")
        rows.append(f"| {len(members)} | {sentence} | {even} | {names} |")
    return [
        "| classes | sentence of the first | with rows of one length | which |",
        "| ---: | --- | --- | --- |",
        *rows,
    ]


def _even(found: dict[str, Any]) -> str:
    return judge(found["even"]) if "even" in found else "-"


def _listed(found: list[dict[str, Any]], key: Any) -> list[str]:
    groups: dict[str, list[str]] = defaultdict(list)
    for each in found:
        groups[str(key(each)).replace("|", "/")].append(each["name"])
    ordered = sorted(groups.items(), key=lambda pair: -len(pair[1]))
    head = ["| classes | what | which |", "| ---: | --- | --- |"]
    return head * bool(found) + [
        f"| {len(names)} | {what} | {', '.join(names)} |" for what, names in ordered
    ]


def _narrow(found: dict[str, Any]) -> str:
    if "widened" in found and judge(found["widened"]) == "exact":
        return "exact to 1e-9 where its float32 is computed in float64"
    return "exact to 1e-6"


def _rows(found: dict[str, Any]) -> str:
    recipe = found["recipe"]
    precision = "" if recipe["dtype"] == "float64" else f", {recipe['dtype']}"
    return f"{recipe['inputs']}; {recipe['labels']}{precision}"


def _why(found: dict[str, Any]) -> str:
    """Return the error's type and first words."""
    reason: str = (
        found.get("not_tiny")
        or found.get("raised")
        or found.get("ended")
        or "the bare trainer's weights become NaN"
    )
    return reason[:150]
