"""Compute in full precision during an audit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def full_precision(keeps_autocast: bool = False) -> Iterator[None]:
    """Context manager that disables TF32, and also autocast unless `keeps_autocast`."""
    with ExitStack() as stack:
        if not keeps_autocast:
            stack.enter_context(_without_autocast())
        stack.enter_context(_without_tf32())
        yield


@contextmanager
def _without_autocast() -> Iterator[None]:
    # code inside can't enable it either
    autocast = torch.amp.autocast_mode.autocast
    entered = autocast.__enter__, autocast.__exit__
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        try:
            autocast.__enter__ = lambda self: self
            autocast.__exit__ = lambda *_: None
            yield
        finally:
            autocast.__enter__, autocast.__exit__ = entered


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Context manager in which float32 matrix products and convolutions don't use TF32."""
    # PyTorch has older settings for this (such as `allow_tf32`) and newer ones (`fp32_precision`,
    # since 2.9); both are changed. Reading an older one raises an error if a newer one disagrees.
    backends = torch.backends
    places = [backends.cuda.matmul, backends.mkldnn.matmul]
    for backend in (backends.cudnn, backends.mkldnn):
        places += [getattr(backend, name) for name in ("conv", "rnn") if hasattr(backend, name)]
    kept = [(each, getattr(each, "fp32_precision", None)) for each in places]
    products = _read(torch.get_float32_matmul_precision)
    convolutions = _read(lambda: backends.cudnn.allow_tf32)
    try:
        if products is not None:
            torch.set_float32_matmul_precision("highest")
        if convolutions is not None:
            backends.cudnn.allow_tf32 = False
        for place, precision in kept:
            if precision is not None:
                place.fp32_precision = "ieee"
        yield
    finally:
        if products is not None:
            torch.set_float32_matmul_precision(products)
        if convolutions is not None:
            backends.cudnn.allow_tf32 = convolutions
        for place, precision in kept:
            if precision is not None:
                place.fp32_precision = precision


def _read(setting: Callable[[], Any]) -> Any:
    """Return the value of a PyTorch setting, or None if it can't be read."""
    # an older setting raises an error if the program has changed the newer one
    try:
        return setting()
    except RuntimeError:
        return None
