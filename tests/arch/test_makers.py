"""A device maker is named only in its own folder and in one line of the registry."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from evener.devices.registry import BACKENDS, all_backends
from evener.plan.layout import GPU_IDS
from tests.support.sources import PACKAGES, REPO, compared, files, nodes, parsed, place

MAKER = re.compile(r"nvidia|nvml|cuda", re.IGNORECASE)
# kinds of devices, and the prefixes of their labels and ids
KIND = re.compile(rf"({'|'.join(BACKENDS)})([-:].*)?", re.IGNORECASE)
OWN = (
    "devices/nvidia/",
    "devices/registry.py",
    "evener/plan/layout.py",
)  # the last one defines GPU_IDS
# "cuda" is PyTorch's word for a GPU of any maker, and CUDA_VISIBLE_DEVICES is what both
# frameworks read
FRAMEWORKS = (
    "evener/torch/",
    "evener/huggingface/",
    "evener/keras/",
    "evener/ray.py",
    "workloads/torch_backend/",
    "workloads/keras_backend/",
)
SHOWN = (
    "tui/view/devices.py",  # leaves the maker out of a product's name
    "tui/cli/machine.py",  # shows the reference units of some NVIDIA products
)


def makers_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the imports, names and strings that name a maker.

    Strings with a space are texts for people, so they are skipped.
    """
    for node in nodes(tree):
        match node:
            case ast.Import(names=found):
                words = [alias.name for alias in found]
            case ast.ImportFrom(module=module, names=found):
                words = [module or "", *(alias.name for alias in found)]
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word):
                words = [word]
            case (
                ast.FunctionDef(name=word)
                | ast.AsyncFunctionDef(name=word)
                | ast.ClassDef(name=word)
            ):
                words = [word]
            case ast.Constant(value=str() as word) if " " not in word.strip():
                words = [word]
            case _:
                continue
        for word in words:
            if MAKER.search(word):
                yield getattr(node, "lineno", 1), word


def kinds_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield comparisons with a device kind's name, or with the prefix of its labels or ids."""
    for line, said, called in compared(tree):
        yield from ((line, word) for word in said if called and KIND.fullmatch(word))


def test_no_maker_is_named_outside_its_folder() -> None:
    """Other code asks `find_backend`, so that a new maker needs only a class and a line."""
    hits = [
        f"{place(path, line)}  {word}"
        for package in PACKAGES
        for path in files(package)
        if not str(path.relative_to(REPO)).startswith(OWN + FRAMEWORKS + SHOWN)
        for line, word in makers_in(parsed(path))
    ]
    assert hits == []


def test_no_kind_of_devices_is_compared() -> None:
    """CPU slices and simulated devices are queried like a maker's devices.

    Only devices/ parses what a person has typed.
    """
    hits = [
        f"{place(path, line)}  {word}"
        for package in PACKAGES
        for path in files(package)
        if not str(path.relative_to(REPO)).startswith(("devices/", *FRAMEWORKS))
        for line, word in kinds_in(parsed(path))
    ]
    assert hits == []


def test_plans_know_the_ids_of_every_makers_gpus() -> None:
    """Plans know the id prefixes of all makers' GPUs.

    Otherwise a training script, which can't ask a backend, would put such a GPU's rank on the CPU.
    """
    makers = [backend for backend in all_backends() if backend.own_memory]
    assert {
        prefix.upper(): each.kind.upper() for each in makers for prefix in each.id_prefixes
    } == GPU_IDS


def test_a_makers_name_would_be_found() -> None:
    """The check finds an import, a name, a string and a comparison, but no text for people."""
    found = ["from evener.devices.nvidia import x", "CUDA = 1", 'name == "NVIDIA"']
    assert [len(list(makers_in(ast.parse(code)))) for code in found] == [1, 1, 1]
    kinds = [
        'device.kind == "gpu"',
        'share.device.startswith("cpu-")',
        'kinds & {"sim"}',
        'label[:4] in ("SIM:",)',
    ]
    assert [len(list(kinds_in(ast.parse(code)))) for code in kinds] == [1, 1, 1, 1]
    assert list(makers_in(ast.parse('print("an NVIDIA GPU is here", device.kind)'))) == []
