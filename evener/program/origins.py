"""Follow values that ranks exchange, to see whether they reach the loss or the model's weights."""

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

    def write(self, data: Any, place: str) -> None:
        """Mark the tensors in `data` as filled by a collective; `place` names it and its line."""
        self.seen = True
        for tensor in each_tensor_in(data):
            self._marks.mark_storage(tensor, place)

    def write_totals(self, data: Any, place: str) -> None:
        """Mark the tensors in `data` as totals over all ranks' rows.

        `place` names the collective and its line.
        """
        for tensor in each_tensor_in(data):
            self._marks.remove(tensor)
            self.totals.write(tensor, place)

    def write_gathered(self, data: Any, place: str) -> None:
        """Mark `data` as gathered values, one per rank, which the script may add up later.

        Each value is a rank's sum over its own rows. `place` names the collective and its line.
        """
        for tensor in each_tensor_in(data):
            self._marks.remove(tensor)
        self.totals.write_gathered(data, place)

    def write_objects(self, data: Any, place: str) -> None:
        """Mark tensors in Python objects that were gathered from all ranks.

        Plain numbers in them can't be tracked, so the script is assumed to use them.
        """
        # what the program does with Python numbers can't be tracked, so it counts as having read
        # them
        self.write(data, place)
        if any(isinstance(leaf, int | float) for leaf in leaves_of(data)):
            self._note_read(place)

    def _note_read(self, place: str) -> None:
        self.read = place
        self.reads += 1

    def find(self, data: Any) -> str:
        """Return the collective, with its line, from which a value in `data` comes, or ""."""
        for leaf in leaves_of(data):
            place = self._marks.find(leaf) if isinstance(leaf, torch.Tensor) else ""
            if place:
                return place
        return ""

    def find_made(self, tensor: torch.Tensor) -> str:
        """Return the collective that this tensor was computed from, or "" if none is known.

        The result is also "" for tensors that the collective itself filled.
        """
        return self._marks.find_own(tensor)

    def follow(self, function: Any, arguments: Any, keywords: Any, result: Any, rows: Rows) -> None:
        """After a PyTorch call, mark its result if one of its arguments came from another rank."""
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
