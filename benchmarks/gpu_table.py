"""Make tables of the runs on real GPUs from their journals.

  python -m benchmarks.gpu_table [JOURNAL...]

With `--compare`, the table has the layouts of comparisons instead of searches; with `--memory`, it
has the memory predicted for each batch before it ran, and the measured peak.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from evener.balancer import journal
from evener.balancer.result.rivals import name_all
from evener.balancer.search.model.evidence import read_device, relative_error
from evener.balancer.search.model.memory import Memory
from evener.balancer.search.model.step_time import Point, fit_curve
from evener.balancer.search.observations import Observations
from evener.balancer.statistics import relative_half_width
from evener.balancer.store import runs
from evener.balancer.types import OutOfMemory, Timed
from evener.plan.file import EvidenceKind, Plan, parse_plan, to_json

RECORDED = Path(__file__).resolve().parent.parent / "tests" / "recorded"
HEADS = (
    "run",
    "devices",
    "global batch",
    "chosen shares",
    "samples/s",
    "even split",
    "best alone",
    "of the solos",
    "probes",
    "out of memory",
    "seconds",
)
COMPARED = ("workload", "layout", "global batch", "samples/s", "±", "of the best alone")
MEMORY_HEADS = (
    "run",
    "layout",
    "device",
    "samples",
    "line from",
    "predicted, MiB",
    "measured, MiB",
    "ratio",
)
WORDS = {
    "neighbour": "other work on the second",
    "strategy": "the strategy's sums",
    "grpc": "sums over gRPC",
}
MIB = 1 << 20


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("journals", nargs="*", type=Path)
    parser.add_argument(
        "--compare", action="store_const", dest="table", const=(COMPARED, _compared)
    )
    parser.add_argument(
        "--memory", action="store_const", dest="table", const=(MEMORY_HEADS, _memory_rows)
    )
    options = parser.parse_args()
    heads, rows_of = options.table or (HEADS, _searched)
    print(f"| {' | '.join(heads)} |")
    print(f"|{' --- |' * 2}{' ---: |' * (len(heads) - 2)}")
    for path in options.journals or sorted(RECORDED.glob("*.jsonl")):
        for row in rows_of(path):
            print(f"| {' | '.join(row)} |")


def _searched(path: Path) -> Iterator[list[str]]:
    if journal.read(path).header.request.compare is None:
        yield _row(path)


def _compared(path: Path) -> Iterator[list[str]]:
    """Yield a row per layout of a comparison, fastest first, with its ratio to the best solo."""
    record = journal.read(path)
    if record.header.request.compare is None:
        return
    found = runs.make_search(record.header.job, observations=record.observations)
    report = found.report()
    standings = report.ranking if report else ()
    alone = [
        one.throughput.value
        for one in standings
        if one.candidate.layout.traits.alone and not one.candidate.layout.knobs
    ]
    for one, words in zip(
        standings,
        name_all([each.candidate for each in standings], found.problem.devices),
        strict=True,
    ):
        rate = one.throughput.value
        against = f"{rate / max(alone):.2f}" if alone else ""
        batch = str(one.candidate.layout.global_batch)
        spread = f"{relative_half_width(one.throughput):.1%}"
        yield [record.header.workload, words, batch, f"{rate:,.0f}", spread, against]


def _row(path: Path) -> list[str]:
    record = journal.read(path)
    if record.ended is None:
        return [path.stem, "not finished", *[""] * (len(HEADS) - 2)]
    plan, request = parse_plan(to_json(record.ended.plan)), record.header.request
    solos, rate = _alone_at_shares(record, plan), plan.throughput.samples_per_second
    how = [words for end, words in WORDS.items() if path.stem.endswith(end)]
    return [
        ", ".join([record.header.workload, *how]),
        f"`{request.devices}`",
        str(request.global_batch or "free"),
        " + ".join(str(batch) for batch in plan.batches),
        f"{rate:,.0f}",
        _gain(plan, "equal_shares"),
        _gain(plan, "best_device"),
        f"{rate / solos:.2f}" if solos else "",
        str(len(record.seen)),
        str(sum(isinstance(seen.seen, OutOfMemory) for seen in record.seen)),
        f"{plan.search.seconds:.0f}",
    ]


def _memory_rows(path: Path) -> Iterator[list[str]]:
    """Yield a row per batch whose memory was predicted before it ran: predicted and measured."""
    record = journal.read(path)
    seen = Observations(record.header.job.problem)
    for entry in record.seen:
        if isinstance(entry.seen, Timed):
            for position in entry.seen.probe.layout.active:
                row = _predicted(read_device(seen, position).memory, entry.seen, position)
                if row:
                    yield [path.stem, entry.seen.probe.stage, str(position), *row]
        seen.add(entry.seen)


def _predicted(memory: Memory, seen: Timed, position: int) -> list[str]:
    """Return the predicted memory of a batch.

    Empty without a prediction, or if the batch had run already.
    """
    share, peak = seen.probe.layout.shares[position], seen.memory_bytes[position]
    if memory.line is None or peak is None or share in dict(memory.points):
        return []
    predicted = memory.line[0] + memory.line[1] * share
    points = " and ".join(str(batch) for batch, _ in memory.distinct_points[-2:])
    return [
        str(share),
        points,
        f"{predicted / MIB:,.0f}",
        f"{peak / MIB:,.0f}",
        f"{predicted / peak:.3f}",
    ]


def _alone_at_shares(record: journal.JournalContents, plan: Plan) -> float | None:
    """Return the sum of the devices' solo samples/s at their shares; None for one device.

    The speeds are read from the curves of their solo probes.
    """
    if len(plan.layout.active) < 2:
        return None
    total = 0.0
    for position, share in enumerate(plan.batches):
        alone = [
            seen.seen
            for seen in record.seen
            if isinstance(seen.seen, Timed) and seen.seen.probe.layout.active == (position,)
        ]
        curve = fit_curve(
            Point(one.probe.layout.global_batch, one.step_seconds, relative_error(one))
            for one in alone
        )
        if share and curve is not None:
            total += share / curve.seconds(share)
    return total


def _gain(plan: Plan, kind: EvidenceKind) -> str:
    """Return the plan's gain over a rival.

    Empty if the rival wasn't measured, or if it is the plan itself.
    """
    rival = next((rival for rival in plan.evidence if rival.kind == kind), None)
    if rival is None or rival.layout.batches == plan.batches:
        return ""
    return f"{plan.throughput.samples_per_second / rival.throughput.samples_per_second - 1:+.0%}"


if __name__ == "__main__":
    main()
