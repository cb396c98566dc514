"""Wrap models to weight their gradients, and check that this is possible."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import RequestError
from ...plan.check import check_fit
from ...plan.file import Plan
from ..private import (
    BatchNorm,
    is_in_ddp_forward,
    leave_uncompiled,
    needs_own_sums,
    unwrap_compiled,
)
from ..rows.structure import each_tensor, tensors_in
from ..sums.exchange import Exchange


def model_digest(model: Any) -> str:
    """Return a digest of the shapes and dtypes of a model's parameters and buffers.

    It has 16 hexadecimal digits. It also depends on which parameters are trained, but not on names.
    A plan contains it, so that evener can detect when the plan is used with another model.
    """
    parameters = [
        f"{tuple(parameter.shape)}:{parameter.dtype}:{parameter.requires_grad}"
        for parameter in model.parameters()
    ]
    buffers = [f"{tuple(buffer.shape)}:{buffer.dtype}" for buffer in model.buffers()]
    return blake2b("\n".join(["torch", *parameters, *buffers]).encode(), digest_size=8).hexdigest()


def check_model(model: Any, plan: Plan | None, strict: bool) -> None:
    """Warn if the plan was made for another model, or raise PlanError if `strict`."""
    if plan is not None:
        for difference in check_fit(
            plan, devices=None, world=None, workload_digest=model_digest(model), strict=strict
        ):
            warnings.warn(difference, stacklevel=3)


_OTHER = {
    "module",
    "mixed_precision",
    "device_mesh",
    "delay_all_reduce_named_params",
    "param_to_hook_all_reduce",
}
# accepted, although most have no effect here
_OPTIONS = signature(DistributedDataParallel).parameters.keys() - _OTHER


class Exchanged(torch.nn.Module):  # type: ignore[misc]  # torch isn't followed
    """Wrapper that weights gradients before it sums them; it replaces DistributedDataParallel."""

    exchange: Exchange | None = None

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True
        self.train(module.training)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which gradients are accumulated without an all-reduce."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "exchange": None}


def wrap_model(
    model: Any,
    device: torch.device,
    forward: Callable[[Any, Any], Any],
    options: dict[str, Any],
    by_loss: bool,
) -> tuple[Any, Exchange | None]:
    """Wrap a model, and return it with the exchange that all-reduces its gradients.

    The exchange is None for a DistributedDataParallel that keeps its own all-reduce.

    Arguments:

    - `forward`: called before each forward pass with the model and its inputs.
    - `options`: keyword arguments of DistributedDataParallel.
    - `by_loss`: whether losses are scaled instead of gradients.
    """
    found = find_wrapper(model)
    if isinstance(found, Exchanged) and found.exchange is None:  # a copy of a wrapped model
        model, found = found.module, None
    if found is None:
        made = wrap_module(model, device, options, forward)
        return made, made.exchange
    hook_forward(model, device, forward)
    return model, getattr(found, "exchange", None) or replace_all_reduce(found, by_loss)


def wrap_module(
    module: Any,
    device: torch.device,
    options: dict[str, Any] | None = None,
    forward: Callable[[Any, Any], Any] = lambda *_: None,
) -> Exchanged:
    """Move a module to the device and wrap it in Exchanged.

    `options` are keyword arguments of DistributedDataParallel. `forward` is called before each
    forward pass, with the module and its inputs. Raises RequestError for unknown options.
    """
    given = options or {}
    if unknown := sorted(set(given) - _OPTIONS):
        raise RequestError(
            f"split.wrap has no option {unknown[0]!r}.",
            (
                "Leave it out, or wrap the model yourself: "
                "split.wrap(DistributedDataParallel(model, ...))."
            ),
        )
    made = Exchanged(module.to(device))
    hook_forward(made, device, forward)
    watch_frozen(module)
    most, buffers = given.get("bucket_cap_mb"), given.get("broadcast_buffers", True)
    size = None if most is None else int(most * 2**20)
    made.exchange = Exchange(
        made.module, given.get("process_group"), bucket_bytes=size, broadcast_buffers=buffers
    )
    return made


def replace_all_reduce(model: Any, by_loss: bool) -> Exchange | None:
    """Replace the all-reduce of a DistributedDataParallel with an exchange; return the exchange.

    `by_loss` is whether losses are scaled instead of gradients. If so, a model with a communication
    hook, mixed precision or sparse gradients keeps its own all-reduce, and the result is None. If
    not, a communication hook or mixed precision raises RequestError.
    """
    # The model's own all-reduce can't be weighted, or repeated after a failure. The model stays a
    # DistributedDataParallel, and its `no_sync` and `module` still work.
    sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
    if needs_own_sums(model) or (by_loss and sparse):
        if by_loss:
            return None
        raise RequestError(
            "The model's DistributedDataParallel has a communication hook or mixed_precision "
            "of its own, by which"
            " gradients can't be weighted.",
            "Use Split(..., weigh='loss') and split.scale(loss) beside it.",
        )
    group = None if model.process_group is dist.group.WORLD else model.process_group
    size = None if getattr(model, "bucket_bytes_cap_default", False) else model.bucket_bytes_cap
    watch_frozen(model)
    made = Exchange(
        model.module, group, bucket_bytes=size, broadcast_buffers=model.broadcast_buffers
    )
    model.reducer = model.logger = None
    model.forward = model.module.__call__  # DistributedDataParallel's own would use its reducer
    model.exchange = made
    return made


def hook_forward(
    model: Any, device: torch.device | None, forward: Callable[[Any, Any], Any]
) -> None:
    """Call `forward` before each forward pass of a model, and move the inputs to `device`.

    If `device` is None, inputs aren't moved. A later call replaces the function and the device.
    """
    hook = _hooks.get(model)
    if hook is None:
        hook = _hooks[model] = _ForwardHook()
        model.register_forward_pre_hook(hook.before, with_kwargs=True)
        model.register_forward_hook(hook.after)
    hook.device, hook.forward = device, forward


class _ForwardHook:
    """Hooks before and after each forward pass of a wrapped model."""

    def __init__(self) -> None:
        self.forward: Callable[[Any, Any], Any] | None = None
        self.device: torch.device | None = None
        self._batch: Any = None  # of the forward pass that is running

    @leave_uncompiled
    def before(self, model: Any, arguments: Any, keywords: Any) -> Any:
        if self.forward is None:
            return None
        self._batch = self.forward(model, (arguments, keywords))
        device = self.device
        if device is None or device.type == "cpu" or getattr(model, "exchange", None) is None:
            return None
        return each_tensor(
            lambda tensor: tensor.to(device, non_blocking=True), (arguments, keywords)
        )

    @leave_uncompiled
    def after(self, model: Any, _: Any, outputs: Any) -> Any:
        inner = unwrap_compiled(model)
        exchange = getattr(inner, "exchange", None)
        if self.forward is None or exchange is None or not torch.is_grad_enabled():
            return None
        tensors = tensors_in(outputs)
        # a hook on a parameter would stay on it
        leaves = any(each.is_leaf and each.requires_grad for each in tensors)
        if leaves:
            outputs = each_tensor(lambda tensor: tensor.view_as(tensor), outputs)
            tensors = tensors_in(outputs)
        exchange.watch(tensors, inner.require_backward_grad_sync, self._batch)
        return outputs if leaves else None

    def __reduce__(self) -> Any:
        # in a copy of the model, the hooks do nothing
        return (type(self), ())


_hooks: weakref.WeakKeyDictionary[Any, _ForwardHook] = weakref.WeakKeyDictionary()  # by model
_ENGINES = {
    "DeepSpeedEngine": "DeepSpeed",
    "MegatronEngine": "Megatron-LM",
    "FullyShardedDataParallel": "FSDP1",
}
_frozen_hooks: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> handle


def find_wrapper(model: Any) -> Any:
    """Return the DistributedDataParallel or Exchanged that wraps the model, or None.

    Raises RequestError if only a submodule is wrapped.
    """
    inner = unwrap_compiled(model)  # of torch.compile
    if isinstance(inner, DistributedDataParallel | Exchanged):
        return inner
    if any(isinstance(module, DistributedDataParallel | Exchanged) for module in model.modules()):
        raise RequestError(
            "A part of the model is in DistributedDataParallel or split.wrap already, and "
            "gradients would be exchanged"
            " twice.",
            (
                "Call split.wrap on the whole model before anything else wraps it, or on that "
                "part alone."
            ),
        )
    return None


def is_sharded(model: Any) -> bool:
    """Return whether FSDP2 shards the model."""
    return "FSDPModule" in _class_names(model)


def can_time_compute(model: Any, rebalances: bool) -> bool:
    """Return whether a rank's compute time can be measured apart from waits for other ranks.

    `rebalances` is whether shares are rebalanced during training, which needs the compute times.
    Raises RequestError if `rebalances` is True, but the times can't be measured.
    """
    # ranks wait in FSDP2's layers and in SyncBatchNorm; rebalancing needs these times
    if not (
        is_sharded(model)
        or any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules())
    ):
        return True
    if rebalances:
        raise RequestError(
            "Ranks meet in layers, by FSDP or SyncBatchNorm, so none has times of its own to "
            "rebalance by.",
            "Leave rebalance out, or use DistributedDataParallel and GroupNorm or LayerNorm.",
        )
    return False


def check_exchange(model: Any) -> None:
    """Raise RequestError if a model uses DeepSpeed, Megatron-LM, FSDP1 or tensor parallelism.

    evener can't weight the gradients of such models.
    """
    names = _class_names(model)
    for name, library in _ENGINES.items():
        if name in names:
            raise RequestError(
                f"{library} takes its own mean of gradients over ranks, which a plan can't weigh.",
                (
                    "Use DistributedDataParallel, or FSDP2 (fully_shard) with Split(..., "
                    "weigh='loss')."
                ),
            )
    if not is_sharded(model) and any(
        type(parameter.data).__name__ == "DTensor" for parameter in model.parameters()
    ):
        raise RequestError(
            "The model uses tensor parallelism, which puts several ranks on one row.",
            "Use DistributedDataParallel, or FSDP2 (fully_shard) with Split(..., weigh='loss').",
        )


def _class_names(model: Any) -> set[str]:
    return {kind.__name__ for module in model.modules() for kind in type(module).__mro__}


def check_not_inside_ddp() -> None:
    """Raise a RequestError if the forward pass of a DistributedDataParallel is running.

    This is called before each forward pass of a wrapped model. If that model were inside a
    DistributedDataParallel, its gradients would be all-reduced twice.
    """
    if is_in_ddp_forward():
        raise RequestError(
            "A model from split.wrap is inside another DistributedDataParallel, which "
            "exchanges gradients again.",
            "Wrap it once: after accelerate, model = split.wrap(accelerator.prepare(model)); "
            "in Lightning, give"
            " the trainer split.strategy() and leave wrap out.",
        )


def check_normalization(model: Any, weigh: str, world: int, passes: Iterable[int] = ()) -> None:
    """Warn if a model has batch normalization, whose statistics depend on the shares.

    `weigh` is what is weighted ("gradients", "loss" or "trainer"), `world` is the number of ranks,
    and `passes` are the row counts of all passes of a batch. Raises RequestError for SyncBatchNorm
    if gradients are weighted or ranks have different numbers of passes.
    """
    kinds = [
        type(module)
        for module in model.modules()
        if isinstance(module, BatchNorm) and module.training
    ]
    if not kinds:
        return
    rows = tuple(passes)
    in_passes = len(rows) > world
    synchronized = any(issubclass(kind, torch.nn.SyncBatchNorm) for kind in kinds)
    if synchronized and world > 1:
        if in_passes:
            check_passes(model)
        if weigh == "gradients":
            raise RequestError(
                "SyncBatchNorm mixes the ranks' gradients before they can be weighted.",
                "Use Split(..., weigh='loss') and split.scale(loss).backward(), which is exact.",
            )
    if in_passes:
        warnings.warn(
            f"Batch normalization sees one pass of {max(rows)} rows, not the whole share.",
            stacklevel=3,
        )
    if not synchronized and world > 1:
        _warn_of_own_rows(kinds[0].__name__)
    _warn_of_single_rows(rows)


def _warn_of_single_rows(rows: Sequence[int]) -> None:
    """Warn if a pass has only one row, because BatchNorm needs several for its statistics."""
    if min(rows, default=2) < 2:
        warnings.warn(
            "Each batch has a pass of a single row, and BatchNorm1d can't take statistics of "
            "one row, also with drop_last=True:"
            " take another global batch (Split(plan, global_batch=N)), GroupNorm or LayerNorm.",
            stacklevel=4,
        )


def _warn_of_own_rows(kind: str) -> None:
    warnings.warn(
        f"{kind} normalizes over each device's own share, so training "
        f"depends on the split; "
        "SyncBatchNorm (on GPUs), GroupNorm or LayerNorm don't. A short last batch can "
        "leave a device a single "
        "row, and PyTorch can't take statistics of one row: use drop_last=True.",
        stacklevel=4,
    )


def check_passes(model: Any) -> None:
    """Raise a RequestError if the model has SyncBatchNorm.

    With it, ranks can't run different numbers of passes.
    """
    # ranks run different numbers of passes, so they would wait for each other forever
    if any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules()):
        raise RequestError(
            "SyncBatchNorm exchanges statistics in each pass, and the ranks have different "
            "numbers of passes.",
            (
                "Use GroupNorm or LayerNorm, or a plan without passes (evener balance --micro "
                "off) and no lengths."
            ),
        )


def watch_frozen(model: Any) -> None:
    """Make frozen parameters raise RequestError if they are unfrozen and trained later."""
    # an exchange only sums gradients of parameters that were trained when the model was wrapped
    for parameter in model.parameters():
        handle = _frozen_hooks.pop(parameter, None)
        if handle is not None:
            handle.remove()
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.requires_grad_(True)  # otherwise it accepts no hook
            _frozen_hooks[parameter] = parameter.register_hook(_refuse_unfrozen)
            parameter.requires_grad_(False)


def forget_frozen() -> None:
    """Remove the hooks of `watch_frozen` from all parameters."""
    for handle in _frozen_hooks.values():
        handle.remove()
    _frozen_hooks.clear()


def _refuse_unfrozen(_: Any) -> None:
    raise RequestError(
        "A layer that was frozen when split.wrap was called is trained, but its gradients "
        "aren't exchanged.",
        (
            "Unfreeze layers before split.wrap (in a trainer, before it trains), or wrap again: "
            "split.wrap(model.module)."
        ),
    )
