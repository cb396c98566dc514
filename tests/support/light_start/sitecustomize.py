"""Frameworks start faster, and steps sleep: every Python that a test starts runs this first.

tests/conftest.py sets it up. Garbage is collected rarely: hardly any object that an import makes is
garbage, and scanning them all takes a sixth of its time. Large packages are hidden from Keras while
it is imported: it looks for them, and the tests need none of what they add. Code that imports these
packages itself finds them. PyTorch's compiler, which each optimizer imports only to say that it
isn't to be compiled, is imported once something is compiled: a second of CPU. Shapes and
decompositions of its operations in Python, a quarter of its own import, are imported on first use.

Devices aren't locked by the kernel's own files, because workers measure on the same cores
(device_locks.py). The registry has the synthetic workload, which is beside this file. A step of it
sleeps instead of spinning, and its process counts that as CPU time: tests that run real children
for seconds leave the cores to others, and are disturbed less by them.

A `sitecustomize` further on the path, such as a test's own, is run too.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from device_locks import keep_off_the_kernels_files
from synthetic_entry import add_to

TYPE_CHECKING = False
if TYPE_CHECKING:  # for annotations: hundreds of processes would import it
    from collections.abc import Sequence
    from typing import Any

COMPILER = "torch._dynamo"
SHAPES = "torch._meta_registrations"
USERS_OF_SHAPES = (
    *(
        "torch._decomp",
        "torch._prims",
        "torch._prims_common.wrappers",
        "torch._refs",
        "torch.utils._content_store",
    ),
)
HIDDEN = ("matplotlib", "pandas", "sklearn")


class HiddenFromKeras:
    """A finder that hides packages from Keras by an ImportError."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> None:
        """Raise an ImportError for hidden packages while Keras is being imported."""
        keras = getattr(sys.modules.get("keras"), "__spec__", None)
        if name in HIDDEN and getattr(keras, "_initializing", False):
            raise ModuleNotFoundError(f"{name} is hidden from Keras in tests", name=name)


class Synthetic:
    """A finder that changes modules as they are imported.

    The workload sleeps, the registry knows it, and the kernel's files of devices are the test's.
    """

    slept = 0.0  # seconds
    process_time = staticmethod(time.process_time)

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, _target: object = None
    ) -> ModuleSpec | None:
        """Return the module, and change it after its import."""
        changes = {
            "synthetic_workload": cls.let_rest,
            "evener.workloads.registry": add_to,
            "evener.balancer.store.locks": keep_off_the_kernels_files,
        }
        change = changes.get(name)
        spec = PathFinder.find_spec(name, path) if change else None
        if change is None or spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec

    @classmethod
    def let_rest(cls, module: ModuleType) -> None:
        """Make its steps sleep, which counts as CPU time."""
        vars(module)["keep_busy"] = cls.rest
        time.process_time = lambda: cls.process_time() + cls.slept

    @classmethod
    def rest(cls, until: float) -> None:
        """Sleep until `time.perf_counter()` reaches this time."""
        while (left := until - time.perf_counter()) > 0:
            time.sleep(left)
            cls.slept += left


class LatePart:
    """A module of the compiler with the attributes that PyTorch reads although nothing
    is compiled.
    """

    def __init__(self, compiler: LateCompiler, name: str, **given: Any) -> None:
        vars(self).update(given, _compiler=compiler, _name=name)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self._compiler.load(), self._name), name)


class LateStance:
    """A stance for compiled functions, such as "force_eager", while nothing is compiled.

    It is set like that of PyTorch: when it is made, until the end of a `with` statement. If the
    compiler is imported meanwhile, it gets this stance.
    """

    def __init__(self, compiler: LateCompiler, arguments: Any, options: Any) -> None:
        self._compiler, self._arguments, self._options = compiler, arguments, options
        self._real: Any = None
        compiler.stances.append(self)

    def set_in(self, compiler: ModuleType) -> None:
        """Set this stance in the real compiler."""
        self._real = compiler.set_stance(*self._arguments, **self._options)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        if self._real is None:
            self._compiler.stances.remove(self)
        else:
            self._real.__exit__(*error)


class LateCompiler(ModuleType):
    """A replacement for `torch._dynamo`, which is imported once another attribute is read.

    Until then nothing is compiled, so functions that it should leave alone are called unchanged.
    """

    def __init__(self) -> None:
        super().__init__(COMPILER)
        self._left_alone: list[Any] = []
        self.stances: list[LateStance] = []  # in the order in which they were set
        # functions that a process group calls
        self.trace_rules = LatePart(self, "trace_rules", clear_lru_cache=lambda: None)
        # DistributedDataParallel
        self.utils = LatePart(self, "utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")

    def __getattr__(self, name: str) -> Any:
        # some read attributes of every module
        if name.startswith("__") or not self._may_have(name):
            raise AttributeError(name)
        return getattr(self.load(), name)

    def _may_have(self, name: str) -> bool:
        """True for a module of the compiler, and for names in its first file."""
        path = os.path.join(os.path.dirname(str(self.__file__)), name)
        if os.path.isdir(path) or os.path.exists(f"{path}.py"):
            return True
        with open(str(self.__file__), encoding="utf-8") as source:
            return name in source.read()

    def load(self) -> ModuleType:
        """Import the real compiler and drop the marks that `disable` left on functions."""
        if sys.modules.get(COMPILER) is self:
            LateImports.late = None
            del sys.modules[COMPILER]
            for each in self._left_alone:
                vars(each).pop("__dynamo_disable", None)
            compiler = import_module(COMPILER)
            for stance in self.stances:
                stance.set_in(compiler)
        return import_module(COMPILER)

    def set_stance(self, *arguments: Any, **options: Any) -> Any:
        """Set how compiled functions run; evener's audits do so although nothing is compiled."""
        if sys.modules.get(COMPILER) is not self:
            return self.load().set_stance(*arguments, **options)
        return LateStance(self, arguments, options)

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """Do nothing; PyTorch's optimizers call it in each step."""

    def disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Return the function unchanged, and remember it, as PyTorch marks it with an attribute."""
        if function is None or sys.modules.get(COMPILER) is not self:
            return self.load().disable(function, recursive, **options)
        self._left_alone.append(function)
        return function


class Existing:
    """An import loader for a module object that already exists."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec or module.__spec__


class LateImports:
    """An import finder that postpones PyTorch's compiler until a submodule of it is imported."""

    late: LateCompiler | None = LateCompiler()

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, _target: object = None
    ) -> ModuleSpec | None:
        if cls.late is None or not name.startswith(COMPILER):
            return None
        if name == COMPILER:
            found = PathFinder.find_spec(name, path)
            if found is not None:
                found.loader = Existing(cls.late)  # type: ignore[assignment]
            return found
        cls.late.load()
        return ModuleSpec(name, Existing(sys.modules[name])) if name in sys.modules else None  # type: ignore[arg-type]


class LateShapes:
    """An import finder that postpones PyTorch's shape computations for tensors without data."""

    late = True

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, _target: object = None
    ) -> ModuleSpec | None:
        if not cls.late or name not in (SHAPES, *USERS_OF_SHAPES):
            return None
        if name == SHAPES and path is not None:  # PyTorch imports it, as its last import
            cls.finish_generators()
            return ModuleSpec(name, Existing(ModuleType(name)))  # type: ignore[arg-type]
        cls.late = False
        if sys.modules.pop(SHAPES, None) is None:  # PyTorch is still being imported
            return None
        import_module(SHAPES)
        loader = Existing(sys.modules[name])
        sys.modules[name].__spec__ = None  # otherwise it would be executed again
        return ModuleSpec(name, loader)  # type: ignore[arg-type]

    @staticmethod
    def finish_generators() -> None:
        """Do the other job of `torch._prims`: without it no torch.Generator can be made (PyTorch
        2.13).
        """
        finish = getattr(sys.modules["torch._C"], "_set_generator_metaclass", None)
        if finish is not None:
            finish(import_module("torch._opaque_base").OpaqueBaseMeta)


sys.meta_path[:0] = [LateImports, LateShapes, HiddenFromKeras, Synthetic]
gc.set_threshold(50_000, 20, 100)


def run_next() -> None:
    """Run the `sitecustomize` that this file hides."""
    own = os.path.dirname(__file__)
    spec = PathFinder.find_spec("sitecustomize", [folder for folder in sys.path if folder != own])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(ModuleType("sitecustomize"))


run_next()
