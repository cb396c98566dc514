"""The audit of a recorded loss: its calls are made again for a few rows, both ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from ...errors import RequestError
from ..rows.structure import each_tensor, tensors_in
from .compute import Bench, Piece
from .record import AS_WRITTEN, MULTIPLES, ROW_COUNTS, LossRecord
from .rows import FewRows
from .step import Audited, Ways, audit

EVERY_COUNT = (AS_WRITTEN, ROW_COUNTS, MULTIPLES)
NOT_A_NUMBER = "its loss isn't a number when it is computed again for some rows"
Compute = Callable[[Any, int], Any]  # of a batch and its rows


class Replayed(msgspec.Struct, frozen=True):
    """The audit of a recorded loss, or why it couldn't be made, as a part of a sentence.

    `cut`: its rows were cut from the batch, as the calls can't be made with rows that are padded
    otherwise. `certain`: no number in the record may count its rows, unknown to anybody; `closed`:
    all of its rows are those of the batch.
    """

    audited: Audited | None
    fault: str = ""
    cut: bool = False
    certain: bool = True
    closed: bool = True


def audit_record(
    record: LossRecord,
    rows: Sequence[FewRows],
    bench: Callable[[], Bench],
    ways: Callable[[FewRows, Compute], Ways],
    counts: Sequence[int] = EVERY_COUNT,
    moves: bool = False,
) -> Replayed:
    """Audit a loss by the first of these rows with which it can be computed.

    Of the numbers in the record some may count its rows: those of `counts` are tried in turn, until
    both ways agree. RequestError for a loss that meets other ranks.
    """
    fault = "its batch can't be cut into rows"
    closed = not record.has_other_rows()
    for few in rows:
        worst: Audited | None = None
        certain = not record.may_count_rows()
        for count in counts:
            compute = partial(_compute, record, count)
            try:
                found = audit(bench(), ways(few, compute), moves)
            except (RequestError, torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:  # of calls that don't fit these rows
                if worst is None:
                    text = f"{type(error).__name__}: {error}".partition("\n")[0]
                    fault = f"its loss can't be computed again to compare it ({text})"
                    certain = True  # a shape that is the number of rows says what that number is
                continue
            if not found.finite:
                fault = NOT_A_NUMBER
                continue
            if found.difference is None:
                return Replayed(found, "", _is_padded_otherwise(rows[0], few), certain, closed)
            worst = worst or found
        if worst is None:
            continue
        if worst.difference is not None and not all(map(math.isfinite, worst.difference.losses)):
            return Replayed(None, NOT_A_NUMBER)
        if worst.difference is not None and _leaves_out(record, few, bench()):
            return Replayed(None, "its loss is made row by row, of as many rows as its batch has")
        return Replayed(worst, "", _is_padded_otherwise(rows[0], few), certain, closed)
    return Replayed(None, fault)


def _compute(record: LossRecord, counts: int, batch: Any, rows: int) -> Any:
    return record.compute(batch, rows, counts)


def _leaves_out(record: LossRecord, few: FewRows, bench: Bench) -> bool:
    """True if the last row is without meaning for the loss: the record is of fewer rows."""

    def repeat_first(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[:-1], tensor[:1]]) if tensor.ndim else tensor

    other = each_tensor(repeat_first, few.whole)
    try:
        with bench.open():
            one = bench.sketch([Piece(partial(record.compute, few.whole, few.rows))])
            two = bench.sketch([Piece(partial(record.compute, other, few.rows))])
    except Exception:  # rows that aren't in the order of their lengths, say: they are used
        return False
    return one.loss == two.loss and one.sums == two.sums


def _is_padded_otherwise(first: FewRows, used: FewRows) -> bool:
    """True if the rows that could be computed are padded to other lengths than those to compute."""
    if first is used:
        return False
    shapes = [[each.shape[1:] for each in tensors_in(few.parts)] for few in (first, used)]
    return shapes[0] != shapes[1]
