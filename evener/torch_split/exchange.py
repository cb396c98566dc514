"""The sum of a model's gradients over the ranks, each rank's times its weight in the batch.

With n_i of N rows on rank i, mean over the batch = sum_i (n_i / N) * mean_i: a plain mean over ranks is another
gradient as soon as the n_i differ. Gradients lie in flat buckets, in one order on all ranks, and a bucket is sent as
soon as its gradients of all passes are there; what is left goes at the end of the backward pass. What was sent is
final, so a rank that runs out of memory computes only the rest again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import RequestError
from .buckets import Bucket, Held, SeenNumber, make_buckets, warn_of_hooks
from .collectives import note_own, own_collectives

BUCKET_BYTES = 25 << 20


def _nothing(*_: Any) -> None:
    """Nobody listens."""


class Exchange:
    """Sums the gradients of `module` over `group` (None: every process), this rank's times `weight`.

    A backward pass through what `watch` was given is summed at its end where `sync` says so. `begun` is called as
    one comes to such outputs, with the batch that they are of and the one of those before in this pass; `ready` when
    the last gradient is there, and `done` when the sums are.
    """

    def __init__(
        self,
        module: Any,
        group: Any = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        broadcast_buffers: bool = True,
        alone: bool = False,
    ) -> None:
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = {id(each): each for name, each in module.named_parameters() if name not in ignored}
        self.parameters = [each for each in named.values() if each.requires_grad]
        self.group, self.weight, self.ran = group, 1.0, False
        self.begun: Callable[[Any, Any], None] = _nothing
        self.ready: Callable[[], None] = _nothing
        self.done: Callable[[], None] = _nothing
        self.noise: Any = None  # a NoiseSampler, which sees what is summed
        self.number = 0  # of the batch in its epoch
        self._seen: list[SeenNumber] = []  # sums of the ranks' numbers that weren't looked at yet
        self._bytes, self._alone = bucket_bytes, alone
        buffers = [each for name, each in module.named_buffers() if name not in ignored]
        self._module, self._spreads = weakref.ref(module), broadcast_buffers and bool(buffers)
        self.normalizers = [each for each in module.modules() if isinstance(each, _BatchNorm)]  # they mix rows
        self._order: list[int] | None = None if alone else []  # of gradients in the first pass; None: it is agreed on
        self._early = False  # buckets may go before the backward pass ends
        self._repeats = False  # a parameter's gradient came in parts
        self._armed = self._sync = False
        self._batch: Any = None  # of the backward pass
        self._begins: list[Any] = []  # hooks that see one of outputs that aren't seen
        self._hidden_task = -1  # the last such backward pass
        self._broken = False  # a backward pass has failed when part of its gradients were sent
        self.waits = False  # a forward pass was watched since the last sum
        self._sent = 0  # buckets that are on their way
        self.sums, self.unsummed = 0, False  # unsummed: parameters have gradients of this rank's rows alone
        self._unsent = False  # gradients may be there that weren't summed
        self._fired = bytearray(len(self.parameters))
        self.held = Held(self.parameters)
        self._overlapping = weakref.WeakSet(each for each in _exchanges if each.has_any(set(named)))
        for each in self._overlapping:
            each._overlapping.add(self)
        if not alone:
            self._agree([*named.values(), *buffers])
        self._make_buckets(range(len(self.parameters))[::-1])
        self._hook()
        _exchanges.add(self)

    def has_any(self, parameters: set[int]) -> bool:
        return not self._alone and not parameters.isdisjoint(map(id, self.parameters))

    def _agree(self, tensors: list[torch.Tensor]) -> None:
        """Begin with the first rank's weights; RequestError where ranks have other ones to train."""
        with torch.no_grad():
            sizes = [len(tensors), sum(each.numel() for each in tensors)]
            shapes = torch.tensor(sizes, device=tensors[0].device if tensors else None)
            most, least = shapes.clone(), shapes.clone()
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
            dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
            if not torch.equal(most, least):
                raise RequestError("The ranks wrap different models.", "Make the same model on every rank.")
            self._spread([each.detach() for each in tensors])

    def _spread(self, tensors: list[torch.Tensor]) -> None:
        """Copy the first rank's values to every rank."""
        group = dist.group.WORLD if self.group is None else self.group
        for device in {each.device for each in tensors}:
            own = [each for each in tensors if each.device == device]
            dist._broadcast_coalesced(group, own, 250 << 20, 0)

    def _make_buckets(self, order: Iterable[int]) -> None:
        self._buckets = [] if self._alone else make_buckets(self.parameters, order, self._bytes)
        self._bucket_of = {place: bucket for bucket in self._buckets for place in bucket.places}

    def _hook(self) -> None:
        reference = weakref.ref(self)  # a parameter must not keep what a dropped wrapper had

        def note(place: int) -> Callable[[Any], None]:
            def hook(_: Any) -> None:
                exchange = reference()
                if exchange is None:
                    return
                if not exchange._armed:
                    exchange._check_outside()
                    return
                if exchange._fired[place]:
                    exchange._note_again()
                exchange._fired[place] = 1
                if exchange._order is not None:
                    exchange._order.append(place)
                bucket = exchange._bucket_of.get(place)  # None where nobody else trains
                if bucket is not None:
                    bucket.left -= 1
                    if not bucket.left:
                        exchange._complete(bucket)

            return hook

        handles = [each.register_post_accumulate_grad_hook(note(i)) for i, each in enumerate(self.parameters)]
        weakref.finalize(self, _remove, handles)

    # ------------------------------------------------------------------ what a batch weighs

    def weigh(self, weight: float) -> None:
        """Set the weight of gradients that come from now on; those that wait for their sum keep their own."""
        if weight != self.weight and self._unsent:
            for bucket in self._buckets:
                bucket.fold(self.weight)
        self.weight = weight

    # ------------------------------------------------------------------ a backward pass

    def watch(self, outputs: Sequence[torch.Tensor], sync: bool, batch: Any = None) -> None:
        """Backward passes through these outputs of the model count; `sync`: they end in a sum."""
        if _open and torch._C._current_graph_task_id() == -1:
            _drop_failed()
        if self._broken:
            raise RequestError(
                "An error ended a backward pass when part of its gradients were on their way to the other ranks.",
                "Let such an error end the training, and train on from a checkpoint.",
            )
        self._forget_begin()
        self.waits = True
        watched = [each for each in outputs if each.requires_grad]
        for each in watched:
            each.register_hook(lambda _: self.arm(sync, batch))
        if watched:
            return
        reference = weakref.ref(self)  # the outputs are in an object that hides them

        def begin(_: Any) -> None:
            if (exchange := reference()) is not None:
                exchange._forget_begin()
                exchange.arm(sync, batch)
                exchange._hidden_task = torch._C._current_graph_task_id()

        self._begins = [each.register_hook(begin) for each in self.parameters if each.requires_grad]

    def _forget_begin(self) -> None:
        for each in self._begins:
            each.remove()
        self._begins = []

    def _check_outside(self) -> None:
        """RequestError for a gradient that comes when a pass of hidden outputs is over: that was a checkpoint's own."""
        if -1 < torch._C._current_graph_task_id() < self._hidden_task:
            raise RequestError(
                "The model's output is an object that hides its tensors, and a part of it is in a reentrant checkpoint:"
                " nobody sees where its backward pass begins.",
                "Return a tensor, tuple or dict, or use torch.utils.checkpoint with use_reentrant=False.",
            )

    def arm(self, sync: bool, batch: Any) -> None:
        """A backward pass begins, or goes on."""
        task = torch._C._current_graph_task_id()
        begins = _open.get(self) != task
        self.begun(batch, batch if begins else self._batch)
        self._batch = batch
        if begins:
            if any(_open.get(other) == task for other in self._overlapping):
                raise RequestError(
                    "Two wrapped models have a layer in common, and are in one backward pass: its gradient would be"
                    " summed twice.",
                    "Wrap one module that computes both in its forward pass, or call backward for each loss.",
                )
            _open.pop(self, None)
            _open[self] = task
            self._armed, self._sync, self._unsent, self._hidden_task = True, False, True, -1
            self._fired = bytearray(len(self.parameters))
            for bucket in self._buckets:
                bucket.left = len(bucket.places)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _end(task))
        self._sync |= sync

    def _complete(self, bucket: Bucket) -> None:
        """Send a bucket whose gradients are all there, once those before it are."""
        if not self.held.apart:
            if not (bucket.on_cpu and self._sync):
                bucket.gather()
            if self._early and self._sync and not self.held.late:
                self._send_complete()

    def _note_again(self) -> None:
        """Note that a parameter got another part of its gradient, as a layer shared by reentrant checkpoints does."""
        self._repeats = True
        if self._order is None and self._early and self._sync:
            raise RequestError(
                "A parameter got a second gradient in one backward pass, unlike in the first: its sum is on its way.",
                "Use torch.utils.checkpoint with use_reentrant=False.",
            )

    def _send_complete(self) -> None:
        """Send in order what is complete, unless a model before this one in the backward pass isn't done."""
        for other in _open:
            if other is self:
                break
            if other._sync and other._sent < len(other._buckets):
                return
        while self._sent < len(self._buckets) and not self._buckets[self._sent].left:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[self._sent]
        self._sent += 1
        bucket.weigh(self.weight, self.number)
        if self._sent == len(self._buckets):
            self.ready()
        note_own()
        if self.noise is not None:
            self.noise.add_own(bucket)
        bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
        if self.noise is not None and self._sent == len(self._buckets):
            self.noise.send(self.group)

    def _finish_pass(self) -> None:
        """Send the buckets that are left once the backward pass has no more gradients."""
        self.held.merge(self._fired)
        if self._sync and any(self._fired):
            while self._sent < len(self._buckets):
                if not self._buckets[self._sent].on_cpu:
                    self._buckets[self._sent].gather()
                self._send()
        elif self.held.apart:
            for bucket in self._buckets:
                bucket.gather()
        if any(self._fired) and not self._sync:
            self.unsummed = True
        self.held.close()

    def _wait(self) -> None:
        """End the sum, if one is under way."""
        self._armed = False
        if not (self._sync and self._sent and self._sent == len(self._buckets)):
            return
        for bucket in self._buckets:
            bucket.receive()
        if self.noise is not None:
            self.noise.receive(self._buckets)
        self._sent, self._unsent, self.waits, self.ran = 0, False, False, True
        self.sums += 1
        self.unsummed = False
        self.held.settle()
        self._compare_numbers()
        if self._order is not None or self._spreads:
            with own_collectives():
                self._agree_again()
        self.done()

    def _compare_numbers(self) -> None:
        """RequestError if the ranks sum gradients of different batches; seen a step late where a device is behind."""
        flat = self._buckets[0].flat
        self._seen.append(SeenNumber(flat[-1:], self.number * dist.get_world_size(self.group)))
        while self._seen and self._seen[0].is_there():
            if not self._seen.pop(0).is_right():
                raise RequestError(
                    "The ranks sum gradients of different batches: one has left a batch out or taken one more, as a"
                    " loop does that goes on after a loss of NaN, or an error, on this rank alone.",
                    "Leave a batch out on all ranks or on none: decide by split.total(...), which all have.",
                )

    def _agree_again(self) -> None:
        """After a sum, take the first rank's order of gradients once, and its buffers."""
        if self._order is not None:
            self._learn_order(self._order)
        if self._spreads:
            self._spread([each.detach() for each in self.buffers()])

    def _learn_order(self, seen: list[int]) -> None:
        """Take the first rank's order of gradients; buckets go early from now on, unless a gradient came in parts."""
        places = list(dict.fromkeys(seen))
        places += [place for place in range(len(self.parameters))[::-1] if place not in set(places)]
        order = torch.tensor(places, device=self._buckets[0].flat.device)
        repeats = torch.tensor([self._repeats], device=order.device, dtype=torch.int64)
        dist.broadcast(order, 0 if self.group is None else dist.get_global_rank(self.group, 0), group=self.group)
        dist.all_reduce(repeats, dist.ReduceOp.MAX, group=self.group)
        self._order, self._early = None, not int(repeats)
        if dist.get_rank(self.group) == 0:
            warn_of_hooks(self.parameters, sum(each is self or each in self._overlapping for each in _exchanges))
        self._make_buckets(order.tolist())
        for bucket in self._buckets:
            bucket.gather()

    # ------------------------------------------------------------------ a pass that failed

    def open(self, dependent: bool, rows: int) -> None:
        """Prepare for the backward pass of these rows, 0 if it is another one of the same; `dependent` as in Held."""
        self._fired = bytearray(len(self.parameters))
        self._armed = self._alone
        self.held.open(dependent)
        if self._alone and self.noise is not None and rows:
            self.noise.expect(rows)

    def close(self) -> None:
        """Finish after the backward pass."""
        if self._alone:
            self._armed = False
            self.held.merge(self._fired)
            self.held.close()

    def has_gradients(self) -> bool:
        """True if a parameter has one."""
        return any(each.grad is not None for each in self.parameters)

    def buffers(self) -> list[torch.Tensor]:
        """The buffers that a pass may change."""
        module = self._module()
        return [] if module is None else list(module.buffers())

    def fail(self) -> None:
        """End a pass with an error: gradients that were sent stay, and those that can't stay are undone."""
        _open.pop(self, None)
        self.held.fail(self._fired)
        if self._alone and self.noise is not None:
            self.noise.leave_out()
        self._armed = False


_open: dict[Exchange, int] = {}  # those that a backward pass goes through, with its number, in the order of all ranks
_exchanges: weakref.WeakSet[Exchange] = weakref.WeakSet()


def _end(task: int) -> None:
    """The backward pass is over: all models send before one waits."""
    ended = [exchange for exchange, number in _open.items() if number == task]
    for exchange in ended:
        exchange._finish_pass()
    for exchange in ended:
        _open.pop(exchange, None)
        exchange._wait()


def _drop_failed() -> None:
    """Forget backward passes that ended with an error: a forward pass begins, and none runs."""
    for exchange in _open:
        exchange._armed, exchange._broken = False, exchange._sent > 0
    _open.clear()


def register(exchange: Any) -> None:
    """Count the parameters of another kind of exchange as summed."""
    _exchanges.add(exchange)


def list_exchanges() -> list[Exchange]:
    """The exchanges of this process with other ranks."""
    return [each for each in _exchanges if isinstance(each, Exchange) and not each._alone]


def exchanged_parameters() -> dict[int, bool]:
    """The parameters of this process whose gradients are summed, by id: whether they ever were."""
    exchanges = sorted(_exchanges, key=lambda exchange: exchange.ran)
    return {id(each): exchange.ran for exchange in exchanges if not exchange._alone for each in exchange.parameters}


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
