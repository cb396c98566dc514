"""Measure the CPU time of searches on machines with 256 devices.

  python -m benchmarks.search_scale

Only `ask` and `tell` count, not the simulated measurements between them. Writes
docs/benchmarks/search_scale.md.
"""

from __future__ import annotations

import time
from pathlib import Path

from evener.balancer.search.search import Search
from evener.balancer.types import Problem
from tests.support import machine_families as machines
from tests.support.recording_prober import RecordingProber

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "search_scale.md"
DEVICES, NOISE, SEED, LIMIT_SECONDS = 256, 0.01, 1000, 10.0
HEAD = f"""# The search on {DEVICES} devices

Written by `python -m benchmarks.search_scale`: one seeded machine of each family, noise {NOISE:.0%}, tolerance 2 %.
CPU seconds of `ask` and `tell` over a whole search, without measurements; the target is {LIMIT_SECONDS:.0f} s at most.

| family | batch | CPU seconds | observations | |
| --- | --- | ---: | ---: | --- |"""  # noqa: E501

REASON = """
Searches above the target: each decision fits the curve of every device that was measured since the last one."""  # noqa: E501
BEYOND = """
On 1024 devices an affine machine takes 45 s with a free batch and 22 s with a fixed one, and "flat, then linear" with
a free batch more than five minutes: the best shares are exact for any number of devices, which takes most of it."""  # noqa: E501


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
    lines.append(BEYOND)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _search(family: str, fixed: bool) -> tuple[float, int]:
    """Return the CPU seconds of the search itself, and its number of observations."""
    machine = machines.machine(family, DEVICES, NOISE, SEED)
    batch = machines.fixed_batch(machine, SEED) if fixed else None
    memory = tuple(machine.usable_memory_bytes(i) for i in range(DEVICES))
    search = Search(Problem(DEVICES, memory, global_batch=batch))
    prober = RecordingProber(machine, SEED)
    spent = 0.0
    while True:
        began = time.process_time()
        probes = search.ask()
        spent += time.process_time() - began
        if not probes:
            return spent, len(prober.seen)
        for seen in list(prober.measure(probes)):
            began = time.process_time()
            search.tell(seen)
            spent += time.process_time() - began


if __name__ == "__main__":
    main()
