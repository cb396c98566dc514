"""The check of a loss in a loop of the user's own: `Split.check`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch

from ..errors import RequestError
from ..training.loss_check import LossMeaning
from .batch_tracker import tensors_in
from .batch_weights import BatchWeights, WholeBatchLoss
from .check_loss import CheckBatch, LossCheck, find_together, make_check_batch
from .loss_measure import LossMeasure
from .nested_batch import cut_rows, each_tensor
from .parts import Part


def check_part_loss(
    loss: Callable[[Part], Any],
    loader: Any,
    count: Callable[[Part], Any] | None,
    models: Iterable[Any],
    device: torch.device,
) -> LossMeaning | None:
    """The meaning of a part's loss: a mean over rows, or over what `count` counts; None if it couldn't be checked.

    None also for a loss that is the whole batch's by split.loss or split.gather. RequestError on every rank if it is no
    such mean on any; every rank calls it. `loader` has a data set, a sampler of shares and a collate function.
    """
    wrapped = list(models)
    if not wrapped:
        raise RequestError("split.check knows of no wrapped model.", "Write model = split.wrap(model) before.")

    wanted = "rows" if count is None else "what count= counts"

    def to_part(batch: Any) -> Part:
        rows = next((len(each) for each in tensors_in(batch) if each.ndim), 1)
        return Part(each_tensor(lambda tensor: tensor.to(device), batch), rows, 1.0, lambda scaled: scaled)

    def counted(batch: Any) -> Mapping[str, float]:
        return {} if count is None else {wanted: float(count(to_part(batch)))}

    def find() -> LossMeaning | None:
        batch = make_check_batch(loader.dataset, loader.batch_sampler, loader.collate_fn)
        if batch is None:
            return None
        check = LossCheck(LossMeasure(torch.nn.ModuleList(wrapped)), batch, counted)
        meaning = check.find_meaning(lambda each: loss(to_part(each)))
        if wanted not in meaning.mean_over:
            raise RequestError(f"The loss is a mean over rows, not over {wanted}.", "Leave count= out.")
        return meaning

    with suppress(WholeBatchLoss), ExitStack() as stack:
        for model in wrapped:
            if hasattr(model, "no_sync"):
                stack.enter_context(model.no_sync())
        return find_together(find)
    return None


def check_rows(loss: Callable[[Part], Any], weights: BatchWeights, device: torch.device, part: Part, most: int) -> None:
    """RequestError on this rank unless the loss of up to `most` rows of `part` is that of parts of them together."""
    rows = min(most, part.rows)
    first = max(1, rows * 3 // 8)
    whole = each_tensor(lambda tensor: tensor.to(device), cut_rows(part.batch, 0, rows, part.rows))
    parts = cut_rows(whole, 0, first, rows), cut_rows(whole, first, rows, rows)
    wanted = "rows" if part.count is None else "what count= counts"

    def to_part(batch: Any) -> Part:
        own = next((len(each) for each in tensors_in(batch) if each.ndim), 1)
        return Part(batch, own, 1.0, lambda scaled: scaled)

    def counted(batch: Any) -> Mapping[str, float]:
        return {} if part.count is None else {wanted: float(part.count(to_part(batch)))}

    batch = CheckBatch(whole, parts, (first, rows - first))
    with weights.checking():
        check = LossCheck(LossMeasure(torch.nn.ModuleList(weights.models)), batch, counted)
        check.find_meaning(lambda each: loss(to_part(each)), {wanted})
