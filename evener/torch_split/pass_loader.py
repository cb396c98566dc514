"""A DataLoader for trainers that accumulate gradients themselves: one batch for each pass of a rank."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from ..errors import RequestError
from .pass_sampler import PassSampler


class PassLoader(DataLoader[Any]):  # type: ignore[misc]  # torch isn't followed
    """The passes of this rank, epoch by epoch; `done` is how many of this epoch the trainer has computed.

    `options` are DataLoader's. `load_state_dict` goes on in mid-epoch, also under other shares, as long as the global
    batch and the number of passes are the same; RequestError if not.
    """

    def __init__(self, dataset: Any, passes: PassSampler, **options: Any) -> None:
        super().__init__(dataset, batch_sampler=passes, **options)
        self.done = 0
        self._start = 0  # pass of the next epoch's iteration

    def __iter__(self) -> Any:
        self.batch_sampler.first_pass = self.done = self._start
        self._start = 0
        return super().__iter__()

    @property
    def drawn_ahead(self) -> int:
        """The most global batches whose rows are drawn before the trainer asks for them."""
        passes: PassSampler = self.batch_sampler
        drawn: int = self.num_workers * (self.prefetch_factor or 2)
        return -(-drawn // passes.passes)

    def take(self, step: int) -> tuple[int, ...]:
        """The rows of each rank in the epoch's global batch number `step`, which the trainer has now."""
        passes: PassSampler = self.batch_sampler
        passes.sampler.schedule.begun = (step + 1) * passes.sampler.global_batch
        return passes.rank_sizes(step)

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration."""
        self.batch_sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position of the training after `done` passes; the same on every rank that has as many."""
        passes: PassSampler = self.batch_sampler
        steps, rest = divmod(self.done, passes.passes)
        rows = passes.sampler
        state = {**rows.state_dict(), "position": min(rows.length, steps * rows.global_batch)}
        return {**state, "global_batch": rows.global_batch, "passes": passes.passes, "pass": rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration go on where `state` was taken."""
        passes: PassSampler = self.batch_sampler
        own = {"global_batch": passes.sampler.global_batch, "passes": passes.passes}
        for key, value in own.items():
            if state.get(key) != value:
                raise RequestError(
                    f"The checkpoint was made with {key} {state.get(key)!r}, this training has {value!r}.",
                    "Go on with the same, or from a checkpoint of an epoch's end.",
                )
        passes.sampler.load_state_dict(state)
        self._start = -(-passes.sampler.position // passes.sampler.global_batch) * passes.passes + int(state["pass"])
        passes.sampler.position = 0
