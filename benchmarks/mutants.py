"""Check whether the fast tests notice small faults in the pure code.

  python -m benchmarks.mutants [--sample 150] [--seed 0]

A mutant is a source file with one operator, comparison, constant, call or return value changed. The
file's tests run on it in a copy of the checkout, with a time limit. Mutants that pass are printed
with their line: such a mutant either behaves as before, or shows that a test is missing.
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

HOME = Path(__file__).resolve().parents[1]
PURE = ("balancer/search", "balancer/families.py", "balancer/objectives.py")
FILES = (
    *PURE,
    "evener/shares/whole_rows.py",
    "evener/plan/file.py",
    "balancer/probes/block_timing.py",
)
SEARCH = (
    "search",
    *(
        f"test_{name}.py"
        for name in ("explain", "recorded_runs", "recorded_curves", "session_simulated")
    ),
)
TESTS = {  # the longest matching prefix counts
    "balancer": ("tests/balancer",),
    "balancer/probes/block_timing.py": ("tests/balancer/test_timing_rules.py",),
    **dict.fromkeys(PURE, tuple(f"tests/balancer/{name}" for name in SEARCH)),
    "evener": ("tests/evener",),
    "evener/plan/file.py": ("tests/evener/test_plan.py", "tests/evener/test_fit_kinds.py"),
    "evener/shares/whole_rows.py": (
        "tests/evener/test_shares.py",
        "tests/evener/test_waterfill.py",
    ),
}
PYTEST = (
    "-m",
    "pytest",
    "-q",
    "-x",
    "-m",
    "not slow",
    "-p",
    "no:cacheprovider",
    "--hypothesis-seed=0",
)
ENOUGH = 0.85  # minimum fraction of mutants that must be noticed
COMPARISONS = (
    "Lt:LtE Lt:GtE LtE:Lt LtE:Gt Gt:GtE Gt:LtE GtE:Gt GtE:Lt Eq:NotEq NotEq:Eq "
    "Is:IsNot IsNot:Is In:NotIn NotIn:In"
)
OPERATORS = "Add:Sub Sub:Add Mult:Div Div:Mult FloorDiv:Mult Mod:Mult Pow:Mult And:Or Or:And"
SWAPS = [pair.split(":") for pair in f"{COMPARISONS} {OPERATORS}".split()]
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Mutant(msgspec.Struct, frozen=True, order=True):
    """One change of a file: the bytes from `start` to `end` become `new`.

    `place` is the change's column and the code of its line.
    """

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str
    place: tuple[int, bytes]

    def apply(self, source: bytes) -> bytes:
        """Return the changed source."""
        return source[: self.start] + self.new.encode() + source[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.old}  →  {self.new}"


def find_mutants(path: str) -> list[Mutant]:
    """Return all mutants of a file."""
    source = (HOME / path).read_bytes()
    code = source.splitlines(keepends=True)
    lines = [0, *itertools.accumulate(map(len, code))]
    found = set()
    for node, new in _changes(ast.parse(source)):
        start = lines[node.lineno - 1] + node.col_offset
        end = lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        old = " ".join(source[start:end].decode().split())
        found.add(
            Mutant(
                path, node.lineno, start, end, old, new, (node.col_offset, code[node.lineno - 1])
            )
        )
    return sorted(found)


def choose(found: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return a random sample of mutants.

    Whether a mutant is chosen doesn't depend on other code, so the sample stays the same while its
    survivors are fixed.
    """
    drawn = sorted(
        found, key=lambda one: random.Random(f"{seed} {one.path} {one.place} {one.new}").random()
    )
    return sorted(drawn[: count or len(found)])


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield each node that may be replaced, with its replacement.

    Only code that runs is changed: no annotations, f-strings or strict=True.
    """
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(
                child, ast.JoinedStr
            ):  # Python 3.11 doesn't know the positions of its parts
                continue
            if (
                isinstance(child, ast.keyword) and child.arg == "strict"
            ):  # an argument of zip that only checks
                continue
            if (
                isinstance(node, ast.Return)
                and isinstance(child, ast.expr)
                and not _is_false(child)
            ):
                yield child, "None"
            if isinstance(child, ast.AugAssign):
                yield from ((child, ast.unparse(_with(child, op=op))) for op in _swaps(child.op))
            elif isinstance(child, ast.expr):
                yield from ((child, f"({new})") for new in _alternatives(child))
            if isinstance(child, ast.AST):
                yield from _changes(child)


def _alternatives(node: ast.expr) -> Iterator[str]:
    """Yield the replacements of an expression."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            for other in _swaps(operator):
                yield ast.unparse(
                    _with(node, ops=[*node.ops[:place], other, *node.ops[place + 1 :]])
                )
    elif isinstance(node, ast.BoolOp) or (isinstance(node, ast.BinOp) and not _joins(node)):
        yield from (ast.unparse(_with(node, op=op)) for op in _swaps(node.op))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield ast.unparse(node.operand)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
        yield ast.unparse(_with(node, func=ast.Name(CALLS[node.func.id])))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield repr(
            node.value + 1 if isinstance(node.value, int) or not node.value else node.value * 2
        )


def _swaps(operator: ast.AST) -> list[Any]:
    return [getattr(ast, new)() for old, new in SWAPS if old == type(operator).__name__]


def _with(node: Any, **changes: object) -> Any:
    changed = copy.copy(node)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def _is_false(node: ast.expr) -> bool:
    """True if replacing the value by None would usually change nothing."""
    return isinstance(node, ast.Constant) and node.value in (None, False)


def _joins(node: ast.BinOp) -> bool:
    """True if the operator joins strings, lists or tuples; any other would raise TypeError."""
    parts = (node.left, node.right)
    return any(
        isinstance(p, ast.JoinedStr | ast.List | ast.Tuple)
        or isinstance(getattr(p, "value", 0), str)
        for p in parts
    )


def copy_checkout(folder: Path) -> Path:
    """Copy all files that git doesn't ignore; links stay links."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=HOME, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(HOME / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(HOME / name, folder / name, follow_symlinks=False)
    return folder


def tests_for(path: str) -> tuple[str, ...]:
    """Return the tests that should notice a change of this file."""
    return TESTS[max((name for name in TESTS if path.startswith(name)), key=len)]


def nearest_first(path: str, tests: tuple[str, ...]) -> list[str]:
    """Return the test files, the file's own test first, because it kills most mutants."""
    files = [
        each for test in tests for each in sorted((HOME / test).rglob("test_*.py")) or [HOME / test]
    ]
    own = f"test_{Path(path).stem}.py"
    return [
        str(each.relative_to(HOME)) for each in sorted(files, key=lambda each: each.name != own)
    ]


def passes(folder: Path, tests: Sequence[str], limit_seconds: float) -> bool:
    """True if the fast tests pass there within the time limit."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, *PYTEST, *tests]
    try:
        return not subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=limit_seconds
        ).returncode
    except subprocess.TimeoutExpired:
        return False


def run(chosen: Sequence[Mutant], root: Path, processes: int) -> list[Mutant]:
    """Return the mutants that pass the tests, and print them as they are found."""
    folders: SimpleQueue[Path] = SimpleQueue()
    for number in range(processes):
        folders.put(copy_checkout(root / str(number)))
    limits = {
        tests: _limit_seconds(root / "0", tests)
        for tests in {tests_for(mutant.path) for mutant in chosen}
    }

    def survives(mutant: Mutant) -> bool:
        folder, tests = folders.get(), tests_for(mutant.path)
        source = (folder / mutant.path).read_bytes()
        _write(folder / mutant.path, mutant.apply(source))
        passed = passes(folder, nearest_first(mutant.path, tests), limits[tests])
        _write(folder / mutant.path, source)
        folders.put(folder)
        if passed:
            print(mutant, flush=True)
        return passed

    with ThreadPoolExecutor(processes) as pool:
        return [
            mutant
            for mutant, passed in zip(chosen, pool.map(survives, chosen), strict=True)
            if passed
        ]


def _write(path: Path, source: bytes) -> None:
    """Write a source file and remove its bytecode, which could belong to an earlier mutant."""
    path.write_bytes(source)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def _limit_seconds(folder: Path, tests: Sequence[str]) -> float:
    """Return ten seconds plus three times the tests' duration on the unchanged sources.

    Raises SystemExit if they fail there.
    """
    began = time.monotonic()
    if not passes(folder, tests, 3600):
        raise SystemExit(
            f"These tests fail on the unchanged sources: {' '.join(tests)}. Fix them first."
        )
    return 10 + 3 * (time.monotonic() - began)


def main() -> int:
    """Print the mutants that no test notices; return 1 if there are too many."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=150, help="number of mutants (150); 0: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--files", nargs="+", default=FILES, help="files and folders to mutate")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    paths = [
        path
        for name in options.files
        for path in sorted((HOME / name).rglob("*.py")) or [HOME / name]
    ]
    found = [mutant for path in paths for mutant in find_mutants(str(path.relative_to(HOME)))]
    chosen = choose(found, options.sample, options.seed)
    with tempfile.TemporaryDirectory() as root:
        noticed = len(chosen) - len(run(chosen, Path(root), options.processes))
    print(
        f"{noticed} of {len(chosen)} mutants noticed ({noticed / len(chosen):.1%}); "
        f"{len(found)} are possible"
    )
    return 0 if noticed >= ENOUGH * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
