"""What a Trainer does otherwise under a plan: whose rows it loads, what a pass weighs, and which figures it logs."""

from __future__ import annotations

import copy
import json
import os
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import seed_worker

from evener.dealing import make_dealer
from evener.errors import RequestError
from evener.huggingface.checks import (
    check_checkpoint,
    check_experts,
    check_loss,
    check_rebalance,
    check_setup,
    check_trainer_class,
    needs_equal_passes,
)
from evener.huggingface.dealt_rows import DealtRows, DealtSteps, PassList, find_lengths
from evener.plan import Plan
from evener.torch_split.length_sampler import LengthSampler
from evener.torch_split.loader import count_rows
from evener.torch_split.model_checks import check_normalization, has_own_work
from evener.torch_split.own_work import StepTimer
from evener.torch_split.pass_loader import PassLoader
from evener.torch_split.pass_sampler import PassSampler
from evener.torch_split.process import find_stand, is_cpu, settle, visible_gpus
from evener.torch_split.rank_shares import RankShares, find_rank_shares, open_plan
from evener.torch_split.rebalancing import Rebalancing
from evener.torch_split.row_order import RowOrder
from evener.torch_split.sampler import UnevenBatchSampler
from evener.torch_split.step_reporter import StepReporter

CHECKPOINT = "evener.json"  # beside trainer_state.json


def with_plan(
    trainer_class: type[Trainer],
    plan: Plan | str | os.PathLike[str] | None = None,
    *,
    global_batch: int | None = None,
    strict: bool = False,
    journal: bool = False,
    rebalance: bool = False,
) -> type[Any]:
    """A subclass of `trainer_class` that trains by `plan`, or by that of evener launch; use it as the class itself.

    The plan decides the rows of each process and pass, instead of `per_device_train_batch_size`; `global_batch` is
    another number of rows for each global batch. `gradient_accumulation_steps=A` makes an optimizer step of A global
    batches. PlanError or RequestError as the trainer is made, or before its first step, if training by the plan
    wouldn't be exact; with `strict` also if the plan was measured on other devices, which is a warning else. With
    `journal`, `evener runs` has the training's steps/s and restarts; with `rebalance`, shares follow own work.
    """
    check_trainer_class(trainer_class)
    chosen = open_plan(plan)
    if chosen is None:
        raise RequestError("No plan is given.", "Give one, or start the script with evener launch.")
    same = {"rebalance": rebalance}
    options = {"plan": chosen, "global_batch": global_batch, "strict": strict, "options": same}
    made = {"_plan_options": options, "_keeps_journal": journal, "_rebalances": rebalance}
    return type(f"Planned{trainer_class.__name__}", (_PlanMixin, trainer_class), made)


class _PlanMixin(Trainer):  # type: ignore[misc]  # transformers has no complete types
    """Placed before a Trainer class, whose methods do the rest."""

    _plan_options: dict[str, Any]
    _keeps_journal: bool
    _rebalances: bool
    args: Any
    state: Any
    _tr_loss: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_setup(self)
        device = self.args.device
        shares = find_rank_shares(stand=find_stand(), gpus=visible_gpus(), device=device, **self._plan_options)
        if is_cpu(shares.share):
            settle(device, shares.share)
        self._shares: RankShares = shares.with_equal_passes() if needs_equal_passes(self) else shares
        if sum(self._shares.passes) > 1:
            check_experts(self.model)
        self._accumulated: int = self.args.gradient_accumulation_steps  # global batches of an optimizer step
        passes = self._shares.passes[self._shares.rank]
        self.args = copy.copy(self.args)  # the user's own stay as they are
        self.args.gradient_accumulation_steps = self._accumulated * passes
        self.args.per_device_train_batch_size = -(-self._shares.batches[self._shares.rank] // passes)
        self._train_batch_size = self.args.per_device_train_batch_size
        self._rows: deque[tuple[int, int]] = deque()  # of each pass to come, with those of the whole optimizer step
        self._done = (0, (0, 0))  # rows of this rank in an optimizer step, and their tokens without and with padding
        self._pass_rows = 0  # of the pass that runs
        self._factor: float | None = None  # of its loss
        self._tokens = 0
        self._reporter = StepReporter(self._shares, device, self._keeps_journal)
        self._reporter.timer.has_own_work = not self.is_fsdp_enabled and has_own_work(self.model, False)
        self._rebalancing: Rebalancing | None = None
        if self._rebalances and self._shares.world > 1:
            check_rebalance(self, self._shares.share)
            self._rebalancing = Rebalancing(self._reporter)
            self._rebalancing.fix_passes(self._shares.passes)
        self.accelerator.gather = partial(_gather_uneven, self.accelerator.gather, self._reporter.timer)

    # ------------------------------------------------------------------ rows

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This rank's rows; not through `accelerator.prepare`, which would share them out again."""
        shares = self._shares
        check_normalization(self.model, "loss", shares.world, shares.pass_rows)
        dataset, collate = training_rows(self)
        rows, args = self._row_sampler(dataset), self.args
        if isinstance(rows, LengthSampler):
            check_experts(self.model)
            self._sampler: PassSampler = DealtSteps(rows)
            dataset, collate = DealtRows(dataset, collate), PassList
        else:
            self._sampler = PassSampler(rows, shares.passes[shares.rank])
        self._batches = PassLoader(
            dataset,
            self._sampler,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            worker_init_fn=partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
        )
        if self._rebalancing is not None:
            self._rebalancing.add(rows, self._batches.drawn_ahead)
        return self._batches

    def _row_sampler(self, dataset: Any) -> UnevenBatchSampler:
        """The trainer's own order of rows, drawn alike on every rank."""
        rows, seed = count_rows(dataset), self.args.seed if self.args.data_seed is None else self.args.data_seed
        order: Any = self._get_train_sampler(dataset)
        if isinstance(order, LengthGroupedSampler):
            order.batch_size = self._shares.global_batch
        plain = order is None or isinstance(order, RandomSampler | SequentialSampler)
        shares = self._shares
        options: dict[str, Any] = {
            "shuffle": isinstance(order, RandomSampler),
            "seed": seed,
            "drop_last": self.args.dataloader_drop_last,
            "order": None if plain else RowOrder(order, rows, seed),
        }
        lengths = find_lengths(self) if shares.share.cost is not None and not needs_equal_passes(self) else None
        if lengths is None:
            return UnevenBatchSampler(rows, shares.batches, shares.rank, **options)
        dealer = make_dealer(shares.batches, shares.micros, shares.shares)
        return LengthSampler(rows, shares.batches, shares.rank, lengths=lengths, dealer=dealer, **options)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Rows of an optimizer step, over all ranks."""
        return self._shares.global_batch * self._accumulated

    # ------------------------------------------------------------------ an optimizer step

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The passes of an optimizer step; rows that only keep step have no labels, so nothing counts them."""
        self._reporter.finish()
        batches = list(islice(epoch_iterator, num_batches))
        sampler, first = self._sampler, self._next_global_batch()
        steps = range(first, first + len(batches) // sampler.passes)
        total = sum(sampler.global_rows(step) for step in steps)
        self._rows = deque((rows, total) for step in steps for rows in sampler.pass_sizes(step))
        self._done = sum(rows for rows, _ in self._rows), sampler.count_tokens(steps)
        passes = [each for batch in batches for each in _list_passes(batch)]
        passes = [each if rows else _ignore_labels(each) for each, (rows, _) in zip(passes, self._rows, strict=True)]
        items = self._get_num_items_in_batch(passes, device)
        check_loss(self, passes, items)
        sizes = {self._batches.take(step) for step in steps}
        self._reporter.timer.begin(sizes.pop() if len(sizes) == 1 else ())
        if not isinstance(sampler, DealtSteps):
            return passes, items
        left = iter(passes)
        return [PassList(islice(left, len(batch))) for batch in batches], items

    def _next_global_batch(self) -> int:
        """Its place in the epoch; steps are counted as the trainer does, also after a checkpoint."""
        updates = -(-len(self._sampler.sampler) // self._accumulated)
        done: int = self.state.global_step
        return done % updates * self._accumulated

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One pass, or all that a batch was dealt in; the last one exchanges the gradients."""
        *others, last = _list_passes(inputs)
        losses = []
        for each in others:
            with self.accelerator.no_sync(model):
                losses.append(self._train_pass(model, each, num_items_in_batch))
        return sum(losses, self._train_pass(model, last, num_items_in_batch))

    def _train_pass(self, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """Its mean loss is weighted by its rows; a loss over all ranks' tokens has its weight already."""
        rows, total = self._rows.popleft()
        self._pass_rows = rows
        if self._counts_tokens(num_items_in_batch):
            self._factor = float(rows > 0)
        else:
            self._factor = rows * self._shares.world * self.current_gradient_accumulation_steps / total
        try:
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._factor = None
        if not self._rows:
            self._report()
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The class's own, times the weight of the pass; as it is in evaluation."""
        result = super().compute_loss(model, inputs, *args, **kwargs)
        if self._factor is None:
            return result
        loss, *others = result if isinstance(result, tuple) else (result,)
        loss = loss if self._factor == 1.0 else loss * self._factor
        self._reporter.timer.end_pass(loss)
        return (loss, *others) if isinstance(result, tuple) else loss

    def _counts_tokens(self, items: Any) -> bool:
        """Whether the loss is a sum over this rank divided by what all ranks have."""
        own = self.loss_is_scaled_for_ga
        takes = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return items is not None and (bool(takes) if own is None else own)

    def _report(self) -> None:
        self._reporter.report(*self._done)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Tokens of all passes, summed over the ranks once an optimizer step, as ranks differ in their passes."""
        if self.args.include_num_input_tokens_seen == "no":
            return
        self._tokens += sum(_count_tokens(self, each) for each in _list_passes(inputs)) if self._pass_rows else 0
        if not self._rows:
            tokens = torch.tensor(self._tokens, device=self.args.device, dtype=torch.int64)
            self.state.num_input_tokens_seen += int(self.accelerator.gather(tokens).sum())
            self._tokens = 0

    def floating_point_ops(self, inputs: Any) -> int:
        """Of all passes."""
        return sum(super(_PlanMixin, self).floating_point_ops(each) for each in _list_passes(inputs))

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """What wasn't logged yet is the mean over ranks too: the trainer takes the first rank's own."""
        self._tr_loss = self.accelerator.gather(self._tr_loss).mean()
        return super()._finalize_training(*args, **kwargs)

    # ------------------------------------------------------------------ checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            state = {"rows": self._sampler.sampler.length, "step_rows": self.get_total_train_batch_size(self.args)}
            (folder / CHECKPOINT).write_text(json.dumps(state) + "\n")

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        if checkpoint is not None:
            check_checkpoint(
                Path(checkpoint) / CHECKPOINT, self._sampler.sampler.length, self.get_total_train_batch_size(self.args)
            )
        found: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial
        )
        return found


def training_rows(trainer: Any) -> tuple[Any, Any]:
    """The training data without columns that the model doesn't take, and their collator."""
    dataset = trainer.train_dataset
    if dataset is None:
        raise RequestError("The trainer has no train_dataset.", "Give one.")
    if hasattr(dataset, "column_names"):  # of the library datasets
        return trainer._remove_unused_columns(dataset, description="training"), trainer.data_collator
    return dataset, trainer._get_collator_with_removed_columns(trainer.data_collator, description="training")


def _list_passes(inputs: Any) -> list[Any]:
    """Of a batch: those that it was dealt in, or itself."""
    return inputs if isinstance(inputs, PassList) else [inputs]


def _ignore_labels(batch: Any) -> Any:
    """The batch with no label that counts."""
    names = [name for name in ("labels", "shift_labels") if name in batch]
    return {**batch, **{name: torch.full_like(batch[name], -100) for name in names}} if names else batch


def _count_tokens(trainer: Any, inputs: Any) -> int:
    """Tokens of a pass: all of them, or those that the attention mask has where padding isn't counted."""
    name = getattr(trainer.model, "main_input_name", "input_ids")
    if name not in inputs:
        return 0
    if trainer.args.include_num_input_tokens_seen == "non_padding" and "attention_mask" in inputs:
        return int(inputs["attention_mask"].sum())
    return int(inputs[name].numel())


def _gather_uneven(gather: Any, timer: StepTimer, tensor: Any) -> Any:
    """All ranks' tensors as accelerate gathers them, also where ranks have different numbers of rows."""
    with timer.meeting():
        return _gather(gather, tensor)


def _gather(gather: Any, tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
        return gather(tensor)
    counts = gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
    if len(set(counts)) == 1:
        return gather(tensor)
    most = max(counts)
    every = gather(pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, most - len(tensor))))
    return torch.cat([every[i * most : i * most + count] for i, count in enumerate(counts)])
