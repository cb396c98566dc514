"""Track what a program computes from values that its ranks exchange.

Uneven shares change exchanged values. That matters if these affect the program's loss, weights or
learning rates, but not if they are only printed.
"""

from __future__ import annotations

from typing import Any

import torch

from .marks import READS, TensorMarks, each_tensor_in, is_in_place, leaves_of
from .totals import Rows, Totals


class Origins:
    """Tracks which tensors depend on exchanged values, and which collective exchanged them."""

    # A tensor computed from exchanged values is tracked by its identity. A tensor into which they
    # were written is tracked by its storage, and with it all views; tensors computed from the
    # storage before that aren't.

    def __init__(self) -> None:
        self._marks = TensorMarks()
        self.totals = Totals()  # exchanged values that are the same with any shares
        self.seen = False  # True once something was exchanged
        self.read = ""  # the call whose result the program read as a number
        self.reads = 0  # number of such reads

    def write(self, data: Any, place: str) -> None:
        """Record that values exchanged at `place` were written into the tensors in `data`.

        `place` names a collective and its line, such as "all_reduce (train.py:12)".
        """
        self.seen = True
        for tensor in each_tensor_in(data):
            self._marks.mark_storage(tensor, place)

    def write_totals(self, data: Any, place: str) -> None:
        """Record that sums over all ranks' rows were written into the tensors in `data`."""
        for tensor in each_tensor_in(data):
            self._marks.remove(tensor)
            self.totals.write(tensor, place)

    def write_gathered(self, data: Any, place: str) -> None:
        """Record that each rank's sum over its rows was gathered into `data`.

        `data` is a tensor or a list of tensors.
        """
        for tensor in each_tensor_in(data):
            self._marks.remove(tensor)
        self.totals.write_gathered(data, place)

    def write_objects(self, data: Any, place: str) -> None:
        """Record that the objects in `data` were exchanged at `place` (see `write`)."""
        # what the program does with Python numbers can't be tracked, so it counts as having read
        # them
        self.write(data, place)
        if any(isinstance(leaf, int | float) for leaf in leaves_of(data)):
            self._note_read(place)

    def _note_read(self, place: str) -> None:
        self.read = place
        self.reads += 1

    def find(self, data: Any) -> str:
        """Return the place of an exchange that a tensor in the nested `data` depends on.

        Return "" if no tensor depends on an exchange.
        """
        for leaf in leaves_of(data):
            place = self._marks.find(leaf) if isinstance(leaf, torch.Tensor) else ""
            if place:
                return place
        return ""

    def find_made(self, tensor: torch.Tensor) -> str:
        """Return where the program exchanged the values behind a tensor, or "".

        The result is also "" for tensors that the exchange itself wrote, such as an all-reduce's
        result.
        """
        return self._marks.find_own(tensor)

    def follow(self, function: Any, arguments: Any, keywords: Any, result: Any, rows: Rows) -> None:
        """Record that a function's results depend on exchanged values if its arguments do.

        `rows` tells which tensors are computed from the batch.
        """
        place = self.find((arguments, keywords)) if self.seen else ""
        place = place or self.totals.follow(function, arguments, keywords, result, rows)
        if not place:
            return
        self.seen = True
        if function in READS:
            self._note_read(place)
        for tensor in each_tensor_in(result):
            self._marks.mark(tensor, place)
        if is_in_place(function) and arguments:
            self.write(arguments[0], place)
            for tensor in each_tensor_in(arguments[0]):
                self._marks.mark(tensor, place)
        if "out" in keywords:
            self.write(keywords["out"], place)
