"""Layout families and objectives are queried, not compared by name.

Only their own files know their names.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from evener.balancer.families import FAMILIES
from evener.balancer.objectives import OBJECTIVES
from evener.plan.layout import KINDS
from tests.support.sources import PACKAGES, REPO, compared, files, parsed

FAMILY_NAMES, OBJECTIVE_NAMES = {*FAMILIES, *KINDS}, set(OBJECTIVES)
# the second file reads them from plans and journals
FAMILY_FILES = ("balancer/families.py", "evener/plan/layout.py")
OBJECTIVE_FILES = ("balancer/objectives.py",)
# a search stage and a Keras engine may have the same names
OTHER_WORDS = {"stage", "engine"}
OTHER_NAMES = {
    "rest",
    "race",
    "knobs",
    "check",
    "towers",
    "multiworker",
    "even_by_rows",
}  # as in these files


def families_in(tree: ast.AST) -> list[int]:
    """Return the lines that compare with the name of a layout family."""
    found = (one for one in compared(tree) if one[1] & FAMILY_NAMES and not one[1] & OTHER_NAMES)
    return [
        line
        for line, said, called in found
        if not called & OTHER_WORDS and (called or said <= FAMILY_NAMES)
    ]


def objectives_in(tree: ast.AST) -> list[int]:
    """Return the lines that compare an objective, or compare with an objective's name."""
    found = (one for one in compared(tree) if one[1] & OBJECTIVE_NAMES)
    return [
        line
        for line, said, called in found
        if "objective" in called or any("-" in word for word in said)
    ]


def files_outside(own_files: Collection[str]) -> Iterator[Path]:
    for package in PACKAGES:
        for path in files(package):
            if not str(path.relative_to(REPO)).startswith(tuple(own_files)):
                yield path


def test_no_other_file_compares_the_names_of_families() -> None:
    hits = [
        f"{path.relative_to(REPO)}:{line}"
        for path in files_outside(FAMILY_FILES)
        for line in families_in(parsed(path))
    ]
    assert hits == []


def test_no_other_file_compares_the_names_of_objectives() -> None:
    paths = files_outside(OBJECTIVE_FILES)
    assert [
        f"{path.relative_to(REPO)}:{line}" for path in paths for line in objectives_in(parsed(path))
    ] == []


@pytest.mark.parametrize(
    ("code", "families", "objectives"),
    [
        ('layout.kind == "pack"', 1, 0),
        ('one.family in ("solo", "even")', 1, 0),
        ('one.family in ("solo", "spare")', 1, 0),
        ('"place" in options.families', 1, 0),
        ('x = {"solo": 1, "pack": 2}', 1, 0),
        ('match layout.kind:\n    case "split" | "solo":\n        pass', 2, 0),
        ('layout.kind.startswith("pack") or {layout.kind} & {"shard"}', 2, 0),
        (
            'words["pack"] + words.get("place") + getattr(view, "solo") + operator.eq(kind, '
            '"even")',
            4,
            0,
        ),
        ('probe.stage == "solo" or self.engine.name != "solo"', 0, 0),
        ('x = {"solo": 1, "race": 2}', 0, 0),
        ('x = {"part": 0.5, "seconds": 2}', 0, 0),
        ('request.objective == "tokens" or name != "samples-per-joule"', 0, 2),
        ('request.objective.startswith("samples")', 0, 1),
        ('column.key != "tokens"', 0, 0),
    ],
)
def test_a_comparison_would_be_found(code: str, families: int, objectives: int) -> None:
    assert (len(families_in(ast.parse(code))), len(objectives_in(ast.parse(code)))) == (
        families,
        objectives,
    )
