"""Search families of hard machines as users do: with a budget, slow starts and events.

A row of the table is a family. Regret is a percentage of the best speed; with a free batch, only
what exceeds the tolerance counts. The truth is the machine in its state when the last probe began.
*settled* counts the runs that report that nothing is left to measure.
"""

from __future__ import annotations

import math
import statistics
import traceback
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from benchmarks.search_report import percent, quantile
from tests.support import machine_families as old
from tests.support import machine_families_hard as hard
from tests.support import search_laws as laws
from tests.support import search_trials as trials
from tests.support.search_trials import Ask, Case, Trial

FAR_OFF, WRONG, LATE, OFTEN = 0.15, 0.03, 0.1, 2
UNLIKELY = 0.05  # below this p-value, a law counts as broken more often than by chance
OLD_SIZES, OLD_NOISES = (2, 4, 8), (0.01,)


class HardJob(msgspec.Struct, frozen=True):
    """A machine, and the options of all searches on it."""

    family: str
    seed: int
    asked: dict[str, float]
    devices: int = 0  # number of devices, for an old family


class Row(msgspec.Struct, frozen=True):
    """The result of one run, without its observations."""

    family: str
    seed: int
    mode: str
    words: str
    regret: float = 1.0
    rate: float = 0.0
    best: float = 0.0
    shares: tuple[int, ...] = ()
    out_of_memory: int = 0
    probes: int = 0
    seconds: float = 0.0
    late: float = 0.0
    held: bool = True
    settled: bool = False
    why: str = ""
    last: str = ""
    error: str = ""

    @property
    def settled_wrongly(self) -> bool:
        """True if the run reports that nothing is left to measure, but is more than 3 % off."""
        return self.settled and self.regret > WRONG


def jobs(families: Sequence[str], seeds: Iterable[int], asked: dict[str, float]) -> list[HardJob]:
    """Return a job for each machine of these families."""
    return [
        HardJob(family, seed, asked, devices)
        for family in families
        for seed in seeds
        for devices in (OLD_SIZES if family in old.FAMILIES else (0,))
    ]


def run(job: HardJob) -> list[Row]:
    """Run all cases of the job's machine."""
    return [
        _row(case)
        for case in (
            _old_cases(job) if job.devices else hard.cases(job.family, job.seed, **job.asked)
        )
    ]


def _old_cases(job: HardJob) -> Iterator[Case]:
    for noise in OLD_NOISES:
        machine = old.machine(job.family, job.devices, noise, job.seed)
        fixed, beyond = old.fixed_batch(machine, job.seed), old.batch_beyond(machine, job.seed)
        for mode, batch in (("free", None), ("fixed", fixed), ("beyond", beyond)):
            ask = Ask(**{"batch": batch, **job.asked})  # type: ignore[arg-type]
            if hard.is_measurable(machine, ask):
                yield Case(job.family, job.seed, f"{mode}, {job.devices} devices", machine, ask)


def _row(case: Case) -> Row:
    said = case.ask.words()
    try:
        found = trials.run(case.machine, case.ask, case.seed)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__} at {where.name}: {error}"
        return Row(case.family, case.seed, case.mode, said, error=what)
    return _judged(case, found, said)


def _judged(case: Case, found: Trial, said: str) -> Row:
    last = found.seen[-1].probe if found.seen else None
    return Row(
        case.family,
        case.seed,
        case.mode,
        said,
        regret=found.regret,
        rate=found.rate,
        best=found.best,
        shares=found.layout.shares if found.layout else (),
        out_of_memory=found.out_of_memory,
        probes=found.probes,
        seconds=found.seconds,
        late=found.late,
        held=found.held,
        settled=found.settled,
        why=found.why,
        last=f"{last.stage} {list(last.layout.shares)}" if last else "",
    )


class Pair(msgspec.Struct, frozen=True):
    """The result of a law's pair of searches and of its control.

    The loss of the second search is a fraction; 1 if a search raised an error.
    """

    law: str
    case: str
    loss: float
    control: float
    error: str = ""


def pairs(job: HardJob) -> list[Pair]:
    """Run each law's pairs of searches on the job's machine."""
    cases = hard.cases(job.family, job.seed, **job.asked)
    return [pair for case in cases for law in laws.LAWS if (pair := _pair(law, case)) is not None]


def _pair(law: str, case: Case) -> Pair | None:
    said = f"{case.family}, seed {case.seed}, {case.mode} {case.ask.words()}".rstrip()
    try:
        loss = laws.LAWS[law](case)
        return None if loss is None else Pair(law, said, loss, laws.control(case, law))
    except Exception as error:
        return Pair(law, said, 1.0, 0.0, repr(error))


def law_table(found: Sequence[Pair]) -> str:
    """Return a table of how often each law and its control were broken, and then each case."""
    head = "| law | pairs | broken | its control | gained | its control | p | holds |"
    lines = [head, f"| --- |{' ---: |' * 6} --- |"]
    lines += [_law_line(name, [pair for pair in found if pair.law == name]) for name in laws.LAWS]
    broken = [pair for pair in found if pair.loss > laws.NOISE]
    words = [
        f"- {one.law}: {one.case}: {one.error or f'{percent(one.loss, 1)} %'}" for one in broken
    ]
    return "\n".join([*lines, "", *words])


def _law_line(name: str, own: Sequence[Pair]) -> str:
    """Return a law's row: broken and gained cases per 1,000 pairs, beyond what noise explains."""
    losses = [pair.loss for pair in own], [pair.control for pair in own]
    broken, control = (sum(loss > laws.NOISE for loss in each) for each in losses)
    gained = (sum(loss < -laws.NOISE for loss in each) for each in losses)
    often = [f"{1000 * count / max(1, len(own)):.1f}" for count in (broken, control, *gained)]
    p = as_often_by_chance(broken, control, len(own))
    return f"| {name} | {len(own)} | {' | '.join(often)} | {p:.2f} | {_yes(p >= UNLIKELY)} |"


def _yes(holds: bool) -> str:
    return "yes" if holds else "**no**"


def as_often_by_chance(broken: int, control: int, pairs: int) -> float:
    """Return the one-sided p-value of Fisher's exact test.

    It is the probability that, of all broken cases, at least `broken` fall on the law rather than
    on its control.
    """
    both = broken + control
    ways = [
        math.comb(pairs, k) * math.comb(pairs, both - k)
        for k in range(broken, min(both, pairs) + 1)
    ]
    return sum(ways) / math.comb(2 * pairs, both)


def table(rows: Sequence[Row]) -> str:
    """Return a table with a row for each family, and one for all."""
    head = (
        "| family | runs | errors | median | 95th | worst | > 3 % | interval holds | probes | "
        "seconds | late | "
        "out of memory > 2 | no plan | settled > 3 % |\n| --- |" + " ---: |" * 13
    )
    names = dict.fromkeys(row.family for row in rows)
    some = [(name, [row for row in rows if row.family == name]) for name in names]
    return "\n".join([head, *(_line(name, own) for name, own in [*some, ("**all**", list(rows))])])


def _line(name: str, rows: Sequence[Row]) -> str:
    ran = [row for row in rows if not row.error]
    regrets = [row.regret for row in ran] or [1.0]
    cells = (
        name,
        len(rows),
        len(rows) - len(ran),
        percent(statistics.median(regrets)),
        percent(quantile(regrets, 0.95)),
        percent(max(regrets)),
        sum(regret > WRONG for regret in regrets),
        f"{sum(row.held for row in ran)} of {len(ran)}",
        f"{statistics.median([row.probes for row in ran] or [0]):.0f}",
        f"{statistics.median([row.seconds for row in ran] or [0]):.0f}",
        sum(row.late > LATE for row in ran),
        sum(row.out_of_memory > OFTEN for row in ran),
        sum(not row.shares for row in ran),
        sum(row.settled_wrongly for row in ran),
    )
    return f"| {' | '.join(map(str, cells))} |"


def worst(rows: Sequence[Row], over: float = FAR_OFF) -> str:
    """Return a line for each run that failed, was late, or is off by more than `over`.

    Runs that often ran out of memory are listed, too.
    """
    bad = [
        row
        for row in rows
        if row.error or row.regret > over or row.late > LATE or row.out_of_memory > OFTEN
    ]
    return "\n".join(_words(row) for row in sorted(bad, key=lambda row: (row.family, -row.regret)))


def _words(row: Row) -> str:
    case = f"- {row.family}, seed {row.seed}, {row.mode} {row.words}".rstrip()
    if row.error:
        return f"{case}: {row.error}"
    short = f", {row.out_of_memory} times out of memory" if row.out_of_memory > OFTEN else ""
    return (
        f"{case}: {percent(row.regret, 1)} % ({row.rate:,.1f} of {row.best:,.1f} samples/s), "
        f"{list(row.shares)} after "
        f"{row.seconds:.0f} s and {row.probes} probes{short}; last {row.last}; {row.why}"
    )
