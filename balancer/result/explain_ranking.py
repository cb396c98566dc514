"""A ranking in words: what a layout is called, and the one sentence of what to do and why. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evener.balancer.result.number_format import percent, rate
from evener.balancer.search.layouts import Candidate
from evener.balancer.search.ranking import Standing
from evener.balancer.types import Layout, Timed

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
MODES = {"": "", "logical": " with equal parts of the memory", "mps": " under MPS"}
KNOBS = {"xla": "XLA", "mixed": "mixed precision"}
LEAST_MOVED = 0.005  # of the throughput; less moved data is no reason
MOST_TIES = 3  # named in the sentence

Turns = Callable[[Layout], Sequence[Timed]]


def name(one: Candidate, devices: int) -> str:
    """The layout's name in tables and in the plan's evidence."""
    layout = one.layout
    own = {
        "solo": "best single device",
        "even": "even split" if len(layout.active) == devices else f"even over {len(layout.active)}",
        "split": "best split",
        "pack": f"pack of {layout.processes}{MODES.get(layout.placement, '')}",
        "place": f"place {layout.placement}",
    }[one.family]
    return own + "".join(f", {KNOBS.get(knob, knob)}" for knob in layout.knobs)


def names(found: Sequence[Candidate], devices: int) -> tuple[str, ...]:
    """A name for each, the fastest first, none of them twice: of two of one kind the slower one is `another`."""
    taken: list[str] = []
    for one in found:
        own = name(one, devices)
        if own in taken:
            own = f"another {own.removeprefix('best ')}"
        if own in taken:
            own = f"{own}, {samples(one)}"
        taken.append(own)
    return tuple(taken)


def verdict(found: Sequence[Standing], labels: Sequence[str], turns: Turns) -> str:
    """One sentence: which layout to take and why; labels are the devices' short names."""
    winner, *others = found
    reasons = [*_gains(winner, others), *_losses(winner, others, turns), *_knobs(winner, others)]
    why = f": {'; '.join(reasons)}" if reasons else ""
    return f"{_subject(winner, labels)}{why}{_ties(found, labels)}."


def moved_share(seen: Sequence[Timed]) -> float | None:
    """The part of a step in which the busiest device waits for others or for data; None where nobody can tell."""
    parts = []
    for one in seen:
        own = [one.device_seconds[i] for i in one.probe.layout.active]
        known = [seconds for seconds in own if seconds is not None]
        if len(known) < len(own) or one.step_seconds <= 0:
            return None
        parts.append(max(0.0, 1 - max(known) / one.step_seconds))
    return sum(parts) / len(parts) if parts else None


def _subject(winner: Standing, labels: Sequence[str]) -> str:
    one, layout = winner.candidate, winner.candidate.layout
    over = listed([labels[i] for i in layout.active])
    speed = f"{rate(winner.throughput.value)} samples/s"
    knobs = "".join(f" with {KNOBS.get(knob, knob)}" for knob in layout.knobs)
    match one.family:
        case "solo":
            subject = f"One {_noun(labels)}{knobs} is fastest ({over}, {speed} at {layout.global_batch})"
        case "even":
            count = _number(len(layout.active))
            subject = f"An even split over {count} {_noun(labels)}s{knobs} is fastest ({over}, {speed})"
        case "split":
            subject = f"The split {samples(one)} over {over}{knobs} is fastest ({speed})"
        case "pack":
            mode = MODES.get(layout.placement, "")
            many = _number(layout.processes).capitalize()
            subject = f"{many} trainings side by side on {over}{mode}{knobs} are fastest (together {speed})"
        case _:
            subject = f"The placement {layout.placement} over {over}{knobs} is fastest ({speed})"
    return subject


def _gains(winner: Standing, others: Sequence[Standing]) -> list[str]:
    """What a winner that is not one device alone gains over it, and a split over an even one."""
    reasons = []
    plain = [one for one in others if not one.candidate.layout.knobs and not _same_but_knobs(one, winner)]
    single = next((one for one in plain if one.candidate.family == "solo"), None)
    if single is not None and not single.tie and single.against is not None:
        reasons.append(f"{_percent(1 / (1 + single.against.value) - 1)} more than one alone")
        if winner.candidate.family == "pack":
            times = winner.step.value / single.step.value
            reasons[-1] += f", though each training takes {times:.1f} times as long"
    even = next((one for one in plain if one.candidate.family == "even" and not one.tie), None)
    if winner.candidate.family == "split" and even is not None and even.against is not None:
        reasons.append(f"{_percent(1 / (1 + even.against.value) - 1)} more than an even split")
    return reasons


def _losses(winner: Standing, others: Sequence[Standing], turns: Turns) -> list[str]:
    """What the best of the other ways loses: over several devices, and packed."""
    reasons = []
    families = {"over": ("even", "split", "place"), "packed": ("pack",)}
    for ways in families.values():
        if winner.candidate.family in ways:
            continue
        rival = next((one for one in others if one.candidate.family in ways and not one.candidate.layout.knobs), None)
        if rival is not None and rival.against is not None and not rival.tie:
            loses = "loses" if rival.candidate.family == "place" else "lose"
            loss = -rival.against.value
            moved = _moved(rival, loss, turns)
            reasons.append(f"{_rival_words(rival)} {loses} {_percent(loss)}{moved}")
    return reasons


def _moved(rival: Standing, loss: float, turns: Turns) -> str:
    """How much of the loss would not be if nothing had to be moved: without it the step is so much shorter."""
    if len(rival.candidate.layout.active) < 2:
        return ""
    share = moved_share(turns(rival.candidate.layout))
    if share is None or share >= 1:
        return ""
    without = 1 - (1 - loss) / (1 - share)
    part = loss - max(0.0, without)
    if part >= 0.95 * loss:
        return ", all of it spent moving data and waiting"
    return f", of which {_percent(part)} is spent moving data and waiting" if part >= LEAST_MOVED else ""


def _rival_words(rival: Standing) -> str:
    one = rival.candidate
    if one.family == "pack":
        return f"{_number(one.layout.processes)} trainings side by side"
    return f"the placement {one.layout.placement}" if one.family == "place" else _number(len(one.layout.active))


def _knobs(winner: Standing, others: Sequence[Standing]) -> list[str]:
    """What each knob gave or took, whichever way the winner has it."""
    reasons = []
    for one in others:
        if one.against is None:
            continue
        if one.candidate.layout.knobs and not one.tie:
            reasons.append(f"{_knob_names(one)} loses {_percent(-one.against.value)}")
        elif one.candidate.layout.knobs:
            reasons.append(f"{_knob_names(one)} makes no difference")
        elif _same_but_knobs(one, winner):
            reasons.append(f"{_knob_names(winner)} gives {_percent(1 / (1 + one.against.value) - 1)}")
    return reasons


def _same_but_knobs(one: Standing, winner: Standing) -> bool:
    """Whether it is the winner without its knobs."""
    a, b = one.candidate.layout, winner.candidate.layout
    return bool(b.knobs) and (a.kind, a.shares, a.processes, a.placement) == (
        b.kind,
        b.shares,
        b.processes,
        b.placement,
    )


def _knob_names(one: Standing) -> str:
    return " and ".join(KNOBS.get(knob, knob) for knob in one.candidate.layout.knobs)


def _ties(found: Sequence[Standing], labels: Sequence[str]) -> str:
    """Who ties with the winner, and who can't be told from it because too little is known."""
    titles = names([one.candidate for one in found], len(labels))
    plain = [
        (title, one) for title, one in zip(titles, found, strict=True) if one.tie and not one.candidate.layout.knobs
    ]
    tied = [title for title, one in plain if not one.unclear][:MOST_TIES]
    unclear = [title for title, one in plain if one.unclear][:MOST_TIES]
    words = f"; {listed(tied)} {'ties' if len(tied) == 1 else 'tie'} with it" if tied else ""
    return words + (f"; {listed(unclear)} can't be told from it yet" if unclear else "")


def _noun(labels: Sequence[str]) -> str:
    kind = labels[0].partition(":")[0]
    return {"CPU": "CPU slice", "SIM": "device"}.get(kind, kind)


def _number(count: int) -> str:
    return NUMBERS[count] if count < len(NUMBERS) else str(count)


def _percent(part: float) -> str:
    return percent(part, 0 if abs(part) >= 0.02 else 1)


def listed(words: Sequence[str]) -> str:
    """One, two and three."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def samples(one: Candidate) -> str:
    """The samples of each device: 150 + 106."""
    return " + ".join(str(one.layout.shares[i]) for i in one.layout.active)
