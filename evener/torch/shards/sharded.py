"""Run a sharded model: gather parameters before they are used, and sum gradients afterwards.

The model is divided into units, modules whose parameters are gathered and freed together. The next
unit is prefetched while one computes. All ranks compute the same units in the same order. Each rank
receives the sums for its own shard.

Usually a rank holds only its shard of a gradient, so each backward pass ends with a reduction, also
in gradient accumulation. With `keeps_gradients`, unsharded gradients are kept instead, and reduced
once per batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Number
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...errors import RequestError
from ..members import Members
from ..packed import is_packed, list_statistics
from ..private import backward_number, call_after_backward
from ..rows.structure import each_tensor, tensors_in
from ..sums.collectives import own_collectives, spread
from .follow import Follower
from .place import ShardRank
from .slot import Slot, byte_count
from .unit import Ledger, Unit, find_parameters
from .whole import WholeParameters, choose_whole

# types of outputs without tensors
_SIMPLE = (type(None), Number, str, bytes, type, torch.dtype, torch.device)


class Sharded:
    """Manages a sharded model with hooks that gather parameters, free them and sum gradients.

    Arguments:

    - `model`: the model.
    - `units`: modules that are gathered one at a time, by name.
    - `place`: this rank, and the size of each rank's part.
    - `dtype`: dtype of computation, which inputs are cast to; None leaves both unchanged.
    - `keeps_gradients`: whether to accumulate unsharded gradients over passes and reduce them once
      per batch.
    - `autocast_dtype`: dtype of an autocast around each forward pass, or None.
    """

    def __init__(
        self,
        model: Any,
        units: Mapping[str, Any],
        place: ShardRank,
        dtype: Any = None,
        keeps_gradients: bool = False,
        autocast_dtype: Any = None,
    ) -> None:
        self.ledger, self.place = Ledger(), place
        parameters = find_parameters(model, units)
        whole = [] if keeps_gradients else choose_whole(parameters)
        modules = {"": model, **units}
        made = [
            Unit(
                name,
                modules[name],
                [slot for slot in own if slot not in whole],
                place,
                dtype,
                autocast_dtype,
                self.ledger,
            )
            for name, own in parameters.items()
        ]
        self.root, self.units = made[0], made[1:]
        if not keeps_gradients:
            self._send_as_computed()
        self.slots = [slot for unit in made for slot in unit.slots]
        self.pieces = [slot.piece for slot in self.slots if slot.piece.requires_grad]
        # trained parameters that each rank holds whole, such as adapters
        self.whole = WholeParameters(place, whole, self.ledger) if whole else None
        self.slots += whole
        self.parameters = [slot.piece for slot in self.slots if slot.piece.requires_grad]
        self._place_statistics(place)
        self.weight, self.ran, self.noise, self.single_rank = 1.0, False, None, False
        self.begun: Callable[[Any, Any], None] = lambda *_: None
        self.done: Callable[[], None] = lambda: None
        self._dtype = dtype
        self.keeps_gradients = keeps_gradients
        self.frees_gradients = True  # True if the memory of cleared gradients is freed
        self._sums = True  # True if the next backward pass ends with a reduction
        self.waits = False  # True if gradients of earlier passes wait for a reduction
        # for each unit, the next unit in the last forward pass
        self._follows: dict[Unit, Unit] = {}
        self._precedes: dict[Unit, Unit] = {}
        self._last: Unit | None = None  # the last unit computed in this forward pass
        # the last unit of the last forward pass, which is the first of the backward pass
        self._final: Unit | None = None
        self._task: int | None = None  # id of the running backward pass
        self._batch: Any = None  # batch of the last forward pass
        self._passing: Any = None  # batch of the backward pass
        self._sending: Unit | None = None
        self._flags: Any = None  # flags of the parameters that any rank used, in their all-reduce
        # flags of the parameters that this rank used last, and the same on the device
        self._known_flags: tuple[tuple[bool, ...], Any] = ((), None)
        self._members = Members(model)
        self._computes = False  # True while the model's forward pass is running
        self._outside: list[Unit] = []  # used in this pass outside their forward passes
        self._follower: Follower | None = None  # set on a rank without rows
        self._hook()
        self._spread_buffers()

    def compute_nothing(self) -> None:
        """From now on, run only the collectives of each pass on this rank, which has no rows.

        The model itself isn't run.
        """
        self._follower = Follower(self.root, self.units, self.place.device)

    def _send_as_computed(self) -> None:
        for unit in [self.root, *self.units]:
            for flat in unit.trained:
                flat.send_as_computed()

    def _hook(self) -> None:
        own = weakref.proxy(self)
        for unit in [self.root, *self.units]:
            hooks = UnitHooks(own, unit)
            unit.module.register_forward_pre_hook(hooks.before, with_kwargs=True, prepend=True)
            unit.module.register_forward_hook(hooks.after)
            for flat in unit.trained:
                for slot in flat.slots:
                    slot.whole.register_post_accumulate_grad_hook(hooks.take(flat, slot))
            is_layer = unit is not self.root and not any(unit.module.children())
            # RNNs have their own list of parameters
            if is_layer and not isinstance(unit.module, torch.nn.RNNBase):
                unit.module._parameters = LayerParameters(own, unit)

        if self.whole is not None:
            self.whole.hook(lambda: own.accumulated_whole(), lambda: own.weight)

    def _place_statistics(self, place: ShardRank) -> None:
        """Move the tensors that are needed to unpack 4-bit weights to the device.

        Their values are copied from rank 0. Every rank has to call this.
        """
        # they are, for example, the scales of blocks of values
        packed = [slot.whole for slot in self.slots if is_packed(slot.whole)]
        for each in packed:
            each.quant_state.to(place.device)
        statistics = list_statistics(packed)
        self.ledger.add("whole", sum(map(byte_count, statistics)))
        if not place.single_rank and statistics:
            with torch.no_grad(), own_collectives():
                spread(statistics)

    def has_any(self, parameters: set[int]) -> bool:
        """Raise a RequestError if any of these parameters is sharded, else return False.

        An object that is about to sum the parameters' gradients calls this, because gradients of
        sharded parameters are already summed here. `parameters` has the ids of the parameters.
        """
        if not parameters.isdisjoint(map(id, self.parameters)):
            raise RequestError(
                "The model is sharded, and its gradients are summed already.",
                "Leave split.wrap out.",
            )
        return False

    def weigh(self, weight: float) -> None:
        """Set the factor to multiply this rank's gradients by before they are summed."""
        self.weight = weight

    def watch(self, outputs: Sequence[torch.Tensor], sync: bool, batch: Any = None) -> None:
        """Register hooks on the model's outputs, which run when a backward pass reaches them.

        If `sync` is False, gradients are accumulated and reduced after a later pass. `batch` is the
        batch that the outputs were computed from.
        """
        self._batch, self._sums = batch, sync

        def begin(_: Any) -> None:
            self.arm(batch)
            self.begin_backward(self.root)

        for output in outputs:
            if output.requires_grad:
                output.register_hook(begin)

    # ------------------------------------------------------------------ a forward pass

    def begin_forward(self, unit: Unit) -> None:
        """Gather a unit before its forward pass, and start to gather the unit that follows."""
        if _in_backward():  # recomputed for activation checkpointing: only gather
            unit.gather()
            return
        if unit is self.root:
            self._start()
        unit.gather()
        if unit is not self.root:
            if self._last is not None:
                self._follows[self._last], self._precedes[unit] = unit, self._last
            self._last = unit
        following = self._follows.get(unit)
        if following is not None:
            following.begin_gather()

    def _start(self) -> None:
        if self._follower is not None:
            self._follower.begin_pass()
        if self._task is not None:  # the last backward pass ended with an error
            self.waits = False
            for unit in [self.root, *self.units]:
                unit.forget()
            if self.whole is not None:
                self.whole.forget()
        self._check_kept(lambda slot: slot.is_kept())
        if self.whole is not None:
            self.whole.check_kept()
        self._task = self._passing = self._sending = self._flags = None
        self._computes, self._outside = True, []
        for unit in [self.root, *self.units]:
            unit.check_unchanged()
            if not (self.keeps_gradients and self.waits):
                unit.free()  # a step may have moved its weights
            if self.frees_gradients:
                for flat in unit.trained:
                    flat.release_gradients()
        self._last = self.root

    def end_forward(self, unit: Unit, outputs: Any) -> None:
        """Free a unit after its forward pass, unless the backward pass begins with it."""
        if _in_backward():
            self._follow_outputs(unit, outputs)
            return
        trains = torch.is_grad_enabled() and self._follow_outputs(unit, outputs)
        if unit is self.root:
            self._final, self._computes = self._last, False
            kept = [self._final, *(self._outside if trains else ())]
            for each in self.units:
                if each not in kept:  # prefetched too early, because the order has changed
                    each.free()
                else:
                    each.hide()
        if not trains or unit not in (self.root, self._final, *self._outside):
            unit.free()
        unit.hide()  # a loop may clear gradients before the backward pass, or make its optimizer

    def _follow_outputs(self, unit: Unit, outputs: Any) -> bool:
        """Register gradient hooks on a unit's outputs, and return whether any requires a gradient.

        Raises RequestError if the outputs have a type that evener can't find tensors in.
        """
        seen = list(_find_tensors(outputs))
        watched = [each for each in seen if isinstance(each, torch.Tensor) and each.requires_grad]
        hiding = next(
            (type(each).__name__ for each in seen if not isinstance(each, torch.Tensor)), None
        )
        if hiding is not None and not watched:
            raise RequestError(
                f"{unit.name or 'The model'} returns a {hiding}, whose tensors can't be seen.",
                "Return tensors, tuples, dicts or a dataclass.",
            )
        for each in watched if unit is not self.root else ():  # the root's outputs are watched
            each.register_hook(lambda _: self.begin_backward(unit))
        return bool(watched)

    def cast(self, unit: Unit, inputs: Any) -> Any:
        """Cast floating-point inputs to the dtype of computation, if `unit` is the model itself.

        Inputs of other units are returned unchanged.
        """
        if self._dtype is None or unit is not self.root:
            return inputs
        return each_tensor(
            lambda tensor: tensor.to(self._dtype) if tensor.is_floating_point() else tensor, inputs
        )

    def read_outside(self, unit: Unit) -> None:
        """Gather a unit when code outside of its module reads the unit's parameters.

        Nothing happens outside of forward and backward passes. The unit stays gathered until the
        backward pass ends.
        """
        # for example, a model may multiply by its head's weight without calling the head
        if not (self._computes or _in_backward()) or (unit.gathered and not unit.hidden):
            return
        unit.gather()
        if unit not in self._outside:
            self._outside.append(unit)

    # ------------------------------------------------------------------ a backward pass

    def arm(self, batch: Any) -> None:
        """Set up the shards for a backward pass, which has just reached outputs of the model.

        `batch` is the batch that these outputs were computed from. Raises RequestError if the
        backward pass runs with `create_graph=True`.
        """
        # once per backward pass; for further outputs, only record that it has reached them
        if torch.is_grad_enabled():
            raise RequestError(
                "A sharded model has no gradients of gradients (create_graph=True).",
                "Leave create_graph out.",
            )
        begins = self._task is None
        if begins:
            self._check_kept(lambda slot: slot.piece.grad is not None)
            if self.root.gathered:
                self.root.gather()  # it may be hidden
            for unit in self._outside:
                unit.unsent = True
                unit.gather()
            if self.whole is not None:
                self.whole.begin()
            self._task = backward_number()
            call_after_backward(self._finish_backward)
        self.begun(batch, batch if begins else self._passing)
        self._passing = batch

    def begin_backward(self, unit: Unit) -> None:
        """Gather a unit before its backward pass, and start to gather the unit that follows."""
        # the unit that follows is the one before it in the forward pass
        if self._task is None:
            self.arm(self._batch)
        unit.unsent = True
        if unit.reads_backward:
            unit.gather()
        before = self._precedes.get(unit)
        if before is not None and before is not self.root and before.reads_backward:
            before.begin_gather()

    def end_backward(self, unit: Unit, is_over: bool = False) -> None:
        """Start to sum a unit's gradients over ranks, and free the unit's parameters.

        `is_over` is True at the end of the whole backward pass.
        """
        # a unit that was used outside its forward pass is only reduced then
        if unit in self._outside and not is_over:
            return
        if unit.unsent:
            unit.count_gradients()  # they are in memory while others are received
            if self._sending is not None:
                self._sending.receive()
            unit.send(1.0 if self.keeps_gradients else self.weight)
            self._sending = unit
        unit.free()

    def accumulated(self, unit: Unit) -> None:
        """Gradient hook that records that a unit has a new gradient to send."""
        unit.unsent = True
        if self._task is None:
            self.arm(self._batch)

    def accumulated_whole(self) -> None:
        """Gradient hook of unsharded parameters, which calls `arm` once per backward pass."""
        if self._task is None:
            self.arm(self._batch)

    def _finish_backward(self) -> None:
        """At the end of a backward pass, sum the remaining gradients, and set each `.grad`."""
        if self._follower is not None:
            self._follower.end_backward()
        if self.keeps_gradients and not self._sums:
            self._keep()
            return
        for unit in [*self.units, self.root]:
            self.end_backward(unit, is_over=True)
        if self._sending is not None:
            self._sending.receive()
        self._sending = self._task = self._passing = None
        self.waits = self.whole is not None and not self._sums
        self._set_gradients()
        if not self.waits:
            self.ran = True
            self.done()

    def _keep(self) -> None:
        """Keep the unsharded gradients of this pass, until a later pass sums them over ranks."""
        # until then, parameters stay whole
        self.waits, self._task, self._passing = True, None, None
        self.root.hide()
        for flat in self.root.trained:
            flat.keep()

    def _check_kept(self, is_kept: Callable[[Slot], bool]) -> None:
        """Raise a RequestError if the user's loop cleared gradients before they were summed.

        `is_kept` returns whether the gradient that was kept for a parameter still exists.
        """
        waits = self.keeps_gradients and self.waits
        if waits and not all(is_kept(slot) for slot in self.root.slots if slot.has_fired):
            raise RequestError(
                "Gradients were cleared between the passes, or the batches, of a sum.",
                "Call zero_grad() after the optimizer's step alone.",
            )

    def _set_gradients(self) -> None:
        """Set the `.grad` of each parameter for which any rank has computed a gradient."""
        flats = [flat for unit in [self.root, *self.units] for flat in unit.trained]
        computed = [slot.has_fired for flat in flats for slot in flat.slots]
        computed += self._add_up_whole()
        if not computed:
            return
        used = self._find_used(computed)
        first = 0
        for flat in flats:
            last = first + len(flat.slots)
            flat.set_gradients(used[first:last])
            first = last
        if self.whole is not None and not self.waits:
            self.whole.set_gradients(used[first:])

    def _add_up_whole(self) -> list[bool]:
        """All-reduce the gradients of unsharded parameters, such as adapters.

        Return for each of these parameters whether it has a gradient on this rank. The result is []
        if there are none, or if a later pass sums their gradients.
        """
        if self.whole is None:
            return []
        if self.waits:
            self.whole.keep()
            return []
        self.whole.add_up()
        return [slot.has_fired for slot in self.whole.slots]

    def _find_used(self, computed: list[bool]) -> list[bool]:
        """Return for each parameter whether any rank has computed its gradient in this pass.

        `computed` has the flags of this rank: whether it has computed the gradient of each
        parameter. Every rank has to call this.
        """
        if self.place.single_rank:
            return computed
        flags = self._flag(computed)
        with own_collectives():
            self._flags = dist.all_reduce(flags, dist.ReduceOp.MAX, async_op=True), flags
        self._spread_buffers()
        if all(computed):
            return computed
        self._flags[0].wait()
        return [bool(each) for each in flags.tolist()]

    def _flag(self, computed: list[bool]) -> torch.Tensor:
        """Return a tensor on this rank's device with the flags in `computed`, one per parameter."""
        # a copy from the host would make the host wait, so unchanged flags are copied from the last
        # tensor
        known = tuple(computed)
        if known != self._known_flags[0]:
            made = torch.tensor(computed, dtype=torch.uint8, device=self.place.device)
            self._known_flags = known, made
        return self._known_flags[1].clone()

    def _spread_buffers(self) -> None:
        """Copy the model's buffers from the first rank that has rows to all other ranks.

        Every rank has to call this.
        """
        # listed again each time, because the model may have replaced some of them
        buffers = {id(buffer): buffer for _, buffer in self._members.buffers()}
        if buffers and not self.place.single_rank:
            with own_collectives():
                spread(list(buffers.values()), source=self.place.first)

    def reset(self) -> None:
        """Discard gradients and gathered parameters after an error has interrupted a pass."""
        self.waits, self._computes, self._outside = False, False, []
        self._task = self._passing = self._sending = self._flags = None
        for unit in [self.root, *self.units]:
            unit.forget()
            unit.drop()
        if self.whole is not None:
            self.whole.forget()

    def note_state(self, optimizer: Any) -> None:
        """Record in the ledger how many bytes the optimizer's state takes."""
        whole = self.whole.parameters if self.whole is not None else []
        self.ledger.note_state(optimizer, set(map(id, whole)))

    def __deepcopy__(self, _: Any) -> NoReturn:
        raise RequestError(
            "A sharded model can't be copied.",
            "Copy it before split.shard, or use split.model_state.",
        )

    def __reduce__(self) -> NoReturn:
        raise RequestError(
            "A sharded model can't be saved as a whole.", "Use split.save, or split.model_state."
        )


class LayerParameters(dict[str, Any]):
    """A layer's dict of parameters, which gathers them when code reads one while the model runs."""

    def __init__(self, sharded: Any, unit: Unit) -> None:
        super().__init__(unit.module._parameters)
        self._sharded, self._unit = sharded, unit

    def __getitem__(self, name: str) -> Any:
        self._sharded.read_outside(self._unit)
        return super().__getitem__(name)


class UnitHooks:
    """Hooks of one unit of a sharded model, which gather and free its parameters."""

    def __init__(self, sharded: Any, unit: Unit) -> None:
        self._sharded, self._unit = sharded, unit

    def before(self, _: Any, arguments: Any, keywords: Any) -> Any:
        """Forward pre-hook that gathers the unit's parameters and casts the model's inputs.

        It also wraps the inputs, to detect the end of the unit's backward pass.
        """
        if torch.compiler.is_compiling():
            raise RequestError("A sharded model can't be compiled.", "Leave torch.compile out.")
        unit, sharded = self._unit, self._sharded
        sharded.begin_forward(unit)
        arguments, keywords = sharded.cast(unit, (arguments, keywords))
        if unit is sharded.root or not torch.is_grad_enabled():
            return arguments, keywords
        tensors = [each for each in tensors_in((arguments, keywords)) if each.requires_grad]
        if not tensors:
            return arguments, keywords
        marked = dict(
            zip(map(id, tensors), _UnitInputs.apply(sharded, unit, *tensors), strict=True)
        )
        direct = [each for each in (*arguments, *keywords.values()) if id(each) in marked]
        if len(direct) < len(tensors):  # some are inside of tuples, lists or mappings
            return each_tensor(lambda tensor: marked.get(id(tensor), tensor), (arguments, keywords))
        return (
            tuple([marked.get(id(argument), argument) for argument in arguments]),
            {name: marked.get(id(each), each) for name, each in keywords.items()},
        )

    def after(self, _: Any, __: Any, outputs: Any) -> None:
        """Forward hook that frees the unit's parameters."""
        self._sharded.end_forward(self._unit, outputs)

    def take(self, flat: Any, slot: Any) -> Callable[[Any], None]:
        """Return a hook that runs when the gradient of a parameter has been computed.

        The parameter is `slot`, in the flat tensor `flat`.
        """

        unit, sharded = self._unit, self._sharded

        def note(_: Any) -> None:  # the unit's gradients are taken together, when it is complete
            if not unit.unsent:
                sharded.accumulated(unit)

        def take(_: Any) -> None:
            sharded.accumulated(unit)
            flat.take(slot, sharded.weight)

        return take if sharded.keeps_gradients else note

    def __deepcopy__(self, _: Any) -> NoReturn:
        raise RequestError(
            "A sharded model can't be copied.",
            "Copy it before split.shard, or use split.model_state.",
        )


class _UnitInputs(torch.autograd.Function):  # type: ignore[misc]  # torch isn't followed
    """Autograd function that returns its inputs, and detects the end of a unit's backward pass."""

    @staticmethod
    def forward(
        ctx: Any, sharded: Any, unit: Unit, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.sharded, ctx.unit = sharded, unit
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        # the gradients of the unit's parameters are complete by now
        ctx.sharded.end_backward(ctx.unit)
        return (None, None, *gradients)


def _find_tensors(outputs: Any) -> Iterator[Any]:
    """Yield the tensors in a module's outputs, and the objects in which tensors can't be found."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
        return
    if isinstance(outputs, _SIMPLE):
        return
    fields = getattr(outputs, "__dataclass_fields__", None)
    if isinstance(outputs, Mapping):
        items: Iterable[Any] = outputs.values()
    elif isinstance(outputs, tuple | list):
        items = outputs
    elif isinstance(outputs, SimpleNamespace):
        items = vars(outputs).values()
    elif fields is not None:
        items = [getattr(outputs, name, None) for name in fields]
    else:
        yield outputs
        return
    for item in items:
        yield from _find_tensors(item)


def _in_backward() -> bool:
    return bool(backward_number() != -1)
