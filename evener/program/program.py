"""State and hooks for a script that trains with DDP, FSDP or DeepSpeed under `evener run`."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from zlib import crc32

import msgspec
import torch
import torch.distributed as dist

from ..errors import EvenerError, RequestError
from ..plan.file import Plan, make_layout
from ..torch.audit.same_data import RankData
from ..torch.audit.state import kept_state
from ..torch.planned import PlannedTraining
from ..torch.private import backward_number, default_store
from ..torch.ranks.ranks import exchange_values, find_shares, open_plan
from ..torch.step.checks import OPTIMIZER_CHECK
from ..torch.step.step import LoaderSteps
from ..torch.step.weights import Weigh
from ..torch.step.wrapped import model_digest
from ..training.first_rank import is_eveners_rank, is_released
from . import sharded, views
from .advice import advise
from .even_start import EvenStart, comes_from_rows, find_callback
from .exchanges import ExchangeCall, Exchanges, sends_flag
from .guard import LOOK_AGAIN, UNSEEN, Guard
from .notes import Notebook, SharesOrigin, read_settings
from .views import RankView

# number of further steps with equal shares to observe if the program exchanges values in the first
WATCHED = 1
# backward passes without an optimizer step after which this is reported: outside of loops over a
# DataLoader, and in one, where gradients may be accumulated
FEW_PASSES, MANY_PASSES = 4, 64
EXCHANGE_SECONDS = 60.0  # timeout for all ranks to reach the end of the first step


class Program:
    """State of the user's script, and hooks that make it train with unequal shares.

    In the first step, shares are equal, and all ranks check whether they may become unequal. If
    not, the script runs unchanged. The only instance is `PROGRAM`.
    """

    def __init__(self) -> None:
        self.notebook = Notebook(read_settings())
        # models in DDP, in order of creation
        self.models: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        # models that were wrapped since the program trains by shares
        self._later_models: weakref.WeakSet[Any] = weakref.WeakSet()
        # models that have trained by shares; the next training run has them, too
        self._followed: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped = False  # True once an optimizer of PyTorch has stepped
        self._passes = 0  # number of backward passes before that
        # the loader over which the latest loop began
        self._newest_loader: weakref.ref[Any] | None = None
        # True if the latest loop began before a model was wrapped
        self._has_begun_early = False
        self._own_iteration = ""  # the class of a loader whose own iteration isn't followed
        self._others = 0  # number of running trainers that have their own hooks
        self._exchanges = 0  # number of exchanges between ranks
        self._noted_calls: set[str] = set()  # the program's collectives that were seen uneven
        self.remarks: list[str] = []  # warnings to print once shares may become unequal
        self._even_start: EvenStart | None = None  # of a library's trainer
        self._begin_undecided()

    def _begin_undecided(self) -> None:
        """Set the initial state: shares are equal, and whether they may differ is undecided."""
        self.training: PlannedTraining | None = None
        self._loop: Any = None  # the loop that yielded the latest batch
        self._other_loop: Any = None  # another loop whose batch belongs to the same step
        self._loader_steps: LoaderSteps | None = None  # receives the steps of the followed loop
        self._guard: Guard | None = None
        self._rechecks = False  # True if the guard's batch follows a change that this rank has seen
        self._updated = False  # True if an optimizer has stepped since that batch
        self._fault = ""  # why the program's use of gradients prevents unequal shares
        # digest of the optimizers' settings in this step; by shares, of the learning rates in all
        # steps so far
        self._rates = 0
        self._steps = 0  # number of steps by shares
        self._uneven = 0  # number of steps with unequal shares
        self._look = LOOK_AGAIN  # the step of the next check by a guard
        self.exchanges = Exchanges(self.note_exchange)
        self._numbers: tuple[float, ...] | None = None  # numbers in the loss of the previous step
        # settings at the start of the batch, for optimizers that have stepped
        self._begun_rates: weakref.WeakKeyDictionary[Any, list[float]]
        self._begun_rates = weakref.WeakKeyDictionary()
        self._begun_reads = 0  # of exchanged values, before the batch
        self._watched = (
            0  # number of steps with equal shares in which the program itself exchanged values
        )

    @property
    def shares(self) -> tuple[int, ...]:
        """Row count of each rank in a full batch; empty until evener divides the batches."""
        return () if self.training is None else self.training.ranks.batches

    @property
    def sizes(self) -> tuple[int, ...]:
        """Row count of each rank in the current batch; empty before the first batch."""
        return () if self._loop is None else self._loop.sizes

    def trains(self, loader: Any) -> bool:
        """Return whether a loop over `loader` trains a model rather than evaluates it.

        The result is False if there is only one rank, and inside `left_unchanged`.
        """
        # a model is in training mode, or the loader has trained before: some programs leave their
        # models in evaluation mode after an epoch
        group = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if not group or self._others or not torch.is_grad_enabled():
            return False
        batches = getattr(loader, "batch_sampler", None)
        has_trained: bool = getattr(batches, "has_trained", False)
        return bool(self.models) and (has_trained or any(model.training for model in self.models))

    def make_model(self, wrapped: Any, model: Any, arguments: Any, keywords: Any) -> None:
        """Hook of the constructors of DDP, FSDP1 and DeepSpeed that records the wrapped model."""
        wrapped(*arguments, **keywords)
        self._record_model(model)

    def _record_model(self, model: Any) -> None:
        """Record a model that is wrapped, for example in DDP, and drop records of its submodules.

        Nothing happens if the model is itself a submodule of a recorded one.
        """
        if not any(model in other.modules() for other in self.models):
            for module in model.modules():
                self.models.pop(module, None)
            self.models[model] = None
            if self.training is not None and not self._others:
                self._note_later_model(model, self.training)

    def shard_model(self, wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
        """Hook of `fully_shard` that records the sharded models."""
        # programs also shard single layers; only the whole model stays recorded
        result = wrapped(*arguments, **keywords)
        given = arguments[0] if arguments else keywords["module"]
        for model in given if isinstance(given, list) else [given]:
            self._record_model(model)
        return result

    def run_backward(self, wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
        """Hook of `autograd.backward` that scales a sharded model's loss by the rank's share."""
        training = self.training
        # a backward pass inside another one, as with checkpointing
        is_inner = backward_number() != -1
        if training is None and not self._others and not is_inner:
            self._count_passes()
        if training is None or self._others or is_inner or not training.weights.by_loss:
            return wrapped(*arguments, **keywords)
        result = sharded.run_weighted(training, wrapped, arguments, keywords)
        training.timer.note_gradients()
        training.timer.note_enqueued()
        training.timer.note_backward()
        return result

    def _count_passes(self) -> None:
        """Count a backward pass, and warn after several of them without an optimizer step.

        The warning says why shares stay equal. In strict mode, RequestError is then raised.
        """
        # the hooks don't see the steps of optimizers other than PyTorch's, such as fastai's
        has_group = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if self._stepped or not self.models or not has_group or self.notebook.pending_reason:
            return
        self._passes += 1
        words = ""
        is_in_loop = self._loop is not None and not self._loop.is_over
        if not is_in_loop and self._passes == FEW_PASSES:
            words = self._find_loader_obstacle()
        elif is_in_loop and self._passes == MANY_PASSES:
            words = views.NO_OPTIMIZER
        if words:
            self.notebook.suppose_even(words)
            self._end_strictly(words)

    def _find_loader_obstacle(self) -> str:
        """Return why evener can't divide the batches of the script's data loader."""
        # the optimizer trains a wrapped model, so the reason is in the loop's loader
        if self._own_iteration:
            return views.OWN_ITERATION.format(self._own_iteration)
        return views.BEGUN_EARLY if self._has_begun_early else views.NO_LOADER

    @property
    def is_uneven(self) -> bool:
        """Whether the current batch has unequal shares, or a step of this training run had them."""
        return self._uneven > 0 or len(set(self.sizes)) > 1

    def note_own_iteration(self, loader: Any) -> None:
        """Record the class of a loader whose own `__iter__` evener can't follow."""
        self._own_iteration = type(loader).__name__

    def note_loader(self, loader: Any) -> None:
        """Record a loader when a loop over it begins."""
        self._newest_loader = weakref.ref(loader)
        self._has_begun_early = not self.models

    def begin_update(self, optimizer: Any, *_: Any) -> None:
        """Optimizer hook before a step: check whether values from other ranks affect the step."""
        if self._guard is not None:
            self._guard.steps = True
            if self.training is None:
                self._check_exchanged_values(optimizer)

    def _check_exchanged_values(self, optimizer: Any) -> None:
        """Check whether values from other ranks affect the loss, gradients, weights or settings.

        If they do, this is recorded as the reason to keep shares equal. The settings are those of
        the optimizer, such as its learning rate.
        """
        exchanges = self.exchanges
        if not exchanges.origins.seen:
            return
        if self._guard is not None:
            exchanges.note_entered(self._guard.entered, "its loss")
        weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [weight.grad for weight in weights]
        exchanges.note_entered(exchanges.origins.find(gradients), "its gradients")
        exchanges.note_entered(exchanges.origins.find(weights), "its weights")
        numbers = [
            number
            for group in optimizer.param_groups
            for name, number in group.items()
            if name != "params"
        ]
        exchanges.note_entered(exchanges.origins.find(numbers), "the rate of its optimizer")
        rates = views.read_numbers(optimizer)
        # a schedule may also change rates within a step: only what was read in it can be a cause
        is_read = exchanges.origins.reads > self._begun_reads
        if is_read and rates != self._begun_rates.get(optimizer, rates):
            exchanges.note_entered(exchanges.origins.read, "the rate of its optimizer")

    def note_update(self, optimizer: Any, *_: Any) -> None:
        """Optimizer hook that runs after a step; if shares have to stay equal, it prints why.

        In strict mode, it raises RequestError instead of training on.
        """
        self._updated = True
        self._stepped = True
        if self._loop is not None:
            self._loop.shared_batches.has_trained = True
        if self._guard is not None:
            self._guard.steps = False
        if self._others:
            return
        self._note_rates(optimizer)
        if not (dist.is_available() and dist.is_initialized()):
            self._note_single_rank(optimizer)
        elif dist.get_world_size() == 1:
            self.stay_even(views.ONE_PROCESS)
        elif self._loop is None and not self.notebook.pending_reason:
            self._note_obstacle(optimizer)

    def _note_rates(self, optimizer: Any) -> None:
        """Add the optimizer's learning rate and other settings to a checksum that ranks compare."""
        # once the program trains by shares, only learning rates are added, and no fault is recorded
        undecided = self.training is None and not self._fault and bool(self.models)
        if undecided and sharded.trains_others(optimizer, self.models):
            # an optimizer trains parameters that belong to no recorded model
            self._fault = views.OUTSIDE
        rates = views.read_numbers(optimizer, () if self.training is None else ("lr",))
        if self.training is None:
            self._begun_rates[optimizer] = views.read_numbers(optimizer)
        self._rates = crc32(repr(rates).encode(), self._rates)

    def _note_single_rank(self, optimizer: Any) -> None:
        """Print that only one device trains, and which lines of code would use all devices."""
        if self.notebook.why:
            return
        if not self.is_single_rank:
            self.stay_even(views.NO_GROUP)
            return
        loader = None if self._newest_loader is None else self._newest_loader()
        self.report_single_device(advise(optimizer, loader))

    @property
    def is_single_rank(self) -> bool:
        """Whether only evener's first process runs the script, without a process group so far."""
        has_group = dist.is_available() and dist.is_initialized()
        return not has_group and is_eveners_rank() and not is_released()

    def report_single_device(self, advice: str) -> None:
        """Print that the script trains on one device, followed by `advice`.

        Raises RequestError in strict mode.
        """
        self.notebook.stay_even(views.FOR_ONE, f". {advice}")
        self._end_strictly(views.FOR_ONE)

    def _save_settings(self) -> None:
        """Save the optimizers' settings at the start of a batch, to detect changes in the step."""
        # A schedule changes the settings between batches. An exchanged value may be the cause of a
        # change within a batch.
        self._begun_reads = self.exchanges.origins.reads
        for optimizer in list(self._begun_rates):
            self._begun_rates[optimizer] = views.read_numbers(optimizer)

    def _note_obstacle(self, optimizer: Any) -> None:
        """If this optimizer's model can't train with unequal shares, print why.

        Raises RequestError in strict mode.
        """
        # the step isn't in a loop that can train by shares; a later one may be
        words = views.find_obstacle(optimizer, list(self.models), self._find_loader_obstacle())
        if words:
            self.notebook.suppose_even(words)
            self._end_strictly(words)

    def clip(self, wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
        """Hook of gradient clipping that keeps shares equal if each rank clips its own gradients.

        If gradients are clipped before they are averaged over ranks, the result depends on the
        shares. Raises RequestError if the script already trains with the plan's shares.
        """
        if not self._others and any(
            not getattr(model, "require_backward_grad_sync", True) for model in self.models
        ):
            self._fault = views.CLIPPED
            if self.training is not None:
                raise RequestError(
                    f"Shares have differed, but {views.CLIPPED}.",
                    "Clip once, after the last batch.",
                )
        return wrapped(*arguments, **keywords)

    def run_collective(self, wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
        """Hook of collectives that checks a call by the user's own code, and then runs it."""
        if self._even_start is not None and comes_from_rows(wrapped.__name__):
            self._note_callback(self._even_start, wrapped.__name__)
        guard = self._guard
        line = self.exchanges.find_line(guard)
        if not line:
            return wrapped(*arguments, **keywords)
        is_uneven = self.is_uneven or self.notebook.was_uneven
        checks = self.training is None
        return self.exchanges.check_and_run(
            wrapped, arguments, keywords, guard, line, is_uneven, checks
        )

    def _note_callback(self, start: EvenStart, name: str) -> None:
        """Record a collective that a user's callback calls while a library's trainer runs.

        `start` watches the trainer's first steps, and `name` is the collective. If these steps are
        over and shares are unequal, a warning is printed instead.
        """
        line = find_callback()
        if not line or not start.is_training:
            return
        if not start.is_over:
            start.note_collective(name, line)
        elif len(set(start.shares)) > 1:
            self.notebook.warn(views.EXCHANGED)

    def note_exchange(self, call: ExchangeCall | None = None) -> None:
        """Warn if the user's script exchanges values between ranks while shares are unequal.

        `call` is the collective, or None if unknown. Nothing happens unless a model is in training
        mode.
        """
        if len(set(self.sizes)) <= 1 or not any(model.training for model in self.models):
            return
        if call is not None and call.words not in self._noted_calls:
            self._noted_calls.add(call.words)  # reading its value makes the host wait for a GPU
            if sends_flag(call):
                self.notebook.warn(views.FLAGGED.format(call.words))
                return
        self.notebook.warn(views.EXCHANGED)

    def open_loop(self) -> None:
        """Prepare for a new loop: if it trains another model, end the current training run.

        Every rank has to call this the same number of times.
        """
        # If the program trains another model from now on, as for the next fold of a
        # cross-validation, a new training run begins. Its shares are equal until its loss has been
        # checked.
        others = [model for model in self.models if model.training and model not in self._followed]
        if self.training is None or not (others or self._later_models):
            return
        gc.collect()  # models that the program has dropped
        if self._loop is not None:
            is_pending = not self._loop.is_over and not self._updated
            self._loop.was_interrupted = is_pending and len(set(self.sizes)) > 1
            self.end(self._loop)  # left early
        self.training.leave()
        self._later_models.clear()
        self._begin_undecided()

    def _note_later_model(self, model: Any, training: PlannedTraining) -> None:
        """Record a model that was wrapped after shares became unequal."""
        # in a loop, the model's gradients are weighted at once, because it may be trained on the
        # current batch already
        self._later_models.add(model)
        in_loop = self._loop is not None and not self._loop.is_over
        if in_loop and isinstance(model, torch.nn.parallel.DistributedDataParallel):
            with suppress(EvenerError):  # the optimizer's first step then says what is wrong
                training.wrap(model)
                self._followed.add(model)

    def begin(self, loop: Any) -> None:
        """Start a step with the batch that `loop` has just yielded.

        Raises RequestError if the batch still has the shares of a training run that has ended.
        """
        if self.training is None and len(set(loop.sizes)) > 1:  # of the run that has ended
            raise RequestError(*views.INTERRUPTED)
        if self.training is not None and self._later_models:
            # batches may already be fetched by shares, so no loss can be checked before
            self._later_models.clear()
            self.go_even(self.training, views.WRAPPED_LATER)
        if loop is not self._loop:
            self._enter(loop)
        self._updated = False
        if self.training is None:
            self._rates = 0
            self._save_settings()
        if self._guard is None and self._needs_guard(loop):
            self._guard = self._make_guard(loop)
        if self.training is not None:
            self._begin_step(loop, self.training)

    def _enter(self, loop: Any) -> None:
        """Make `loop` the current loop, whose batches the script trains on."""
        left = self._loop
        if left is not None and self._updated and left.shared_batches is loop.shared_batches:
            self.end(left)  # a new epoch of a loop that counts its batches itself
        # without an update in between, both loops belong to one step
        self._other_loop = None if self._updated else self._loop
        self._loop = loop

    def _needs_guard(self, loop: Any) -> bool:
        """Return whether a Guard has to check the loss of the next step.

        A Guard finds out whether unequal shares would change the loss.
        """
        # every batch before training by shares, the first uneven one, then at growing intervals
        if self.training is None:
            return not self.notebook.why and not loop.shared_batches.fault
        if loop.origin is None:
            return False
        is_first_uneven = not self._uneven and len(set(loop.sizes)) > 1
        return is_first_uneven or self._steps == self._look

    def _begin_step(self, loop: Any, training: PlannedTraining) -> None:
        """Start a step with the plan's shares, and set the weights of the ranks' gradients.

        If the loss may have changed, for example because the script computes it in a new way, a
        Guard checks it in this step.
        """
        # The loss needs a check if it has just changed, or if a setting that affects the loss has.
        # A guard disturbs the step's time, which isn't used for rebalancing.
        if self._loader_steps is None or loop.origin is None:
            # a batch of another loader, which the program divides itself
            training.weights.begin(loop.sizes)
            return
        self._loader_steps.begin(loop.origin, loop.sizes, loop.batch)
        changed = training.audits.follows_change and not self._communicates_in_layers
        if self._guard is None and changed:
            self._guard = self._make_guard(loop)
            self._rechecks = True
        if self._guard is not None:
            training.timer.disturb()

    def _make_guard(self, loop: Any) -> Guard:
        agree = self._agree if self._communicates_in_layers else None
        given: dict[str, Any]
        if self.training is None:
            given = {"origins": self.exchanges.origins, "are_sums": None}
        else:
            are_sums = self.training.weights.are_sums
            sketcher = self.training.audits.make_sketcher
            given = {"sketcher": sketcher, "step": self._steps + 1, "are_sums": are_sums}
        rows = loop.count_rows()
        return Guard(self.models, loop.batch, loop.fetch_few_rows, rows=rows, agree=agree, **given)

    @property
    def _communicates_in_layers(self) -> bool:
        """Whether the model's layers communicate between ranks, as with FSDP."""
        return sharded.choose_weighted(self.models) == "loss"

    def finish(self, loop: Any) -> None:
        """Finish the training step of the loop's last batch.

        After the first step, all ranks decide whether shares may differ. Every rank has to call
        this the same number of times. Raises RequestError if another training run interrupted the
        loop, or if ranks have trained with different row orders or learning rates.
        """
        if loop.was_interrupted:
            raise RequestError(*views.INTERRUPTED)
        if self._loader_steps is not None and loop.origin is not None:
            self._loader_steps.done(loop.sizes, (0, 0))
            self._compare_records_if_due(loop)
        if loop is not self._loop and loop.batch is not None:
            self._check_several_loops(loop)
        elif (
            loop is self._loop and self._updated and self.training is None and not self.notebook.why
        ):
            self._train_loop_by_shares(loop)
        self._drop_guard()

    def end(self, loop: Any) -> None:
        """End a loop over a loader, whether it ran to the end or the script left it early.

        If it trained with the plan's shares, the ranks compare their last steps, so every rank has
        to call this.
        """
        self._drop_guard()
        if loop.is_over:
            return
        loop.is_over = True
        if self._loader_steps is not None and loop.origin is not None:
            self._loader_steps.end(loop.origin)
            self._compare_records(loop)

    def _drop_guard(self) -> None:
        """Stop recording this batch's loss if no backward pass has used it."""
        if self._guard is not None and not self._guard.done:
            self._guard.close()
            self._guard = None

    def _check_several_loops(self, loop: Any) -> None:
        """Check a step that takes batches from two loops.

        Raises RequestError if the training run has already used unequal shares, and the two loops
        divide their rows among the ranks in different ratios.
        """
        self.notebook.pending_reason = views.SEVERAL
        ratios = [[size / sum(each.sizes) for size in each.sizes] for each in (loop, self._loop)]
        if (
            self.training is not None
            and self._updated
            and self._other_loop is loop
            and ratios[0] != ratios[1]
        ):
            raise RequestError(
                f"Shares have differed, but {views.SEVERAL}, and ranks have other parts of them.",
                "Start it with its own launcher.",
            )

    def _compare_records_if_due(self, loop: Any) -> None:
        """Count a step, and compare all ranks' records of it if a comparison is due."""
        self._steps += 1
        if self._steps > self._look:
            self._look *= LOOK_AGAIN
        uneven = len(set(loop.sizes)) > 1
        self._uneven += uneven
        if self._rechecks:
            self._send_loss_check()
        # due after a step with a guard, a loop's first step, and the second uneven step
        if self._guard is not None or not loop.compared or (uneven and self._uneven == 2):
            self._compare_records(loop)

    def _send_loss_check(self) -> None:
        """Send all ranks the result of this rank's check of a loss that may have changed.

        The rank doesn't wait for the others' results.
        """
        # the other ranks may not have seen the change
        assert self.training is not None
        self._rechecks = False
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()
            self._note_fault(guard)
            self.training.audits.report(guard.fault if guard.measured else "")

    def _note_fault(self, guard: Guard) -> None:
        """Warn if the guard couldn't check whether unequal shares would change this step's loss."""
        if guard.fault and guard.fault != UNSEEN and not guard.measured:
            self.notebook.warn(
                f"in step {self._steps}, its loss couldn't be compared with that of equal shares: "
                f"{guard.fault}"
            )

    def _compare_records(self, loop: Any) -> None:
        """Compare all ranks' records of the last steps; if a rank has a problem, make shares equal.

        Every rank has to call this. Raises RequestError if ranks have trained with different row
        orders or learning rates.
        """
        every = self.exchange(self._make_record(loop))
        loop.compared = True
        difference = views.find_difference(every)
        if difference in ("order", "rates"):
            raise RequestError(
                f"Since shares have differed, {views.DIFFERENCES[difference]}.",
                "Let nothing depend on a rank's own rows, or start it with its own launcher.",
            )
        if fault := next(
            (each.fault for each in every if each.fault), views.DIFFERENCES.get(difference, "")
        ):
            self._go_back(loop, fault.rstrip("."))

    def _go_back(self, loop: Any, fault: str) -> None:
        """Make this loop's shares equal for the rest of the training run, and print why."""
        assert self.training is not None
        self.training.follow(loop.sampler, loop.ahead)
        self.go_even(self.training, f"in step {self._steps}, {fault}")

    def go_even(self, training: PlannedTraining, fault: str) -> None:
        """Make shares equal for the rest of the training run, and print why.

        Raises RequestError in strict mode. Every rank has to call this after the same step.
        """
        why = fault.rstrip(".")
        if training.begins_even:  # nothing was trained by unequal shares
            training.stay_even()
            self.stay_even(why)
            return
        if self.notebook.settings.strict:
            raise RequestError(
                f"Shares can't stay unequal: {why}.",
                "Leave --strict out to train with equal shares.",
            )
        self._look = sys.maxsize
        training.stay_even()
        self.notebook.warn(
            f"shares are equal again, for good: {why}; earlier steps may have learned something"
            " else than with equal shares"
        )

    def audit(self, training: PlannedTraining) -> None:
        """Let audits compare gradients during the training run.

        If an audit finds a difference, shares become equal.
        """
        training.audits.follow_launcher(partial(self.go_even, training))

    def begin_even(self, training: PlannedTraining, hooks: str) -> None:
        """Keep shares equal until all ranks have checked the first steps of a library's trainer.

        `hooks` names the trainer's class, for the message that is printed when shares become
        unequal.
        """
        self.notebook.pending_reason = views.EVEN_START
        leave = partial(self._leave_even, training, hooks)
        self._even_start = EvenStart(training, self.exchange, self.stay_even, leave)

    def _leave_even(self, training: PlannedTraining, hooks: str) -> None:
        self.notebook.pending_reason = ""
        self.notebook.watch(training, hooks)

    def exchange(self, own: Any, seconds: float = 0) -> list[Any]:
        """Gather one value from each rank, in rank order; `own` is this rank's.

        Every rank has to call this the same number of times. Values go through the process group's
        store, and must be serializable by msgspec. The result is empty on all ranks if one doesn't
        answer within `seconds`; 0 uses the store's timeout.
        """
        self._exchanges += 1
        store = default_store()
        every = exchange_values(
            store,
            f"evener/program/{self._exchanges}",
            dist.get_rank(),
            dist.get_world_size(),
            msgspec.msgpack.encode(own),
            seconds,
        )
        return [msgspec.msgpack.decode(each, type=type(own)) for each in every]

    def _agree(self, fault: str) -> str:
        """Exchange error messages with all ranks, and return the first one, or "" if there is none.

        Every rank has to call this.
        """
        # Ranks agree before they run passes together, in which they communicate layer by layer. If
        # a rank doesn't answer, that is a reason, too.
        every = self.exchange(RankView(fault), EXCHANGE_SECONDS)
        return next((each.fault for each in every if each.fault), "") if every else views.ALONE

    def _train_loop_by_shares(self, loop: Any) -> None:
        """Together with all ranks, decide after a step whether this loop may use unequal shares.

        If it may, the plan's shares take effect. Every rank has to call this after the same step.
        """
        # If the program has exchanged values, wait one more step, which may use them.
        every = self.exchange(self._make_record(loop), EXCHANGE_SECONDS)
        fault = _find_common_fault(every)
        if fault:
            maker = loop.batch_maker
            self.stay_even(
                f"{fault.rstrip('.')}; its batches are made by {maker}" if maker else fault
            )
            return
        if self._watched < WATCHED and any(each.exchanges for each in every):
            self._watched += 1  # the next step may use the exchanged values
            return
        models = [model for model in self.models if model.training or model in self._followed]
        try:
            training = self._plan_loop(models, loop, every[0].are_sums)
        except EvenerError as error:
            self.stay_even(error.message)
            return
        self._followed.update(models)
        self.training, self._loader_steps = training, LoaderSteps(training, True)
        self._rates, loop.compared = 0, True
        OPTIMIZER_CHECK.steps_schedules = False
        for warning in [*self.remarks, *(each.warning for each in every)]:
            if warning:
                self.notebook.warn(warning)
        self.audit(training)
        loop.follow(training)
        loop.sampler.change_shares(self.shares, loop.ahead)
        self.notebook.watch(training, f"{sharded.name_wrapper(models)} and DataLoader")

    def _plan_loop(self, models: list[Any], loop: Any, are_sums: bool) -> PlannedTraining:
        """Create a training run with the plan's shares for this loop, and add the models to it.

        `are_sums` says whether losses are sums over rows.
        """
        weigh = sharded.choose_weighted(models)
        training = self.plan(models, loop.sampler.global_batch, weigh)
        training.weights.are_sums = are_sums
        for model in models:
            sharded.follow(training, model)
        return training

    def choose_plan(self, models: Sequence[Any], global_batch: int) -> Plan | None:
        """Return a plan with equal shares if the launched plan was for another model or batch size.

        The result is None if the launched plan can be used, or if the script started another number
        of processes. `global_batch` is in rows per step.
        """
        self.notebook.model = "+".join(sorted(map(model_digest, models)))
        origin = self.notebook.settings.origin
        if origin in (None, SharesOrigin(self.notebook.model, global_batch)):
            return None
        given = open_plan(None)
        if given is None:  # the program started another number of processes
            return None
        devices = given.layout.active
        self.notebook.warn(
            "the last training's shares were of another model or batch, so it starts with equal"
            " shares"
        )
        even = make_layout(given.layout.kind, devices, (1,) * len(devices))
        return msgspec.structs.replace(given, layout=even)

    def plan(
        self,
        models: Sequence[Any],
        global_batch: int,
        weigh: Weigh = "gradients",
        **options: Any,
    ) -> PlannedTraining:
        """Create a training run that uses the plan's shares.

        - `global_batch`: rows per step.
        - `weigh`: what is multiplied by a rank's weight, such as "gradients" or "loss".
        - `options`: further arguments of `find_shares`.

        Raises EvenerError if the plan doesn't fit the script.
        """
        settings = self.notebook.settings
        chosen = self.choose_plan(models, global_batch)
        found = find_shares(
            chosen, None, global_batch, {"rebalance": settings.rebalance}, **options
        )
        return PlannedTraining(
            found, weigh, rebalance=settings.rebalance, noise=settings.noise, journal=True
        )

    def _make_record(self, loop: Any) -> RankView:
        """Return what this rank has observed in the last steps, to compare it between ranks."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()
        if self.training is not None:
            return self._view_shares(loop, guard)
        numbers, uses = (None, ()) if guard is None else (guard.numbers, guard.uses)
        self._compare_numbers(numbers)
        fault = self._find_fault(loop, guard)
        warning = ""
        data: RankData | None = None
        if not fault and loop.varies():
            warning = views.OTHER_ROWS
        elif not fault:
            warning = views.PADDED if guard is not None and guard.padded else ""
            data = loop.summarize_data()
        return RankView(
            fault,
            loop.shared_batches.digest,
            self._rates,
            numbers,
            uses,
            warning,
            data=data,
            are_sums=guard is not None and guard.are_sums,
            exchanges=self.exchanges.origins.seen,
        )

    def _view_shares(self, loop: Any, guard: Guard | None) -> RankView:
        """Return this rank's record of the last step of training with the plan's shares.

        `guard` has checked that step; it is None if there was no check.
        """
        order = loop.shared_batches.digest
        if guard is None:
            return RankView("", order, self._rates)
        self._note_fault(guard)
        fault = guard.fault if guard.measured else ""
        return RankView(fault or guard.local_use, order, self._rates, guard.numbers, guard.uses)

    def _find_fault(self, loop: Any, guard: Guard | None) -> str:
        """Return why this rank can't train with unequal shares, or "" if it can.

        `guard` has checked the latest batch; it is None if there was no check.
        """
        sampler = loop.sampler
        if sampler is not None and sampler.global_batch == dist.get_world_size():
            return views.SINGLE
        faults = [views.find_fault(model) for model in self.models if model.training]
        faults += [loop.shared_batches.fault, self._fault, self.exchanges.fault]
        if guard is not None:
            faults += [guard.fault, "" if guard.exchanges else views.LOCAL, guard.local_use]
            faults.append(views.DIVIDED if guard.divides_sums else "")
            if guard.are_sums and self.notebook.settings.noise:
                faults.append(views.NO_NOISE)
        faults.append(views.NO_SAMPLER if sampler is None else "")
        return next(filter(None, faults), "")

    def _compare_numbers(self, numbers: tuple[float, ...] | None) -> None:
        """Compare the numbers in the loss, such as a scale factor, with the previous step's.

        If they differ, and the script has read a number that comes from other ranks, the collective
        that the number comes from is recorded as the cause.
        """
        before, self._numbers = self._numbers, numbers
        if None not in (before, numbers) and before != numbers:
            self.exchanges.note_entered(self.exchanges.origins.read, "a number in its loss")

    @contextmanager
    def left_unchanged(self) -> Iterator[None]:
        """Context manager in which the hooks of this class ignore training.

        It is used where other hooks handle the training, such as those for a library's trainer.
        """
        self._others += 1
        try:
            yield
        finally:
            self._others -= 1

    def stay_even(self, why: str) -> None:
        """Keep shares equal for this script, and print why.

        Raises RequestError in strict mode.
        """
        self.notebook.stay_even(why)
        self._end_strictly(self.notebook.why)

    def _end_strictly(self, why: str) -> None:
        """Raise RequestError with this reason if `--strict` was given."""
        if self.notebook.settings.strict:
            raise RequestError(
                f"Shares can't differ: {why}.",
                "Leave --strict out to train with equal shares.",
            )


def _find_common_fault(records: list[RankView]) -> str:
    """Return why shares have to stay equal, or "" if they may differ.

    The reason is the first `fault` in the ranks' records, or else a difference between the records.
    If a rank didn't answer, `records` is empty, and that is the reason.
    """
    if not records:
        return views.ALONE
    for each in records:
        if each.fault:
            return each.fault
    return views.DIFFERENCES.get(views.find_difference(records), "")


def share_state(trainer: Any, kind: type[Any]) -> Any:
    """Return an object of class `kind` that shares its attributes with `trainer`."""
    made = object.__new__(kind)
    made.__dict__ = vars(trainer)
    return made


@contextmanager
def stays_if_refused(trainer: Any) -> Iterator[None]:
    """Context manager that handles an EvenerError by keeping shares equal for this script.

    The trainer's attributes are then restored, so that it trains as if evener hadn't changed it.
    """
    before = dict(vars(trainer))
    try:
        with kept_state():
            yield
    except EvenerError as error:
        vars(trainer).clear()
        vars(trainer).update(before)
        PROGRAM.stay_even(error.message)


PROGRAM = Program()
