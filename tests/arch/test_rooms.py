"""Families and objectives are asked, not compared by name: nobody outside their files knows what they are called."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from evener.balancer.families import FAMILIES
from evener.balancer.objectives import OBJECTIVES
from evener.plan.layout import KINDS
from tests.support.sources import PACKAGES, REPO, files, parsed

FAMILY_NAMES, OBJECTIVE_NAMES = {*FAMILIES, *KINDS}, set(OBJECTIVES)
FAMILY_ROOM = "balancer/families.py", "evener/plan/layout.py"  # the second reads them from plans and journals
OBJECTIVE_ROOM = ("balancer/objectives.py",)
OTHER_WORDS = {"stage", "engine"}  # a stage of a search and an engine of Keras may have the same names


def named(node: ast.AST) -> set[str]:
    """The words of what an operand is called: `self.engine.name` has engine and name."""
    dotted = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
    return set(dotted.split("."))


def words(node: ast.AST | None) -> set[str]:
    """The strings that an operand consists of; none if it has anything else."""
    each = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    found = {one.value for one in each if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return found if len(found) == len(each) else set()


def compared(tree: ast.AST) -> Iterator[tuple[int, set[str], set[str]]]:
    """(line, strings, names of what they are compared with) of comparisons, `in` tests, match cases and dict keys."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            called = set().union(*map(named, operands))
            yield from ((node.lineno, found, called) for one in operands if (found := words(one)))
        elif isinstance(node, ast.Match):
            cases = [each for case in node.cases for each in ast.walk(case.pattern) if isinstance(each, ast.MatchValue)]
            yield from ((one.value.lineno, found, named(node.subject)) for one in cases if (found := words(one.value)))
        elif isinstance(node, ast.Dict) and node.keys:
            keys = [words(key) for key in node.keys]
            if all(keys):
                yield node.lineno, set().union(*keys), set()


def families_in(tree: ast.AST) -> list[int]:
    """The lines that compare with names of families and of nothing else."""
    found = (one for one in compared(tree) if one[1] <= FAMILY_NAMES)
    return [line for line, _, called in found if not called & OTHER_WORDS]


def objectives_in(tree: ast.AST) -> list[int]:
    """The lines that compare an objective, or with a name that only an objective has."""
    found = (one for one in compared(tree) if one[1] <= OBJECTIVE_NAMES)
    return [line for line, said, called in found if "objective" in called or any("-" in word for word in said)]


def outside(room: Collection[str]) -> Iterator[Path]:
    for package in PACKAGES:
        for path in files(package):
            if not str(path.relative_to(REPO)).startswith(tuple(room)):
                yield path


def test_nobody_compares_the_names_of_families() -> None:
    hits = [f"{path.relative_to(REPO)}:{line}" for path in outside(FAMILY_ROOM) for line in families_in(parsed(path))]
    assert hits == []


def test_nobody_compares_the_names_of_objectives() -> None:
    paths = outside(OBJECTIVE_ROOM)
    assert [f"{path.relative_to(REPO)}:{line}" for path in paths for line in objectives_in(parsed(path))] == []


@pytest.mark.parametrize(
    ("code", "families", "objectives"),
    [
        ('layout.kind == "pack"', 1, 0),
        ('one.family in ("solo", "even")', 1, 0),
        ('"place" in options.families', 1, 0),
        ('x = {"solo": 1, "pack": 2}', 1, 0),
        ('match layout.kind:\n    case "split" | "solo":\n        pass', 2, 0),
        ('probe.stage == "solo" or self.engine.name != "solo"', 0, 0),
        ('x = {"solo": 1, "race": 2}', 0, 0),
        ('request.objective == "tokens" or name != "samples-per-joule"', 0, 2),
        ('column.key != "tokens"', 0, 0),
    ],
)
def test_a_comparison_would_be_found(code: str, families: int, objectives: int) -> None:
    assert (len(families_in(ast.parse(code))), len(objectives_in(ast.parse(code)))) == (families, objectives)
