"""What runs on real GPUs found, as a table from their journals: `python -m benchmarks.gpu_table [JOURNAL...]`."""

from __future__ import annotations

import sys
from pathlib import Path

from balancer import journal
from balancer.records import OutOfMemory
from evener.plan import Plan

RECORDED = Path(__file__).resolve().parent.parent / "tests" / "recorded"
HEADS = ("run", "devices", "global batch", "chosen shares", "samples/s", "even split", "best alone", "of sum of solos",
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
    solos = [rival.throughput.samples_per_second for rival in plan.evidence if rival.name.startswith("solo ")]
    rate = plan.throughput.samples_per_second
    return [
        record.header.workload,
        f"`{request.devices}`",
        str(request.global_batch or "free"),
        " + ".join(str(batch) for batch in plan.batches),
        f"{rate:,.0f}",
        _gain(plan, "even split"),
        _gain(plan, "best single device"),
        f"{rate / sum(solos):.2f}" if len(solos) > 1 else "",
        str(len(record.seen)),
        str(sum(isinstance(seen.seen, OutOfMemory) for seen in record.seen)),
        f"{plan.search.seconds:.0f}",
    ]


def _gain(plan: Plan, name: str) -> str:
    """What the plan gains over a rival; empty where it wasn't measured, or is the plan itself."""
    rival = next((rival for rival in plan.evidence if rival.name == name), None)
    if rival is None or rival.layout.batches == plan.batches:
        return ""
    return f"{plan.throughput.samples_per_second / rival.throughput.samples_per_second - 1:+.0%}"


if __name__ == "__main__":
    main()
