"""Frameworks start faster, and steps rest: every Python that a test starts runs this first (tests/conftest.py).

Garbage is collected seldom: hardly any object that an import makes is garbage, and looking through them all takes a
sixth of its time. Large packages are hidden from Keras while it is imported: it looks for them, and the tests need
none of what they add. Code that imports these packages itself finds them.

A step of the synthetic workload sleeps instead of spinning, and its process counts that as CPU time: tests that run
real children for seconds leave the cores to others, and are disturbed less by them.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

HIDDEN = ("matplotlib", "pandas", "sklearn")


class HiddenFromKeras:
    """A finder that finds nothing, and says so where Keras asks."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> None:
        """An ImportError for hidden packages while Keras is being imported."""
        keras = getattr(sys.modules.get("keras"), "__spec__", None)
        if name in HIDDEN and getattr(keras, "_initializing", False):
            raise ModuleNotFoundError(f"{name} is hidden from Keras in tests", name=name)


class RestingSteps:
    """A finder that changes one module as it is imported."""

    slept = 0.0  # seconds
    process_time = staticmethod(time.process_time)

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        """The synthetic workload's, whose steps rest."""
        spec = PathFinder.find_spec(name, path) if name == "evener.workloads.synthetic" else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def change(module: object) -> None:
            load(module)  # type: ignore[arg-type]
            vars(module)["keep_busy"] = cls.rest
            time.process_time = lambda: cls.process_time() + cls.slept

        spec.loader.exec_module = change  # type: ignore[method-assign]
        return spec

    @classmethod
    def rest(cls, until: float) -> None:
        """Sleep until `time.perf_counter()` is there."""
        while (left := until - time.perf_counter()) > 0:
            time.sleep(left)
            cls.slept += left


sys.meta_path[:0] = [HiddenFromKeras, RestingSteps]
gc.set_threshold(50_000, 20, 100)
