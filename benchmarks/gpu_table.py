"""What runs on real GPUs found, as a table from their journals: `python -m benchmarks.gpu_table [JOURNAL...]`."""

from __future__ import annotations

import sys
from pathlib import Path

from balancer import journal
from balancer.core.curve import Point, fit
from balancer.core.ledger import relative_error
from balancer.records import OutOfMemory, Timed
from evener.plan import Plan

RECORDED = Path(__file__).resolve().parent.parent / "tests" / "recorded"
HEADS = ("run", "devices", "global batch", "chosen shares", "samples/s", "even split", "best alone", "of the solos",
         "probes", "out of memory", "seconds")  # fmt: skip


def main() -> None:
    """Print the table."""
    paths = [Path(name) for name in sys.argv[1:]] or sorted(RECORDED.glob("*.jsonl"))
    print(f"| {' | '.join(HEADS)} |")
    print(f"|{' --- |' * 2}{' ---: |' * (len(HEADS) - 2)}")
    for path in paths:
        print(f"| {' | '.join(_row(path))} |")


def _row(path: Path) -> list[str]:
    record = journal.read(path)
    if record.ended is None:
        return [path.stem, "not finished", *[""] * (len(HEADS) - 2)]
    plan, request = record.ended.plan, record.header.request
    solos, rate = _alone_at_shares(record, plan), plan.throughput.samples_per_second
    return [
        record.header.workload,
        f"`{request.devices}`",
        str(request.global_batch or "free"),
        " + ".join(str(batch) for batch in plan.batches),
        f"{rate:,.0f}",
        _gain(plan, "even split"),
        _gain(plan, "best single device"),
        f"{rate / solos:.2f}" if solos else "",
        str(len(record.seen)),
        str(sum(isinstance(seen.seen, OutOfMemory) for seen in record.seen)),
        f"{plan.search.seconds:.0f}",
    ]


def _alone_at_shares(record: journal.Record, plan: Plan) -> float | None:
    """What the devices do alone at their shares, summed, by the curves of their solo probes; None for one device."""
    if len(plan.layout.active) < 2:
        return None
    total = 0.0
    for position, share in enumerate(plan.batches):
        alone = [
            seen.seen
            for seen in record.seen
            if isinstance(seen.seen, Timed) and seen.seen.probe.layout.active == (position,)
        ]
        curve = fit(Point(one.probe.layout.global_batch, one.step_seconds, relative_error(one)) for one in alone)
        if share and curve is not None:
            total += share / curve.seconds(share)
    return total


def _gain(plan: Plan, name: str) -> str:
    """What the plan gains over a rival; empty where it wasn't measured, or is the plan itself."""
    rival = next((rival for rival in plan.evidence if rival.name == name), None)
    if rival is None or rival.layout.batches == plan.batches:
        return ""
    return f"{plan.throughput.samples_per_second / rival.throughput.samples_per_second - 1:+.0%}"


if __name__ == "__main__":
    main()
