"""Checks the text of a result against itself.

It parses the printed throughputs and gains, computes each gain again from the throughputs beside
it, and reports each contradiction as a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

NUMBER = r"\d{1,3}(?: \d{3})*(?:\.\d+)?"
TABLE = re.compile(rf"^(?P<device>\S+).*  (?P<alone>{NUMBER})(?: ± [\d.]+ %)? at (?P<batch>\d+)")
RIVAL = re.compile(
    rf"^(?P<name>[^:]+(?::\d+)?[^:]*): (?P<rate>{NUMBER}) samples/s(?: ± (?P<error>[\d.]+) %)?"
    rf"(?: at (?P<where>[\d+]+)(?: = (?P<whole>\d+) samples a step)?)?(?:[;,] (?P<rest>.*))?$"
)
GAIN = re.compile(
    r"the plan (?:(?P<verb>gains|loses) (?P<gain>[\d.]+) %|reaches (?P<part>[\d.]+) % of it)"
)
EARLIER = re.compile(rf"measured alternately: (?P<now>{NUMBER}) now, (?P<earlier>{NUMBER}) earlier")
NAME = r"[^,(]+?(?: \(\d[^)]*\))?"
CLAUSE = re.compile(
    rf"(?:\+(?P<more>[\d.]+) %(?: ± [\d.]+ %)? over (?P<over>{NAME})"
    rf"|(?P<less>[\d.]+) %(?: ± [\d.]+ %)? slower than (?P<than>{NAME}))"
    r"(?P<turn> \(measured alternately\))?(?=, |$)"
)
TIE = re.compile(
    rf"(?:(?P<gap>[\d.]+) % (?P<word>faster|slower) than|as fast as) (?P<tie>{NAME}) "
    r"± (?:< )?(?P<error>[\d.]+) % \((?P<turn>measured alternately: )?(?P<why>too close|under)"
)
CLOSE = re.compile(
    r"(?P<gap>[\d.]+) % (?:more|less) ± (?:< )?(?P<error>[\d.]+) %"
    r"(?: \(|: )(?P<why>too close|under)"
)
FIGURE = re.compile(rf"(?P<rate>{NUMBER}) samples/s(?: ± (?:< )?(?P<error>[\d.]+) %)?")
RECOMMENDS = re.compile("(simulated: )?(So far: )?([Uu]se |Measure again |Fix your )")
NOT_COMPARED = ("too uncertain", "none was measured near", "less than in the plan")
WHOLE = re.compile(r"^(?:together|in all) +(?P<samples>\d+)")
MORE = re.compile(rf"(?P<rate>{NUMBER}) samples/s, (?P<more>[\d.]+) % more")
WITHIN = re.compile(r"\(--tolerance (?P<part>[\d.]+) %\)")
FASTER_ALONE = re.compile(
    r"; (?P<names>[^;]+?) (?:was|were) (?P<why>faster with another batch"
    r"|measured alone, too imprecisely|slower alone than in the plan|faster alone than the plan)"
)
INSIDE = re.compile(rf"^(?!together|in all)(?P<device>\S+) .* \d\.\d{{3}} +(?P<rate>{NUMBER}|-)  ")
TWINS = re.compile(
    r"and (?P<fast>\S+) was (?P<times>[\d.]+) times as fast alone at (?P<batch>\d+) samples a step"
    r": .* uses (?P<slow>\S+)\.$"
)
LESS = re.compile(
    rf"reached (?P<rate>{NUMBER}) samples/s, (?P<less>[\d.]+) % (?P<word>less|more) than the plan"
)
UNCERTAIN = re.compile(
    rf"(?:^|, )(?P<name>{NAME}) (?:is|are) too uncertain to compare \(± (?P<error>[\d.]+) %\)"
)
WITH_IDLE = re.compile(r"the fastest split with it \((?P<batches>[\d +]*)")
LEFT_OUT = re.compile(r"^(?P<name>\S+) is left out: the fastest split")
IDLE_ROW = re.compile(r"^(?P<device>\S+) .* left out  0\.000 ")
ENDS_TIED = re.compile(r"\. (?P<names>[^.]*) ties? with the plan")
SIMPLER = re.compile(r"One device is the simpler way: (?P<name>.+?) reached")
NO_TIME = re.compile(r"The budget left no time to measure (?P<names>.*); --budget")
OF_SUM = re.compile(r"The plan reaches (?P<part>\d+) % of the sum")
BAR = re.compile(rf"^ (?P<name>.+?) +▇+ +(?P<rate>~?{NUMBER})(?:  (?P<gain>\S.*?))? *$")
PLAN_GAIN = re.compile(r"plan (?P<sign>[+-])(?P<gain>[\d.]+) %")
UNKNOWN = 25.0  # percent: throughputs with a larger error aren't compared
ROUGH = 2.0  # percent: smaller errors aren't printed
ROUNDED = 0.11  # the largest apparent difference of two equal numbers, each rounded to one decimal
GAIN_OVER_EQUAL = re.compile(r"over equal shares(?! \()")
EQUAL = ("equal shares", "equal numbers of rows")


class Line(NamedTuple):
    """The printed line of a layout that the plan is compared with."""

    name: str
    rate: float
    error: float  # percent, an upper limit, as small errors aren't printed
    where: str
    gain: float | None  # percent by which the plan is faster
    paired: bool
    compared: bool
    text: str


class Printed(NamedTuple):
    """The parts of a printed result."""

    recommendation: str  # the line before the headline
    headline: str
    own: float
    error: float
    shares: str
    alone: dict[str, tuple[float, int]]  # samples/s and batch in the table's column, by device
    inside: dict[str, float]  # samples/s in the column "in the plan", by device
    not_compared: dict[str, str]  # why devices that were faster alone aren't compared, by device
    rivals: list[Line]
    rest: list[str]


def number(text: str) -> float:
    """Parse a printed number with spaces between its thousands."""
    return float(text.replace(" ", ""))


def read_result(lines: Sequence[str]) -> Printed:
    """Find the parts of what `evener balance` prints."""
    rivals, alone, inside = [], dict[str, tuple[float, int]](), dict[str, float]()
    headline = next(line for line in lines if "   " in line and "samples/s" in line and _has(line))
    for line in lines[: lines.index(headline)]:
        found, row, part = RIVAL.match(line), TABLE.match(line), INSIDE.match(line)
        if part is not None and part["rate"] != "-":
            inside[part["device"]] = number(part["rate"])
        if found is not None:
            rivals.append(_read_rival(found, line))
        elif row is not None:
            alone[row["device"]] = number(row["alone"]), int(row["batch"])
    figure = FIGURE.search(headline)
    assert figure is not None, headline
    rest = list(lines[lines.index(headline) + 1 :])
    total = next(found for line in lines if (found := WHOLE.match(line)) is not None)
    before = lines.index(headline) - 1
    return Printed(
        lines[before] if before >= 0 else "",
        headline,
        number(figure["rate"]),
        float(figure["error"] or 0.0),
        total["samples"],
        alone,
        inside,
        _read_not_compared(lines),
        rivals,
        rest,
    )


def _read_not_compared(lines: Sequence[str]) -> dict[str, str]:
    """Return the devices that a note under the table says aren't compared, with the reason."""
    notes = [found for line in lines for found in FASTER_ALONE.finditer(line)]
    return {name: note["why"] for note in notes for name in re.split(", | and ", note["names"])}


def _has(line: str) -> bool:
    return not line.startswith(("together", "in all", "device", "warning")) and " on " in line


def _read_rival(found: re.Match[str], line: str) -> Line:
    gain = GAIN.search(found["rest"] or "")
    percent = None
    if gain is not None and gain["gain"]:
        percent = float(gain["gain"]) * (1 if gain["verb"] == "gains" else -1)
    elif gain is not None and gain["part"]:
        percent = float(gain["part"]) - 100
    rest = found["rest"] or ""
    where = found["where"] or ""
    paired = "measured alternately" in rest
    compared = not any(words in rest for words in NOT_COMPARED)
    error = float(found["error"] or ROUGH)
    return Line(found["name"], number(found["rate"]), error, where, percent, paired, compared, line)


def find_faults(lines: Sequence[str]) -> Iterator[str]:
    """Yield every contradiction that a reader of these lines can find."""
    printed = read_result(lines)
    for rival in printed.rivals:
        yield from _rival_faults(printed, rival)
    yield from _clause_faults(printed)
    yield from _tie_faults(printed)
    yield from _advice_faults(lines, printed)
    yield from _faster_faults(printed)
    yield from _alone_faults(printed)
    yield from _twin_faults(printed)
    yield from _split_faults(printed)
    yield from _uncertain_faults(printed)
    yield from _time_faults(printed)
    yield from _table_faults(lines, printed)
    yield from _ending_faults(printed)
    if printed.error > UNKNOWN and "too uncertain to compare" not in printed.headline:
        yield f"compared though ± {printed.error} %: {printed.headline}"
    ties = [line for line in printed.rest if "leading layouts tie" in line]
    if ties and printed.error > UNKNOWN:
        yield f"a tie of what isn't known: {ties}"


def _rival_faults(printed: Printed, rival: Line) -> Iterator[str]:
    if " samples a step" in rival.text:
        found = RIVAL.match(rival.text)
        assert found is not None
        if sum(map(int, rival.where.split("+"))) != int(found["whole"]):
            yield f"the shares don't add up: {rival.text}"
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
    """Yield a fault if a percentage differs from the true one by more than rounding."""
    decimals = len(digits.partition(".")[2])
    slack = 0.5 * 10**-decimals + 1e-9 + abs(true) * 1e-9
    if abs(true - said) > slack or true * said < 0 < min(abs(true), abs(said)) - slack:
        yield f"the figures say {true:.3f} %: {text}"


def _clause_faults(printed: Printed) -> Iterator[str]:
    """Check the gains in the headline against the lines for the same layouts."""
    gains = printed.headline.rpartition("   ")[2]
    for clause in CLAUSE.finditer(gains):
        over = clause["over"] or clause["than"]
        named = [one for one in printed.rivals if _is(one, over)]
        if not named:
            yield f"no line for {over!r}: {printed.headline}"
            continue
        said = float(clause["more"] or clause["less"])
        said = -said if clause["less"] else said
        faults = [list(_one_clause(printed, clause, one, said)) for one in named]
        if all(faults):
            yield from faults[0]


def _is(one: Line, over: str) -> bool:
    if over in EQUAL:
        return "equal shares" in one.name
    if over.startswith(("the ", "another ", "equal shares (")) and over.endswith(")"):
        name, _, batches = over.removesuffix(")").removeprefix("the ").partition(" (")
        where = batches.partition(" =")[0].replace(" ", "")
        return one.name.partition(", ")[0] == name and one.where == where
    return one.name in (over, f"the other device alone, {over.removesuffix(' alone')}")


def _one_clause(printed: Printed, clause: re.Match[str], one: Line, said: float) -> Iterator[str]:
    if not one.compared:
        yield f"a gain here, none there: {one.text} | {printed.headline}"
    elif not clause["turn"]:
        true = 100 * (printed.own / one.rate - 1)
        yield from _differs(true, said, clause["more"] or clause["less"], printed.headline)


def _tie_faults(printed: Printed) -> Iterator[str]:
    """Check what is called too close to call: the gap must be within the stated ±.

    A gap that wasn't measured alternately must also follow from the two printed throughputs.
    """
    for tie in TIE.finditer(printed.headline):
        yield from _close_faults(tie, printed.headline)
        named = [one for one in printed.rivals if _is(one, tie["tie"])]
        if not named:
            yield f"no line for {tie['tie']!r}: {printed.headline}"
        if not named or tie["turn"] or tie["gap"] is None:
            continue
        said = float(tie["gap"]) * (1 if tie["word"] == "faster" else -1)
        faults = [
            list(_differs(100 * (printed.own / one.rate - 1), said, tie["gap"], one.text))
            for one in named
        ]
        if all(faults):
            yield from faults[0]
    for line in printed.rest:
        for close in CLOSE.finditer(line):
            yield from _close_faults(close, line)
    if "within the error" in " ".join((printed.headline, *printed.rest)):
        yield f"a tie without the comparison's own figure: {printed.headline}"


def _close_faults(found: re.Match[str], text: str) -> Iterator[str]:
    gap, error = float(found["gap"] or 0.0), float(found["error"])
    if found["why"] == "too close" and gap > error + ROUNDED:
        yield f"{gap} % with ± {error} % aren't too close to call: {text}"
    if found["why"] == "under" and gap > 1 + ROUNDED:
        yield f"{gap} % aren't under 1 %: {text}"


def _advice_faults(lines: Sequence[str], printed: Printed) -> Iterator[str]:
    """Check the recommendation for contradictions with the rest of the text."""
    text = "\n".join(lines)
    one, again = (
        "Use one device" in printed.recommendation,
        "Measure again" in printed.recommendation,
    )
    if not RECOMMENDS.match(printed.recommendation):
        yield f"no recommendation before the headline: {printed.recommendation!r}"
    if one and " + " in printed.recommendation.rpartition(" on ")[2]:
        yield f"several devices are no single one: {printed.recommendation}"
    if one and " on " in printed.recommendation and GAIN_OVER_EQUAL.search(printed.headline):
        yield f"one device would do, and a gain is the headline: {printed.headline}"
    if again and "Nothing left to measure" in text:
        yield f"measure again, and nothing is left to measure: {printed.recommendation}"
    if again and "Equal shares are right" in text:
        yield f"measure again, and equal shares are right: {printed.recommendation}"
    if "\nin all" in text and any(rival.name.startswith("sum") for rival in printed.rivals):
        yield "a sum of all devices for a plan of one"


def _faster_faults(printed: Printed) -> Iterator[str]:
    """Check that each row that is faster than the plan is explained below the headline."""
    if printed.error >= UNKNOWN:  # it may have been rounded down to the limit
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
        if rival.name.startswith("sum") or rival.error >= UNKNOWN:
            continue
        if rival.rate > printed.own and _write(rival) not in explained:
            yield f"faster than the plan, and nothing says why not: {rival.text}"


def _write(rival: Line) -> str:
    return rival.text.partition(": ")[2].partition(" samples/s")[0]


def _alone_faults(printed: Printed) -> Iterator[str]:
    """Check that each device has one throughput at one batch when it trains alone.

    The device named as the fastest one must be the fastest, or the text has to say why not. An
    earlier throughput beside that of the final comparison must be of the same device.
    """
    for rival in printed.rivals:
        label = rival.name.removesuffix(" alone").removeprefix("the other device alone, ")
        if label not in printed.alone or not rival.where:
            continue
        rate, batch = printed.alone[label]
        if int(rival.where) == batch and rate != rival.rate:
            yield f"{label} alone has {rate} in the table: {rival.text}"
        others = [
            name
            for name, (speed, _) in printed.alone.items()
            if speed > rival.rate
            and name not in (label, *printed.not_compared)
            # the plan's own device
            and not printed.headline.partition(f" on {name} alone")[1]
        ]
        if others:
            yield f"{others} alone are faster in the table: {rival.text}"
        earlier = EARLIER.search(rival.text)
        speeds = [speed for name, (speed, _) in printed.alone.items() if name != label]
        if earlier is not None and number(earlier["earlier"]) in speeds:
            yield f"the earlier throughput is another device's: {rival.text}"
    for name, why in printed.not_compared.items():
        slower = name in printed.inside and printed.alone[name][0] < printed.inside[name]
        if slower != ("slower" in why) and "another batch" not in why and "imprecise" not in why:
            yield f"{name} was {why}: {printed.alone[name]}, {printed.inside.get(name)} in the plan"


def _twin_faults(printed: Printed) -> Iterator[str]:
    """Check which of two equal devices is the faster one in the column "alone".

    If the column has both at the batch of the warning, their ratio must be that of the warning.
    """
    for line in printed.rest:
        found = TWINS.search(line)
        if found is None:
            continue
        fast, slow = (printed.alone.get(found[name]) for name in ("fast", "slow"))
        batch = int(found["batch"])
        if fast is None or slow is None:
            continue
        times = fast[0] / slow[0]
        if (fast[1], slow[1]) != (batch, batch):
            times = float(found["times"])
        if fast[0] <= slow[0] or abs(times - float(found["times"])) > 0.05 + 1e-9:
            yield f"{slow} and {fast} in the table: {line}"


def _uncertain_faults(printed: Printed) -> Iterator[str]:
    """Check that what the headline calls too uncertain to compare isn't compared elsewhere."""
    for clause in UNCERTAIN.finditer(printed.headline.rpartition("   ")[2]):
        named = [one for one in printed.rivals if _is(one, clause["name"])]
        if not any(f"± {clause['error']} %" in one.text and not one.compared for one in named):
            yield f"no line for {clause['name']!r}, too uncertain to compare: {printed.headline}"


def _time_faults(printed: Printed) -> Iterator[str]:
    """Check that no device is both measured and not measured for lack of time, at one batch."""
    for line in printed.rest:
        found = NO_TIME.search(line)
        names = re.split(", | and ", found["names"]) if found is not None else []
        for device, (_, batch) in printed.alone.items():
            if f"{device} alone at {batch} sample{'s' * (batch != 1)}" in names:
                yield f"{device} was measured alone at {batch}: {line}"


def _table_faults(lines: Sequence[str], printed: Printed) -> Iterator[str]:
    """Check that the devices' parts add up to the plan, and which devices are left out."""
    total = sum(printed.inside.values())
    if printed.inside and abs(total / printed.own - 1) > 0.003:
        yield f"the column in the plan sums up to {total:.1f}: {printed.headline}"
    idle = [row["device"] for line in lines if (row := IDLE_ROW.match(line)) is not None]
    for line in printed.rest:
        found = LEFT_OUT.match(line)
        if found is not None and found["name"] not in idle:
            yield f"only {idle} are left out in the table: {line}"
    for device in idle:
        if re.search(rf" on (?:.* \+ )?{device}\b", printed.headline.partition("   ")[0]):
            yield f"{device} is left out in the table: {printed.headline}"


def _ending_faults(printed: Printed) -> Iterator[str]:
    """Check that what ends as a tie has no certain gain, and that a finished search lacks nothing.

    One device that is called as fast as the plan has no certain gain either.
    """
    gains = printed.headline.rpartition("   ")[2]
    surely = [each["over"] or each["than"] for each in CLAUSE.finditer(gains)]
    text = "\n".join(printed.rest)
    simpler = SIMPLER.search(text)
    if simpler is not None and simpler["name"] in surely:
        yield f"as fast, and not as fast: {simpler[0]} | {printed.headline}"
    tied = ENDS_TIED.search(text)
    names = re.split(r"(?<=\)), | and ", tied["names"]) if tied is not None else []
    for name in names:
        layout, _, batches = name.partition(" (")
        shares = batches.partition(" on ")[0]
        layout = f"{layout[:1].lower()}{layout[1:]}" if ":" not in layout else layout
        for over in surely:
            if over == layout and _has_other_batches(printed, over, shares):
                continue
            if over in (layout, f"{layout} ({shares})", f"the {layout} ({shares})"):
                yield f"a tie, and a gain over {over}: {name} | {printed.headline}"
    if "Nothing left to measure is expected to gain" in text and NO_TIME.search(text):
        yield f"nothing is left to measure, and there was no time: {NO_TIME.findall(text)}"


def _has_other_batches(printed: Printed, name: str, shares: str) -> bool:
    """Return whether the line of this name is about other shares, such as another batch."""
    named = [one for one in printed.rivals if _is(one, name)]
    return bool(named) and all(one.where != shares.replace(" ", "") for one in named)


def _split_faults(printed: Printed) -> Iterator[str]:
    """Check how much slower a split with an idle device is, and the plan's part of the sum."""
    total = next((one for one in printed.rivals if one.name.startswith("sum")), None)
    for line in printed.rest:
        for found in LESS.finditer(line):
            said = float(found["less"]) * (-1 if found["word"] == "less" else 1)
            true = 100 * (number(found["rate"]) / printed.own - 1)
            yield from _differs(true, said, found["less"], line)
        idle = WITH_IDLE.search(line)
        ties = TIE.finditer(printed.headline)
        # another device's split may have the same shares
        named = [one for tie in ties for one in printed.rivals if _is(one, tie["tie"])]
        tied = idle is not None and any(
            _write(one) in line and one.where == idle["batches"].replace(" ", "") for one in named
        )
        if tied and "too close to call" not in line:
            yield f"a tie in the headline, and a loss here: {line}"
        of_sum = OF_SUM.search(line)
        if of_sum is not None and total is not None and total.gain is not None:
            yield from _differs(100 + total.gain, float(of_sum["part"]), of_sum["part"], line)
    if total is not None and "an upper bound" in total.text and (total.gain or 0.0) > 0:
        yield f"more than an upper bound: {total.text}"


def find_bar_faults(screen: Sequence[str], lines: Sequence[str]) -> Iterator[str]:
    """Yield where the app's bars contradict the printed lines of the same result."""
    printed = read_result(lines)
    bars = [found for line in screen if (found := BAR.match(line)) is not None]
    if not bars:
        yield "no bars"
    for bar in bars:
        speed = number(bar["rate"].removeprefix("~"))
        if bar["name"] == "this plan":
            if speed != printed.own:
                yield f"the plan has {printed.own}: {bar[0]}"
            continue
        named = [one for one in printed.rivals if one.name == bar["name"] and one.rate == speed]
        if not named:
            yield f"no line for it: {bar[0]}"
            continue
        gain = PLAN_GAIN.search(bar["gain"] or "")
        if gain is not None and not named[0].paired:
            said = float(gain["gain"]) * (1 if gain["sign"] == "+" else -1)
            yield from _differs(100 * (printed.own / speed - 1), said, gain["gain"], bar[0])
