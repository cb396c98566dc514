"""Wrap a library's function so that programs can still copy and pickle it."""

from __future__ import annotations

import pkgutil
from typing import Any

from wrapt import FunctionWrapper


class WrappedFunction(FunctionWrapper):  # type: ignore[type-arg]
    """A library's function with a wrapper around it.

    It is copied as itself and pickled by its name, like a plain function. wrapt's own class allows
    neither. `path` is that name, such as "torch:nn.utils.clip_grad_norm_".
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
