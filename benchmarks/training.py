"""Check whether training runs as fast as its plan says.

  python -m benchmarks.training --framework torch --devices cpu:0,1

Each round finds a plan (`evener balance --export`) and trains by it with the example script. With
`--one-plan`, all rounds use the first plan, and each round probes its shares again just before
training: on a machine with other users, both are slowed equally. Prints a row per round: plan |
training | ratio.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from evener.plan.file import Plan, load_plan

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
WORKLOADS = {"tensorflow": "keras_mnist", "torch": str(EXAMPLES / "torch_train.py") + ":build"}
RATE = re.compile(r"([\d,]+) samples/s over")


def main() -> None:
    """Plan, train and compare in rounds."""
    options = parse()
    print("| round | shares | plan, samples/s | training, samples/s | training / plan |")
    print("| ---: | --- | ---: | ---: | ---: |")
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, options.repeat + 1):
            path = Path(folder) / f"plan-{1 if options.one_plan else number}.toml"
            if not path.exists():
                balance(options, path)
            plan = load_plan(path)
            said = probe(options, plan) if options.one_plan else plan.throughput.samples_per_second
            trained = train(options, path)
            ratios.append(trained / said)
            shares = " + ".join(str(share) for share in plan.layout.batches)
            print(
                f"| {number} | {shares} | {said:,.0f} | {trained:,.0f} | {ratios[-1]:.3f} |",
                flush=True,
            )
    print(
        f"\nMedian ratio {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}."
    )


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--framework", choices=list(WORKLOADS), default="tensorflow")
    parser.add_argument("--devices", default="cpu:0,1")
    parser.add_argument("--workload", help="keras_mnist, keras_maxer, or a function of an example")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each training")
    parser.add_argument("--budget", default="90s", help="of each search")
    parser.add_argument(
        "--rows", type=int, help="of the data set; the example's own number by default"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--one-plan",
        action="store_true",
        help="use one plan for all rounds; probe it before each training",
    )
    parser.add_argument(
        "--balance",
        nargs="*",
        default=[],
        metavar="WORD",
        help="more options for evener balance, without --",
    )
    options = parser.parse_args()
    options.workload = options.workload or WORKLOADS[options.framework]
    options.more = (
        ["--set", f"rows={options.rows}"] if options.rows and ":" in options.workload else []
    )
    return options


def asked(options: argparse.Namespace) -> list[str]:
    """Return the arguments that balance and probe share."""
    return [
        "--devices",
        options.devices,
        "--workload",
        options.workload,
        "--framework",
        options.framework,
        *options.more,
    ]


def run(command: list[str]) -> str:
    """Return a command's output; raise SystemExit with its errors if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with "
            f"{done.returncode}:\n{done.stderr[-3000:]}{done.stdout[-2000:]}"
        )
    return done.stdout


def balance(options: argparse.Namespace, path: Path) -> None:
    """Find a plan and write it to `path`."""
    more = [f"--{word}" if i % 2 == 0 else word for i, word in enumerate(options.balance)]
    command = [
        sys.executable,
        "-m",
        "evener",
        "balance",
        *asked(options),
        "--budget",
        options.budget,
        *more,
    ]
    run([*command, "--json", "--export", str(path)])


def probe(options: argparse.Namespace, plan: Plan) -> float:
    """Return the samples/s of the plan's shares in a probe on the plan's devices now."""
    active = [
        (str(i), str(share.batch)) for i, share in enumerate(plan.layout.share) if share.batch
    ]
    positions, batches = zip(*active, strict=True)
    command = [
        sys.executable,
        "-m",
        "evener",
        "probe",
        *asked(options),
        "--gpus",
        *positions,
        "--batches",
        *batches,
    ]
    answer = json.loads(
        run([*command, "--seconds", f"{options.seconds:g}s", "--repeat", "1", "--json"])
    )
    return float(answer["runs"][0]["samples_per_second"])


def train(options: argparse.Namespace, path: Path) -> float:
    """Return the samples/s of the example script with the plan."""
    script = EXAMPLES / ("torch_train.py" if options.framework == "torch" else "keras_train.py")
    rows = ["--rows", str(options.rows)] if options.rows else []
    launch = [sys.executable, "-m", "evener", "launch", str(path), str(script)]
    text = run([*launch, "--seconds", f"{options.seconds:g}", *rows])
    found = RATE.findall(text)
    if not found:
        raise SystemExit(f"The example says no samples/s:\n{text[-2000:]}")
    return float(found[-1].replace(",", ""))


if __name__ == "__main__":
    main()
