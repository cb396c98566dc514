"""What asking and telling cost on machines of 1024 devices: `python -m benchmarks.search_scale`.

Only the search's own CPU time counts; the simulated measuring between is left out. It writes
docs/benchmarks/search_scale.md.
"""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.search_runs import Watched
from evener.balancer.search.search import Search
from evener.balancer.types import Problem
from tests.support import machine_families as machines

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "search_scale.md"
DEVICES, NOISE, SEED, LIMIT_SECONDS = 1024, 0.01, 1000, 10.0
HEAD = f"""# The search on {DEVICES} devices

Written by `python -m benchmarks.search_scale`: one seeded machine of each family, noise {NOISE:.0%}, tolerance 2 %.
CPU seconds of `ask` and `tell` over a whole search, without the measuring; at most {LIMIT_SECONDS:.0f} are wanted.

| family | batch | CPU seconds | observations | |
| --- | --- | ---: | ---: | --- |"""

REASON = """
Where it takes longer: each decision fits the curves of all devices that something new is known of."""


def main() -> None:
    """Search each machine and write the page."""
    lines = [HEAD]
    for family in machines.FAMILIES:
        for kind in ("free", "fixed"):
            seconds, observations = _search(family, kind == "fixed")
            held = "yes" if seconds <= LIMIT_SECONDS else "**no**"
            lines.append(f"| {family} | {kind} | {seconds:.1f} | {observations} | {held} |")
            print(lines[-1], flush=True)
    if any("**no**" in line for line in lines):
        lines.append(REASON)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _search(family: str, fixed: bool) -> tuple[float, int]:
    """CPU seconds of the search's own work, and how many observations it was told."""
    machine = machines.machine(family, DEVICES, NOISE, SEED)
    batch = machines.fixed_batch(machine, SEED) if fixed else None
    memory = tuple(machine.usable_memory_bytes(i) for i in range(DEVICES))
    search, watched = Search(Problem(DEVICES, memory, global_batch=batch)), Watched(machine, SEED)
    spent = 0.0
    while True:
        began = time.process_time()
        probes = search.ask()
        spent += time.process_time() - began
        if not probes:
            return spent, len(watched.seen)
        for seen in list(watched.measure(probes)):
            began = time.process_time()
            search.tell(seen)
            spent += time.process_time() - began


if __name__ == "__main__":
    main()
