"""A trainer's rows of unequal length, dealt by cost: each of its batches is the list of passes that a rank computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Dataset

from ..torch_split.length_sampler import LengthSampler
from ..torch_split.pass_sampler import PassSampler


class DealtSteps(PassSampler):
    """A batch sampler with one batch for each global batch, of as many items as this rank has passes."""

    sampler: LengthSampler

    def __init__(self, sampler: LengthSampler) -> None:
        super().__init__(sampler, 1)

    def _passes(self) -> Iterator[Any]:
        return ([tuple(rows.tolist()) for rows in step] for step in self.sampler.steps())

    def pass_sizes(self, step: int) -> tuple[int, ...]:
        """The rows that count of each pass."""
        return self.sampler.pass_sizes(step * self.sampler.global_batch, self.sampler.epoch)


class DealtRows(Dataset):  # type: ignore[misc]  # torch is not followed
    """A data set whose items are passes: by a tuple of row numbers, those rows collated."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self._collate = collate

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, rows: tuple[int, ...]) -> Any:
        if hasattr(self._dataset, "__getitems__"):
            return self._collate(self._dataset.__getitems__(list(rows)))
        return self._collate([self._dataset[row] for row in rows])


class PassList(list[Any]):
    """The passes of a batch, each collated already."""


def find_lengths(trainer: Any) -> list[int] | None:
    """The tokens of each training row, where the trainer finds them to group by length; None where rows have none."""
    dataset, name = trainer.train_dataset, trainer.args.length_column_name
    if name in (getattr(dataset, "column_names", None) or ()):
        return list(dataset[name])
    names = ("input_ids",) if trainer.processing_class is None else trainer.processing_class.model_input_names[:1]
    if len(dataset) == 0 or not hasattr(dataset[0], "keys") or names[0] not in dataset[0]:
        return None
    return [len(dataset[row][names[0]]) for row in range(len(dataset))]  # to iterate one without an end never ends
