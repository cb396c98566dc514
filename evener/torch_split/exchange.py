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
from .collectives import make_buckets, note_own, own_collectives


class Held:
    """Gradients of earlier passes while a pass is computed that may have to be computed again.

    If rows depend on random draws or on one another (`late`), nothing of a pass may stay if it fails. Otherwise each
    gradient that is there is the whole pass's, and is final: a second try leaves it as it is.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameters = parameters
        self._final: bytearray | None = None  # of the failed pass
        self._kept: list[Any] | None = None  # gradients from before the pass
        self.opened = self.late = self.apart = False

    @property
    def is_final(self) -> bool:
        """True while the rows of a failed pass are computed again, except for gradients that are already there."""
        return self._final is not None

    def open(self, dependent: bool) -> None:
        """Prepare for the backward pass; `dependent`: rows depend on random draws, or on one another."""
        self.opened, self.late = True, dependent or self._final is not None
        self.apart = self.late and (self._final is not None or any(each.grad is not None for each in self._parameters))
        if self.apart:
            self._kept = [each.grad for each in self._parameters]
            for each in self._parameters:
                each.grad = None

    def merge(self, fired: bytearray) -> None:
        """Add the pass's gradients to those that were kept, except for final ones."""
        if self._kept is None:
            return
        sums: list[Any] = []
        added: list[Any] = []
        final = self._final or bytes(len(fired))
        for place, (parameter, kept) in enumerate(zip(self._parameters, self._kept, strict=True)):
            if parameter.grad is not None and kept is not None and not final[place]:
                sums.append(kept)
                added.append(parameter.grad)
            if kept is not None:
                parameter.grad = kept
        self._kept = None
        if sums:
            with torch.no_grad():
                torch._foreach_add_(sums, added)

    def close(self) -> None:
        """Finish a complete pass."""
        self.opened = self.late = self.apart = False

    def settle(self) -> None:
        """Forget a failed pass whose rows are now all computed."""
        self._final = None

    def fail(self, fired: bytearray) -> None:
        """Undo the pass, or remember what of it is final."""
        if self._kept is not None:
            for parameter, kept in zip(self._parameters, self._kept, strict=True):
                parameter.grad = kept
            self._kept = None
        elif self.late:
            for parameter, done in zip(self._parameters, fired, strict=True):
                if done:
                    parameter.grad = None
        elif self.opened:
            self._final = bytearray(fired)
        self.close()


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
        self._bytes, self._alone = bucket_bytes, alone
        self._buffers = [each for name, each in module.named_buffers() if name not in ignored]
        self._module, self._spreads = weakref.ref(module), broadcast_buffers and bool(self._buffers)
        self.normalizers = [each for each in module.modules() if isinstance(each, _BatchNorm)]  # they mix rows
        self._order: list[int] | None = []  # in which the first backward pass gave gradients; None: it is agreed on
        self._early = False  # buckets may go before the backward pass ends
        self._repeats = False  # a parameter's gradient came in parts
        self._armed = self._sync = self._blind = False
        self._batch: Any = None  # of the backward pass, or of the forward pass where that is blind
        self._sent = 0  # buckets that are on their way
        self._unsent = False  # gradients may be there that weren't summed
        self._fired = bytearray(len(self.parameters))
        self.held = Held(self.parameters)
        self._overlapping = weakref.WeakSet(each for each in _exchanges if each._has_any(set(named)))
        for each in self._overlapping:
            each._overlapping.add(self)
        if not alone:
            self._agree([*named.values(), *self._buffers])
        self._make_buckets(range(len(self.parameters))[::-1])
        self._hook()
        _exchanges.add(self)

    def _has_any(self, parameters: set[int]) -> bool:
        return not self._alone and not parameters.isdisjoint(map(id, self.parameters))

    def _agree(self, tensors: list[torch.Tensor]) -> None:
        """Begin with the first rank's weights; RequestError where ranks have other ones to train."""
        with torch.no_grad():
            shapes = torch.tensor([len(tensors), sum(each.numel() for each in tensors)], device=_device(tensors))
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
                if exchange._blind:
                    exchange.arm(exchange._sync, exchange._batch)
                elif not exchange._armed:
                    return
                if exchange._fired[place]:
                    exchange._note_again()
                exchange._fired[place] = 1
                if not exchange._alone:
                    exchange._count(place)

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
        watched = [each for each in outputs if each.requires_grad]
        for each in watched:
            each.register_hook(lambda _: self.arm(sync, batch))
        if not watched:  # of an object that hides its tensors
            self._blind, self._sync, self._batch = True, sync, batch

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
            self._armed, self._sync, self._blind, self._unsent = True, False, False, True
            self._fired = bytearray(len(self.parameters))
            for bucket in self._buckets:
                bucket.left = len(bucket.places)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _end(task))
        self._sync |= sync

    def _count(self, place: int) -> None:
        """Count the gradient of a parameter, and send its bucket if that is complete."""
        if self._order is not None:
            self._order.append(place)
        bucket = self._bucket_of[place]
        bucket.left -= 1
        if bucket.on_cpu and not self.held.apart:
            bucket.take(place)
        if not bucket.left and not self.held.apart:
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
        bucket.weigh(self.weight)
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
                self._buckets[self._sent].gather()
                self._send()
        elif self.held.apart:
            for bucket in self._buckets:
                bucket.gather()
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
        self._sent, self._unsent, self.ran = 0, False, True
        self.held.settle()
        if self._order is not None or self._spreads:
            with own_collectives():
                self._agree_again()
        self.done()

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
            if self.noise is not None:
                self.noise.take_sum()

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
        self._armed = self._blind = False


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


def register(exchange: Any) -> None:
    """Count the parameters of another kind of exchange as summed."""
    _exchanges.add(exchange)


def exchanged_parameters() -> dict[int, bool]:
    """The parameters of this process whose gradients are summed, by id: whether they ever were."""
    exchanges = sorted(_exchanges, key=lambda exchange: exchange.ran)
    return {id(each): exchange.ran for exchange in exchanges if not exchange._alone for each in exchange.parameters}


def _device(tensors: Sequence[torch.Tensor]) -> Any:
    return tensors[0].device if tensors else None


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
