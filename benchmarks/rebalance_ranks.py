"""One rank of the training that `python -m benchmarks.rebalance real` or `gpus` starts; see
rebalance_jobs.py.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch

from benchmarks.gpu_neighbour import Neighbour
from benchmarks.rebalance_jobs import Job, make_computing, make_sleeping
from evener.plan.file import Plan, Throughput
from evener.torch_split import Split
from evener.torch_split.ranks import visible_gpus
from tests.support.torch_ranks import example_plan

SHORT, WARM = (
    100,
    20,
)  # steps of a training whose speed doesn't change, and those of them that aren't counted
NEVER, ALWAYS = range(0), range(SHORT)
QUANTA = (
    32  # of a batch; the best static shares are looked for within two of those that the rule found
)


class Trained(NamedTuple):
    """When each step ended, and each change of shares: its step, and the shares from then on."""

    times: list[float]
    changes: list[tuple[int, tuple[int, ...]]]

    def step_seconds(self, steps: range) -> float:
        """The median of some steps."""
        return median(
            after - before for before, after in pairwise(self.times[steps.start : steps.stop])
        )


def make_plan(shares: tuple[int, ...], rate: float = 0.0) -> Plan:
    """A plan for these shares on the GPUs that are here, without curves; memory holds any share."""
    devices = [*visible_gpus()][: len(shares)] or [f"sim-{rank}" for rank in range(len(shares))]
    plan = example_plan(shares)
    replace = msgspec.structs.replace
    placed = zip(plan.layout.share, devices, strict=True)
    share = tuple(replace(each, device=device, most=sum(shares)) for each, device in placed)
    promised = Throughput(rate, rate, rate) if rate else plan.throughput
    return replace(
        plan, workload="rebalance", layout=replace(plan.layout, share=share), throughput=promised
    )


def train(job: Job, plan: Plan, steps: int, disturbed: range, rebalance: bool = False) -> Trained:
    """The second rank is disturbed in some of the steps."""
    torch.manual_seed(0)
    split = Split(plan, rebalance=rebalance)
    network = job.make_network()
    model = split.wrap(network)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    computed: deque[Any] = deque()  # a GPU's last two steps, which this loop doesn't wait for
    times: list[float] = []
    loader = split.loader(job.rows, drop_last=True)
    while True:
        for inputs, labels in loader:
            step = len(times)
            if split.rank == 1 and disturbed and step in (disturbed.start, disturbed.stop):
                job.disturb(network, step == disturbed.start)
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if split.device.type == "cuda":
                computed.append(torch.cuda.Event())
                computed[-1].record()
                if len(computed) > 2:
                    computed.popleft().synchronize()
            times.append(time.perf_counter())
            if len(times) == steps:
                if split.rank == 1 and disturbed.stop >= steps:
                    job.disturb(network, False)
                changes = [(change.step, tuple(change.after)) for change in split.reporter.changes]
                split.reporter.close()
                return Trained(times, changes)


def compare(job: Job, start: int, end: int, steps: int) -> dict[str, Any]:
    """Train by the rule, without it into the disturbance, and by all shares near those that the
    rule found.
    """
    even, while_disturbed = (job.batch // 2, job.batch // 2), range(start, end)
    free = train(job, make_plan(even), SHORT, NEVER).step_seconds(range(WARM, SHORT))
    say(f"even shares, nothing disturbs: {free * 1e3:.1f} ms a step")
    plan = make_plan(even, job.batch / free)
    ruled = train(job, plan, steps, while_disturbed, rebalance=True)
    say(f"by the rule: {ruled.changes}")
    stayed = train(job, plan, (start + end) // 2, while_disturbed)
    found = next((shares for step, shares in reversed(ruled.changes) if step <= end), even)
    static = {}
    for shares in near(found, job.batch // QUANTA):
        static["+".join(map(str, shares))] = train(
            job, make_plan(shares), SHORT, ALWAYS
        ).step_seconds(range(WARM, SHORT))
        say(f"always disturbed, {list(static.items())[-1]}")
    phases = {"start": start, "end": end, "steps": steps, "batch": job.batch}
    times = {"rebalance": ruled.times, "even": stayed.times}
    return {**phases, "free": free, "static": static, "times": times, "changes": ruled.changes}


def near(shares: Sequence[int], quantum: int) -> list[tuple[int, int]]:
    """Two shares, and those with up to two quanta moved."""
    first, second = shares
    moved = [(first + times * quantum, second - times * quantum) for times in range(-2, 3)]
    return [pair for pair in moved if min(pair) > 0]


def say(text: str) -> None:
    """By the first rank."""
    if int(os.environ["RANK"]) == 0:
        print(text, flush=True)


def main() -> None:
    """Train; the first rank prints what came of it as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=("sleeping", "computing"))
    parser.add_argument(
        "steps", type=int, nargs=3, help="the second rank is disturbed from, until; all"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        if given.job == "sleeping":
            job = make_sleeping()
        elif int(os.environ["RANK"]) == 1:
            neighbour = Neighbour("cuda:1" if torch.cuda.is_available() else "cpu")
            job = make_computing(stack.enter_context(neighbour).work)
        else:
            job = make_computing(lambda _: None)
        found = compare(job, *given.steps)
    say(json.dumps(found))


if __name__ == "__main__":
    main()
