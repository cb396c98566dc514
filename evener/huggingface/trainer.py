"""The Trainer class that gives each device its planned share of every batch."""

from __future__ import annotations

import copy
import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import seed_worker

from ..errors import RequestError
from ..plan.file import Plan
from ..torch.audit.rows import ROWS as ROWS_COMPUTED
from ..torch.audit.rows import TIMES, FewRows, fetch_rows
from ..torch.audit.state import kept_attributes
from ..torch.planned import PlannedTraining
from ..torch.ranks.ranks import find_shares, open_plan
from ..torch.rows.loader import StepLoader
from ..torch.step.part import Part
from ..torch.step.wrapped import can_time_compute, check_normalization
from . import private
from .audits import TrainerAudit
from .gathering import Gathering, pretend_processes, share_evaluation
from .loss import (
    ITEMS,
    ROWS,
    TrainerLoss,
    assume_loss,
    has_ignored,
    has_uneven_labels,
)
from .meaning import find_loss
from .passes import TrainerPasses, count_tokens, weigh_loss, weigh_passes
from .rows import (
    CHECKPOINT,
    PassRows,
    PassSampler,
    check_checkpoint,
    check_rebalance,
    check_setup,
    check_trainer_class,
    make_sampler,
    needs_equal_passes,
    training_rows,
)
from .shards import ShardMixin, load_from_shards
from .stop_signal import stop_on_signal


def with_plan(
    trainer_class: type[Trainer],
    plan: Plan | str | os.PathLike[str] | None = None,
    *,
    ratios: Sequence[float] | None = None,
    global_batch: int | None = None,
    strict: bool = False,
    journal: bool = False,
    rebalance: bool = False,
    noise: bool = False,
    check: bool = True,
) -> type[Any]:
    """Return a subclass of `trainer_class` that divides its batches by a plan.

    Use it like the class itself. The plan, not `per_device_train_batch_size`, determines how many
    rows each process computes, and the result is as if one device trained on whole batches. With
    `gradient_accumulation_steps=A`, an optimizer step has A global batches.

    - `plan`: a Plan or its file; None takes the plan of `evener launch`.
    - `ratios`: relative shares of the processes, instead of a plan.
    - `global_batch`: rows of all processes in one batch. The default is the plan's global batch or,
      with `ratios`, `per_device_train_batch_size` times the number of processes.
    - `strict`: raise an error instead of a warning if the plan was measured on other devices.
    - `journal`: record the training run for `evener runs`.
    - `rebalance`: change shares during training if step times differ.
    - `noise`: measure the gradient noise scale.
    - `check`: find out from a few rows whether the loss is a mean over rows or labels, and compare
      gradients during training. If False, trust transformers' settings.

    Raises RequestError or PlanError if the trainer can't train with the plan, either when it is
    created or before its first step.
    """
    check_trainer_class(trainer_class)
    if plan is not None and ratios is not None:
        raise RequestError(
            "Both a plan and ratios are given.", "Give one of them; the plan has its own ratios."
        )
    chosen = None if ratios is not None else open_plan(plan)
    if chosen is None and ratios is None:
        raise RequestError(
            "No plan is given.", "Give one or ratios=, or start the script with evener launch."
        )
    options = {"strict": strict, "journal": journal, "rebalance": rebalance, "noise": noise}
    given = SimpleNamespace(
        plan=chosen, ratios=ratios, global_batch=global_batch, check=check, options=options
    )
    sharded = (ShardMixin,) if chosen is not None and chosen.layout.traits.sharded else ()
    return type(
        f"Planned{trainer_class.__name__}", (*sharded, _PlanMixin, trainer_class), {"_given": given}
    )


class _PlanMixin(Trainer):  # type: ignore[misc]  # transformers has no complete types
    """Trainer mixin that gives each rank its planned share of rows, and weights the losses."""

    _given: SimpleNamespace  # the arguments of with_plan
    # True: keep the loss of the program's own launcher, even if one process's loss differs
    keeps_launcher = False
    args: Any
    state: Any
    _tr_loss: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.begin_plan()

    def begin_plan(self) -> None:
        """Check the Trainer's settings, and prepare training with the plan.

        Raises RequestError if the settings conflict with a plan.
        """
        # called by the constructor or, if the program has already created the trainer, by `evener
        # run`
        check_setup(self)
        given, options, rows = self._given, self._given.options, self._given.global_batch
        if given.plan is None and rows is None:
            rows = self.args.per_device_train_batch_size * self.args.world_size
        same = {name: options[name] for name in ("rebalance", "noise")}
        found = find_shares(
            given.plan, given.ratios, rows, same, strict=options["strict"], device=self.args.device
        )
        if options["rebalance"] and found.world > 1:
            check_rebalance(self, found.share)
        if needs_equal_passes(self) or found.is_sharded:
            found = msgspec.structs.replace(found, passes=(max(found.passes),) * found.world)
        self._planned = PlannedTraining(found, "trainer", **options)
        self._shares = shares = self._planned.ranks  # the plan's shares
        passes = shares.passes[shares.rank]
        self.args = copy.copy(self.args)  # the user's own arguments stay unchanged
        own = max(1, shares.batches[shares.rank])  # a rank without rows has a filler row
        self.args.per_device_train_batch_size = -(-own // passes)
        self._train_batch_size = self.args.per_device_train_batch_size
        self._loss: TrainerLoss | None = None  # the meaning of the loss, once it was checked
        # rows and weights of the next passes of the optimizer step
        self._to_come: deque[tuple[int, float]] = deque()
        # rows of this rank in an optimizer step, and their tokens without and with padding
        self._done = (0, (0, 0))
        self._is_last = True  # the current part is the last one of its batch
        self._factor: Any = None  # factor of the current pass's loss
        self._evaluates = False  # a batch of an evaluation
        self._newest = 0  # newest global batch of the epoch
        self._tokens = 0
        self._logged: list[tuple[Any, ...]] = []  # in a pass
        self._planned.timer.can_time_compute = not self.is_fsdp_enabled and can_time_compute(
            self.model, False
        )
        fixed = needs_equal_passes(self) or max(shares.passes) > 1
        if self._planned.rebalancing is not None and fixed:
            self._planned.rebalancing.passes = shares.passes
        self._gathering = Gathering(self.accelerator, self._planned.timer)
        self._planned.passes.recovery.check = self._check_parts
        self._passes = TrainerPasses(self, self._planned, self._gathering)
        stop_on_signal(self, shares.world)

    # ------------------------------------------------------------------ rows

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader that yields this rank's gradient-accumulation passes of each batch."""
        shares = self._shares
        check_normalization(self.model, "loss", shares.world, shares.pass_rows)
        dataset, collate, order = training_rows(self, super().get_train_dataloader)
        rows, args = make_sampler(self, self._planned, dataset, order), self.args
        self._fetch_few = partial(_fetch_few, rows, dataset, collate)
        self._sampler = PassSampler(rows, shares.passes[shares.rank])
        self._audit = TrainerAudit(self, self._gathering, dataset, collate)
        self._batches = StepLoader(
            PassRows(dataset, collate),
            self._sampler,
            ahead=True,
            collate_fn=list,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            worker_init_fn=partial(
                seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index
            ),
        )
        self._planned.follow(rows, self._batches.drawn_ahead)
        if self._given.check:
            self._planned.compare_data(dataset, collate, rows)
        # without `accelerator.prepare`, which would divide the rows among ranks again
        return self._batches

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        """Return a data loader; for evaluation, it gives whole batches to the ranks in turn."""
        made = partial(super()._get_dataloader, *args, is_training=is_training, **kwargs)
        return made() if is_training else share_evaluation(self, made, self._gathering)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of rows in an optimizer step."""
        return self._shares.global_batch * int(self.args.gradient_accumulation_steps)

    # ------------------------------------------------------------------ an optimizer step

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Fetch this rank's passes for the next optimizer step, and return them and the item count.

        The passes are a list for each global batch. The item count is `num_items_in_batch` of all
        ranks, or None if the trainer doesn't count items.
        """
        self._planned.end()
        passes = list(islice(epoch_iterator, num_batches))  # a list for each global batch
        sampler, accumulated = self._sampler, int(self.args.gradient_accumulation_steps)
        # position in the epoch, also when training continues from a checkpoint
        first = int(self.state.global_step) % -(-len(sampler) // accumulated) * accumulated
        batches = range(first, first + len(passes))
        self._newest = batches[-1] if batches else first
        sizes = [sampler.pass_sizes(batch) for batch in batches]
        self._done = sum(map(sum, sizes)), sampler.count_tokens(batches)
        rank_rows = [self._batches.take(batch) for batch in batches]
        every_pass = [one_pass for of_batch in passes for one_pass in of_batch]
        items = self._weigh_and_count(every_pass, sizes, list(map(sum, rank_rows)), device)
        if self._planned.noise is not None:
            self._planned.noise.accumulated = len(rank_rows)
        self._planned.timer.begin(rank_rows[0] if len(set(rank_rows)) == 1 else ())
        return passes, items

    def _get_num_items_in_batch(self, batches: list[Any], device: torch.device) -> Any:
        """Count this rank's items on the CPU; return None if the trainer doesn't count items."""
        calls = self._gathering.calls  # transformers 4 gathers here even if one process counts
        # a copy to a GPU would make the host wait for the optimizer's step; `weigh_passes` moves it
        items = super()._get_num_items_in_batch(batches, torch.device("cpu"))
        self._gathering.calls = calls
        return items

    def _prepare_input(self, data: Any) -> Any:
        """Copy a batch to the device, without waiting for copies from pinned memory."""
        inner: Any = super()._prepare_input
        # a class may have a method of its own, for example to convert tensors
        is_plain = getattr(inner, "__func__", None) is Trainer._prepare_input
        is_pinned = isinstance(data, torch.Tensor) and data.is_pinned()
        if is_pinned and is_plain and not self.is_deepspeed_enabled:
            return data.to(self.args.device, non_blocking=True)
        return inner(data)

    def _weigh_and_count(
        self, passes: list[Any], sizes: list[Any], totals: list[int], device: torch.device
    ) -> Any:
        """Set the weights of a step's passes, and return the number of items on all ranks.

        For each global batch in the step, `sizes` has the row counts of this rank's passes, and
        `totals` has the batch's row count. The result is None if the trainer doesn't count items.
        Every rank has to call this.
        """
        rows = [own for step in sizes for own in step]
        with self._gathering.local():
            counted = [each for each, own in zip(passes, rows, strict=True) if own]
            items = self._get_num_items_in_batch(counted or passes[:1], device)
        items = items if items is None or counted else items * 0
        # the first step
        if self._loss is None:
            self._loss = self._find_loss(any(map(has_ignored, counted)))
        weights, items, ignored = weigh_passes(
            self._loss, passes, sizes, totals, items, self._gathering, device
        )
        # means over labels and rows can't be distinguished while all labels count
        if ignored and not self._loss.certain:
            self._loss = self._find_loss(True)
            weights, _, _ = weigh_passes(
                self._loss, passes, sizes, totals, None, self._gathering, device
            )
        self._to_come = deque(zip(rows, weights, strict=True))
        return items

    def _find_loss(self, accepts_ignored: bool, checked_rows: int = 0) -> TrainerLoss:
        """Find out what the loss is a mean over, or assume what the Trainer's settings say.

        The settings are trusted if checks are off. They are also trusted if one process computes
        each batch in one pass, unless `checked_rows` is given.

        - `accepts_ignored`: whether the loss is known to support ignored labels.
        - `checked_rows`: maximum number of rows to check if a single process is about to use
          smaller passes for the first time; otherwise 0.
        """
        world = self._shares.world
        if not self._given.check or (world * sum(self._shares.passes) == 1 and not checked_rows):
            # the user turned the check off, or one process computes each batch in one pass
            return assume_loss(self, world)
        max_rows = checked_rows or ROWS_COMPUTED
        # a device of a sharded model has no more memory than its passes need
        if self._shares.is_sharded:
            smallest = min(micro for micro in self._shares.micros if micro)
            max_rows = min(max_rows, max(2, smallest))
        fetch = partial(self._fetch_few, max_rows, is_diverse=not checked_rows)
        return find_loss(
            self,
            self._audit.computations,
            fetch,
            self._gathering,
            accepts_ignored,
            in_parts=checked_rows > 0,
        )

    def check_loss(self) -> None:
        """Raise RequestError if the plan's shares would change the Trainer's loss.

        Call this after the training loader has been created.
        """
        # Training with the plan changes what is learned if the loss isn't a mean over rows, labels
        # or items, or if the script's own launcher averages means over different numbers of labels.
        few_rows = self._fetch_few()
        self._loss = self._find_loss(few_rows is not None and has_ignored(few_rows.whole))
        by_labels = self._loss.mean_over not in (ITEMS, ROWS)
        if by_labels and self.keeps_launcher and few_rows and has_uneven_labels(few_rows.whole):
            raise RequestError(
                "its loss is a mean over a rank's own labels, of which rows have different "
                "numbers: its own launcher averages the means of ranks, and with unequal shares it "
                "would be the mean over all labels",
                "Train it with with_plan, which takes the mean over all labels.",
            )

    def _check_parts(self, part: Any, rows: int) -> None:
        """Check that the loss stays the same if a pass that ran out of memory is divided.

        `part` is the pass, and at most `rows` of its rows are checked. Nothing is checked unless a
        single process computes each batch in one pass.
        """
        if self._shares.world * sum(self._shares.passes) == 1:
            self._loss = self._find_loss(has_ignored(part.batch), checked_rows=rows)

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Train on this rank's rows of one global batch, in passes, and return the loss.

        The loss is weighted so that the mean over ranks is the loss of a single process.
        """
        parts = [Part(each, *self._to_come.popleft(), lambda loss: loss) for each in inputs]
        for part in parts:
            self._planned.weights.note_lengths(part.batch)
        train = partial(self._train_part, model, num_items_in_batch)
        result = self._passes.compute(model, parts, self._loss_found, train)
        if self.args.include_num_input_tokens_seen not in ("no", False):
            self._tokens += sum(count_tokens(self, part.batch) for part in parts if part.rows)
        while self._logged:
            super().log(*self._logged.pop(0))
        if not self._to_come:
            self._audit_step()
            self._planned.report(*self._done)
        return result

    def _audit_step(self) -> None:
        """Audit the gradients of the latest global batch, if an audit is due."""
        if self._given.check:
            numbers = self._sampler.sampler.rows_of_all(self._newest)
            self._audit.after_step(numbers, self._loss_found())

    def log(self, *logged: Any, **options: Any) -> None:
        """Log metrics.

        Metrics that a pass logs are held back until its batch is finished.
        """
        if self._factor is None:
            super().log(*logged, **options)
        else:
            # metrics are logged once per batch: only the logs of its last pass are kept
            self._logged.append((*logged, *options.values()))

    def _loss_found(self) -> TrainerLoss:
        assert self._loss is not None  # set before the first pass
        return self._loss

    @property
    def excess(self) -> int:
        """Factor by which the loss is deliberately left too large.

        With `keeps_launcher`, evener trains as the script's own launcher does, and the launcher's
        loss may be a multiple of the mean. Otherwise, the factor is 1.
        """
        # Without `keeps_launcher`, the weights of the passes correct the loss.
        return self._loss.excess if self.keeps_launcher and self._loss is not None else 1

    def _train_part(self, model: Any, items: Any, part: Part, is_last: bool) -> torch.Tensor:
        self._is_last = is_last
        self._factor = part.weight * (self._shares.world / self._loss_found().multiplied)
        self._factor *= self.excess
        try:
            result: torch.Tensor = super().training_step(model, part.batch, items)
        finally:
            self._factor = None
        return result

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a pass's loss, weighted by the pass's fraction of the global batch."""
        # attributes that the class sets are kept only in the batch's last pass
        with nullcontext() if self._factor is None or self._is_last else kept_attributes(self):
            result = super().compute_loss(model, inputs, *args, **kwargs)
        multiplied = self._evaluates and kwargs.get("num_items_in_batch") is not None
        if self._factor is None and not multiplied:
            return result
        loss, *others = result if isinstance(result, tuple) else (result,)
        if self._factor is None:
            loss = loss * self.excess
        else:
            loss = weigh_loss(loss, self._factor, model)
            self._passes.watch_backward(loss)
        return (loss, *others) if isinstance(result, tuple) else loss

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run an evaluation step as in a single process, and don't count its time."""
        self._planned.timer.note_validation()
        self._evaluates = True
        try:
            with pretend_processes(self.accelerator, 1):
                return super().prediction_step(*args, **kwargs)
        finally:
            self._evaluates = False

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Add the input tokens of all ranks to the Trainer's count, once per optimizer step."""
        if self.args.include_num_input_tokens_seen not in ("no", False) and not self._to_come:
            # ranks may have different numbers of passes, so they can't synchronize in each
            tokens = torch.tensor(self._tokens, device=self.args.device, dtype=torch.int64)
            self.state.num_input_tokens_seen += int(self.accelerator.gather(tokens).sum())
            self._tokens = 0

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the floating-point operations of all passes in `inputs`."""
        return sum(super(_PlanMixin, self).floating_point_ops(each) for each in inputs)

    def _maybe_log_save_evaluate(self, tr_loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Log, save and evaluate as the Trainer does.

        After the last step, also average the training loss over all ranks.
        """
        result = super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        ends = self.control.should_training_stop or self.state.global_step >= self.state.max_steps
        # transformers 4 has no `_finalize_training`
        if ends and not hasattr(super(), "_finalize_training"):
            tr_loss.copy_(self.accelerator.gather(tr_loss).mean())
        return result

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Finish the training as the Trainer does, but average the latest losses over all ranks."""
        # the trainer itself would use only the first rank's losses
        self._tr_loss = self.accelerator.gather(self._tr_loss).mean()
        return super()._finalize_training(*args, **kwargs)

    # ------------------------------------------------------------------ checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            outputs = Path(private.output_folder(self, trial))
            folder = outputs / f"checkpoint-{self.state.global_step}"
            state = {
                "rows": self._sampler.sampler.length,
                "step_rows": self.get_total_train_batch_size(self.args),
            }
            (folder / CHECKPOINT).write_text(json.dumps(state) + "\n")

    def _load_optimizer_and_scheduler(self, folder: Any) -> None:
        super()._load_optimizer_and_scheduler(folder)
        load_from_shards(self, folder)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        if checkpoint is not None:
            rows, step_rows = (
                self._sampler.sampler.length,
                self.get_total_train_batch_size(self.args),
            )
            check_checkpoint(Path(checkpoint), rows, step_rows, max_steps / num_train_epochs)
        found: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial
        )
        return found


def _fetch_few(
    sampler: Any,
    dataset: Any,
    collate: Any,
    max_rows: int = ROWS_COMPUTED,
    is_diverse: bool = True,
) -> FewRows | None:
    """Return a few collated rows for a check of the loss, or None if they can't be fetched.

    Every rank gets the same rows. With `is_diverse`, they are selected from a larger number of
    rows, so that they differ in class and length.
    """
    more = (TIMES - 1) * max_rows if is_diverse else 0
    rows = sampler.sample_rows(max_rows, more)
    return fetch_rows(dataset, collate, rows, min(max_rows, ROWS_COMPUTED))
