"""The files of this repository, each parsed once per process: many tests in tests/arch read all of
them.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("evener", "devices", "workloads", "balancer", "tui")


def files(folder: str, suffixes: tuple[str, ...] = (".py",)) -> Iterator[Path]:
    """Yield the folder's files, without following links; "." has only those in the top folder."""
    for path, folders, names in os.walk(REPO / folder):
        folders[:] = (
            []
            if folder == "."
            else sorted(name for name in folders if not name.startswith((".", "__pyc")))
        )
        yield from (Path(path, name) for name in sorted(names) if name.endswith(suffixes))


@cache
def parsed(path: Path) -> ast.Module:
    """Return a file's syntax tree, which callers must not change."""
    return ast.parse(path.read_bytes())


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """Return all nodes of a tree, cached: walking through all files takes a second."""
    found = [tree]
    for node in found:  # the list grows during the loop
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, ast.AST):
                found.append(value)
            elif isinstance(value, list):
                found += [each for each in value if isinstance(each, ast.AST)]
    return found


def place(path: Path, line: int) -> str:
    """Return `file:line`, relative to the repository."""
    return f"{path.relative_to(REPO)}:{line}"


def named(node: ast.AST) -> set[str]:
    """Return the parts of an operand's name: `self.engine.name` has self, engine and name."""
    dotted = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
    return set(dotted.split("."))


def words(node: ast.AST | None) -> set[str]:
    """Return the strings of an operand, a literal or a collection; empty if it contains anything
    else.
    """
    each = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    found = {
        one.value for one in each if isinstance(one, ast.Constant) and isinstance(one.value, str)
    }
    return found if len(found) == len(each) else set()


LOOKS = {
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "get",
    "pop",
    "count",
    "index",
    "find",
    "__eq__",
}
BUILTIN_LOOKS = {"getattr", "hasattr", "setattr", "eq"}


def compared(tree: ast.AST) -> Iterator[tuple[int, set[str], set[str]]]:
    """Yield (line, strings, names that they are compared with) for every comparison of strings.

    Comparisons include `in`, set operations, match cases, dict keys and lookups, attributes by
    name, and methods like startswith.
    """
    for node in nodes(tree):
        match node:
            case ast.Compare(left=left, comparators=others):
                pairs = [(one, (left, *others)) for one in (left, *others)]
            case ast.BinOp(left=left, op=ast.BitAnd() | ast.Sub(), right=right):
                pairs = [(left, (right,)), (right, (left,))]
            case ast.Match(subject=subject, cases=cases):
                parts = chain.from_iterable(ast.walk(case.pattern) for case in cases)
                values = [one for one in parts if isinstance(one, ast.MatchValue)]
                pairs = [(one.value, (subject,)) for one in values]
            case ast.Subscript(value=looked, slice=key):
                pairs = [(key, (looked,))]
            case ast.Call(func=ast.Attribute(attr=method, value=looked), args=[key, *_]) if (
                method in LOOKS
            ):
                pairs = [(key, (looked,))]
            case ast.Call(
                func=ast.Name(id=builtin) | ast.Attribute(attr=builtin), args=[looked, key, *_]
            ) if builtin in BUILTIN_LOOKS:
                pairs = [(key, (looked,))]
            case ast.Dict(keys=keys) if keys and all(map(words, keys)):
                yield node.lineno, set().union(*map(words, keys)), set()
                continue
            case _:
                continue
        yield from (
            (one.lineno, found, set().union(*map(named, beside)))
            for one, beside in pairs
            if (found := words(one))
        )
