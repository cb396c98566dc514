"""The page of what is tested where, from the names in the tests themselves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[1]
FRAMEWORKS = {  # the beginnings of test files' names, or of a file's tests
    "PyTorch": ("test_torch_", "test_noise_scale"),
    "transformers, TRL": ("test_huggingface", "test_trainer_matrix", "test_trainer_audits"),
    "Lightning": ("test_lightning",),
    "Keras": ("test_keras_", "test_fit_kinds", "test_early_sums"),
    "Ray Train": tuple(
        f"test_ray_hosts::test_{words}"
        for words in ("a_launch", "a_plan", "a_training", "ray_train")
    ),
}
FEATURES = {  # words in the names of tests and of their cases
    "same weights as one process": r"learns?\b|weights|exact|what_one",
    "shares in passes": r"pass(es)?\b|parts",
    "memory that runs out": r"oom|memory|retreat|smaller_passes",
    "shares that change": r"rebalanc|shares_change|changes? to the same shares",
    "rows of unequal length": r"lengths?\b|by cost|tokens by|assigned|dealt",
    "resumed, restarted": r"resum|goes_on|go_on|checkpoint|killed|restored|BackupAndRestore",
    "losses and loops that are refused": r"refused|guard|no_mean|part_values|_audit",
    "noise scale": r"noise_scale|test_torch_noise",
    "gradient accumulation": r"accumulat|no_sync",
    "FSDP2": r"FSDP2",
    "a state that is divided by memory": r"shard",
    "mixed precision": r"bf16|half_precision|every_precision|loss_scal|overflow",
    "evaluation and prediction": r"evaluat|predict|validation",
    "without changing a line": r"run_programs|trained_by_shares",
    "times of own work and waiting": r"own_work|waits|held_up",
}
TWO_GPUS = re.compile(r"gpu_ranks|/dev/nvidia1")
PLACES = ("CPU", "one GPU", "two")


class Tested(NamedTuple):
    """A test: its file, its name, and the words of its cases."""

    file: str
    name: str
    words: str
    place: str  # one of PLACES


def find_tests() -> Iterator[Tested]:
    """Every test of a training, with the words by which features are found."""
    for path in sorted((REPO / "tests").rglob("test_*.py")):
        if not any(
            path.name.startswith(each.partition("::")[0])
            for names in FRAMEWORKS.values()
            for each in names
        ):
            continue
        text = path.read_text()
        tree = ast.parse(text)
        constants = {
            target.id: " ".join(_strings(node.value))
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        everywhere = bool(TWO_GPUS.search(constants.get("pytestmark", "")))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
                "test_"
            ):
                named = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                cases = [
                    *_strings(node),
                    *(constants[name] for name in sorted(named & constants.keys())),
                ]
                takes = " ".join(argument.arg for argument in node.args.args)
                two = everywhere or bool(TWO_GPUS.search(takes))
                place = (
                    "two"
                    if two
                    else "one GPU"
                    if "cuda.is_available" in ast.unparse(node)
                    else "CPU"
                )
                yield Tested(path.stem, node.name, " ".join(cases), place)


def _strings(node: ast.AST) -> Iterator[str]:
    """The texts in it that are names: short ones, no docstring."""
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and len(each.value) < 60:
            yield each.value


def tested_page() -> str:
    """A table of features by frameworks: in how many tests on CPUs and on two GPUs."""
    tests = list(find_tests())
    lines = [
        "# What is tested where",
        "",
        "Made from the names of the tests and of their cases. A cell has the number of test "
        "functions: **on slices of"
        " the CPU, over gloo or gRPC, in every run of the suite / on one GPU / on two, over NCCL**."
        " [On real GPUs](../benchmarks/gpu.md) says when those for GPUs ran. A function may "
        "have many cases, and count"
        " in several rows.",
        "",
        f"| | {' | '.join(FRAMEWORKS)} |",
        "| --- |" + " ---: |" * len(FRAMEWORKS),
    ]
    for feature, words in FEATURES.items():
        cells = []
        for prefixes in FRAMEWORKS.values():
            found = [
                each
                for each in tests
                if f"{each.file}::{each.name}".startswith(prefixes)
                and re.search(words, f"{each.file} {each.name} {each.words}")
            ]
            counts = [sum(each.place == place for each in found) for place in PLACES]
            cells.append(" / ".join(str(count or "–") for count in counts) if found else "–")
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_searches()]) + "\n"


def _searches() -> Iterator[str]:
    """How many searches were recorded on GPUs, by workload."""
    found: dict[str, dict[str, int]] = {}
    for path in sorted((REPO / "tests/recorded").glob("*.jsonl")):
        match = re.match(r"h200x(\d)-(?:compare-)?([a-z]+_[a-z]+)", path.stem)
        if match is not None:
            counts = found.setdefault(match[2], {})
            counts[match[1]] = counts.get(match[1], 0) + 1
    yield "## Searches recorded on GPUs"
    yield ""
    yield "Journals in tests/recorded, which the suite replays."
    yield ""
    yield "| workload | on two H200 | on four |"
    yield "| --- | ---: | ---: |"
    for workload, counts in found.items():
        yield f"| {workload} | {counts.get('2', 0) or '–'} | {counts.get('4', 0) or '–'} |"
