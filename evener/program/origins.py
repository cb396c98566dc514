"""Track values that ranks exchange, to see whether they reach the loss or the model's weights."""

from __future__ import annotations

from typing import Any

import torch

from .marks import READS, TensorMarks, each_tensor_in, is_in_place, leaves_of
from .totals import Rows, Totals


class Origins:
    """Marks results of the script's collectives, and all tensors that are computed from them.

    Marks are strings that name the collective and its line, such as "all_reduce (train.py:12)".
    """

    # A tensor computed from exchanged values is tracked by its identity. A tensor into which they
    # were written is tracked by its storage, and with it all views; tensors computed from the
    # storage before that aren't.

    def __init__(self) -> None:
        self._marks = TensorMarks()
        self.totals = Totals()  # exchanged values that are the same with any shares
        self.seen = False  # True once something was exchanged
        self.read = ""  # the call whose result the program read as a number
        self.reads = 0  # number of such reads

    def write(self, data: Any, collective: str) -> None:
        """Mark the tensors in `data` as filled by a collective.

        `collective` names it and its line, such as "all_reduce (train.py:12)".
        """
        self.seen = True
        for tensor in each_tensor_in(data):
            self._marks.mark_storage(tensor, collective)

    def write_totals(self, data: Any, collective: str) -> None:
        """Mark the tensors in `data` as totals over all ranks' rows, computed by `collective`."""
        for tensor in each_tensor_in(data):
            self._marks.remove(tensor)
            self.totals.write(tensor, collective)

    def write_gathered(self, data: Any, collective: str) -> None:
        """Record that `collective` has gathered `data` from all ranks.

        Each value in `data` is a rank's sum over its own rows. The script may add the values up
        later.
        """
        for tensor in each_tensor_in(data):
            self._marks.remove(tensor)
        self.totals.write_gathered(data, collective)

    def write_objects(self, data: Any, collective: str) -> None:
        """Mark tensors in Python objects that `collective` has gathered from all ranks.

        Plain numbers in the objects can't be tracked, so the script is assumed to use them.
        """
        self.write(data, collective)
        if any(isinstance(leaf, int | float) for leaf in leaves_of(data)):
            self._note_read(collective)

    def _note_read(self, collective: str) -> None:
        self.read = collective
        self.reads += 1

    def find(self, data: Any) -> str:
        """Return the collective that a value in `data` comes from, or "" if there is none."""
        for leaf in leaves_of(data):
            collective = self._marks.find(leaf) if isinstance(leaf, torch.Tensor) else ""
            if collective:
                return collective
        return ""

    def find_source_collective(self, tensor: torch.Tensor) -> str:
        """Return the collective from whose result the tensor was computed, or "" if none is known.

        The result is also "" for a tensor that a collective itself has filled.
        """
        return self._marks.find_own_mark(tensor)

    def follow(self, function: Any, arguments: Any, keywords: Any, result: Any, rows: Rows) -> None:
        """Mark the result of a PyTorch call if one of its arguments comes from another rank.

        `rows` knows which tensors were computed from this rank's rows.
        """
        collective = self.find((arguments, keywords)) if self.seen else ""
        collective = collective or self.totals.follow(function, arguments, keywords, result, rows)
        if not collective:
            return
        self.seen = True
        if function in READS:
            self._note_read(collective)
        for tensor in each_tensor_in(result):
            self._marks.mark(tensor, collective)
        if is_in_place(function) and arguments:
            self.write(arguments[0], collective)
            for tensor in each_tensor_in(arguments[0]):
                self._marks.mark(tensor, collective)
        if "out" in keywords:
            self.write(keywords["out"], collective)
