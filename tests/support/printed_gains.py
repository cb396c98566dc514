"""What a plan prints of gains, worked out again from the rates beside them: every fault as a
sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from evener.balancer.number_format import rate, relative_error
from evener.plan.file import BEST_SINGLE, EVEN_SPLIT, SOLO_PREFIX, Evidence, Plan, PlanLayout
from evener.tui.text.summaries import summary_lines

FIGURE = r"[0-9][0-9. ]*"
RIVAL = re.compile(
    rf"(?P<name>.*): (?P<rate>{FIGURE}) samples/s (?:on \S+ )?at (?P<where>[0-9+]+);"
    rf" (?P<paired>measured in turn, )?the plan (?P<verb>gains|loses) (?P<gain>[0-9.]+) %"
)
CLAUSE = re.compile(
    r"(?P<gain>[0-9.]+) % (?P<verb>faster|slower) than (?P<name>the even split|\S+ alone)"
    r"(?: at (?P<batch>\d+) samples)?(?P<paired>, measured in turn)?"
)
KNOBS = re.compile(", with (XLA|mixed precision)")
UNKNOWN = 0.25  # relative error, beyond which samples/s aren't known
COARSE = 0.02  # beyond which a gain has whole percents


def find_faults(plan: Plan, verdict: str, labels: Sequence[str]) -> Iterator[str]:
    """Gains that don't follow from two rates, that compare a layout with itself, or that hide
    another batch.
    """
    yield from _evidence_faults(plan, bool(KNOBS.search(verdict)))
    yield from find_summary_faults(plan, labels)
    for clause in CLAUSE.finditer(verdict):
        yield from _clause_faults(plan, clause, labels)
    if _error(plan) > UNKNOWN and (
        "are too uncertain" not in verdict or re.search(rf"{FIGURE} samples/s", verdict)
    ):
        yield f"samples/s of ± {_error(plan):.0%} are said as if they were known: {verdict}"


def find_summary_faults(plan: Plan, labels: Sequence[str]) -> Iterator[str]:
    """The same of a plan's summary alone, as of plans that older versions wrote."""
    for line in summary_lines(plan, labels):
        if "the plan gains" in line or "the plan loses" in line:
            yield from _line_faults(plan, line)


def _error(one: Plan | Evidence) -> float:
    figure = one.throughput
    return relative_error(figure.samples_per_second, figure.low, figure.high)


def _what(layout: PlanLayout) -> tuple[object, ...]:
    return (
        layout.kind,
        layout.batches,
        tuple(share.micro for share in layout.share),
        layout.processes,
        layout.placement,
    )


def _evidence_faults(plan: Plan, with_knobs: bool) -> Iterator[str]:
    own, gains = plan.throughput.samples_per_second, dict[object, object]()
    for one in plan.evidence:
        if (
            _what(one.layout) == _what(plan.layout)
            and not with_knobs
            and (one.gain is not None or one.tie)
        ):
            yield f"{one.name} is the plan, and is compared with it"
        if one.gain is not None and not one.paired:
            if abs(own / one.throughput.samples_per_second - 1 - one.gain) > 1e-9:
                yield f"{one.name}: a gain of {one.gain} doesn't follow from the figures"
            if max(_error(plan), _error(one)) > UNKNOWN:
                yield f"{one.name}: a gain over a figure that isn't known"
        if gains.setdefault((_what(one.layout), one.name.partition(",")[2]), one.gain) != one.gain:
            yield f"{one.name}: one layout has two gains"
        if (
            one.gain is not None
            and one.layout.kind == "split"
            and 2 * one.layout.global_batch < plan.layout.global_batch
        ):
            yield (
                f"{one.name}: compared at {one.layout.global_batch} of {plan.layout.global_batch} "
                f"samples"
            )


def _line_faults(plan: Plan, line: str) -> Iterator[str]:
    found = RIVAL.fullmatch(line)
    if found is None:
        yield f"can't be read: {line}"
        return
    if found["where"] == "+".join(str(batch) for batch in plan.batches if batch):
        yield f"compared with itself: {line}"
    printed = (1 if found["verb"] == "gains" else -1) * float(found["gain"])
    if not found["paired"]:
        yield from _digit_faults(plan, found["rate"], printed, found["gain"], line)
    coarse = "." not in found["gain"]
    if _error(plan) > COARSE and not coarse and not found["paired"]:
        yield f"digits that aren't certain: {line}"


def _digit_faults(plan: Plan, rival: str, printed: float, digits: str, line: str) -> Iterator[str]:
    own = rate(plan.throughput.samples_per_second).replace(" ", "")
    true = 100 * (float(own) / float(rival.replace(" ", "")) - 1)
    decimals = len(digits.partition(".")[2])
    if (
        f"{true:.{decimals}f}".lstrip("-") != f"{printed:.{decimals}f}".lstrip("-")
        or true * printed < 0
    ):
        yield f"the rates {own} and {rival} say {true:.3f} %: {line}"


def _clause_faults(plan: Plan, clause: re.Match[str], labels: Sequence[str]) -> Iterator[str]:
    names = {f"{label} alone": (f"{SOLO_PREFIX}{label}", BEST_SINGLE) for label in labels}
    batch = int(clause["batch"] or plan.layout.global_batch)
    found = [one for one in plan.evidence if one.name in names.get(clause["name"], (EVEN_SPLIT,))]
    found = [
        one
        for one in found
        if one.layout.global_batch == batch and _what(one.layout) != _what(plan.layout)
    ]
    if not found:
        yield f"no such layout at {batch} samples: {clause[0]}"
        return
    if any(one.paired for one in found):
        if not clause["paired"]:
            yield f"a paired gain that doesn't say so: {clause[0]}"
        return
    printed = (1 if clause["verb"] == "faster" else -1) * float(clause["gain"])
    faults = [
        list(
            _digit_faults(
                plan, rate(one.throughput.samples_per_second), printed, clause["gain"], clause[0]
            )
        )
        for one in found
    ]
    if all(faults):
        yield from faults[0]
