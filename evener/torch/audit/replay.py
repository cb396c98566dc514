"""Audit a recorded loss by repeating its calls on a few rows, as one batch and in unequal parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from ...errors import RequestError
from ..rows.structure import each_tensor, tensors_in
from .computations import Computations
from .compute import GradientSketcher, Piece
from .objects import find_objects
from .record import AS_WRITTEN, MULTIPLES, ROW_COUNTS, LossRecord
from .rows import FewRows
from .step import Audited, audit

EVERY_COUNT = (AS_WRITTEN, ROW_COUNTS, MULTIPLES)
ROW_BY_ROW = "its loss is made row by row, of as many rows as its batch has"
NOT_A_NUMBER = "its loss isn't a number when it is computed again for some rows"
Compute = Callable[[Any, int], Any]  # computes the loss of a batch and its number of rows


class Replayed(msgspec.Struct, frozen=True):
    """Result of an audit of a recorded loss, or the reason why no audit was possible."""

    audited: Audited | None  # the audit; None if it isn't possible
    fault: str = ""  # why it isn't possible, as a part of a message
    # True if the loss could only be computed for rows that are padded to other lengths than the
    # preferred rows
    cut: bool = False
    # False if a number in the record may be an unrecognized count of its rows
    certain: bool = True
    closed: bool = True  # True if the record uses no rows but those of its batch


def audit_record(
    record: LossRecord,
    rows: Sequence[FewRows],
    sketcher: Callable[[], GradientSketcher],
    computations: Callable[[FewRows, Compute], Computations],
    counts: Sequence[int] = EVERY_COUNT,
    add_noise: bool = False,
) -> Replayed:
    """Audit a recorded loss on the first choice of rows for which its calls can be repeated.

    Arguments:

    - `rows`: choices of rows, the preferred one first.
    - `sketcher`: returns a new GradientSketcher.
    - `computations`: returns what to compute for a choice of rows.
    - `counts`: which constants to treat as row counts (AS_WRITTEN, ROW_COUNTS or MULTIPLES). They
      are tried in this order until an audit finds no difference.
    - `add_noise`: whether to add noise to weights whose values are all the same.

    Raises RequestError if the loss communicates with other ranks.
    """
    fault = "its batch can't be cut into rows"
    has_only_these_rows = not record.has_other_rows()
    for selection in rows:
        interpretations = _Interpretations(record, selection)
        for count in counts:
            interpretations.audit(sketcher, computations, count, add_noise)
            if interpretations.found is not None and interpretations.found.difference is None:
                break
        found, is_certain = interpretations.found, interpretations.certain
        if found is None:
            fault = interpretations.fault or fault
            continue
        if found.difference is not None:
            if not all(map(math.isfinite, found.difference.losses)):
                return Replayed(None, NOT_A_NUMBER)
            if not find_objects(selection.whole) and _ignores_last_row(
                record, selection, sketcher()
            ):
                return Replayed(None, ROW_BY_ROW)
        return Replayed(
            found, "", _is_padded_otherwise(rows[0], selection), is_certain, has_only_these_rows
        )
    return Replayed(None, fault)


class _Interpretations:
    """Audits the same rows under different assumptions about which constants are row counts."""

    def __init__(self, record: LossRecord, few: FewRows) -> None:
        self._record = record
        self._few = few
        # the first audit that succeeded, or a later one that found no difference
        self.found: Audited | None = None
        self.fault = ""  # why `found` is None
        # False if a number in the record may be an unrecognized count of its rows
        self.certain = not record.may_count_rows()

    def audit(
        self,
        sketcher: Callable[[], GradientSketcher],
        computations: Callable[[FewRows, Compute], Computations],
        count: int,
        add_noise: bool,
    ) -> None:
        """Audit the rows under one assumption about which constants in the loss are row counts.

        The result of an earlier audit is replaced only if this one finds no difference. Arguments:

        - `sketcher`: returns a new GradientSketcher.
        - `computations`: returns what to compute for a choice of rows.
        - `count`: the constants that are scaled with the number of rows: none (AS_WRITTEN), the row
          count itself (ROW_COUNTS), or also its multiples (MULTIPLES).
        - `add_noise`: whether to add noise to weights whose values are all the same.
        """
        try:
            found = audit(
                sketcher(),
                computations(self._few, partial(_compute, self._record, count)),
                add_noise,
            )
        except (RequestError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # the calls don't support these rows
            if self.found is None:
                text = f"{type(error).__name__}: {error}".partition("\n")[0]
                self.fault = f"its loss can't be computed again to compare it ({text})"
                self.certain = True  # a shape that equals the number of rows identifies it
            return
        if not found.finite:
            self.fault = NOT_A_NUMBER
        elif self.found is None or found.difference is None:
            self.found = found


def _compute(record: LossRecord, counts: int, batch: Any, rows: int) -> Any:
    return record.compute(batch, rows, counts)


def _ignores_last_row(record: LossRecord, few: FewRows, sketcher: GradientSketcher) -> bool:
    """Return whether the loss stays the same if the last row is replaced with a copy of the first.

    If so, the recorded calls don't compute the loss of all rows.
    """
    # if it does, the recorded calls don't cover all rows

    def repeat_first(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[:-1], tensor[:1]]) if tensor.ndim else tensor

    with_first_row_repeated = each_tensor(repeat_first, few.whole)
    try:
        with sketcher.open():
            as_it_is = sketcher.sketch([Piece(partial(record.compute, few.whole, few.rows))])
            repeated = sketcher.sketch(
                [Piece(partial(record.compute, with_first_row_repeated, few.rows))]
            )
    except Exception:  # for example, rows have to be sorted by length; then the last row counts
        return False
    return as_it_is.loss == repeated.loss and as_it_is.sums == repeated.sums


def _is_padded_otherwise(first: FewRows, used: FewRows) -> bool:
    """Return whether the rows `used` are padded differently than the preferred rows `first`."""
    # shapes are compared without the first axis, which counts rows
    if first is used:
        return False
    shapes = [[tensor.shape[1:] for tensor in tensors_in(few.parts)] for few in (first, used)]
    return shapes[0] != shapes[1]
