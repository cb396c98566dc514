"""Layouts as findings, whose sentences are their names in sentences, tables and a plan's evidence."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.plan.file import BEST_SPLIT

from ..number_format import join_shares
from ..search.layouts import Candidate
from ..types import Finding, Layout
from .words import say


def describe(one: Candidate, devices: int) -> Finding:
    """The layout of one of `devices` devices or several, as a finding."""
    layout = one.layout
    values = {
        "count": len(layout.active),
        "trainings": layout.processes,
        "mode": layout.placement,
        "placement": layout.placement,
        "knobs": list(layout.knobs),
        "another": False,
        "shares": None,
    }
    return Finding(one.family.code(layout, devices), values)


def describe_all(found: Sequence[Candidate], devices: int) -> tuple[Finding, ...]:
    """A finding for each, the fastest first, no name twice: of two of one kind the slower one is `another`.

    No split is the best one behind a split that comes first.
    """
    described: list[Finding] = []
    names: set[str] = set()
    for one in found:
        finding = describe(one, devices)
        second = bool(names) and found[0].layout.traits.together and say(finding) == BEST_SPLIT
        if second or say(finding) in names:
            finding = _with(finding, another=True)
        if say(finding) in names:
            finding = _with(finding, shares=list_shares(one.layout))
        names.add(say(finding))
        described.append(finding)
    return tuple(described)


def _with(finding: Finding, **values: object) -> Finding:
    return msgspec.structs.replace(finding, values=finding.values | values)


def list_shares(layout: Layout) -> list[tuple[int, int]]:
    """The rows of each device that computes, and the most of them in one pass."""
    return [(layout.shares[i], layout.pass_rows[i]) for i in layout.active]


def list_samples(layout: Layout) -> str:
    """The samples of each device of a layout, in words."""
    return join_shares(list_shares(layout))
