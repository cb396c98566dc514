"""Tables in Markdown, and a plot of regret over probes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.search_runs import MODES, SearchOutcome

WITHIN = 0.005  # a rival that is better by at most this is a draw
MODE_WORDS = {
    "free": "free batch, tolerance 0",
    "fixed": "fixed batch",
    "beyond": "fixed batch from half to four times what fits at once",
    "tolerant": "free batch, tolerance 2 %",
}
MANY_ROUNDS = (
    "A fixed batch that may have to be taken in passes has rounds in passes, which "
    "count as solo rounds."
)
REASONS = {
    "stairs": (
        "where stairs end is known from a few batches only, and of many devices one is mostly "
        "beyond its own"
    ),
}


def percent(value: float, digits: int = 2) -> str:
    """Return a fraction in percent, without a minus sign before zero."""
    return f"{round(100 * value, digits) + 0.0:.{digits}f}"


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile of these values by the nearest-rank method."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[
        min(len(ordered) - 1, max(0, -(-round(share * len(ordered) * 1000) // 1000) - 1))
    ]


def report(outcomes: Sequence[SearchOutcome], seeds: int, command: str) -> str:
    """Return the whole page."""
    parts = [
        "# The search on simulated machines\n",
        f"Written by `{command}`: {len(outcomes)} searches on seeded random machines, {seeds} "
        f"seeds for each family, "
        "number of devices (2, 4, 8, 16), step noise (0.2, 1, 3 %) and kind of batch. The "
        "search wasn't tuned on these "
        "seeds. The best layout is known exactly from the physics of each machine "
        "(`tests/support/search_oracle.py`). "
        "Regret, in per cent, is what the chosen layout's true throughput lacks of the best; "
        "at tolerance 2 % it is "
        "about 2 by design. Best and search may take shares in passes; of a free batch these "
        "end by the time of the "
        "slowest device, which takes one. `SimulatedProber` measures, with the timing rules "
        "of real probes. These "
        "searches have no budget; [hard machines](search_hard.md) are searched with one, as "
        "users do.\n",
        "## Targets\n",
        targets(outcomes),
        "\n## By family\n",
        *(f"### {MODE_WORDS[mode]}\n\n{families(outcomes, mode)}\n" for mode in MODES),
        "## Against rivals, at equal probes\n",
        "Each rival has the same prober and as many probes as the search used on that "
        "machine, and keeps the best "
        "layout that it measured. *Not beaten by it*: the search is better, or at most 0.5 % "
        "worse.\n",
        rivals(outcomes),
        "\n![Regret against probes](search.svg)\n",
        "\nRegret of the best layout so far against the number of probes, median over "
        "machines (fixed and free batch, "
        "tolerance 0). The search's solo probes run at the same time, the rivals' splits one "
        "after another.\n",
    ]
    return "\n".join(parts)


def targets(outcomes: Sequence[SearchOutcome]) -> str:
    """Return a table of targets and measured values; a miss names its families."""
    sharp = [o for o in outcomes if o.job.mode != "tolerant" and o.job.noise <= 0.01]
    noisy = [o for o in outcomes if o.job.mode != "tolerant" and o.job.noise > 0.01]
    tolerant = [o for o in outcomes if o.job.mode == "tolerant"]
    calm = [o for o in tolerant if o.job.noise <= 0.01]
    smooth = [o for o in outcomes if o.job.family != "stairs"]
    straight = [o for o in outcomes if o.job.family != "bent memory"]
    bent = [o for o in outcomes if o.job.family == "bent memory"]
    beyond = [o for o in smooth if o.job.mode == "beyond"]
    identical = [o for o in outcomes if o.job.family == "identical"]
    held = statistics.fmean(o.held for o in outcomes)
    short = statistics.fmean(o.solo_rounds <= 4 for o in outcomes)
    few = statistics.fmean(o.splits <= 4 for o in smooth) if smooth else 1.0
    cpu = max((o.cpu_seconds for o in outcomes if o.job.devices == 16), default=0.0)
    rows = [
        _limit("regret, tolerance 0, noise ≤ 1 %: median", sharp, lambda o: o.regret, 0.5, 0.005),
        _limit("the same: 95th percentile", sharp, lambda o: o.regret, 0.95, 0.02),
        _limit("regret, tolerance 0, noise 3 %: median", noisy, lambda o: o.regret, 0.5, 0.01),
        _limit("the same: 95th percentile", noisy, lambda o: o.regret, 0.95, 0.04),
        _limit(
            "regret, fixed batch from half to four times what fits, without stairs: median",
            beyond,
            lambda o: o.regret,
            0.5,
            0.01,
        ),
        _limit("the same: 95th percentile", beyond, lambda o: o.regret, 0.95, 0.03),
        _limit("regret, tolerance 2 %: median", tolerant, lambda o: o.regret, 0.5, 0.025),
        _limit("the same: 95th percentile, noise ≤ 1 %", calm, lambda o: o.regret, 0.95, 0.04),
        _limit(
            "global batch / smallest within 2 %: median",
            tolerant,
            lambda o: o.batch_ratio,
            0.5,
            1.15,
            ratio=True,
        ),
        _limit(
            "the same: 90th percentile", tolerant, lambda o: o.batch_ratio, 0.9, 1.15, ratio=True
        ),
        (
            "searches of at most 4 solo rounds (6 where samples/s fell)",
            "≥ 99 %",
            percent(short, 1) + " %",
            _mark(short >= 0.99 and max(o.solo_rounds for o in outcomes) <= 6),
        ),
        (
            "searches of at most 4 splits, without stairs (8 where times lie on no simple curve)",
            "≥ 99 %",
            percent(few, 1) + " %",
            _mark(few >= 0.99 and max(o.splits for o in outcomes) <= 8),
        ),
        _most("out of memory on one device, straight line", straight, lambda o: o.out_of_memory, 1),
        _most("out of memory on one device, bent line", bent, lambda o: o.out_of_memory, 3),
        _most("out of memory in the race", outcomes, lambda o: o.race_out_of_memory, 0),
        (
            "95 % interval holds the true throughput",
            "90 – 99 %",
            percent(held, 1) + " %",
            _mark(0.9 <= held <= 0.99),
        ),
        (
            "identical devices get equal shares",
            "all",
            (f"{sum(o.even for o in identical)} of {len(identical)}"),
            _mark(all(o.even for o in identical)),
        ),
        ("CPU of ask and tell, 16 devices, most", "< 1 s", f"{cpu:.2f} s", _mark(cpu < 1)),
        _rival_row(outcomes),
    ]
    head = "| what | target | measured | |\n| --- | --- | --- | --- |\n"
    return head + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n\n" + _misses(outcomes)


def families(outcomes: Sequence[SearchOutcome], mode: str) -> str:
    """Return a table with a row for each family, and one for all."""
    head = (
        "| family | regret, median | 95th | worst | probes | splits | races | OOM, most | "
        "virtual s | interval holds | "
        "batch ratio, median | 95th |\n|" + " --- |" * 12 + "\n"
    )
    mine = [o for o in outcomes if o.job.mode == mode]
    rows = [
        (name, [o for o in mine if o.job.family == name])
        for name in dict.fromkeys(o.job.family for o in mine)
    ]
    return head + "\n".join(_family_row(name, some) for name, some in [*rows, ("**all**", mine)])


def rivals(outcomes: Sequence[SearchOutcome]) -> str:
    """Return a table with a row for each rival."""
    head = (
        "| rival | machines | its regret, median | 95th | the search there, median | not "
        "beaten by it |\n|"
    )
    rows = []
    for name in dict.fromkeys(name for o in outcomes for name in o.rivals):
        some = [o for o in outcomes if name in o.rivals]
        theirs = [o.rivals[name][-1] for o in some]
        rows.append(
            f"| {name} | {len(some)} | {percent(statistics.median(theirs))} | "
            f"{percent(quantile(theirs, 0.95))} | "
            f"{percent(statistics.median(o.regret for o in some))} | "
            f"{percent(_unbeaten(some, name), 1)} % |"
        )
    return head + " --- |" * 6 + "\n" + "\n".join(rows) + "\n"


def plot(outcomes: Sequence[SearchOutcome], path: Path) -> None:
    """Plot the median regret over probes of the search and of every rival."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "evener"
    from matplotlib import pyplot

    sizes = sorted({o.job.devices for o in outcomes})
    figure, axes = pyplot.subplots(
        1, len(sizes), figsize=(4 * len(sizes), 4), sharey=True, squeeze=False
    )
    for axis, size in zip(axes[0], sizes, strict=True):
        some = [
            o for o in outcomes if o.job.devices == size and o.job.mode != "tolerant" and o.rivals
        ]
        courses = {"this search": [o.course for o in some]}
        for name in dict.fromkeys(name for o in some for name in o.rivals):
            courses[name] = [o.rivals[name] for o in some if name in o.rivals]
        for name, lines in courses.items():
            medians = _medians(lines)
            axis.plot(
                range(1, len(medians) + 1),
                medians,
                label=name,
                linewidth=2.5 if name == "this search" else 1,
            )
        axis.set(title=f"{size} devices", xlabel="probes", yscale="log", ylim=(5e-4, 1.1))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("median regret")
    axes[0][-1].legend(fontsize=7, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _medians(courses: Sequence[Sequence[float]]) -> list[float]:
    """Return the median after each probe, up to the probe that half of the machines reached.

    A finished search keeps its last value.
    """
    length = int(statistics.median(len(course) for course in courses)) if courses else 0
    return [
        max(5e-4, statistics.median(c[min(n, len(c) - 1)] for c in courses)) for n in range(length)
    ]


def _family_row(name: str, some: Sequence[SearchOutcome]) -> str:
    regrets, ratios = [o.regret for o in some], [o.batch_ratio for o in some]
    cells = [
        name,
        percent(statistics.median(regrets)),
        percent(quantile(regrets, 0.95)),
        percent(max(regrets)),
        f"{statistics.median(o.probes for o in some):.0f}",
        f"{statistics.fmean(o.splits for o in some):.1f}",
        f"{statistics.fmean(o.races for o in some):.1f}",
        str(max(o.out_of_memory for o in some)),
        f"{statistics.median(o.virtual_seconds for o in some):.0f}",
        percent(statistics.fmean(o.held for o in some), 1) + " %",
        f"{statistics.median(ratios):.2f}",
        f"{quantile(ratios, 0.95):.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _mark(holds: bool) -> str:
    return "yes" if holds else "**no**"


def _limit(
    what: str,
    some: Sequence[SearchOutcome],
    of: Callable[[SearchOutcome], float],
    share: float,
    limit: float,
    ratio: bool = False,
) -> tuple[str, str, str, str]:
    value = quantile([of(o) for o in some], share)
    asked, got = (f"{v:.2f}" if ratio else f"{percent(v)} %" for v in (limit, value))
    return what, f"≤ {asked}", got, _mark(value <= limit)


def _most(
    what: str, some: Sequence[SearchOutcome], of: Callable[[SearchOutcome], int], limit: int
) -> tuple[str, str, str, str]:
    value = max((of(o) for o in some), default=0)
    return what, f"≤ {limit}", str(value), _mark(value <= limit)


def _unbeaten(some: Sequence[SearchOutcome], name: str) -> float:
    return statistics.fmean(o.regret <= o.rivals[name][-1] + WITHIN for o in some)


def _rival_row(outcomes: Sequence[SearchOutcome]) -> tuple[str, str, str, str]:
    names = dict.fromkeys(name for o in outcomes for name in o.rivals)
    worst = min(
        (_unbeaten([o for o in outcomes if name in o.rivals], name), name) for name in names
    )
    return (
        "not beaten by any rival at equal probes",
        "≥ 95 %",
        f"{percent(worst[0], 1)} % ({worst[1]})",
        _mark(worst[0] >= 0.95),
    )


def _misses(outcomes: Sequence[SearchOutcome]) -> str:
    """Return the rows that miss their target, with the reason if it is known."""
    lines = []
    for name in dict.fromkeys(o.job.family for o in outcomes):
        some = [
            o.regret
            for o in outcomes
            if o.job.family == name and o.job.mode != "tolerant" and o.job.noise <= 0.01
        ]
        middle, far = statistics.median(some), quantile(some, 0.95)
        if middle > 0.005 or far > 0.02:
            reason = f": {REASONS[name]}" if name in REASONS else ""
            lines.append(
                f"- *{name}* alone misses the regret target ({percent(middle)} %, "
                f"{percent(far)} %){reason}."
            )
    if statistics.fmean(o.solo_rounds <= 4 for o in outcomes) < 0.99:
        lines.append(f"- {MANY_ROUNDS}")
    ratios = [o.batch_ratio for o in outcomes if o.job.mode == "tolerant"]
    if quantile(ratios, 0.9) > 1.15:
        lines.append(
            "- The smallest tolerable global batch is missed where throughput hardly depends "
            "on it: there 0.2 % of the "
            "throughput, less than a probe can tell, is 10 % of that batch and more."
        )
    return "\n".join(lines)
