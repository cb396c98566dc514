"""Wrappers of a model whose gradients an Exchange sums: a module of evener's, or the user's own wrapper."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..errors import RequestError
from .batch_tracker import tensors_in
from .exchange import BUCKET_BYTES, Exchange
from .nested_batch import each_tensor

_NEEDLESS = (  # options of DistributedDataParallel that make no difference here
    "device_ids",
    "output_device",
    "dim",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "check_reduction",
    "init_sync",
    "skip_all_reduce_unused_params",
)


class Exchanged(torch.nn.Module):  # type: ignore[misc]  # torch isn't followed
    """A model whose gradients are summed over the ranks; `module` is the model itself.

    A copy of it has no exchange.
    """

    exchange: Exchange | None = None

    def __init__(self, module: Any, exchange: Exchange) -> None:
        super().__init__()
        self.module = module
        self.exchange = exchange
        self.require_backward_grad_sync = True
        self.train(module.training)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """The model's own."""
        return self.module(*inputs, **options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward passes within it leave their gradients for a later sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "exchange": None}


def wrap_module(module: Any, device: torch.device, options: dict[str, Any]) -> Exchanged:
    """The module on its device, with an exchange; RequestError for an option that there is no equal of."""
    group = options.pop("process_group", None)
    most = options.pop("bucket_cap_mb", None)
    buffers = options.pop("broadcast_buffers", True)
    unknown = sorted(set(options) - set(_NEEDLESS))
    if unknown:
        raise RequestError(
            f"split.wrap has no option {unknown[0]!r}.",
            "Leave it out, or wrap the model yourself: split.wrap(DistributedDataParallel(model, ...)).",
        )
    module = module.to(device)
    size = BUCKET_BYTES if most is None else int(most * 2**20)
    return Exchanged(module, Exchange(module, group, bucket_bytes=size, broadcast_buffers=buffers))


class TakenOver(torch.nn.parallel.DistributedDataParallel):  # type: ignore[misc]
    """One whose gradients an Exchange sums: its forward pass is its module's, with the hooks of that."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """The model's own."""
        return self.module(*inputs, **options)


def take_over(model: Any) -> Exchange:
    """An exchange in place of a DistributedDataParallel's own, whose sums can't be weighted or taken up again.

    RequestError for a communication hook, or parameters of mixed precision. The model stays what it is, and its
    `no_sync` and `module` go on to work.
    """
    if model._comm_hooks or model.mixed_precision is not None:
        raise RequestError(
            "The model's DistributedDataParallel has a communication hook or mixed_precision of its own, by which"
            " gradients can't be weighted.",
            "Use Split(..., weigh='loss') and split.scale(loss) beside it.",
        )
    group = None if model.process_group is dist.group.WORLD else model.process_group
    made = Exchange(model.module, group, bucket_bytes=model.bucket_bytes_cap, broadcast_buffers=model.broadcast_buffers)
    model.reducer = model.logger = None
    model.__class__ = TakenOver
    model.exchange = made
    return made


def watch(model: Any, device: torch.device | None, forward: Callable[[Any, Any], None]) -> None:
    """Call `forward` with the model and its inputs before each forward pass, and tell its exchange of the outputs.

    Inputs are moved to `device`, if there is one.
    """
    hook = _hooks.get(model)
    if hook is None:
        hook = _hooks[model] = _ForwardHook()
        model.register_forward_pre_hook(hook.before, with_kwargs=True)
        model.register_forward_hook(hook.after)
    hook.device, hook.forward = device, forward


class _ForwardHook:
    """Looks at a wrapped model's forward passes; a copy of the model has one that doesn't."""

    def __init__(self) -> None:
        self.forward: Callable[[Any, Any], None] | None = None
        self.device: torch.device | None = None
        self.before, self.after = _Before(self), _After(self)


class _Before:
    _torchdynamo_disable = True  # torch.compile leaves it as it is

    def __init__(self, hook: _ForwardHook | None = None) -> None:
        self._hook = hook

    def __call__(self, model: Any, arguments: Any, keywords: Any) -> Any:
        if self._hook is None or self._hook.forward is None:
            return None
        self._hook.forward(model, (arguments, keywords))
        device = self._hook.device
        if device is None or device.type == "cpu" or getattr(model, "exchange", None) is None:
            return None
        return each_tensor(lambda tensor: tensor.to(device, non_blocking=True), (arguments, keywords))

    def __reduce__(self) -> Any:
        return (type(self), ())


class _After:
    _torchdynamo_disable = True

    def __init__(self, hook: _ForwardHook | None = None) -> None:
        self._hook = hook

    def __call__(self, model: Any, _: Any, outputs: Any) -> None:
        inner = getattr(model, "_orig_mod", model)
        exchange = getattr(inner, "exchange", None)
        if self._hook is not None and exchange is not None and torch.is_grad_enabled():
            exchange.watch(tensors_in(outputs), inner.require_backward_grad_sync)

    def __reduce__(self) -> Any:
        return (type(self), ())


_hooks: weakref.WeakKeyDictionary[Any, _ForwardHook] = weakref.WeakKeyDictionary()
