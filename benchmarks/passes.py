"""Does a plan with passes hold under a memory cap? `python -m benchmarks.passes --cap 300MiB
--batch 2400`.

Two devices of one speed, in PyTorch. Three parts: the shares of a fixed global batch with and
without a cap on the second device; steps of that plan under the cap; and a global batch several
times what fits in both devices together, planned, and trained by `split.parts` under the same caps.
The rows for docs/benchmarks/passes.md go to stdout.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec

from evener.balancer.events import Finished
from evener.balancer.intake import take_in
from evener.balancer.request import Request
from evener.balancer.result.rivals import list_samples
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.balancer.trials import RunLength, timed_runs
from evener.balancer.types import Layout, layout_of
from evener.devices.terms import parse_limit
from evener.plan.file import SOLO_PREFIX, Plan, load_plan, to_toml
from evener.system.cores import cap_address_space

WORKLOAD = str(Path(__file__).resolve().parents[1] / "examples" / "torch_train.py") + ":build"
FREE, CAPPED, BOTH = "{0},{1}", "{0},{1}@{cap}", "{0}@{cap},{1}@{cap}"


def main() -> None:
    """Print the tables, or train as one rank of the third."""
    options = parse()
    if options.rank_plan:
        train_rank(options)
        return
    capped = compare_shares(options)
    steps, _ = probe(options, CAPPED, capped, RunLength(steps=options.steps))
    print(f"\n{steps} steps under the cap: none ran out of memory.\n", flush=True)
    compare_training(options)


def compare_shares(options: argparse.Namespace) -> Plan:
    """Plan the fixed batch with and without the cap, print both, and return the capped plan."""
    plans = [find_plan(options, devices, options.batch) for devices in (FREE, CAPPED)]
    print("\n| second device | shares | samples/s | its part of the batch | of the speeds alone |")
    print("| --- | --- | ---: | ---: | ---: |")
    for name, plan in zip(("whole", f"at most {options.cap}"), plans, strict=True):
        words = (
            f"| {name} | {list_samples(layout(plan))} | {plan.throughput.samples_per_second:,.0f} |"
        )
        print(f"{words} {plan.layout.share[1].ratio:.3f} | {speed_part(plan):.3f} |", flush=True)
    return plans[-1]


def compare_training(options: argparse.Namespace) -> None:
    """Plan a batch several times what fits; probe and train it in turns, so that both see the same
    machine.
    """
    fits = find_what_fits(options)
    plan = find_plan(options, BOTH, options.times * fits)
    said = plan.throughput.samples_per_second
    print(
        f"{fits} rows fit at once. {plan.layout.global_batch} rows: "
        f"{list_samples(layout(plan))}, {said:,.0f} a second."
    )
    print(
        "\n| round | probe, samples/s | training, samples/s | training / probe |\n| ---: | "
        "---: | ---: | ---: |"
    )
    for number in range(1, options.rounds + 1):
        _, probed = probe(options, BOTH, plan, RunLength(options.seconds))
        trained = train(options, plan)
        print(f"| {number} | {probed:,.0f} | {trained:,.0f} | {trained / probed:.3f} |", flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", nargs=2, default=["cpu:0", "cpu:1"], help="two of one speed")
    parser.add_argument(
        "--cap", default="300MiB", help="memory of a capped device, as behind @ in --devices"
    )
    parser.add_argument("--batch", type=int, default=2400, help="the fixed global batch")
    parser.add_argument(
        "--times", type=int, default=4, help="the large batch, in multiples of what fits"
    )
    parser.add_argument("--steps", type=int, default=300, help="of the capped plan")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of a probe and a training by the large plan"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of them")
    parser.add_argument("--budget", type=float, default=90.0, help="of each search, in seconds")
    parser.add_argument("--rows", type=int, default=40_000, help="of the data set")
    parser.add_argument("--rank-plan", help=argparse.SUPPRESS)
    return parser.parse_args()


def request(options: argparse.Namespace, devices: str) -> Request:
    """A search of the example's network on these devices."""
    return Request(
        devices.format(*options.devices, cap=options.cap),
        workload=WORKLOAD,
        framework="torch",
        settings={"rows": options.rows},
        budget_seconds=options.budget,
    )


def find_plan(options: argparse.Namespace, devices: str, batch: int) -> Plan:
    """The plan of a fixed global batch."""
    asked = msgspec.structs.replace(request(options, devices), global_batch=batch)
    session = Session(open_run(asked))
    (plan,) = [event.plan for event in session.events() if isinstance(event, Finished)]
    session.close()
    print(
        f"{asked.devices}, {batch}: {'; '.join(plan.warnings) or 'no warnings'}",
        file=sys.stderr,
        flush=True,
    )
    return plan


def find_what_fits(options: argparse.Namespace) -> int:
    """The rows that both capped devices hold at once, by a search of a free batch."""
    session = Session(open_run(msgspec.structs.replace(request(options, BOTH), micro="off")))
    for _ in session.events():
        pass
    session.close()
    return sum(curve.largest_batch or 0 for curve in session.search.belief().curves)


def speed_part(plan: Plan) -> float:
    """The second device's part of the samples/s of both, each alone at its fastest; 0 if one wasn't
    measured.
    """
    alone = [
        each.throughput.samples_per_second
        for each in plan.evidence
        if each.name.startswith(SOLO_PREFIX)
    ]
    return alone[1] / sum(alone) if len(alone) == 2 else 0.0


def layout(plan: Plan) -> Layout:
    """The plan's shares and passes."""
    return layout_of(plan.batches, tuple(share.micro for share in plan.layout.share))


def probe(
    options: argparse.Namespace, devices: str, plan: Plan, length: RunLength
) -> tuple[int, float]:
    """Steps and samples/s of a plan in children under their caps; NoLayoutError if one runs out of
    memory.
    """
    resolved, stop = take_in(request(options, devices)), threading.Event()
    with timed_runs(resolved, layout(plan), 1, length, stop) as runs:
        (run,) = runs
    return run.steps, run.samples_per_second


def train(options: argparse.Namespace, plan: Plan) -> float:
    """Samples/s of a training by the plan, over all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        path.write_bytes(to_toml(plan))
        words = ["-m", "benchmarks.passes", "--rank-plan", str(path), "--cap", options.cap]
        words += ["--seconds", str(options.seconds), "--rows", str(options.rows)]
        launch = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(len(plan.layout.active)),
        ]
        done = subprocess.run([sys.executable, *launch, *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"The training ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return float(done.stdout.split()[-1])


def train_rank(options: argparse.Namespace) -> None:
    """One rank: the example's loop with passes, under the cap of its device, for so many
    seconds.
    """
    import torch

    from evener.torch_split import Split
    from examples.torch_train import build

    split = Split(load_plan(options.rank_plan))
    model, _, criterion, data = build(options.rows)
    cap = parse_limit(options.cap).memory_bytes or 0
    if split.device.type == "cuda":
        whole = torch.cuda.get_device_properties(split.device).total_memory
        torch.cuda.set_per_process_memory_fraction(cap / whole, split.device)
    else:
        cap_address_space(cap)
    loader, model = split.loader(data, seed=0, drop_last=True), split.wrap(model)
    optimizer = torch.optim.Adam(model.parameters())
    steps, began, seconds = 0, 0.0, 0.0
    while split.total(seconds < options.seconds):
        for batch in loader:
            optimizer.zero_grad()
            for part in split.parts(batch):
                images, labels = part.batch
                part.backward(criterion(model(images), labels))
            optimizer.step()
        steps += len(loader)
        began = began or time.monotonic()  # the first epoch allocates
        seconds = time.monotonic() - began
    if split.rank == 0:
        print((steps - len(loader)) * split.global_batch / seconds)
    split.close()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    main()
