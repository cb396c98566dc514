"""Runs training_step on each pass of a batch, and averages the metrics that it logs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torchmetrics import Metric

from . import lightning_private as private
from .errors import RequestError
from .torch.audit.compute import GradientSketcher
from .torch.audit.state import keep_attributes
from .torch.private import own_buffers
from .torch.ranks.own_work import StepTimer
from .torch.step.part import Part

# the library has two names; pytorch_lightning is used only if the program loaded only that one
LIGHTNING = (
    "pytorch_lightning"
    if {"pytorch_lightning", "lightning.pytorch"} & {*sys.modules} == {"pytorch_lightning"}
    else "lightning.pytorch"
)
has_argument: Any = import_module(
    f"{LIGHTNING}.utilities.signature_utils"
).is_param_in_hook_signature
DummyLogger = import_module(f"{LIGHTNING}.loggers.logger").DummyLogger


def check_module_part(strategy: Any, part: Part, rows: int) -> None:
    """Check that a pass that ran out of memory gives the same gradient if it is divided.

    At most `rows` of its rows are checked. Raises RequestError if the gradients differ, if the rows
    can't be cut, or if the optimizer is LBFGS.
    """
    module = strategy.lightning_module
    audits = strategy.planned.audits
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in strategy.optimizers):
        raise RequestError("LBFGS needs the loss of the whole batch.", "Use another optimizer.")

    def make_sketcher() -> GradientSketcher:
        around = [partial(silent, module)]
        function = module.training_step
        made: GradientSketcher = audits.make_sketcher(
            [module], strategy.optimizers, function=function, contexts=around
        )
        return made

    audits.audit_part(
        lambda each: _run_training_step(strategy, each.batch), part, rows, make_sketcher
    )


def compute_part(strategy: Any, part: Part, others: Sequence[Any] | None = None) -> Any:
    """Run training_step on a part of a batch, and return its loss, or None if it returns none.

    `others` are training_step's arguments after the batch. If it is None, training_step gets the
    batch index 0, if it takes one.
    """
    module, precision = strategy.lightning_module, strategy.precision_plugin
    converted = precision.convert_input(part.batch)
    batch = private.move_batch(module, converted, strategy.root_device)
    if others is None:
        return _run_training_step(strategy, batch)
    with strategy.precision_plugin.train_step_context():
        return extract_loss(module.training_step(batch, *others))


def _run_training_step(strategy: Any, batch: Any) -> Any:
    """Run training_step on a batch that is already on the device, and return its loss."""
    module = strategy.lightning_module
    step = module.training_step
    # as Lightning does, because the argument for the batch index may have any name
    numbers = [0] if has_argument(step, "batch_idx", min_args=2) else []
    with strategy.precision_plugin.train_step_context():
        return extract_loss(step(batch, *numbers))


def extract_loss(result: Any) -> Any:
    """Return the loss from the result of training_step, which is a tensor, a mapping or None."""
    return result["loss"] if isinstance(result, Mapping) else result


@contextmanager
def silent(module: Any) -> Iterator[None]:
    """Context manager in which the LightningModule logs nothing."""
    trainer = module.trainer
    loggers, trainer.loggers = trainer.loggers, [DummyLogger() for _ in trainer.loggers]
    module.log = module.log_dict = lambda *_, **__: None
    try:
        yield
    finally:
        del module.log, module.log_dict
        trainer.loggers = loggers


_JOINED = {
    "mean": torch.add,
    "avg": torch.add,
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
# a metric times its weight, and the weight; the metric alone if it isn't a mean
Sums = tuple[torch.Tensor, ...]


class PassMetrics:
    """Averages the metrics that training_step logs or reduces, over a batch's passes and ranks."""

    # A pass that ran out of memory is computed in pieces. Ranks reduce each metric once per pass,
    # in its last piece.

    def __init__(
        self, module: Any, device: torch.device, reduce: Callable[..., Any], timer: StepTimer
    ) -> None:
        self._module, self._device, self._reduce, self._timer = module, device, reduce, timer
        self._metrics = [each for each in module.modules() if isinstance(each, Metric)]
        self._part: Part | None = None  # the part whose forward pass is running
        self._calls = 0  # number of reductions over ranks in this forward pass
        # metrics of earlier passes, by the call's number or the metric's name
        self._earlier: dict[Any, Sums] = {}
        self._pieces: dict[Any, Sums] = {}  # metrics of earlier pieces of this pass
        self._reduced: dict[Any, Sums] = {}  # metrics of the whole pass, reduced over ranks

    @property
    def _logged(self) -> Any:
        return private.logged(self._module.trainer)

    def begin(self) -> None:
        """Forget the metrics of the previous batch, at the start of a new one."""
        self._earlier, self._pieces, self._reduced = {}, {}, {}

    def end(self, part: Part) -> None:
        """Record that a part of a batch is computed; if that completes a pass, keep its metrics."""
        if part.turn.ends:
            self._earlier |= self._reduced
            self._pieces, self._reduced = {}, {}

    def save_state(self) -> Callable[[], None]:
        """Return a function that restores the current state of the metrics, for a retry."""
        attributes = keep_attributes(
            self._module, *self._metrics, excluded=(own_buffers(self._module),)
        )
        logged, pieces = self._keep_logged(), dict(self._pieces)

        def put_back() -> None:
            attributes()
            logged()
            self._pieces = pieces

        return put_back

    def _keep_logged(self) -> Callable[[], None]:
        before = {name: dict(vars(metric)) for name, metric in self._logged.items()}

        def put_back() -> None:
            # a new metric isn't removed, because other ranks will reduce it too
            for name, metric in self._logged.items():
                for state, default in private.default_states(metric).items():
                    setattr(
                        metric, state, before[name][state] if name in before else default.clone()
                    )

        return put_back

    @contextmanager
    def counting(self, part: Part, rows: Any) -> Iterator[None]:
        """Context manager around the forward pass of a part of a batch.

        Lightning gets `rows` as the batch size of the part's metrics. A part with weight 0 doesn't
        change the metrics.
        """
        module, logged = self._module, self._logged
        before = module._current_fx_name, logged.batch_size
        module._current_fx_name, logged.batch_size = "training_step", rows
        self._part, self._calls = part, 0
        steps = {name: metric._forward_cache for name, metric in logged.items()}
        put_back = () if part.weight else (keep_attributes(*self._metrics), self._keep_logged())
        try:
            yield
            for each in put_back:
                each()
            if part.weight:
                self._average_steps(steps)
        finally:
            self._part, (module._current_fx_name, logged.batch_size) = None, before

    def _average_steps(self, before: dict[str, Any]) -> None:
        """Average each metric that is logged per step over the batch's passes so far.

        `before` has the metrics' values from before this pass. Metrics that the pass didn't log are
        skipped.
        """
        for name, metric in self._logged.items():
            meta, own = metric.meta, metric._forward_cache
            alone = (
                metric.is_tensor
                and meta.on_step
                and meta.is_mean_reduction
                and not meta.sync.should
            )
            if alone and own is not before.get(name):
                metric._forward_cache = self._join_earlier_parts(
                    name, "mean", self._weigh(own), lambda each: each
                ).to(own.dtype)

    def reduce(self, tensor: Any, group: Any, op: Any) -> Any:
        """Reduce a metric over all ranks and, within training_step, over the batch's passes."""
        # Lightning divides by the mean number of rows, so a truncated integer would be wrong
        whole = isinstance(tensor, torch.Tensor) and not tensor.is_floating_point()
        metric = tensor.double() if whole else tensor
        if self._part is None or op not in _JOINED:
            with self._timer.collective():
                return self._reduce(metric, group, op)
        metric = torch.as_tensor(metric, device=self._device)
        mean = op in ("mean", "avg")
        key, self._calls = self._calls, self._calls + 1
        own = self._weigh(metric) if mean else (metric.clone(),)
        return self._join_earlier_parts(
            key, op, own, lambda each: self._reduce(each, group, "sum" if mean else op)
        ).to(metric.dtype)

    def _weigh(self, metric: torch.Tensor) -> Sums:
        assert self._part is not None
        weight = torch.as_tensor(
            self._part.weight, dtype=torch.float64, device=metric.device
        ).clone()
        return (metric * weight if weight else torch.zeros_like(metric)), weight

    def _join_earlier_parts(
        self, key: Any, op: str, own: Sums, reduce: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Combine a metric's value in this part of the batch with its values in earlier parts.

        `own` is the value in this part, and `key` identifies the metric within a pass. `reduce`
        reduces a tensor over ranks; it is called once per pass and metric.
        """
        assert self._part is not None
        if key not in self._reduced:
            own = _add(op, self._pieces.get(key), own)
            if not self._part.turn.ends:
                self._pieces[key] = own
                return _divide_sums(_add(op, self._earlier.get(key), own))
            with self._timer.collective():
                own = tuple(map(reduce, own))
            self._reduced[key] = _add(op, self._earlier.get(key), own)
        return _divide_sums(self._reduced[key])


def _add(op: str, before: Sums | None, own: Sums) -> Sums:
    return (
        own
        if before is None
        else tuple(_JOINED[op](*pair) for pair in zip(before, own, strict=True))
    )


def _divide_sums(sums: Sums) -> torch.Tensor:
    return sums[0] if len(sums) == 1 else sums[0] / sums[1]
