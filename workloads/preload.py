"""Imports of the process that a workload's children are forked from: the framework, and a script's libraries.

Nothing of the user's own runs: their module may start CUDA, and is imported by each child alone.
"""

from __future__ import annotations

import ast
from contextlib import suppress
from pathlib import Path

from evener.errors import EvenerError

from . import registry
from .user_code import list_imports, names_a_file, package_of

LIBRARIES = frozenset(  # known to start neither CUDA nor threads of their own when they are imported
    ("accelerate", "datasets", "lightning", "peft", "pytorch_lightning", "timm", "torchvision", "transformers", "trl")
)
_SETS_VARIABLES = ("environ", "putenv")  # a script that does this does it before it imports what reads them


def find_imports(workload: str, framework: str) -> tuple[str, ...]:
    """ "module" or "module:attribute" for the children of a workload, in order; none for one that doesn't exist."""
    with suppress(EvenerError, OSError, SyntaxError, ValueError):
        module = registry.find(workload, framework).home.partition(":")[0]
        script = workload.rpartition(":")[0]
        return (module, *(_find_library_imports(Path(script)) if names_a_file(script) else ()))
    return ()


def _find_library_imports(script: Path) -> tuple[str, ...]:
    source = script.read_text()
    if any(word in source for word in _SETS_VARIABLES):
        return ()
    names = [name for node in ast.parse(source).body for name in list_imports(node)]
    return tuple(name for name in names if package_of(name) in LIBRARIES)
