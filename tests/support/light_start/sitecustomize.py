"""Makes frameworks start faster; every Python that a test starts runs this first (tests/conftest.py).

Garbage is collected seldom: hardly any object that an import makes is garbage, and looking through them all takes a
sixth of its time. Large packages are hidden from Keras while it is imported: it looks for them, and the tests need
none of what they add. Code that imports these packages itself finds them.
"""

from __future__ import annotations

import gc
import sys

HIDDEN = ("matplotlib", "pandas", "sklearn")


class HiddenFromKeras:
    """A finder that finds nothing, and says so where Keras asks."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> None:
        """An ImportError for hidden packages while Keras is being imported."""
        keras = getattr(sys.modules.get("keras"), "__spec__", None)
        if name in HIDDEN and getattr(keras, "_initializing", False):
            raise ModuleNotFoundError(f"{name} is hidden from Keras in tests", name=name)


sys.meta_path.insert(0, HiddenFromKeras)
gc.set_threshold(50_000, 20, 100)
