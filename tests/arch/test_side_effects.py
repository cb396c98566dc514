"""What evener changes in a training process, and in the objects of other libraries.

A training script imports evener with its own libraries. Therefore nothing happens on import, no
object of another library changes its class, and only evener's launcher decides how a process exits.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import PACKAGES, files, nodes, parsed, place

# Functions that change the process, or PyTorch in all of it.
REGISTERING = {"register_at_fork", "set_wakeup_fd", "register"}
LAUNCHER = "evener/program/install.py"
ENDS_PROCESSES = {  # and evener's own children, which may exit in any way
    "evener/training/ending.py",
    "balancer/probes/fork_server.py",
    "balancer/probes/forkable.py",
    "balancer/probes/link_rank.py",
    "balancer/probes/shared_build.py",
    "balancer/probes/worker.py",
    "devices/cluster/agents.py",
    "tui/start.py",
}
TAKES_SIGNALS = {
    "evener/launch/watcher.py",
    "evener/system/signals.py",
    "evener/torch/ranks/stop_signal.py",  # SIGTERM only, if a training script asks for it
    "evener/training/ending.py",
    "balancer/probes/worker.py",
    "tui/cli/main.py",
}


def sources() -> Iterator[tuple[Path, str]]:
    for folder in PACKAGES:
        for path in files(folder):
            yield path, place(path, 0).removesuffix(":0")


def called(node: ast.AST) -> str:
    """Return the dotted name of the called function; empty for anything but a call."""
    function = node.func if isinstance(node, ast.Call) else None
    return ast.unparse(function) if isinstance(function, ast.Name | ast.Attribute) else ""


def assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that are assigned."""
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node


def on_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes that run on import: all except function bodies."""
    left: list[ast.AST] = list(tree.body)
    while left:
        node = left.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            left += node.decorator_list
        elif not isinstance(node, ast.Lambda):
            left += ast.iter_child_nodes(node)


def registrations(tree: ast.Module) -> list[int]:
    """Return the lines that register something in the process on import."""
    found = []
    for node in on_import(tree):
        name = called(node).rpartition(".")[2]
        if name in REGISTERING or (name.startswith("register_") and name.endswith("_hook")):
            found.append(getattr(node, "lineno", 0))
    return found


def reassigned_classes(tree: ast.Module) -> list[int]:
    return [node.lineno for node in assigned(tree) if node.attr == "__class__"]


def test_no_object_gets_another_class() -> None:
    assert [name for path, name in sources() if reassigned_classes(parsed(path))] == []


def test_nothing_is_registered_on_import() -> None:
    found = [f"{name}:{line}" for path, name in sources() for line in registrations(parsed(path))]
    assert found == []


def test_no_product_file_imports_a_library_for_tests() -> None:
    assert [name for path, name in sources() if imports_mocks(parsed(path))] == []


def imports_mocks(tree: ast.Module) -> bool:
    for node in nodes(tree):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        if {name.partition(".")[0] for name in names} & {"unittest", "pytest", "mock"}:
            return True
    return False


def test_only_the_launcher_decides_how_errors_are_shown() -> None:
    found = {
        name
        for path, name in sources()
        for node in assigned(parsed(path))
        if ast.unparse(node) == "sys.excepthook"
    }
    assert found == {LAUNCHER}


def calling(function: str) -> set[str]:
    """Return the files that call a function."""
    return {
        name for path, name in sources() for node in nodes(parsed(path)) if called(node) == function
    }


def test_processes_end_in_one_place() -> None:
    assert calling("os._exit") == ENDS_PROCESSES


def test_few_files_take_signals() -> None:
    assert calling("signal.signal") == TAKES_SIGNALS


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("import atexit\natexit.register(close)", [2]),
        ("register_optimizer_step_pre_hook(note)", [1]),
        ("class A:\n    os.register_at_fork(after_in_child=reset)", [2]),
        ("def begin():\n    atexit.register(close)", []),
        ("HOOKS = ProcessHooks(lambda: [register_module_hook(note)])", []),
    ],
)
def test_a_registration_would_be_found(code: str, lines: list[int]) -> None:
    assert registrations(ast.parse(code)) == lines
    assert reassigned_classes(ast.parse("model.__class__ = Other")) == [1]
    assert imports_mocks(ast.parse("from unittest import mock"))


PRIVATE = (  # one file per library
    "evener/torch/private.py",
    "evener/lightning_private.py",
    "evener/huggingface/private.py",
)
ASK_THEM = ("evener/torch/", "evener/lightning", "evener/huggingface/", "evener/program/")
# Names of Python itself and of named tuples; of an operation in a loss's graph, which says how it
# reduces its rows; of distributed functions that a program may call.
NOT_THEIRS = {
    *("_", "_getframe", "_current_frames", "_current_exceptions", "_fields", "_run_exitfuncs"),
    *("_saved_reduction", "_all_gather_base"),
}
# Names for audits: an operation's arguments, whether rows are sparse, and operations by name.
IN_AUDITS = {
    *("_schema", "_nnz", "_backward_hooks", "_C", "_DisableTorchDispatch"),
    *("_cudnn_init_dropout_state", "_like", "_scaled_dot_product", "_standard_gamma"),
}
MOST = 58  # private names of these libraries, without those for audits


def private_names(tree: ast.Module) -> set[str]:
    """Return the private names that a file uses but doesn't assign."""
    used: set[str] = set()
    own: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.Attribute):
            (own if isinstance(node.ctx, ast.Store) else used).add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.add(node.value)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            used.update(each.name for each in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
    return {
        name
        for name in used - own
        if name.startswith("_") and not name.startswith("__") and name.isidentifier()
    }


def own_names() -> set[str]:
    """Return the private names of functions and attributes that evener defines itself."""
    ours: set[str] = set()
    for path, name in sources():
        if name in PRIVATE:
            continue
        for node in nodes(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                ours.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                ours.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                ours.add(node.target.id)
    return ours


def test_private_names_of_a_library_are_in_one_file() -> None:
    """Only the library's `private.py`, whose test tries each name, uses its private names."""
    ours = own_names()
    found = {
        f"{name}: {each}"
        for path, name in sources()
        if name.startswith(ASK_THEM) and name not in PRIVATE
        for each in private_names(parsed(path)) - ours - NOT_THEIRS
        if not (name.startswith("evener/torch/audit/") and each in IN_AUDITS)
    }
    assert found == set()


def test_private_names_become_fewer() -> None:
    names = {
        (name, each) for path, name in sources() if name in PRIVATE for each in _used(parsed(path))
    }
    assert len(names) < MOST, sorted(names)


def _used(tree: ast.Module) -> set[str]:
    """Return the private names in a file, including those assigned to other objects."""
    stored = {each.attr for each in assigned(tree)}
    return private_names(tree) | {each for each in stored if each.startswith("_")} - {"_own"}
