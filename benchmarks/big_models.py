"""Plan models that no card holds, and train them by the plan, on cards with capped memory.

  python -m benchmarks.big_models [full1b | full3b | lora | qlora] --gib 5,3 [--budget 120s]

`full1b` and `full3b` train all parameters of Llamas of 1.1 and 3.1 billion, `lora` adapters beside
3 billion in bfloat16, and `qlora` adapters beside 8.1 billion in 4 bits. A search gets the budget;
then transformers' Trainer trains by its plan, and by a plan of equal shards. `--gib` has the memory
of each GPU. Prints the plan, how long it took, what both trained, and the peaks of PyTorch's
allocator beside those of the plan. `--tiny` tries it on two slices of the CPU, without caps.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from evener.plan.file import Plan, load_plan, to_toml

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "benchmarks" / "big_jobs" / "big.py"
WARM_UP = 10  # steps that aren't timed
ENDS_AFTER = 30.0  # seconds that a search may take beyond its budget


class BigModel(NamedTuple):
    """The sizes of a Llama, and whether only adapters are trained."""

    width: int
    layers: int
    mlp: int
    adapters: bool = False
    key_heads: int = 64  # at most as many as attention heads
    words: int = 32_000
    tokens: int = 256


CASES = {
    "full1b": BigModel(2048, 20, 5632),
    "full3b": BigModel(3072, 26, 8192),
    "lora": BigModel(3072, 26, 8192, adapters=True),
    "qlora": BigModel(4096, 32, 14336, adapters=True, key_heads=8),
}
TINY = BigModel(128, 2, 256, words=256, tokens=16)  # of every case


def run(words: Sequence[str], seconds: float, variables: dict[str, str]) -> str:
    """Run a command and return its output; kill it and its children if it takes longer."""
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "evener", *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": _python_path(), "HF_HUB_OFFLINE": "1", **variables},
            start_new_session=True,
        )
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            print(f"killed after {seconds:.0f} s")
        output.seek(0)
        return output.read()


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def train(name: str, plan: Path, variables: dict[str, str], seconds: float) -> None:
    """Train with a plan, and print its speed and each rank's peak memory."""
    output = run(("launch", str(plan), str(PROGRAM)), seconds, variables)
    shares = load_plan(plan).layout.share
    ranks = [json.loads(each) for each in re.findall(r'\{"rank".*\}', output)]
    if not ranks:
        failed = re.findall(r"^.*(?:Error|out of memory|killed).*$", output, re.MULTILINE)
        print(f"{name}: no figure; {' | '.join(failed[-3:])[:600] or output[-600:]}")
        return
    step = max(median(rank["seconds"][WARM_UP:] or rank["seconds"]) for rank in ranks)
    batch = sum(share.batch for share in shares)
    print(f"{name}: {batch / step:.2f} samples/s; {1e3 * step:.0f} ms a step")
    taking_part = [share for share in shares if share.batch or share.state]
    for rank, share in zip(sorted(ranks, key=lambda each: each["rank"]), taking_part, strict=True):
        print(f"  device {share.index}: peak {describe_peak(rank['peak'], share.peak_bytes)}")


def describe_peak(peak: int, planned: int) -> str:
    """Return a rank's peak memory, and its part of the plan's if the plan has one."""
    beside = f", {peak / planned:.3f} of the plan's" if planned else ""
    return f"{peak / 2**30:.2f} GiB{beside}"


def make_equal(plan: Plan) -> Plan:
    """Return the plan with equal shares and, of a model in shards, equal parts of the state."""
    shares = plan.layout.share
    rows = max(1, sum(share.batch for share in shares) // len(shares))
    state = 1 / len(shares) if any(share.state for share in shares) else 0.0
    equal = tuple(
        msgspec.structs.replace(
            share, batch=rows, micro=rows, ratio=1 / len(shares), state=state, peak_bytes=0
        )
        for share in shares
    )
    layout = msgspec.structs.replace(
        plan.layout,
        kind="shard" if state else "split",
        share=equal,
        global_batch=rows * len(shares),
    )
    return msgspec.structs.replace(plan, layout=layout)


def measure(case: str, gib: str, options: Any, folder: Path) -> None:
    """Search, then train by the plan and by equal shares."""
    limits = gib.split(",")
    variables = {"BIG_MODEL": case, "GIB": gib, "FOLDER": str(folder), "STEPS": str(options.steps)}
    devices = ",".join(f"gpu:{gpu}@{limit}GiB" for gpu, limit in enumerate(limits))
    if options.tiny:
        variables |= {"TINY": "1", "GIB": ""}
        devices = "cpu/2"
    path = folder / "plan.toml"
    words = ("--workload", f"{PROGRAM}:build", "--devices", devices, "--budget", options.budget)
    began = time.monotonic()
    seconds = float(options.budget.rstrip("s")) + ENDS_AFTER
    more = ("--max-global-batch", "64", "--export", str(path))
    print(run(("balance", *words, *more), seconds, variables), flush=True)
    took = time.monotonic() - began
    if not path.exists():
        print(f"{case} on {gib} GiB: no plan after {took:.0f} s")
        return
    print(f"{case} on {gib} GiB: a plan after {took:.0f} s")
    train("by the plan", path, variables, options.seconds)
    even = folder / "even.toml"
    even.write_bytes(to_toml(make_equal(load_plan(path))))
    train("equal shares", even, variables, options.seconds)


def main() -> None:
    """Measure the named case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--gib", default="5,3", help="memory of each GPU, separated by commas")
    parser.add_argument("--budget", default="120s", help="of the search, in seconds")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=90.0, help="time limit of a training")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(options.case, options.gib, options, Path(folder))


if __name__ == "__main__":
    main()
