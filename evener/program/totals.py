"""Find tensors that are totals over all ranks' rows, which are the same whatever the shares are.

An example is the sum of all ranks' token counts, from an all-reduce.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..torch.audit.nested_values import is_arithmetic, leaves_in
from .marks import READS, TensorMarks, each_tensor_in, is_in_place

_SUMS = {torch.sum, torch.Tensor.sum}
_JOINS = {torch.cat, torch.stack}
_VIEWS = {torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.flatten, torch.Tensor.detach}


class Rows(Protocol):
    """Interface of an object that knows which tensors were computed from this rank's rows."""

    rows: int
    has_asked_length: bool

    def depends_on_rows(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor was computed from this rank's rows or from their count."""
        ...


class Totals:
    """Marks tensors that hold totals over all ranks' rows, and tensors computed from them.

    It also follows gathered values, one per rank, that the script hasn't added up yet.
    """

    def __init__(self) -> None:
        self._whole = TensorMarks()
        self._gathered = TensorMarks()  # with one element for each rank
        self._parts = TensorMarks()  # the sum over one rank's rows

    def write(self, tensor: torch.Tensor, collective: str) -> None:
        """Mark the tensor as a total over all ranks, which `collective` has computed."""
        self._mark_only(self._whole, tensor, collective)

    def write_gathered(self, data: Any, collective: str) -> None:
        """Record that `collective` has gathered `data` from all ranks.

        Each value in `data` is one rank's sum over its own rows. `data` is a tensor with an element
        per rank, or a list of tensors.
        """
        kind = self._gathered if isinstance(data, torch.Tensor) else self._parts
        for tensor in each_tensor_in(data):
            self._mark_only(kind, tensor, collective)

    def _mark_only(self, kind: TensorMarks, tensor: torch.Tensor, collective: str) -> None:
        for each in (self._whole, self._gathered, self._parts):
            each.remove(tensor)
        kind.mark_storage(tensor, collective)

    def find(self, tensor: torch.Tensor) -> str:
        """Return the collective that computed this total, such as "all_reduce (train.py:12)".

        The result is "" if the tensor isn't a total.
        """
        return self._whole.find(tensor)

    def follow(self, function: Any, arguments: Any, keywords: Any, result: Any, rows: Rows) -> str:
        """Check whether shares may change the result of a function call that uses totals.

        If they may, return the collective that computed the total. If not, mark the result as a
        total too, and return "".
        """
        leaves = leaves_in((arguments, keywords))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        parts = _find_collectives(self._parts, tensors)
        if parts:
            return self._follow_parts(function, tensors, result, parts)
        gathered = _find_collectives(self._gathered, tensors)
        if gathered:
            return self._follow_gathered(function, leaves, result, gathered[0])
        whole = _find_collectives(self._whole, tensors)
        if not whole:
            return ""
        counts = is_arithmetic(function) and not all(_is_fixed(leaf, rows) for leaf in leaves)
        if function in READS or counts:
            return whole[0]
        return self._follow_whole(function, tensors, result, rows, whole[0])

    def _follow_whole(
        self, function: Any, tensors: list[torch.Tensor], result: Any, rows: Rows, collective: str
    ) -> str:
        """Check whether shares may change the result of a call whose arguments include totals.

        If they may, return `collective`, which computed the totals. Otherwise, return "", and mark
        the result as a total too, unless the call also uses this rank's rows or changes another
        tensor in place.
        """
        # A result that also uses this rank's own rows isn't marked. Own rows with gradients are a
        # part of the loss, which is computed again in parts.
        others = [tensor for tensor in tensors if not self._whole.find(tensor)]
        own = [each for each in others if rows.depends_on_rows(each)]
        if own:
            return "" if all(each.requires_grad for each in own) else collective
        changes_other = is_in_place(function) and any(tensors[0] is each for each in others)
        if not changes_other:
            for each in each_tensor_in(result):
                self._whole.mark(each, collective)
        return ""

    def _follow_parts(
        self, function: Any, tensors: list[torch.Tensor], result: Any, parts: list[str]
    ) -> str:
        """Check a call that uses values which were gathered as a list, one tensor per rank.

        If the call only joins the tensors of all ranks, mark the result as gathered values, and
        return "". Otherwise, return the first of `parts`, the collectives that gathered the values.
        """
        are_all = len(set(map(id, tensors))) == len(parts) == dist.get_world_size()
        if function not in _JOINS or not are_all:
            return parts[0]
        self._gathered.mark(result, parts[0])
        return ""

    def _follow_gathered(
        self, function: Any, leaves: list[Any], result: Any, collective: str
    ) -> str:
        """Check whether shares may change the result of a call that uses gathered values.

        The values are in one tensor, one per rank, and their sum is a total. Returns "" if shares
        can't change the result, and otherwise `collective`, which gathered the values.
        """
        if function in _SUMS and len(leaves) == 1:
            self._whole.mark(result, collective)
            return ""
        if function in _VIEWS:
            self._gathered.mark(result, collective)
            return ""
        return collective


def _find_collectives(marks: TensorMarks, tensors: list[torch.Tensor]) -> list[str]:
    """Return the collectives that marked tensors come from; unmarked tensors are left out."""
    return [collective for collective in map(marks.find, tensors) if collective]


def _is_fixed(value: Any, rows: Rows) -> bool:
    """Return whether a number stays the same whatever the shares are, unlike a row count."""
    # The number of ranks can't be one either, unless it equals the rows and the program has asked
    # for their number.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    if abs(value) in (0, 1):
        return True
    is_ambiguous = rows.has_asked_length and value == rows.rows
    return value == dist.get_world_size() and not is_ambiguous
