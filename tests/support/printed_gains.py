"""A reader of the printed result alone: it parses figures and gains from the text, and works each
gain out again from the figures beside it; every fault as a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

NUMBER = r"\d{1,3}(?: \d{3})*(?:\.\d+)?"
TABLE = re.compile(rf"^(?P<device>\S+).*  (?P<alone>{NUMBER})(?: ± [\d.]+ %)? at (?P<batch>\d+)")
RIVAL = re.compile(
    rf"^(?P<name>[^:]+(?::\d+)?[^:]*): (?P<rate>{NUMBER}) samples/s(?: ± (?P<error>[\d.]+) %)?"
    rf"(?: at (?P<where>[\d+]+))?(?:; (?P<rest>.*))?$"
)
GAIN = re.compile(
    r"the plan (?:(?P<verb>gains|loses) (?P<gain>[\d.]+) %|reaches (?P<part>[\d.]+) % of it)"
)
EARLIER = re.compile(rf"measured in turn: (?P<now>{NUMBER}) now, (?P<earlier>{NUMBER}) earlier")
CLAUSE = re.compile(
    r"(?:\+(?P<more>[\d.]+) % over (?P<over>[^,]+?)|(?P<less>[\d.]+) % slower than (?P<than>[^,]+?)"
    r"|as fast as (?P<tie>[^,]+?) within the error)(?P<turn>, measured in turn)?(?=, |$)"
)
FIGURE = re.compile(rf"(?P<rate>{NUMBER}) samples/s(?: ± (?P<error>[\d.]+) %)?")
MORE = re.compile(rf"(?P<rate>{NUMBER}) samples/s, (?P<more>[\d.]+) % more")
WITHIN = re.compile(r"within --tolerance (?P<part>[\d.]+) %")
UNKNOWN = 25.0  # percent of error, beyond which nothing is compared
ROUGH = 2.0  # from which it is printed
EVEN = ("even", "even by number of rows")


class Line(NamedTuple):
    """A rival's printed line."""

    name: str
    rate: float
    error: float  # percent, at most: a smaller one isn't printed
    where: str
    gain: float | None  # percent of the plan over it
    paired: bool
    tie: bool
    text: str


class Printed(NamedTuple):
    """What a reader finds in the text of a result."""

    headline: str
    own: float
    error: float
    shares: str
    alone: dict[str, tuple[float, int]]  # by device: samples/s and batch of the table's column
    rivals: list[Line]
    rest: list[str]


def number(text: str) -> float:
    """A printed number, its thousands set apart."""
    return float(text.replace(" ", ""))


def read_result(lines: Sequence[str]) -> Printed:
    """Find the parts of what `evener balance` prints."""
    rivals, alone = [], dict[str, tuple[float, int]]()
    headline = next(line for line in lines if "   " in line and "samples/s" in line and _has(line))
    for line in lines[: lines.index(headline)]:
        found, row = RIVAL.match(line), TABLE.match(line)
        if found is not None:
            rivals.append(_read_rival(found, line))
        elif row is not None:
            alone[row["device"]] = number(row["alone"]), int(row["batch"])
    figure = FIGURE.search(headline)
    assert figure is not None, headline
    rest = list(lines[lines.index(headline) + 1 :])
    total = next(line for line in lines if line.startswith("together"))
    return Printed(
        headline,
        number(figure["rate"]),
        float(figure["error"] or 0.0),
        total.split()[1],
        alone,
        rivals,
        rest,
    )


def _has(line: str) -> bool:
    return not line.startswith(("together", "device", "warning")) and " on " in line


def _read_rival(found: re.Match[str], line: str) -> Line:
    gain = GAIN.search(found["rest"] or "")
    percent = None
    if gain is not None and gain["gain"]:
        percent = float(gain["gain"]) * (1 if gain["verb"] == "gains" else -1)
    elif gain is not None and gain["part"]:
        percent = float(gain["part"]) - 100
    rest = found["rest"] or ""
    tie = "as fast within the error" in rest
    where = found["where"] or ""
    paired = "in turn" in rest and not tie
    error = float(found["error"] or ROUGH)
    return Line(found["name"], number(found["rate"]), error, where, percent, paired, tie, line)


def find_faults(lines: Sequence[str]) -> Iterator[str]:
    """Every contradiction that a reader of these lines can find."""
    printed = read_result(lines)
    for rival in printed.rivals:
        yield from _rival_faults(printed, rival)
    yield from _clause_faults(printed)
    yield from _faster_faults(printed)
    yield from _alone_faults(printed)
    if printed.error > UNKNOWN and "too uncertain to compare" not in printed.headline:
        yield f"compared though ± {printed.error} %: {printed.headline}"
    ties = [line for line in printed.rest if "leading layouts tie" in line]
    if ties and printed.error > UNKNOWN:
        yield f"a tie of what isn't known: {ties}"


def _rival_faults(printed: Printed, rival: Line) -> Iterator[str]:
    apart = 100 * abs(printed.own / rival.rate - 1)
    if rival.tie and apart > 1.2 * (printed.error + rival.error) and "in turn" not in rival.text:
        yield f"a tie of figures that are {apart:.1f} % apart: {rival.text}"
    if rival.gain is None or rival.paired:
        return
    if printed.error > UNKNOWN:
        yield f"compared though the plan is ± {printed.error} %: {rival.text}"
    digits = GAIN.search(rival.text)
    assert digits is not None
    words = digits["gain"] or digits["part"]
    if rival.name.startswith("sum"):
        total = sum(speed for speed, _ in printed.alone.values())
        if abs(total / rival.rate - 1) > 0.001:
            yield f"the column alone sums up to {total:.0f}: {rival.text}"
        yield from _differs(100 * printed.own / rival.rate, float(words), words, rival.text)
        return
    yield from _differs(100 * (printed.own / rival.rate - 1), rival.gain, words, rival.text)


def _differs(true: float, said: float, digits: str, text: str) -> Iterator[str]:
    """A fault if a percentage isn't the true one in as many digits; the figures are rounded too."""
    decimals = len(digits.partition(".")[2])
    slack = 0.5 * 10**-decimals + 1e-9 + abs(true) * 1e-9
    if abs(true - said) > slack or true * said < 0 < min(abs(true), abs(said)) - slack:
        yield f"the figures say {true:.3f} %: {text}"


def _clause_faults(printed: Printed) -> Iterator[str]:
    """The headline's gains are those of the lines that name the same layout."""
    gains = printed.headline.rpartition("   ")[2]
    for clause in CLAUSE.finditer(gains):
        over = clause["over"] or clause["than"] or clause["tie"]
        named = [one for one in printed.rivals if _is(one, over)]
        if not named:
            yield f"no line for {over!r}: {printed.headline}"
            continue
        said = float(clause["more"] or clause["less"] or 0.0)
        said = -said if clause["less"] else said
        faults = [list(_one_clause(printed, clause, one, said)) for one in named]
        if all(faults):
            yield from faults[0]


def _is(one: Line, over: str) -> bool:
    if over in EVEN:
        return "even split" in one.name
    if over.startswith("the ") and over.endswith(")"):
        name, _, batches = over.removesuffix(")").removeprefix("the ").partition(" (")
        return one.name == name and one.where == batches.replace(" ", "")
    return one.name in (over, f"the other device alone, {over.removesuffix(' alone')}")


def _one_clause(printed: Printed, clause: re.Match[str], one: Line, said: float) -> Iterator[str]:
    if clause["tie"]:
        if not one.tie:
            yield f"a tie here, none there: {one.text} | {printed.headline}"
        return
    if one.tie or one.gain is None:
        yield f"a gain here, none there: {one.text} | {printed.headline}"
    elif bool(clause["turn"]) and not one.paired:
        yield f"measured in turn here, not there: {one.text} | {printed.headline}"
    elif abs(one.gain - said) > 0.5 + 0.5 * 10 ** -len(str(one.gain).partition(".")[2]):
        yield f"{said} % here, {one.gain} % there: {one.text} | {printed.headline}"


def _faster_faults(printed: Printed) -> Iterator[str]:
    """A row whose figure is above the plan's is named below the headline, with a reason."""
    if printed.error > UNKNOWN:
        return
    for line in printed.rest:
        for found in MORE.finditer(line):
            yield from _differs(
                100 * (number(found["rate"]) / printed.own - 1),
                float(found["more"]),
                found["more"],
                line,
            )
        found_within = WITHIN.search(line)
        if found_within is not None and "when it was chosen" not in line:
            most = max(float(found["more"]) for found in MORE.finditer(line))
            if most > float(found_within["part"]) + 0.05:
                yield f"{most} % aren't within the tolerance: {line}"
    explained = " ".join(printed.rest)
    for rival in printed.rivals:
        if rival.name.startswith("sum") or rival.error > UNKNOWN:
            continue
        if rival.rate > printed.own and _write(rival) not in explained:
            yield f"faster than the plan, and nothing says why not: {rival.text}"


def _write(rival: Line) -> str:
    return rival.text.partition(": ")[2].partition(" samples/s")[0]


def _alone_faults(printed: Printed) -> Iterator[str]:
    """A device alone has one figure at one batch, and the best of them is the best that is named;
    where an earlier one was higher, that is said.
    """
    for rival in printed.rivals:
        label = rival.name.removesuffix(" alone").removeprefix("the other device alone, ")
        if label not in printed.alone or not rival.where:
            continue
        rate, batch = printed.alone[label]
        if int(rival.where) == batch and rate != rival.rate:
            yield f"{label} alone has {rate} in the table: {rival.text}"
        others = [
            speed
            for name, (speed, at) in printed.alone.items()
            if name != label and at == int(rival.where) and str(at) != printed.shares
        ]
        told = EARLIER.search(rival.text)
        hidden = max(others, default=0.0) > rival.rate and told is None
        if hidden and rival.gain is not None and not rival.name.startswith("the other device"):
            yield f"another device alone is faster in the table: {rival.text}"
