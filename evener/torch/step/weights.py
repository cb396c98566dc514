"""Weight each rank's gradients, so that their sum is the gradient of the whole batch."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from ...errors import RequestError
from ...shares.whole_rows import count_passes, gradient_weight
from ...training.passes import count_equal_passes
from ..private import backward_number, unwrap_compiled
from ..ranks.own_work import StepTimer
from ..ranks.ranks import RankShares
from ..rows.loader import Epoch
from ..rows.structure import tensors_in
from ..sums.exchange import Exchange, exchanged_parameters
from ..sums.noise import RankNoise, refuse_noise
from ..weak_list import WeakList
from .batches import BatchTracker, Match, TakenBatch, match_objects
from .recognition import match_addresses
from .unowned import UNOWNED
from .wrapped import (
    check_not_inside_ddp,
    check_passes,
    forget_frozen,
    hook_forward,
    is_sharded,
    replace_all_reduce,
)


class WholeBatchLoss(BaseException):  # so that a program's `except Exception` can't catch it
    """Raised if a loss needs the rows of all ranks, because one rank can't audit it alone."""


Weigh = Literal["gradients", "loss", "trainer"]
# number of batch numbers that ranks compare; their sum over 64 ranks is exact in bfloat16
NUMBERS = 4


class BatchWeights(BatchTracker):
    """Weights each rank's gradients by its number of rows, and checks that none is left unweighted.

    Arguments:

    - `shares`: the shares of all ranks.
    - `weigh`: what is weighted: "gradients" in the all-reduce; "loss" if the user's loop scales its
      loss; "trainer" if a library's adapter does that.
    - `timer`: records when gradients are ready and summed.
    - `noise`: measures the gradient noise scale, or None.
    """

    def __init__(
        self, shares: RankShares, weigh: Weigh, timer: StepTimer, noise: RankNoise | None
    ) -> None:
        super().__init__()
        self.shares, self.weigh = shares, weigh
        # models whose forward passes are watched, in the order of wrapping
        self.models: WeakList[Any] = WeakList()
        self._auditing = False
        self.in_parts: TakenBatch | None = None  # the batch whose parts are computed
        self._searched = False  # the search for tensors without a module was made
        # True while the newest batch's loss hasn't used a method of the split
        self.is_loops = False
        self._exchanges: WeakList[Exchange] = WeakList()
        # exchanges by model, with a single rank
        self._own_exchanges: weakref.WeakKeyDictionary[Any, Exchange] = weakref.WeakKeyDictionary()
        self.noise = noise  # measures the noise scale of one model
        self.in_pass = False  # True in a trainer's pass, if batches have several passes
        # True if ranks synchronize in each pass, so that all run the same number
        self.equal_passes = False
        self.are_averaged = False  # True if another library averages the gradients over ranks
        # True if the loss is a sum over a rank's rows; all ranks then have the same weight
        self.are_sums = False
        # True if a model was trained on a whole batch instead of parts
        self.computes_at_once = False
        self.lengths_vary = False  # True if batches aren't padded to one length
        self._shape: tuple[int, ...] | None = None  # shape of a row in the newest batch
        self._rank = shares.rank
        self.timer = timer
        # the backward pass in which a scaled loss was seen last
        self._scaled_pass: int | None = None

    def take(self, origin: Epoch, sizes: tuple[int, ...], data: Any) -> None:
        """Record a batch that a loader is about to yield.

        `origin` is the loop over the loader, `sizes` has the row count of each rank, and `data` is
        this rank's rows.
        """
        super().take(origin, sizes, data)
        if origin.training:
            self.look_for_tensors()

    def leave(self) -> None:
        """Give all ranks equal weights from now on.

        This is called when the planned training run has ended.
        """
        if BatchTracker.newest() is self:
            BatchTracker.newest = staticmethod(lambda: None)
            UNOWNED.weigh = lambda: None
        for exchange in self._exchanges:
            exchange.average()
        for model in self.models:
            hook_forward(model, None, lambda *_: None)
        forget_frozen()  # of models that no longer exist, too

    def look_for_tensors(self) -> None:
        """Find trained tensors that no module owns, so that their gradients are weighted, too.

        Only the first call searches for them.
        """
        if self.shares.world == 1 or self.are_averaged:
            return
        UNOWNED.device, UNOWNED.weigh = self.shares.device, weakref.WeakMethod(self.weigh_tensors)
        if not self._searched:
            self._searched = True
            UNOWNED.find()

    def weigh_tensors(self) -> float | None:
        """Return the current weight for gradients of tensors that no module owns.

        The result is None during an audit and, unless losses are scaled, outside of training loops.
        """
        if self._auditing:
            return None
        if self.by_loss:
            return 1.0 / self.shares.world
        return self.weight if self.is_training() else None

    @property
    def by_loss(self) -> bool:
        """Whether weights are applied to losses instead of gradients."""
        return self.weigh != "gradients"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Row count of each rank in the current batch.

        After an epoch, these are the row counts of the last batch; before the first batch, those of
        a full batch.
        """
        batch = self.current or self.last
        return self.shares.batches if batch is None else batch.sizes

    @property
    def weight(self) -> float:
        """This rank's weight in the sum over ranks: its fraction of the batch's rows.

        If losses are sums over rows, all ranks have the same weight.
        """
        return self._find_weight(self.sizes)

    def _find_weight(self, sizes: Sequence[int]) -> float:
        """Return the weight of this rank's gradients in a batch with the given row counts."""
        if self.are_sums:
            return 1.0 / self.shares.world
        return gradient_weight(sizes, self._rank)

    def note_lengths(self, batch: Any) -> None:
        """Detect whether the padded length varies, given the next batch.

        The shape of its rows is compared with that of the previous batch's rows.
        """
        shape = next((tuple(tensor.shape[1:]) for tensor in tensors_in(batch) if tensor.ndim), None)
        if shape is None or self.lengths_vary:
            return
        self.lengths_vary = self._shape not in (None, shape)
        self._shape = shape

    def make_exchanges(self, model: Any) -> list[Exchange]:
        """Set up the Exchange that all-reduces a model's gradients and can undo failed passes.

        Returns a list with this Exchange. The list is empty if the model keeps its own all-reduce,
        for example with FSDP. Raises RequestError if the noise scale is to be measured, but the
        model keeps its own all-reduce.
        """
        if self.shares.world == 1:
            return [self._exchange_of_one_rank(model)]
        wrapper = unwrap_compiled(model)  # of torch.compile
        if not isinstance(wrapper, DistributedDataParallel):
            if self.noise is not None:
                raise refuse_noise("FSDP or another library")
            return []
        exchange = replace_all_reduce(wrapper, by_loss=True)
        self.weigh_exchange(model, exchange)
        hook_forward(model, None, lambda *_: None)
        return [] if exchange is None else [exchange]

    def weigh_sharded(self, model: Any, sharded: Any, device: torch.device) -> None:
        """Make a sharded model weight its gradients in each backward pass.

        `sharded` is the Sharded object that sums the model's gradients. The model's inputs are
        moved to `device` before each forward pass.
        """
        sharded.begun = partial(self._begin_backward, weakref.proxy(sharded))
        if self.by_loss:
            sharded.weigh(1.0 / self.shares.world)
        self.equal_passes = True
        self.watch_forward(model, device)

    def weigh_exchange(self, model: Any, exchange: Exchange | None) -> None:
        """Make `exchange` multiply a model's gradients by weights before the all-reduce.

        `exchange` is None if the model keeps its own all-reduce. Raises RequestError if the
        gradient noise scale is requested but can't be measured on this model.
        """
        # if losses are weighted already, the exchange averages
        self.models.add(model)
        if exchange is None:
            self.timer.can_time_compute = False  # nothing reports when its gradients are ready
            if self.noise is not None:
                raise refuse_noise(
                    "DistributedDataParallel's communication hook or mixed_precision"
                )
            return
        self._attach_noise_scale(exchange)
        exchange.averages = False
        exchange.begun = partial(self._begin_backward, weakref.proxy(exchange))
        exchange.ready, exchange.sent = self.timer.note_gradients, self.timer.note_sent
        exchange.done = self.timer.note_backward
        if self.by_loss:
            exchange.weigh(1.0 / self.shares.world)
        self._exchanges.add(exchange)

    def _attach_noise_scale(self, exchange: Exchange) -> None:
        """Measure the noise scale on the gradients that this exchange all-reduces.

        Raises RequestError if two models are trained.
        """
        # an earlier exchange of the same model is no longer used for this
        if self.noise is None:
            return
        own = set(map(id, exchange.parameters))
        for other in self._exchanges:
            if other.noise is not None and own.isdisjoint(map(id, other.parameters)):
                raise RequestError(
                    "Two models are trained, and a noise scale is measured for one only.",
                    "Leave noise out, or wrap one model.",
                )
            other.noise = None
        exchange.noise = self.noise

    def _exchange_of_one_rank(self, model: Any) -> Exchange:
        if model not in self._own_exchanges:
            self._own_exchanges[model] = Exchange(model, single_rank=True)
        return self._own_exchanges[model]

    def watch_forward(self, model: Any, device: torch.device) -> None:
        """Register a hook that runs before each forward pass of a model.

        It finds out which batch the inputs come from, and moves them to `device`.
        """
        self.models.add(model)
        hook_forward(model, device, self.forward)

    def _begin_backward(
        self, exchange: Any, batch: TakenBatch | RequestError | None, before: Any
    ) -> None:
        """Set the weight of a model's gradients when a backward pass reaches the model's outputs.

        `batch` is the result of `forward` for these outputs. `before` is the batch of the outputs
        that the same backward pass reached before, or `batch` itself if there were none. Raises
        RequestError if batches with different weights are mixed, or if the loss wasn't scaled.
        """
        if isinstance(batch, RequestError):
            raise batch
        if batch is None:
            return
        # of the newest batch, because it doesn't depend on addresses
        exchange.number = batch.origin.batches[-1].number % NUMBERS
        if exchange.noise is not None:
            exchange.noise.note(batch)
        if self.weigh == "loss" and self._scaled_pass != backward_number():
            raise _scale_forgotten()
        if self.by_loss:
            return
        if before is not batch and before is not None and not before.can_share_backward(batch):
            raise RequestError(
                "One backward pass mixes two batches that weigh differently, in this step or "
                "at the end of an epoch.",
                "Call backward() for each batch by itself, or use drop_last=True in each "
                "split.loader, and no"
                " rebalance=True.",
            )
        exchange.weigh(self._find_weight(batch.sizes))

    def begin_parts(self, batch: Any) -> TakenBatch:
        """Start to compute a batch in parts, and return the loader's batch that it comes from.

        Raises RequestError if no loader has yielded the batch, if another batch is being computed
        in parts, or if a library's trainer, such as Lightning's, runs the passes.
        """
        self.refuse_in_parts("parts")
        if self.weigh == "trainer":
            raise RequestError(
                "split.parts is for a loop of your own: Lightning's strategy takes the passes "
                "itself.",
                "Compute all of the batch in training_step.",
            )
        self.is_loops = False
        self.in_parts = self._identify(batch, True, match_objects)
        return self.in_parts

    def list_models(self, chosen: Sequence[Any] | None, batch: TakenBatch) -> list[Any]:
        """Return the models whose gradients are all-reduced in a batch's last part.

        `chosen` has the models that the user has passed, or is None for all wrapped models. Raises
        RequestError if there are none, or if they can't run different numbers of passes on
        different ranks.
        """
        models, by_length = list(self.models if chosen is None else chosen), batch.origin.by_length
        if self.shares.world == 1 or not (self.shares.in_passes or by_length):
            return models
        if any(map(is_sharded, models)) and (by_length or len(set(self._count_passes(batch))) > 1):
            raise RequestError(
                "FSDP gathers weights in each pass, and the ranks have different numbers of "
                "passes in this batch.",
                "Use DistributedDataParallel, or a plan without passes (evener balance "
                "--micro off) and no lengths; if"
                " only the last batch is short, drop_last=True.",
            )
        for model in models if by_length else ():
            check_passes(model)
        if not models:
            raise RequestError(
                "split.parts knows of no wrapped model, so each pass would exchange gradients.",
                "Write model = split.wrap(model) before, or split.parts(batch, models=[model]).",
            )
        return models

    def list_exchanges(self) -> list[Exchange]:
        """Return the objects that all-reduce the gradients of wrapped models."""
        if self.shares.world > 1:
            return list(self._exchanges)
        return list(map(self._exchange_of_one_rank, self.models))

    def _count_passes(self, batch: TakenBatch) -> list[int]:
        """Return how many passes each rank needs for a batch."""
        # its rows mustn't be assigned by length
        return [
            max(1, count_passes(*each))
            for each in zip(batch.sizes, self.shares.micros, strict=True)
        ]

    def count_equal_passes(self, batch: TakenBatch) -> int:
        """Return how many passes every rank has to run, or 0 if ranks may run different numbers.

        Raises RequestError if the numbers have to be equal and rows are assigned by length.
        """
        # the rank that needs the most passes determines the number
        if not self.equal_passes:
            return 0
        if batch.origin.by_length:
            raise RequestError(
                "Ranks meet in each unit of a sharded model, and rows assigned by length take "
                "unequal numbers of passes.",
                "Leave lengths out.",
            )
        return count_equal_passes(batch.sizes, self.shares.micros)

    def refuse_in_parts(self, name: str) -> None:
        """Raise RequestError if a part of a batch is being computed, rather than the whole batch.

        `name` is the called method of Split, which needs all ranks. During an audit,
        WholeBatchLoss is raised instead if `name` is "loss" or "gather".
        """
        # ranks run different numbers of passes, so a collective in each pass would make them wait
        # for each other forever
        self.is_loops &= name not in ("loss", "gather")
        if self._auditing and name in ("loss", "gather"):
            raise WholeBatchLoss
        if self.in_parts is not None or self.in_pass:
            raise RequestError(
                f"split.{name} can't be called inside split.parts, or training_step where "
                f"shares take several passes:"
                " it applies to a whole batch, and ranks wait for each other in it.",
                "Call it after the last part; part.backward(loss) weighs a loss, count= (of "
                "split.parts or"
                " split.strategy) a mean that isn't over rows.",
            )

    @contextmanager
    def auditing(self) -> Iterator[None]:
        """Context manager for audits, in which gradients aren't weighted."""
        self._auditing = True
        try:
            yield
        finally:
            self._auditing = False

    def forward(self, model: Any, inputs: Any) -> TakenBatch | RequestError | None:
        """Return the batch that a forward pass computes, found by the addresses of its inputs.

        The result is None if nothing has to be weighted. If no batch matches, RequestError is
        raised in training mode. In evaluation mode, the error is returned, to be raised if a
        backward pass follows. Also raises RequestError if a batch that needs several passes is
        computed at once.
        """
        # outside of training mode, there may be no backward pass
        if self._auditing:
            return None
        if not torch.is_grad_enabled():
            self._note_prediction()
            return None
        if self.in_parts is None and model.training:
            self.computes_at_once = True
            if self.shares.in_passes:
                raise self._parts_missing()
        if self.shares.world == 1:
            return None
        check_not_inside_ddp()
        try:
            return self.in_parts or self._identify(inputs, model.training, match_addresses)
        except RequestError as error:
            if model.training:
                raise
            # a model that only predicts has no backward pass, so the error may never be raised; its
            # traceback is removed because it would keep the model alive
            return error.with_traceback(None)

    def _note_prediction(self) -> None:
        """Record a forward pass without gradients, for example during validation."""
        # a loader for validation has already noted its batch
        if self.current is None or self.current.origin.training:
            self.timer.note_validation()
        if self.current is not None:
            self.current.used = True

    def _identify(self, data: Any, training: bool, match: Match) -> TakenBatch:
        batch = self.find(data, training, match)
        if batch is None:
            raise RequestError(
                "The model computes gradients, but there is no current batch of split.loader to "
                "weigh them by.",
                (
                    "Take batches from split.loader(...), or say split.begin(rows of each rank) "
                    "before."
                ),
            )
        return batch

    def scale(self, loss: Any) -> Any:
        """Return the loss multiplied by this rank's weight and by the number of ranks.

        Libraries that average gradients over ranks need this factor.
        """
        if self.current is not None and not self.current.used:
            self.find((), True, match_addresses)  # raises RequestError if several are in use
        scaled = loss * (self.shares.world * self.weight)
        if getattr(scaled, "requires_grad", False):
            scaled.register_hook(self._note_scaled)
        return scaled

    def weigh_backward(self, losses: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Multiply the initial gradients of a backward pass by the same factor as `scale`.

        The factor is this rank's weight times the number of ranks. `gradients` has the initial
        gradient of each loss; None means ones. Return the products.
        """
        weight = self.shares.world * self.weight
        made = []
        for loss, given in zip(losses, gradients, strict=True):
            loss.register_hook(self._note_scaled)
            made.append((torch.ones_like(loss) if given is None else given) * weight)
        return made

    def check_trained(self, parameters: list[Any]) -> None:
        """Raise RequestError if gradients of these parameters weren't weighted.

        Call this before an optimizer changes the parameters.
        """
        if self.are_averaged:
            return
        exchanged = exchanged_parameters()
        unknown = [parameter for parameter in parameters if id(parameter) not in exchanged]
        unknown = UNOWNED.check(unknown) if unknown else []
        if self.by_loss:
            if self._scaled_pass is None:
                raise _scale_forgotten()
            return
        trained = [parameter for parameter in parameters if id(parameter) in exchanged]
        if unknown:
            raise _not_wrapped(len(trained), len(unknown))
        if not all(exchanged[id(each)] for each in trained):
            raise RequestError(
                "The gradients were never exchanged with the other ranks.",
                (
                    "Call split.wrap's model, not model.module, end windows without no_sync, and "
                    "step after backward()."
                ),
            )

    def _parts_missing(self) -> RequestError:
        rows = self.shares.batches
        passes = list(map(count_passes, rows, self.shares.micros))
        rank = passes.index(max(passes))
        return RequestError(
            f"The plan has rank {rank} compute its {rows[rank]} rows in {passes[rank]} "
            f"passes, but this loop"
            " computes a batch at once.",
            "Write for part in split.parts(batch): and part.backward(loss), or make a plan "
            "with evener balance --micro"
            " off.",
        )

    def _note_scaled(self, gradient: Any) -> None:
        self._scaled_pass = backward_number()


def _scale_forgotten() -> RequestError:
    return RequestError(
        "With weigh='loss' a loss was not scaled, so its gradients would be the plain mean "
        "over ranks.",
        "Write split.scale(loss).backward().",
    )


def _not_wrapped(wrapped: int, missing: int) -> RequestError:
    """Return the error for an optimizer that trains unwrapped parameters.

    `wrapped` is the number of its parameters that belong to wrapped models, and `missing` the
    number of those that don't.
    """
    if not wrapped:
        return RequestError(
            "The optimizer trains a model whose gradients aren't weighted: the ranks "
            "would learn something else.",
            "Write model = split.wrap(model) (after accelerate, "
            "split.wrap(accelerator.prepare(model)); of a copy,"
            " split.wrap(copy.deepcopy(model.module)); for FSDP, Split(..., weigh='loss') "
            "and split.scale(loss); in"
            " Lightning, L.Trainer(strategy=split.strategy()), before split.loader).",
        )
    return RequestError(
        f"Of {wrapped + missing} parameters that the optimizer trains, {missing} weren't in the "
        "model when split.wrap was called, so their gradients aren't exchanged.",
        (
            "If they are another module's, such as a head that the loss has, wrap that "
            "too: head = split.wrap(head). Add and unfreeze layers before split.wrap, or "
            "wrap again: model = split.wrap(model.module)."
        ),
    )
