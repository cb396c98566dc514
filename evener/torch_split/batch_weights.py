"""The gradient weights of the batch that each forward pass computes, from the loader's step to the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import RequestError
from ..shares.passes import count_passes
from ..shares.whole_rows import gradient_weight
from . import model_checks
from .batch_tracker import BatchTracker, Epoch, TakenBatch
from .exchange import Exchange, exchanged_parameters
from .gather import average
from .optimizer_check import OPTIMIZER_CHECK, check_weighted
from .own_work import StepTimer
from .wrapped import take_over, watch, wrap_module


class WholeBatchLoss(BaseException):  # it ends a check past what catches errors
    """A loss that is checked asks the split for what makes it the whole batch's."""


class BatchWeights:
    """The rows and weight of one rank in the current batch; with `by_loss`, `scale` applies the weight, not a hook.

    `timer` is marked when a step's last gradient is there.
    """

    def __init__(
        self, shares: Sequence[int], rank: int, by_loss: bool, timer: StepTimer, micros: Sequence[int] = ()
    ) -> None:
        self.batches = BatchTracker()
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()  # whose forward passes are looked at
        self._micros = tuple(micros) or tuple(shares)
        self._checking = False
        self._open: TakenBatch | None = None  # the batch whose parts are computed
        self._waiting: TakenBatch | None = None  # of a forward pass whose gradients aren't summed yet
        self._refusal: RequestError | None = None  # of the next backward pass
        self._exchanges: weakref.WeakSet[Exchange] = weakref.WeakSet()
        self._alone: weakref.WeakKeyDictionary[Any, Exchange] = weakref.WeakKeyDictionary()  # where no others train
        self._shares = tuple(shares)
        self.weighed_by_trainer = False  # gradients, by Lightning's strategy
        self.in_pass = False  # of that strategy's, where shares take several
        self.computes_at_once = False  # a model was trained on a whole batch, not by parts
        self._rank = rank
        self._by_loss = by_loss
        self.timer = timer
        self._scaled_pass: int | None = None  # the backward pass in which a scaled loss was seen last
        self._reference = weakref.ref(self)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of all ranks in the current batch; after an epoch, in its last; before the first, in a full one."""
        batch = self.batches.current or self.batches.last
        return self._shares if batch is None else batch.sizes

    @property
    def weight(self) -> float:
        """This rank's part of the current batch, 0 to 1."""
        return gradient_weight(self.sizes, self._rank)

    def attach(self, model: Any, device: torch.device, options: dict[str, Any]) -> Any:
        """The model with an exchange, which weighs its gradients; where losses are weighted, it takes their mean.

        A model in DistributedDataParallel stays itself, and keeps its own where losses are weighted beside a hook.
        """
        found = model_checks.find_wrapper(model)
        if found is None:
            model = found = wrap_module(model, device, dict(options))
        elif getattr(found, "exchange", None) is None and not (self._by_loss and found._comm_hooks):
            take_over(found)
        model_checks.watch_frozen(model)
        exchange = getattr(found, "exchange", None)
        if self._by_loss:
            model_checks.check_first_gradient(model, self._check_scaled)
        if exchange is not None:
            exchange.begun, exchange.ready, exchange.done = self._begin_backward, self._note_ready, self._note_sum
            exchange.weigh(1.0 / len(self._shares) if self._by_loss else self.weight)
            self._exchanges.add(exchange)
        self.follow(model, device)
        return model

    def follow(self, model: Any, device: torch.device) -> None:
        """Look at each of its forward passes."""
        self.models.add(model)
        watch(model, device, self.forward)

    def _begin_backward(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _note_ready(self) -> None:
        if self.timer.has_own_work:
            self.timer.note_gradients()

    def _note_sum(self) -> None:
        self._waiting = None
        if self.timer.has_own_work:
            self.timer.note_backward()

    def _weigh(self, sizes: Sequence[int]) -> None:
        """Weigh the gradients of a batch in which each rank has these rows; a rank may have none."""
        if not self._by_loss:
            for exchange in self._exchanges:
                exchange.weigh(gradient_weight(sizes, self._rank))

    def take(self, origin: Epoch, sizes: tuple[int, ...], data: Any) -> None:
        """Take a batch that a loader yields."""
        if len(sizes) > 1 and not self.weighed_by_trainer:
            OPTIMIZER_CHECK.trainer = self._reference
        self.batches.take(origin, sizes, data)

    def begin(self, sizes: Sequence[int]) -> None:
        """Begin a batch of which the ranks have these rows."""
        self.batches.begin(sizes)
        self._waiting = None

    def end(self, origin: Epoch) -> None:
        """An epoch is over."""
        self.batches.end(origin)

    def change(self, shares: tuple[int, ...], micros: tuple[int, ...]) -> None:
        """Full batches will have these shares, in passes of up to `micros` rows."""
        self._shares, self._micros = shares, micros

    @property
    def in_passes(self) -> bool:
        """True if a rank needs more than one pass for its share."""
        return self._micros != self._shares

    def open_parts(self, batch: Any) -> TakenBatch:
        """Begin the passes of this batch."""
        self.refuse_in_parts("parts")
        if self.weighed_by_trainer:
            raise RequestError(
                "split.parts is for a loop of your own: Lightning's strategy takes the passes itself.",
                "Compute all of the batch in training_step.",
            )
        self._open = self._identify(batch, True)
        return self._open

    def scale_part(self, loss: Any) -> Any:
        """A pass's part of the loss, as `scale` has it where gradients aren't weighted."""
        return self.scale(loss) if self._by_loss else loss

    def list_models(self, given: Sequence[Any] | None, in_passes: bool) -> list[Any]:
        """The models that exchange gradients: those given, else all that are wrapped."""
        models = list(self.models if given is None else given)
        if len(self._shares) == 1 or not in_passes:
            return models
        if any(map(model_checks.is_sharded, models)) and not self._has_equal_passes():
            raise RequestError(
                "FSDP gathers weights in each pass, and the ranks have different numbers of passes in this batch.",
                "Use DistributedDataParallel, or a plan without passes (evener balance --micro off) and no lengths; if"
                " only the last batch is short, drop_last=True.",
            )
        for model in models if self._open and self._open.origin.dealt else ():
            model_checks.check_passes(model)
        if not models:
            raise RequestError(
                "split.parts knows of no wrapped model, so each pass would exchange gradients.",
                "Write model = split.wrap(model) before, or split.parts(batch, models=[model]).",
            )
        return models

    def list_exchanges(self) -> list[Exchange]:
        """The exchanges of the wrapped models; made on first use if only one device trains."""
        if len(self._shares) > 1:
            return list(self._exchanges)
        for model in self.models:
            if model not in self._alone:
                self._alone[model] = Exchange(model, alone=True)
        return list(self._alone.values())

    def _has_equal_passes(self) -> bool:
        """True if all ranks take equally many passes for the batch whose parts are computed."""
        batch = self._open
        if batch is None or batch.origin.dealt:
            return False
        return len({max(1, count_passes(*each)) for each in zip(batch.sizes, self._micros, strict=True)}) == 1

    def close_parts(self) -> None:
        """All passes of a batch are computed."""
        self._open = None

    def refuse_in_parts(self, name: str) -> None:
        """RequestError while parts are computed: the ranks have different numbers of passes, and would wait forever.

        WholeBatchLoss where a loss that is checked needs no check.
        """
        if self._checking and name in ("loss", "gather"):
            raise WholeBatchLoss
        if self._open is not None or self.in_pass:
            raise RequestError(
                f"split.{name} can't be called inside split.parts, or training_step where shares take several passes:"
                " it is of a whole batch, and ranks wait for each other in it.",
                "Call it after the last part; part.backward(loss) weighs a loss, count= (of split.parts or"
                " split.strategy) a mean that isn't over rows.",
            )

    @contextmanager
    def checking(self) -> Iterator[None]:
        """A context in which models compute without a step."""
        self._checking = True
        try:
            yield
        finally:
            self._checking = False

    def forward(self, model: Any, inputs: Any) -> None:
        """A wrapped model computes: its gradients count by the sizes of the batch that `inputs` are of."""
        if self._checking:
            return
        if not torch.is_grad_enabled():
            self.batches.skip()
            return
        if self._open is None and model.training:
            self.computes_at_once = True
            if self.in_passes:
                raise self._parts_missing()
        if len(self._shares) == 1:
            return
        model_checks.check_not_inside_ddp()
        self._refusal = None
        try:
            batch = self._open or self._identify(inputs, model.training)
        except RequestError as error:
            if model.training:
                raise
            # a model that only predicts has no backward pass to be refused; a traceback would keep the model alive
            self._refusal = error.with_traceback(None)
            return
        if model.training and batch.origin.training and getattr(model, "require_backward_grad_sync", True):
            self._waiting = batch
        self._weigh(batch.sizes)

    def _identify(self, inputs: Any, training: bool) -> TakenBatch:
        batch = self.batches.find(inputs, training)
        if batch is None:
            raise RequestError(
                "The model computes gradients, but no batch of split.loader is in hand to weigh them by.",
                "Take batches from split.loader(...), or say split.begin(rows of each rank) before.",
            )
        waiting = self._waiting
        if waiting is not None and waiting is not batch and not waiting.mixes_with(batch):
            raise RequestError(
                "One backward pass mixes two batches that weigh differently, in this step or at the end of an epoch.",
                "Call backward() for each batch by itself, or use drop_last=True in each split.loader, and no"
                " rebalance=True.",
            )
        return batch

    def scale(self, loss: Any) -> Any:
        """The mean loss of this rank's rows, weighted so that the mean over ranks is the mean over the batch."""
        batch = self.batches.current
        if batch is not None and not batch.used:
            self.batches.find((), training=True)  # refuses if several are in use
        self._waiting = None
        scaled = loss * (len(self._shares) * self.weight)
        if getattr(scaled, "requires_grad", False):
            scaled.register_hook(self._note_scaled)
            if not self._exchanges:  # as beside a communication hook of the user's
                self.timer.end_pass(scaled)
        return scaled

    def average(self, loss: Any, device: Any) -> Any:
        """The current batch's figure, made of each rank's figure of its own rows."""
        return average(loss, self.sizes, device, self.timer)

    def is_training(self) -> bool:
        """True if a loop may still use a batch to train on."""
        return self.batches.is_training()

    def check_trained(self, parameters: list[Any]) -> None:
        """RequestError if an optimizer is about to apply gradients that nothing weighted."""
        if not self._by_loss:
            check_weighted(parameters, exchanged_parameters())
        elif self._scaled_pass is None:
            raise _scale_forgotten()

    def _parts_missing(self) -> RequestError:
        passes = list(map(count_passes, self._shares, self._micros))
        rank = passes.index(max(passes))
        return RequestError(
            f"The plan has rank {rank} compute its {self._shares[rank]} rows in {passes[rank]} passes, but this loop"
            " computes a batch at once.",
            "Write for part in split.parts(batch): and part.backward(loss), or make a plan with evener balance --micro"
            " off.",
        )

    def _note_scaled(self, gradient: Any) -> None:
        self._scaled_pass = torch._C._current_graph_task_id()

    def _check_scaled(self) -> None:
        if self._scaled_pass != torch._C._current_graph_task_id():
            raise _scale_forgotten()


def _scale_forgotten() -> RequestError:
    return RequestError(
        "With weigh='loss' a loss was not scaled, so its gradients would be the plain mean over ranks.",
        "Write split.scale(loss).backward().",
    )
