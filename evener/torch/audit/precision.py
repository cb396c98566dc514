"""Full precision while a few rows are computed: no autocast, no TF32, no bfloat16 in products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def full_precision() -> Iterator[None]:
    """A context in which products of float32 are computed in float32, whatever the program asks."""
    with ExitStack() as stack:
        stack.enter_context(_without_autocast())
        stack.enter_context(_without_tf32())
        yield


@contextmanager
def _without_autocast() -> Iterator[None]:
    """No autocast, also where code enters it meanwhile."""
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
    """No coarser products.

    PyTorch has two ways to ask for them, and raises an error where the older one is read and the
    newer one (`fp32_precision`, since 2.9) says something else.
    """
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
    """A setting of the older way; None where the program has said it in the newer one."""
    try:
        return setting()
    except RuntimeError:
        return None
