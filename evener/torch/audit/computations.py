"""Computations that an audit compares, with variants that help to find why gradients differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from .compute import Piece

Computation = Sequence[Piece]


class AuditChange(msgspec.Struct, frozen=True, eq=False):
    """Variant of an audit's computations that avoids one possible cause of a difference.

    If the gradients agree in this variant, that was the cause.
    """

    trained: Computation  # the training run's computation without the cause
    reference: Computation | None = None  # the reference without it; None if that is the same


class WholeShares(msgspec.Struct, frozen=True, eq=False):
    """Two computations whose losses are compared while each row draws its own random numbers.

    Each device's share is computed in a single pass. The rows are padded as in the whole batch, so
    that a row draws the same random numbers in both computations.
    """

    reference: Computation  # the correct computation
    reference_sizes: tuple[int, ...]  # number of rows in each of its passes
    trained: Computation  # the training run's computation
    sizes: tuple[int, ...]  # number of rows in each of its passes


class Computations(msgspec.Struct, frozen=True, eq=False):
    """What an audit computes: the correct gradient, the training run's, and variants of both.

    The variants help to find the cause if the gradients differ.
    """

    reference: Computation  # the correct computation
    trained: Computation  # the training run's computation
    # an AuditChange to test each possible cause of a difference, by the cause's name
    changes: Mapping[str, AuditChange] = {}
    sizes: tuple[int, ...] = ()  # number of rows in each part
    digest: int = 0  # of all numbers in the rows
    pads: bool = False  # parts that are collated separately are padded to other lengths
    # to look for a loss by a random count of rows; None leaves that out
    shares: WholeShares | None = None
