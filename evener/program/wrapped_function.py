"""Wrap a library's function with a hook so that it can still be copied and pickled."""

from __future__ import annotations

import pkgutil
from typing import Any

from wrapt import FunctionWrapper


class WrappedFunction(FunctionWrapper):  # type: ignore[type-arg]
    """Wrapper that adds a hook to a library's function.

    It is pickled as the function's name, `path`, so that the pickle can be loaded without evener.
    """

    def __init__(self, wrapped: Any, wrapper: Any, path: str) -> None:
        super().__init__(wrapped, wrapper)
        self._self_path = path

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, _: Any) -> Any:
        return self

    def __reduce_ex__(self, _: Any) -> Any:
        # a function of Python's library, so the file can be read where evener isn't installed
        return pkgutil.resolve_name, (self._self_path,)
