"""What each layout is called in sentences, tables and a plan's evidence."""

from __future__ import annotations

from collections.abc import Sequence

from evener.balancer.result.number_format import write_share
from evener.balancer.search.layouts import Candidate
from evener.balancer.types import Layout
from evener.plan.file import BEST_SPLIT

PACK_MODES = {"": "", "logical": " with equal parts of the memory", "mps": " under MPS"}
KNOBS = {"xla": "XLA", "mixed": "mixed precision"}


def name_candidate(one: Candidate, devices: int) -> str:
    """The layout's name in tables and in the plan's evidence."""
    layout = one.layout
    name = {
        "solo": "best single device",
        "even": "even split" if len(layout.active) == devices else f"even over {len(layout.active)}",
        "split": BEST_SPLIT,
        "pack": f"pack of {layout.processes}{PACK_MODES.get(layout.placement, '')}",
        "place": f"place {layout.placement}",
    }[one.family]
    return name + "".join(f", {KNOBS.get(knob, knob)}" for knob in layout.knobs)


def name_all(found: Sequence[Candidate], devices: int) -> tuple[str, ...]:
    """A name for each, the fastest first, none of them twice: of two of one kind the slower one is `another`.

    No split is the best one behind a split that comes first.
    """
    names: list[str] = []
    for one in found:
        name = name_candidate(one, devices)
        if name in names or (names and found[0].layout.kind == "split" and name == BEST_SPLIT):
            name = f"another {name.removeprefix('best ')}"
        if name in names:
            name = f"{name}, {list_samples(one.layout)}"
        names.append(name)
    return tuple(names)


def list_samples(layout: Layout) -> str:
    """The samples of each device: 150 + 106; in passes (820 = 2 × 410) + 568."""
    shares = [write_share(layout.shares[i], layout.pass_rows[i]) for i in layout.active]
    return " + ".join(f"({share})" if "=" in share and len(shares) > 1 else share for share in shares)
