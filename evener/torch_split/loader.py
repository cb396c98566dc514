"""A DataLoader for one rank of an uneven split: it says what each step's rows weigh and can go on in mid-epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from evener.errors import RequestError
from evener.torch_split.fetch import Fetch
from evener.torch_split.prefetch import DEPTH, Prefetcher
from evener.torch_split.sampler import UnevenBatchSampler

_TAKEN = ("batch_size", "sampler", "batch_sampler")


class Loader:
    """Batches of this rank's rows, in step with the other ranks. Use each batch before the next one is taken.

    Every pass is a new epoch in a new order, unless `set_epoch` or `load_state_dict` says which. `begin` is told the
    rows of all ranks as each step begins, `done` this rank's rows as it ends; `end` is called when a pass is over, or
    left. With a `prefetch` of 1 or more, so many batches are fetched ahead and sent to `device`; with 0, each is
    fetched when it is asked for and stays on the host.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: UnevenBatchSampler,
        begin: Callable[[Sequence[int]], None],
        done: Callable[[int], None],
        options: dict[str, Any],
        device: torch.device | None = None,
        prefetch: int | None = None,
        end: Callable[[], None] | None = None,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.device = device or torch.device("cpu")
        self.prefetch = check_prefetch(prefetch, self.device)
        on_gpu = self.device.type == "cuda"
        pinned = bool(self.prefetch or options.get("pin_memory")) and on_gpu
        self._fetch = Fetch(dataset, sampler, options, pinned)
        self._begin = begin
        self._done = done
        self._end = end
        self._steps = 0  # of this pass, begun
        self._fresh = True  # the next pass is the epoch that the sampler says
        self._chosen = False  # by set_epoch, so the next pass is that one, whatever is left of it
        self._loaded = False  # a state, and no pass since
        self._ahead: Prefetcher | None = None  # of the pass that runs

    def __len__(self) -> int:
        """Steps of a pass."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        if not self._fresh or not (len(self.sampler) or self._chosen):
            self.sampler.set_epoch(self.sampler.epoch + 1)
        self._fresh = self._chosen = self._loaded = False
        self._steps = 0
        return self._walk()

    def _walk(self) -> Iterator[Any]:
        batches = iter(self._fetch)
        ahead = Prefetcher(batches, self.device, self.prefetch) if self.prefetch else None
        self._ahead = ahead
        try:
            for step, batch in enumerate(ahead or batches):
                sizes = self.sampler.sizes(step)
                self._begin(sizes)
                self._steps = step + 1
                yield batch
                self._done(sizes[self.sampler.rank])
        finally:
            if ahead is not None:
                ahead.close()
            if self._end is not None:
                self._end()

    def wait_until_full(self) -> None:
        """Return when all that is fetched ahead is there; at once where nothing is."""
        if self._ahead is not None:
            self._ahead.wait_until_full()

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass this epoch, from its first row; of an epoch whose state was just loaded, what is left."""
        if not (self._loaded and epoch == self.sampler.epoch):
            self.sampler.set_epoch(epoch)
        self._steps = 0
        self._fresh = self._chosen = True

    def state_dict(self) -> dict[str, Any]:
        """Where the training is once the batch in hand is done; the same on every rank, fit for JSON."""
        return self.sampler.state_dict(self._steps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass go on where `state` was taken, also under another plan."""
        self.sampler.load_state_dict(state)
        self._steps = 0
        self._fresh = self._loaded = True
        self._chosen = False


def count_rows(dataset: Any) -> int:
    """The length of a data set; RequestError for one whose length is unknown, and for a loader of one."""
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader | Loader):
        raise RequestError(
            f"A {kind} has made batches already, and the plan decides which rows are in a rank's.",
            "Give its data set, and its options beside it: split.loader(loader.dataset, num_workers=...).",
        )
    if not isinstance(dataset, IterableDataset):
        try:
            return len(dataset)
        except (TypeError, NotImplementedError):
            pass
    raise RequestError(
        f"The length of a {kind} is not known, so its rows can't be shared out exactly.",
        "Give a data set with len() and numbered rows, or collect the stream into one.",
    )


def check_prefetch(prefetch: int | None, device: torch.device) -> int:
    """Batches to fetch ahead; unless said two for a GPU, none on a CPU, which computes. RequestError for no count."""
    if prefetch is None:
        return DEPTH if device.type == "cuda" else 0
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise RequestError(f"prefetch={prefetch!r} is no number of batches.", "Give 0 or more, or leave it out.")
    return prefetch


def check_options(options: dict[str, Any]) -> None:
    """RequestError for an option of DataLoader that the split decides."""
    for name in _TAKEN:
        if options.get(name) is not None:
            raise RequestError(
                f"{name}={options[name]!r} can't be given: the plan decides each rank's rows.",
                "Leave it out; another global batch is Split(plan, global_batch=N).",
            )
