"""The name of each layout in sentences, tables and a plan's evidence."""

from __future__ import annotations

from collections.abc import Sequence

from evener.plan.file import BEST_SPLIT

from ..number_format import write_share
from ..search.layouts import Candidate
from ..types import Layout

KNOBS = {"xla": "XLA", "mixed": "mixed precision"}


def name_candidate(one: Candidate, devices: int) -> str:
    """The layout's name in tables and in the plan's evidence."""
    return one.family.title(one.layout, devices) + "".join(f", {KNOBS.get(knob, knob)}" for knob in one.layout.knobs)


def name_all(found: Sequence[Candidate], devices: int) -> tuple[str, ...]:
    """A name for each, the fastest first, none of them twice: of two of one kind the slower one is `another`.

    No split is the best one behind a split that comes first.
    """
    names: list[str] = []
    for one in found:
        name = name_candidate(one, devices)
        if name in names or (names and found[0].layout.traits.together and name == BEST_SPLIT):
            name = f"another {name.removeprefix('best ')}"
        if name in names:
            name = f"{name}, {list_samples(one.layout)}"
        names.append(name)
    return tuple(names)


def list_shares(layout: Layout) -> list[tuple[int, int]]:
    """The rows of each device that computes, and the most of them in one pass."""
    return [(layout.shares[i], layout.pass_rows[i]) for i in layout.active]


def join_shares(shares: Sequence[tuple[int, int]]) -> str:
    """Such rows in words: 150 + 106; in passes (820 = 2 × 410) + 568."""
    words = [write_share(rows, micro) for rows, micro in shares]
    return " + ".join(f"({share})" if "=" in share and len(words) > 1 else share for share in words)


def list_samples(layout: Layout) -> str:
    """The samples of each device of a layout, in words."""
    return join_shares(list_shares(layout))
