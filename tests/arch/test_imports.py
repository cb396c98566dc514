"""Import rules that static contracts can't check: which modules a command really loads."""

from __future__ import annotations

import ast
import glob
import json
import subprocess
import sys
from pathlib import Path

import pytest

import evener
from tests.support.frameworks import IMPORTED
from tests.support.sources import nodes, parsed

FRAMEWORKS = {"tensorflow", "keras", "torch"}
SCREEN = {"textual"}


def modules_after(code: str, tmp_path: Path) -> set[str]:
    """Return the top-level modules that a new interpreter has loaded after running `code`."""
    program = (
        f"{code}\nimport sys, json\nprint(json.dumps(sorted({{m.partition('.')[0] for m in "
        f"sys.modules}})))"
    )
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=True,
    )
    return set(json.loads(answer.stdout.splitlines()[-1]))


def command(*arguments: str) -> str:
    """Return code that runs a command of evener to its end and then continues."""
    return f"from evener.tui.cli.main import run\nassert run({list(arguments)!r}) == 0"


def test_import_evener_loads_no_framework(tmp_path: Path) -> None:
    """A training script loads only what it needs to read the plan."""
    loaded = modules_after("import evener; evener.load_plan; evener.report", tmp_path)
    assert not loaded & (FRAMEWORKS | SCREEN | {"rich", "typer", "psutil", "pynvml", "numpy"})


def test_a_headless_balance_loads_no_screen_and_no_framework(tmp_path: Path) -> None:
    """A simulated search with JSON output loads neither Textual nor a framework."""
    loaded = modules_after(
        command("balance", "--devices", "sim:gtx1080ti,gtx1080", "--json"), tmp_path
    )
    assert not loaded & (FRAMEWORKS | SCREEN)


@pytest.mark.parametrize(
    "arguments",
    [
        ("devices", "--devices", "cpu"),
        ("runs",),
        ("monitor", "--once", "--devices", "cpu"),
        ("monitor", "--json", "--devices", "sim:gtx1080ti"),
        ("compare", "--devices", "sim:gtx1080ti,gtx1080", "--json"),
    ],
    ids=" ".join,
)
def test_headless_commands_load_no_screen_and_no_framework(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """Commands that only print lines start quickly."""
    assert not modules_after(command(*arguments), tmp_path) & (FRAMEWORKS | SCREEN)


def test_the_version_is_answered_before_anything_is_imported(tmp_path: Path) -> None:
    """`evener --version` loads neither the parser nor msgspec."""
    code = (
        "import sys; sys.argv = ['evener', '--version']\nfrom evener.__main__ import main\nmain()"
    )
    assert not modules_after(code, tmp_path) & {"typer", "msgspec", "rich", "psutil"}


def test_evener_is_the_only_name_that_an_install_offers(tmp_path: Path) -> None:
    """A user's own `devices.py` or `tui.py` neither shadows evener's packages nor is shadowed."""
    ours = "evener", "balancer", "benchmarks", "devices", "docs", "tests", "tui", "workloads"
    program = f"import importlib.util\nprint([n for n in {ours!r} if importlib.util.find_spec(n)])"
    answer = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": ""},
        check=True,
    )
    assert answer.stdout.strip() == "['evener']"


def imports_by_module(package: Path) -> dict[str, set[str]]:
    """Return each module's imports within the package.

    Type-only imports and imports inside functions are included.
    """
    # which follows symlinks
    paths = [Path(path) for path in glob.iglob(f"{package}/**/*.py", recursive=True)]
    dotted = {
        path: ".".join(path.relative_to(package.parent).with_suffix("").parts) for path in paths
    }
    names = {name.removesuffix(".__init__"): path for path, name in dotted.items()}
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        wanted: set[str] = set()
        for node in nodes(parsed(path.resolve())):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = ".".join(
                    filter(None, [*dotted[path].split(".")[: -node.level or 0], node.module])
                )
                modules = {f"{base}.{alias.name}" for alias in node.names} & names.keys()
                wanted |= modules if len(modules) == len(node.names) else {*modules, base}
        found[name] = (wanted & names.keys()) - {name}
    return found


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the modules in import cycles, or between two cycles.

    Modules that nothing imports, or that import nothing, are removed until none is left.
    """
    left = {name: set(wanted) for name, wanted in imports.items()}
    while True:
        imported = set().union(*left.values()) if left else set()
        ends = [name for name, wanted in left.items() if not wanted or name not in imported]
        if not ends:
            break
        for name in ends:
            del left[name]
        left = {name: wanted & left.keys() for name, wanted in left.items()}
    return [sorted(left)] if left else []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """No modules import each other in a cycle; type-only imports count, too."""
    package = Path(evener.__file__).parent
    imports = imports_by_module(package)
    assert "evener.errors" in imports["evener.plan.file"], "relative imports count"
    assert {"evener.plan.file", "evener.tui.app", "evener.balancer.session"} <= imports.keys(), (
        "every package is read"
    )
    assert circles(imports) == []


def test_a_circle_would_be_found() -> None:
    """The check finds two modules that import each other among others that don't."""
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert circles(imports) == [["b", "c"]]


def test_collecting_tests_imports_no_slow_framework(request: pytest.FixtureRequest) -> None:
    """Test files import TensorFlow, transformers and others inside tests, or name them as text.

    Every worker imports all test files.
    """
    assert request.config.stash[IMPORTED] == []


WITHOUT = """
import glob, importlib, os, sys
import pytest
for name in (
    *("tensorflow", "keras", "torch", "transformers", "accelerate", "trl", "lightning", "ray"),
    *("prometheus_client", "textual_serve"),
):
    sys.modules[name] = None  # as if it weren't installed
for path in glob.glob("tests/*/**/test_*.py", recursive=True):
    if not os.path.basename(path).startswith("test_torch_"):  # tests/conftest.py leaves them out
        try:
            importlib.import_module(path[:-3].replace(os.sep, "."))
        except pytest.skip.Exception:
            pass
"""


def test_tests_are_found_without_the_optional_packages() -> None:
    """Test files import no optional package at module level, as each worker imports all files."""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", WITHOUT], cwd=root, check=True)
