"""Find, check, import and call the user's own functions that build a model.

No framework is imported here, except by the user's own code.
"""

from __future__ import annotations

import ast
import inspect
import re
import symtable
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, NamedTuple, cast

import evener
from evener.errors import EvenerError, RequestError

from .protocol import BACKENDS, Entry, pick

_DATA_FUNCTIONS = ("sample_batch", "training_data", "lengths")
# the function that makes the argument `model` of the user's function
LOADS_MODEL = "load_model"
MODEL = "model"
_PLACE_IN_TEXT = re.compile(r'File "([^"]+)", line (\d+)')
_PACKAGES = {
    "tensorflow": {"keras", "tensorflow"},
    "torch": {"accelerate", "lightning", "pytorch_lightning", "torch", "transformers", "trl"},
}
# libraries that start neither CUDA nor threads on import; bitsandbytes doesn't because the fork
# server calls `prevent_driver_initialization`
LIBRARIES = frozenset(
    (
        "accelerate",
        "bitsandbytes",
        "datasets",
        "lightning",
        "peft",
        "pytorch_lightning",
        "timm",
        "torchvision",
        "transformers",
        "trl",
    )
)
# methods of os.environ that only read variables
_READS_VARIABLES = frozenset(("copy", "get", "items", "keys", "values"))
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


class UserCodeError(EvenerError):
    """The user's file can't be parsed."""

    kind: ClassVar[str] = "user_code"
    exit_code: ClassVar[int] = 2


class UserModule(NamedTuple):
    """What the user's function has returned, and the data functions of the same module."""

    result: Any
    sample_batch: Callable[..., Any] | None
    training_data: Callable[..., Any] | None
    lengths: Callable[..., Any] | None


def entry(name: str, framework: str) -> Entry:
    """Return a registry entry for the user's function, which has a name such as `train.py:build`.

    It may also be in a module, as in `package.module:build`. The file is parsed, but not run.
    Raises `RequestError` if the name is malformed or the function doesn't exist, and
    `UserCodeError` for a syntax error.
    """
    home, _, attribute = name.rpartition(":")
    if not home or not attribute.isidentifier():
        if names_a_file(home or attribute):
            raise _missing_function_error(name, Path(home or attribute))
        raise RequestError(
            f"{name!r} doesn't name a function.",
            "Write it as train.py:build or package.module:build.",
        )
    if framework not in BACKENDS:
        raise RequestError(f"{name} needs a framework.", f"Choose one of {', '.join(BACKENDS)}.")
    if names_a_file(home):
        _check_file(Path(home), attribute)
    elif not all(part.isidentifier() for part in home.split(".")):
        raise RequestError(
            f"{home!r} is neither a Python file nor a module.", "Write it as train.py:build."
        )
    kind = cast(Literal["tensorflow", "torch"], framework)
    return Entry(
        name, kind, f"{BACKENDS[framework]}.user_model:build", f"your own {attribute}", home, {}
    )


def names_a_file(name: str) -> bool:
    """Return whether a name refers to a Python file rather than a module."""
    return name.endswith(".py") or "/" in name


def guess_framework(name: str) -> str:
    """Return the framework that the user's file imports; "tensorflow" if that isn't clear.

    Raises `RequestError` if the file can't be read, and `UserCodeError` for a syntax error.
    """
    home = name.rpartition(":")[0] or name
    if not names_a_file(home):
        return "tensorflow"
    _parsed(Path(home))  # raises an error if the file is invalid
    return script_framework(Path(home)) or "tensorflow"


def script_framework(script: Path) -> str:
    """Return the framework that a script imports; "" if it imports none or both."""
    imported: list[str] = []
    with suppress(EvenerError):
        imported = [name for node in ast.walk(_parsed(script)) for name in list_imports(node)]
    found = [
        framework for framework, own in _PACKAGES.items() if own & set(map(package_of, imported))
    ]
    return found[0] if len(found) == 1 else ""


def list_imports(node: ast.AST) -> list[str]:
    """Return what an import statement imports, as "module" or "module:name".

    Returns an empty list for relative imports and for other statements.
    """
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [f"{node.module}:{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def package_of(name: str) -> str:
    """Return the top-level package of an import such as "torch.nn:Module"."""
    return name.partition(":")[0].partition(".")[0]


def find_library_imports(script: Path) -> tuple[str, ...]:
    """Return a script's top-level imports from libraries that can safely be imported in advance.

    Returns an empty tuple if the script may set environment variables, because libraries read them
    when they are imported.
    """
    tree = ast.parse(script.read_text())
    if _may_set_variables(tree):
        return ()
    names = [name for node in tree.body for name in list_imports(node)]
    return tuple(name for name in names if package_of(name) in LIBRARIES)


def _may_set_variables(tree: ast.AST) -> bool:
    """Return whether a script may change environment variables."""
    nodes = list(ast.walk(tree))
    imported = {name.rpartition(":")[2] for node in nodes for name in list_imports(node)}
    if imported & {"environ", "putenv"}:
        return True
    only_read = {id(each) for node in nodes for each in _list_reads(node)}
    used = [node for node in nodes if isinstance(node, ast.Attribute)]
    return any(
        node.attr == "putenv" or (node.attr == "environ" and id(node) not in only_read)
        for node in used
    )


def _list_reads(node: ast.AST) -> list[ast.expr]:
    """Return the parts of an expression that are only read, not changed."""
    if isinstance(node, ast.Subscript):
        return [node.value] if isinstance(node.ctx, ast.Load) else []
    if isinstance(node, ast.Attribute):
        return [node.value] if node.attr in _READS_VARIABLES else []
    return node.comparators if isinstance(node, ast.Compare) else []


class UserFunction(NamedTuple):
    """The user's function with its arguments.

    `takes_model` is True if one of the arguments is the model that the user's `load_model`
    returned.
    """

    module: ModuleType
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    takes_model: bool = False

    def call(self) -> UserModule:
        """Call the function, and return its result with the data functions of its module.

        Exceptions of the user's code are passed on.
        """
        made = (getattr(self.module, each, None) for each in _DATA_FUNCTIONS)
        data = (each if callable(each) else None for each in made)
        return UserModule(self.function(**self.arguments), *data)


def load(name: str, settings: Mapping[str, Any]) -> UserModule:
    """Import and call the user's function.

    Raises `RequestError` if the function doesn't exist, or if the settings don't fit its
    parameters. Exceptions of the user's code are passed on.
    """
    return find_function(name, settings).call()


def find_function(name: str, settings: Mapping[str, Any]) -> UserFunction:
    """Import the user's function, and prepare its arguments from the settings.

    If it has a required parameter `model` and its module has a function `load_model`, that is
    called first. Raises `RequestError` if the function doesn't exist, or if the settings don't fit
    its parameters. Exceptions of the user's code are passed on.
    """
    home, _, attribute = name.rpartition(":")
    module = _import(home, Path(home).resolve() if names_a_file(home) else None)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise RequestError(
            f"{home} has no function {attribute!r}.", "Name one that builds the model."
        )
    arguments = {key: _literal(value) for key, value in settings.items()}
    load_model = getattr(module, LOADS_MODEL, None)
    if not callable(load_model) or not _needs_model(function, arguments):
        _check_arguments(name, function, arguments)
        return UserFunction(module, function, arguments)
    of_model = pick(load_model, arguments)
    others = {key: value for key, value in arguments.items() if key not in of_model}
    own = others | pick(function, arguments)
    _check_arguments(f"{home}:{LOADS_MODEL}", load_model, of_model)
    _check_arguments(name, function, {**own, MODEL: None})
    return UserFunction(module, function, {**own, MODEL: load_model(**of_model)}, takes_model=True)


def _needs_model(function: Callable[..., Any], arguments: Mapping[str, Any]) -> bool:
    """Return whether the function requires a parameter `model` that isn't among the arguments."""
    parameter = inspect.signature(function).parameters.get(MODEL)
    if parameter is None or MODEL in arguments:
        return False
    return parameter.default is inspect.Parameter.empty


def _check_arguments(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise `RequestError` if the arguments don't fit the function's parameters."""
    parameters = inspect.signature(function)
    try:
        parameters.bind(**arguments)
    except TypeError as error:
        attribute = name.rpartition(":")[2]
        raise RequestError(
            f"{name}: {error}.", f"It is {attribute}{parameters}; write --set KEY=VALUE."
        ) from None


def find_line(error: BaseException, name: str = "") -> str:
    """Return where in the user's code an error occurred, as `FILE:LINE`; "" if unknown.

    The file of the workload `name` counts as user code even if it is in an installed package.
    """
    # An error from a TensorFlow graph has its lines only in its message, so the message is searched
    # too.
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    places = [*_PLACE_IN_TEXT.findall(str(error)), *frames]
    module = sys.modules.get(name.rpartition(":")[0])
    script = getattr(module, "__file__", "")
    for file, line in reversed(places):
        if file == script or is_user_file(file):
            return f"{file}:{line}"
    return ""


# names of folders with installed packages, in any environment
INSTALLED = {"site-packages", "dist-packages"}


def is_user_file(file: str) -> bool:
    """Return whether a file is the user's own.

    It isn't if it belongs to Python, to evener or to an installed package.
    """
    folders = [
        Path(evener.__file__).parent,
        *map(Path, map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))),
    ]
    try:
        if not file.endswith(".py"):
            return False
        real = {*folders, *(folder.resolve() for folder in folders)}
        for path in (Path(file), Path(file).resolve()):
            if INSTALLED & {*path.parts} or any(map(path.is_relative_to, real)):
                return False
        return True
    except (OSError, ValueError):  # an error's message may contain an invalid path
        return False


def _import(home: str, source: Path | None) -> ModuleType:
    if source is None:
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return import_module(home)
    spec = util.spec_from_file_location(source.stem, source)
    if spec is None or spec.loader is None:
        raise RequestError(f"{source} can't be imported.", "Give a Python file.")
    module = util.module_from_spec(spec)
    sys.path.insert(
        0, str(source.parent)
    )  # makes the modules in its folder importable, as for a script
    sys.modules.setdefault(source.stem, module)
    spec.loader.exec_module(module)
    return module


def _literal(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False}.get(value.lower(), value)


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise RequestError(
            f"There is no file {path}.", f"Check the path, and write it as {path}:FUNCTION."
        ) from None
    except OSError as error:
        raise RequestError(
            f"{path} can't be read: {error.strerror or error}.", "Check the path."
        ) from None
    except (SyntaxError, ValueError) as error:
        where, why = (
            (f"{path}:{error.lineno or 1}", error.msg)
            if isinstance(error, SyntaxError)
            else (path, error)
        )
        raise UserCodeError(
            f"{where}: {type(error).__name__}: {why}.", "Correct that line."
        ) from None


def _missing_function_error(name: str, path: Path) -> RequestError:
    """Return the error for a workload name that doesn't include the name of a function.

    The error suggests functions in the file that may return the model.
    """
    functions = [node for node in _functions(path) if _could_build(node)]
    free = _without_required_arguments(functions)
    known = " or ".join(node.name for node in free or functions)
    could = f"it could be {known}" if known else "it has none yet that could give a model"
    return RequestError(f"{name} doesn't name a function.", f"Write {path}:FUNCTION; {could}.")


MOST_FILES = 100  # maximum number of files searched for models
MOST_FILE_BYTES = 1 << 20
_BUILDS = ("build", "make", "create", "get_model", "model", "trainer")


def find_models(folder: Path) -> tuple[str, ...]:
    """Return the names of functions that may build a model, such as `train.py:build`.

    The functions are in the Python files of a folder. Likely names come first, then recently
    changed files. No file is run. Files that import no framework, or that can't be parsed, are left
    out.
    """
    with suppress(OSError):
        files = [path for path in folder.glob("*.py") if _is_small_file(path)]
        files.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        found = [name for path in files[:MOST_FILES] for name in _list_models(path)]
        return tuple(sorted(found, key=_rank_model))
    return ()


def _is_small_file(path: Path) -> bool:
    return path.is_file() and path.stat().st_size <= MOST_FILE_BYTES


def _list_models(path: Path) -> list[str]:
    """Return the names of a file's functions that may build a model and need no arguments.

    A name includes the file, as in `train.py:build`.
    """
    if not script_framework(path):
        return []
    functions = [node for node in _functions(path) if _could_build(node)]
    ready = _without_required_arguments(functions)
    return [f"{path.name}:{node.name}" for node in ready if node.name != "main"]


def _without_required_arguments(functions: Iterable[ast.FunctionDef]) -> list[ast.FunctionDef]:
    """Return the functions that can be called without arguments from the user.

    A parameter `model` is allowed if `load_model` is among the functions.
    """
    found = [*functions]
    given = {MODEL} if any(node.name == LOADS_MODEL for node in found) else set()
    return [node for node in found if _required(node) <= given]


def _functions(path: Path) -> list[ast.FunctionDef]:
    """Return the functions at a file's top level."""
    return [node for node in _parsed(path).body if isinstance(node, ast.FunctionDef)]


def _rank_model(name: str) -> int:
    function = name.rpartition(":")[2]
    if function == "build":
        return 0
    return 1 if any(word in function for word in _BUILDS) else 2


def _could_build(function: ast.FunctionDef) -> bool:
    """Return whether a function may build a model.

    It may if it is public, returns a value and isn't one of the data functions.
    """
    # The data functions are `sample_batch`, `training_data` and `lengths`.
    if function.name.startswith("_") or function.name in _DATA_FUNCTIONS:
        return False
    return any(node.value is not None for node in _own_returns(function))


def _own_returns(function: ast.FunctionDef) -> Iterator[ast.Return]:
    """Yield the return statements of a function, without those of functions inside it."""
    left: list[ast.AST] = [*function.body]
    while left:
        node = left.pop()
        if isinstance(node, _SCOPES):
            continue
        if isinstance(node, ast.Return):
            yield node
        left += ast.iter_child_nodes(node)


def _required(function: ast.FunctionDef) -> set[str]:
    """Return the names of parameters without a default."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    required = positional[: len(positional) - len(given.defaults)]
    both = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    return {each.arg for each in required} | {each.arg for each, default in both if default is None}


def _check_file(path: Path, attribute: str) -> None:
    tree = _parsed(path)
    stars = any(
        isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in tree.body
    )
    symbols = symtable.symtable(ast.unparse(tree), str(path), "exec").get_symbols()
    names = {
        symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()
    }
    if attribute not in names and not stars:
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        known = ", ".join(functions) or "none"
        raise RequestError(f"{path} has no function {attribute!r}.", f"Its functions: {known}.")
