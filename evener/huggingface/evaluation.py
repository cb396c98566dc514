"""A Trainer's evaluation over several ranks: the batches that one process would compute, each computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from .gathering import Gathering


def share_evaluation(trainer: Any, make: Callable[[], Any], gathering: Gathering) -> Any:
    """The loader that `make` gives, with every world-th of its batches; as it is where its rows have no fixed order."""
    prepare = trainer.accelerator.prepare
    trainer.accelerator.prepare = lambda loader: loader
    try:
        loader = make()
    finally:
        trainer.accelerator.prepare = prepare
    fixed = not isinstance(loader.dataset, IterableDataset) and isinstance(loader.sampler, SequentialSampler)
    return SharedLoader(loader, trainer.accelerator, gathering) if fixed else prepare(loader)


class SharedLoader(DataLoader[Any]):  # type: ignore[misc]  # torch is not followed
    """Batches number rank, rank + world and so on of a loader; at the end, the last one again to keep step."""

    def __init__(self, loader: Any, accelerator: Any, gathering: Gathering) -> None:
        world, rank = accelerator.num_processes, accelerator.process_index
        self._every = list(loader.batch_sampler)
        self._places = range(rank, -(-len(self._every) // world) * world, world)
        self._gathering, self._full = gathering, loader.batch_size
        last = len(self._every) - 1
        super().__init__(
            loader.dataset,
            batch_sampler=[self._every[min(place, last)] for place in self._places],
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            prefetch_factor=loader.prefetch_factor,
        )

    def __iter__(self) -> Iterator[Any]:
        for place, batch in zip(self._places, super().__iter__(), strict=True):
            rows = len(self._every[place]) if place < len(self._every) else 0
            with self._gathering.counting(rows, self._full):
                yield batch
