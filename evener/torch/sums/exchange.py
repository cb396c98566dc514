"""Sum a model's gradients over the ranks, weighted by each rank's fraction of the batch.

With n_i of N rows on rank i, the mean over the batch is sum_i (n_i / N) * mean_i. Gradients are in
flat buckets, in the same order on all ranks. A bucket is sent as soon as it has the gradients of
all passes. The remaining buckets are sent at the end of the backward pass. Gradients that were sent
are final, so a rank that runs out of memory only computes the other ones again.

An exchange has these states; the attribute that shows a state is in brackets:

    idle ── a forward pass is watched ──► waiting [waits]
    waiting ── a backward pass reaches its outputs: `arm` ──► collecting [_armed]
    collecting ── a gradient comes: `_send_ready_buckets` ──► collecting; complete buckets are sent
                  [_sent] if the pass ends in a sum [_sync] and the order is known [_early]
    collecting ── the backward pass is over: `_finish_pass`, `_wait_for_sums`
                  ├─ it ends in a sum ──► all buckets sent and received ──► idle [sums + 1]
                  └─ under no_sync ──► gradients stay on this rank ──► waiting [unsummed]
    collecting ── memory runs out: `fail` ──► waiting; what was sent stays [held.final]
    collecting ── another error, with buckets sent ──► broken for good [_broken]

In the first sum, the order in which gradients are computed is recorded (`_learn_order`). In later
sums, complete buckets are sent before the backward pass ends.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import is_
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from ...errors import RequestError
from ..private import (
    BatchNorm,
    backward_number,
    call_after_backward,
    ignored_names,
)
from ..weak_list import WeakList
from .buckets import (
    GRADIENT,
    SAMPLED,
    Bucket,
    Buffers,
    EarlierGradients,
    TailReader,
    make_buckets,
    warn_of_hooks,
)
from .collectives import is_equal_everywhere, note_own, own_collectives, spread

LEAST_BYTES, MOST_BYTES = 25 << 20, 100 << 20  # size limits of a bucket
# approximate number of buckets; more would cost host time and hide little more communication
BUCKETS = 6
MOST_ARRIVED = 1 << 20  # upper bound for the number of gradients in a pass
EVERY = 4  # ranks compare some of their weights in one of this many sums


def _find_normalizers(module: Any) -> list[Any]:
    return [each for each in module.modules() if isinstance(each, BatchNorm)]


def _list_unignored(named: Iterable[tuple[str, Any]], ignored: set[str]) -> list[Any]:
    """Return the tensors whose names aren't in `ignored`, without duplicates."""
    return list({id(each): each for name, each in named if name not in ignored}.values())


def _choose_bytes(parameters: Sequence[torch.Tensor]) -> int:
    """Choose the size of a bucket in bytes, based on the size of all parameters."""
    whole = sum(int(parameter.numel()) * int(parameter.element_size()) for parameter in parameters)
    return min(max(LEAST_BYTES, whole // BUCKETS), MOST_BYTES)


class Exchange:
    """Sums a model's gradients over ranks, with a weight for each rank.

    Arguments:

    - `module`: the model.
    - `group`: process group; None is the default one.
    - `bucket_bytes`: size of a bucket; None chooses it.
    - `broadcast_buffers`: whether to copy the first rank's buffers after they change.
    - `single_rank`: True if there are no other ranks, so that nothing is summed, and only failed
      passes have to be undone.

    Every rank of the group has to create one. Raises RequestError if ranks have different models,
    or if the model is sharded. These attributes are callbacks:

    - `begun`: called when a backward pass reaches outputs of the model. Its arguments are the batch
      of these outputs, and the batch of the outputs that this backward pass has reached before. If
      these are the first outputs, both arguments are the same batch.
    - `ready`: called when the last gradient is computed.
    - `sent`: called when all buckets are sent.
    - `done`: called when all sums are complete.
    """

    def __init__(
        self,
        module: Any,
        group: Any = None,
        *,
        bucket_bytes: int | None = None,
        broadcast_buffers: bool = True,
        single_rank: bool = False,
    ) -> None:
        ignored = ignored_names(module)
        taking_part = _list_unignored(module.named_parameters(), ignored)
        self.parameters = [each for each in taking_part if each.requires_grad]
        self.normalizers = _find_normalizers(module)  # BatchNorm layers, which mix rows
        self.group, self.single_rank, self.weight = group, single_rank, 1.0
        self._world = 1 if single_rank else dist.get_world_size(group)
        for each in EXCHANGES:  # raises RequestError for a sharded model
            each.has_any(set(map(id, taking_part)))
        if not single_rank:
            buffers = _list_unignored(module.named_buffers(), ignored)
            self._agree([*taking_part, *buffers])

        self.begun: Callable[[Any, Any], None] = lambda *_: None
        self.ready: Callable[[], None] = lambda: None
        self.sent: Callable[[], None] = lambda: None
        self.done: Callable[[], None] = lambda: None
        self.noise: Any = None  # a RankNoise that samples the sums
        self.averages = False  # True while no training run weights the gradients

        self.number = 0  # the number of the batch in its epoch
        self.resting = False  # True while an audit computes, outside of a step
        self.waits = False  # True if a forward pass was watched since the last sum
        self.sums = 0  # number of completed sums
        self.ran = False
        self.unsummed = False  # True if gradients come from this rank's rows alone
        self._unsent = False  # True if there may be gradients that weren't summed

        # The order of gradients in the first pass; None once ranks have agreed on it.
        self._order: list[int] | None = None if single_rank else []
        self._early = False  # True if buckets may be sent before the backward pass ends
        self._armed = self._sync = False
        self._batch: Any = None  # of the backward pass
        self._begins: list[Any] = []  # hooks that detect the backward pass of hidden outputs
        self._hidden_task = -1  # the number of that pass
        self._broken = False  # True if a backward pass failed after some of its gradients were sent
        self._hooks: list[Any] = []  # hooks that add parameters to `_arrived`
        # parameters whose gradients were computed
        self._arrived: deque[Any] = deque(maxlen=MOST_ARRIVED)
        self._came: set[int] = set()  # ids of such parameters in this backward pass
        self._repeats = False  # True if a parameter got several gradients in a backward pass
        self._listen()

        self.held, self._tail_reader = EarlierGradients(self.parameters), TailReader()
        self.buffers, self._common = Buffers(module), Buffers(module, ignored)
        shares_buffers = broadcast_buffers and not single_rank
        # Until buffers change, ranks compare them; then the first rank's are copied after each sum.
        self._compares = shares_buffers and self._common.keep()
        self._spreads = shares_buffers and not self._compares
        self._bytes = _choose_bytes(self.parameters) if bucket_bytes is None else bucket_bytes
        self._buckets = [] if single_rank else make_buckets(self.parameters[::-1], self._bytes)
        self._sent = 0  # number of buckets that were sent but not received
        for hooks in (self._hooks, self._begins):
            weakref.finalize(self, _remove, hooks)
        EXCHANGES.add(self)

    def average(self) -> None:
        """From now on, average gradients with equal weights.

        This is called when the planned training run has ended.
        """
        self.begun = lambda *_: None
        self.ready = self.sent = self.done = lambda: None
        self.noise = None
        self.averages = True
        self.weigh(1.0 / self._world)

    def has_any(self, parameters: set[int]) -> bool:
        """Return whether this exchange sums the gradients of any of these parameters.

        `parameters` has their ids.
        """
        return not self.single_rank and not parameters.isdisjoint(map(id, self.parameters))

    def _agree(self, tensors: list[torch.Tensor]) -> None:
        """Copy the first rank's tensors to all ranks, so that all ranks begin with the same values.

        Raises RequestError if the ranks wrap different models.
        """
        with torch.no_grad():
            digest = crc32(str([tensor.numel() for tensor in tensors]).encode())
            if not is_equal_everywhere(digest, tensors[0].device if tensors else None, self.group):
                raise RequestError(
                    "The ranks wrap different models.", "Make the same model on every rank."
                )
            spread(tensors, self.group)

    def weigh(self, weight: float) -> None:
        """Set the factor for this rank's gradients, from the current backward pass on."""
        if weight != self.weight and self._unsent:
            for bucket in self._buckets:
                bucket.fold(self.weight)
        self.weight = weight

    # ------------------------------------------------------------------ a backward pass

    def watch(self, outputs: Sequence[torch.Tensor], sync: bool, batch: Any = None) -> None:
        """Register hooks on the model's outputs that run when a backward pass reaches them.

        If `sync` is False, gradients are accumulated without an all-reduce. `batch` is the batch
        that the outputs were computed from; it is passed to `begun`. Raises RequestError if an
        earlier backward pass failed after sending gradients.
        """
        if self.resting:
            return
        _forget_failed_passes()
        if self._broken:
            raise RequestError(
                "An error ended a backward pass when part of its gradients were on their way "
                "to the other ranks.",
                "Let such an error end the training, and train on from a checkpoint.",
            )
        _remove(self._begins)
        self._hidden_task = -1
        self.waits = True
        watched = [each for each in outputs if each.requires_grad]
        for output in watched:
            output.register_hook(lambda _: self.arm(sync, batch))
        if not watched:
            self._watch_parameters(sync, batch)

    def _watch_parameters(self, sync: bool, batch: Any) -> None:
        """Register hooks on the parameters, to detect when a backward pass begins.

        This is done if no tensor was found in the model's outputs.
        """
        # such outputs are of unknown classes; a backward pass is assumed to begin with its first
        # gradient
        reference = weakref.ref(self)

        def begin(_: Any) -> None:
            exchange, task = reference(), backward_number()
            if exchange is None or exchange.resting:
                return
            if exchange._hidden_task == -1:
                exchange.arm(sync, batch)
                exchange._hidden_task = task
            elif task < exchange._hidden_task:
                # the hidden task was a checkpoint's inner backward pass
                raise RequestError(
                    "The model's output is an object that hides its tensors, and a part of it "
                    "is in a reentrant checkpoint: evener can't see where its backward pass "
                    "begins.",
                    "Return a tensor, tuple or dict, or use torch.utils.checkpoint with "
                    "use_reentrant=False.",
                )

        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        self._begins += (each.register_hook(begin) for each in trained)
        own_hooks.update(each.id for each in self._begins)

    def _listen(self) -> None:
        """Register hooks that record the order in which parameters get their gradients."""
        # They aren't needed if the order is known and no parameter has a gradient: any gradient
        # after the backward pass was then computed in it.
        if not self._hooks and (self._order is not None or self.has_gradients()):
            self._hooks += (_hook(parameter, self._arrived.append) for parameter in self.parameters)

    def arm(self, sync: bool, batch: Any) -> None:
        """Prepare for the backward pass that has just reached the model's outputs.

        `sync` is whether the pass ends with an all-reduce. Raises RequestError if another model in
        the same backward pass shares parameters.
        """
        task = backward_number()
        begins = _open.get(self) != task
        self.begun(batch, batch if begins else self._batch)
        self._batch = batch
        if begins:
            others = [other for other, its in _open.items() if its == task]
            if others and any(other.has_any(set(map(id, self.parameters))) for other in others):
                raise RequestError(
                    "Two wrapped models have a layer in common, and are in one backward pass: "
                    "its gradient would be summed twice.",
                    "Wrap one module that computes both in its forward pass, or call backward "
                    "for each loss.",
                )
            _open.pop(self, None)
            _open[self] = task
            self._armed, self._sync, self._unsent, self._came = True, False, True, set()
            self._arrived.clear()
            self._listen()
            call_after_backward(lambda: _end(task))
        self._sync |= sync

    def _note_arrived(self) -> None:
        """Record which gradients the backward pass has computed since the last call."""
        # reentrant checkpoints that share a layer give it several gradients in a backward pass
        if not self._hooks:
            self._came = {
                id(parameter) for parameter in self.parameters if parameter.grad is not None
            }
            return
        came = list(map(id, self._arrived))
        self._arrived.clear()
        if self._order is not None:
            self._order += came
        count = len(self._came) + len(came)
        self._came.update(came)
        self._repeats |= len(self._came) < count

    def _send_ready_buckets(self, bucket: Bucket) -> None:
        """Send all complete buckets, now that the last gradient of `bucket` has been computed."""
        # before the order is known, gradients are only copied into the bucket
        if not self._armed or self.held.apart:
            return
        if self._early and self._sync and not self.held.late:
            if self._hooks:
                self._note_arrived()
            self._send_complete()
        else:
            bucket.gather()

    def _send_complete(self) -> None:
        """Send buckets in their order, up to the first one that isn't complete."""
        # none while another model that began earlier in this backward pass has buckets to send
        for other in _open:
            if other is self:
                break
            if other._sync and other._sent < len(other._buckets):
                return
        came = self._came if self._hooks else None
        while self._sent < len(self._buckets) and self._buckets[self._sent].has_all_gradients(came):
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[self._sent]
        self._sent += 1
        bucket.weigh(self.weight, self.number)
        if self._sent == 1:
            self._write_tail(bucket.tail)
        if self._sent == len(self._buckets):
            self.ready()
        note_own()
        if self.noise is not None:
            self.noise.add_own(bucket)
        bucket.send(dist.group.WORLD if self.group is None else self.group)
        if self.noise is not None and self._sent == len(self._buckets):
            self.noise.send(self.group)

    def _write_tail(self, tail: torch.Tensor) -> None:
        """Write values that ranks compare, such as a few weights, to the end of a bucket."""
        # The tail says whether buffers have changed. In one of EVERY sums, it also has a few
        # weights. The first rank multiplies them by the number of other ranks, and the others by
        # -1, so that equal weights add up to 0. The last value is the sum of their magnitudes.
        if self._compares:
            self._common.flag_changes(tail[:1])
        turn, left = divmod(self.sums, EVERY)
        line = self.parameters[-1 - turn % len(self.parameters)].detach()
        if left or type(line) is not torch.Tensor or not line.numel():
            return
        own = line.real.reshape(-1)[turn * SAMPLED % line.numel() :][:SAMPLED]
        tail[2 : 2 + len(own)].copy_(
            own * (self._world - 1 if dist.get_rank(self.group) == 0 else -1)
        )
        tail[-1:].copy_(own.abs().sum())

    def _finish_pass(self) -> None:
        """Finish a backward pass, and send the remaining buckets if it ends with an all-reduce."""
        if self._hooks:
            self._note_arrived()
        came = self._came if self._hooks else self.has_gradients()
        self.held.merge()
        for bucket in self._buckets[: self._sent]:
            bucket.check_sent()
        if self._sync and came:
            while self._sent < len(self._buckets):
                self._send()
        elif came:
            self.unsummed = True
        self.held.close()

    def _wait_for_sums(self) -> None:
        """Wait until all gradients are summed, and finish the batch."""
        self._armed = False
        if not (self._sync and self._sent and self._sent == len(self._buckets)):
            return
        self.sent()
        for bucket in self._buckets:
            bucket.receive()
        if self.noise is not None:
            self.noise.finish_sum(self._buckets)
        self._sent, self._unsent, self.waits, self.unsummed = 0, False, False, False
        self.sums, self.ran = self.sums + 1, True
        self.held.forget_failure()
        if self._tail_reader.read(self._buckets[0].tail, self.number * self._world):
            self._spreads, self._compares = True, False
        if self._order is not None or self._spreads:
            with own_collectives():
                if self._order is not None:
                    self._learn_order(self._order)
                if self._spreads:
                    # `data` has its own version counter, so retained graphs stay valid.
                    spread([each.data for each in self._common.all()], self.group)
        self.done()

    def _learn_order(self, seen: list[int]) -> None:
        """Create new buckets, ordered by when the first rank computes each gradient.

        `seen` has the ids of this rank's parameters in the order of their gradients. Every rank has
        to call this.
        """
        # from now on, buckets are sent early, unless a parameter got several gradients on some rank
        index_of = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        indices = list(
            dict.fromkeys([*map(index_of.__getitem__, seen), *reversed(index_of.values())])
        )
        order = torch.tensor(indices, device=self._buckets[0].flat.device)
        repeats = torch.tensor([int(self._repeats)], device=order.device)
        dist.broadcast(
            order,
            0 if self.group is None else dist.get_global_rank(self.group, 0),
            group=self.group,
        )
        dist.all_reduce(repeats, dist.ReduceOp.MAX, group=self.group)
        self._order, self._early = None, not repeats.item()
        if dist.get_rank(self.group) == 0:
            warn_of_hooks(self.parameters, own_hooks)
        self._buckets = make_buckets(
            [self.parameters[index] for index in order.tolist()], self._bytes
        )
        _remove(self._hooks)
        # weak, so that a parameter doesn't keep a dropped wrapper's exchange
        look = partial(_look_for, weakref.ref(self))
        weakref.finalize(
            self, _remove, [_hook(each.last, partial(look, each)) for each in self._buckets]
        )
        for bucket in self._buckets:
            bucket.gather()

    # ------------------------------------------------------------------ a pass that failed

    def open(self, dependent: bool) -> None:
        """Begin a gradient-accumulation pass that can be undone if memory runs out.

        `dependent` is whether the results of its rows depend on random draws or on each other.
        """
        self._arrived.clear()
        self._armed, self._came = self.single_rank, set()
        self.held.open(dependent)
        self._listen()

    def close(self) -> None:
        """End the pass that `open` began, if there is only one rank.

        With several ranks, nothing happens, because the pass has already ended with its backward
        pass.
        """
        # `_finish_pass` does it there
        if self.single_rank:
            self._armed = False
            self.held.merge()
            self.held.close()

    def has_gradients(self) -> bool:
        """Return whether any parameter has a gradient."""
        return not all(map(is_, map(GRADIENT, self.parameters), repeat(None)))

    def fail(self) -> None:
        """Undo the changes that a failed pass has made to the gradients, so it can be retried."""
        _open.pop(self, None)
        self._note_arrived()
        self.held.fail(self._came)
        self._armed = False


# Exchanges in a running backward pass, with its number, in the same order on all ranks.
_open: dict[Exchange, int] = {}
EXCHANGES: WeakList[Any] = WeakList()  # also sharded models, which sum gradients too
own_hooks: set[int] = set()  # handle ids of evener's hooks on parameters


def _look_for(reference: weakref.ref[Exchange], bucket: Bucket, _: Any) -> None:
    if (exchange := reference()) is not None:
        exchange._send_ready_buckets(bucket)


def _end(task: int) -> None:
    """At the end of a backward pass, send the last buckets of all models, then wait for the sums.

    `task` is the number of the backward pass.
    """
    # all models send their remaining buckets before any of them waits for a sum
    ended = [exchange for exchange, number in _open.items() if number == task]
    for exchange in ended:
        exchange._finish_pass()
    for exchange in ended:
        _open.pop(exchange, None)
        exchange._wait_for_sums()


def is_in_backward(task: int) -> bool:
    """Return whether any exchange is still summing gradients of the backward pass number `task`."""
    return task in _open.values()


def exchanged_parameters() -> dict[int, bool]:
    """Return the parameters whose gradients evener weights and sums over ranks.

    The result is a dict with their ids as keys. A value is True if the parameter's model has
    already completed a sum.
    """
    every = sorted(EXCHANGES, key=lambda exchange: exchange.ran)
    exchanges = [exchange for exchange in every if not exchange.single_rank]
    return {
        id(parameter): exchange.ran
        for exchange in exchanges
        if not getattr(exchange, "averages", False)
        for parameter in exchange.parameters
    }


def _hook(parameter: Any, function: Callable[[Any], None]) -> Any:
    if frozen := not parameter.requires_grad:  # a frozen parameter accepts no hook
        parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(function)
    if frozen:
        parameter.requires_grad_(False)
    own_hooks.add(handle.id)
    return handle


def _forget_failed_passes() -> None:
    """Reset exchanges whose last backward pass ended with an error."""
    if backward_number() != -1:
        return
    for each in _open:
        each._armed = False
        # after some gradients were sent, an exchange can't be used any more
        each._broken = each._sent > 0
    _open.clear()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
        own_hooks.discard(handle.id)
    handles.clear()
