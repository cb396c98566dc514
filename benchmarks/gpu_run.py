"""Compare `evener run` with each program's own launcher.

  python -m benchmarks.gpu_run --out FOLDER [--kind cpu]

The unchanged programs of benchmarks/run_jobs train on two devices: equal ones (overhead), and with
the second one at 60 % (gain without a plan). Each is also trained with the shares that follow from
both devices' compute times (own work) at equal shares, as in a plan of `evener balance`. Times are
those of optimizer steps; the own launcher and evener run take turns (`--turns`), and
neighbouring turns are compared. Cases run in the order of their value; cases that don't start
within `--seconds` are skipped. With `--ahead`, the next program imports its libraries while one
trains, and then waits. With `--kind cpu`, each rank has half of this process's cores under either
launcher, and one thread unless `--threads` says otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_bench import mps_daemon
from evener.system.cores import slice_cores

HERE = Path(__file__).parent
SIZES = {
    "gpu": {"WIDTH": "768", "LAYERS": "8", "LENGTH": "128", "ROWS": "32", "COUNT": "105"},
    "cpu": {"WIDTH": "128", "LAYERS": "2", "LENGTH": "64", "ROWS": "16", "COUNT": "100"},
}
PLAN = '[[layout.share]]\ndevice = "{}"\nbatch = {}\n[[layout.share]]\ndevice = "{}"\nbatch = {}\n'
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus", "2"],
}
CASES = "loop:60,loop:100,trainer:60,accelerated:60"
WINDOW, SECONDS = 40, 100


def main() -> None:
    """Run the cases and write gpu_run.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", default="gpu", choices=("gpu", "cpu"))
    parser.add_argument("--seconds", type=float, default=190.0)
    parser.add_argument(
        "--cases",
        default=CASES,
        help="programs of run_jobs, and the percentage of the second device (sharded: FSDP2; "
        "zero: DeepSpeed, of the stage in ZERO_STAGE)",
    )
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument(
        "--plans", type=int, default=99, help="turns with a run by a plan; else its last one counts"
    )
    parser.add_argument("--count", default="", help="steps of a program")
    parser.add_argument("--length", default="", help="tokens of a row")
    parser.add_argument("--width", default="", help="of the model")
    parser.add_argument(
        "--ahead", action="store_true", help="start the next program while one trains"
    )
    parser.add_argument("--threads", default="1", help="of a rank")
    parser.add_argument(
        "--launcher",
        default="torchrun",
        choices=tuple(LAUNCHERS),
        help="the program's own launcher; with deepspeed, evener run starts this launcher",
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    with bench.limits() as variables:
        try:
            bench.measure(variables)
        finally:
            bench.close()
    bench.summarize()


class Job(NamedTuple):
    """A training run: the program, the second device's percentage, the launcher and the turn.

    `way` is "own" (the program's launcher), "run" (evener run) or "plan".
    """

    name: str
    percent: str
    way: str
    turn: int

    @property
    def case(self) -> tuple[str, str]:
        """The program and percentage; only runs of the same case are compared."""
        return self.name, self.percent


class Started(NamedTuple):
    """The processes of a training run, which wait for the file `gate`."""

    job: Job
    process: subprocess.Popen[bytes]
    folder: Path
    plan: str


class Bench:
    """Runs the cases and saves the results after each of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._ends = options, time.monotonic() + options.seconds
        self._found: list[dict[str, Any]] = []
        self._pairs: list[dict[str, Any]] = []
        self._newest: dict[
            tuple[str, str, str], dict[str, Any]
        ] = {}  # the latest result of each case and launcher
        self._running: list[subprocess.Popen[bytes]] = []
        # devices, and the cores of ranks started by the program's own launcher
        self._devices, self._cores = ("gpu:0,gpu:1", "")
        if options.kind == "cpu":
            allowed = os.sched_getaffinity(0)
            self._devices = "cpu/2"
            self._cores = ";".join(
                ",".join(map(str, slice_cores(f"cpu-{i}-of-2", allowed))) for i in range(2)
            )

    def limits(self) -> contextlib.AbstractContextManager[dict[str, str]]:
        """Return a context in which GPUs can be limited to a percentage."""
        return (
            contextlib.nullcontext({})
            if self._options.kind == "cpu"
            else mps_daemon(self._options.out / "mps")
        )

    def measure(self, variables: dict[str, str]) -> None:
        """Train each program by evener run, by its own launcher, and by a plan."""
        jobs = self._jobs()
        ahead = self._start(jobs[0], variables)
        for job, following in zip(jobs, [*jobs[1:], None], strict=True):
            current, early = ahead, self._options.ahead
            if current is not None:
                (current.folder / "gate").touch()
            ahead = self._start(following, variables) if following and early else None
            if current is not None:
                self._newest[*job.case, job.way] = self._end(current)
            if following is None or (following.case, following.turn) != (job.case, job.turn):
                self._compare(job)
            if following and not early:
                ahead = self._start(following, variables)

    def close(self) -> None:
        """Stop the processes that still run."""
        for process in self._running:
            process.terminate()  # the launcher stops its ranks, which have their own sessions
        for process in self._running:
            process.wait(30)

    def _jobs(self) -> list[Job]:
        """Return all training runs in order.

        A run by a plan comes last in its turn, because the plan is made from the results of evener
        run.
        """
        jobs = []
        for turn in range(self._options.turns):
            for case in self._options.cases.split(","):
                name, percent = case.split(":")
                ways = ["run", "own"] if turn % 2 == 0 or percent != "100" else ["own", "run"]
                ways += ["plan"] * (turn < self._options.plans and percent != "100")
                jobs += [Job(name, percent, way, turn) for way in ways]
        return jobs

    def _compare(self, job: Job) -> None:
        """Save the ratios of a turn's training runs."""
        own, ours, plan = (self._newest.get((*job.case, way), {}) for way in ("own", "run", "plan"))
        if (
            {own.get("turn"), ours.get("turn")} == {job.turn}
            and own.get("last_ms")
            and ours.get("last_ms")
        ):
            line = {
                "program": job.name,
                "percent": job.percent,
                "gain": own["last_ms"] / ours["last_ms"] - 1,
            }
            line["cpu"] = ours["cpu_ms"] / own["cpu_ms"] - 1
            if plan.get("last_ms"):
                line["of_plan"] = plan["last_ms"] / ours["last_ms"]
                line["steps_to_95"] = _steps_to(ours["steps_ms"], plan["last_ms"] / 0.95)
            self._pairs.append(line)
            self._keep(line)

    def summarize(self) -> None:
        """Print the median ratios of each case."""
        for case in dict.fromkeys((each["program"], each["percent"]) for each in self._pairs):
            pairs = [each for each in self._pairs if (each["program"], each["percent"]) == case]
            names = [name for name in ("gain", "of_plan", "steps_to_95", "cpu") if name in pairs[0]]
            found = {
                name: [round(each[name], 4) for each in pairs if name in each] for name in names
            }
            print(
                *case,
                {name: (round(statistics.median(each), 4), each) for name, each in found.items()},
                flush=True,
            )

    def _plan(self, said: str) -> str:
        """Make a plan from evener's compute times at equal shares; return "" if there are none."""
        found = re.findall(r"\(((?:GPU|cpu)-[^)\s]+)\)\s+(\d+)\s+([\d.]+) ms", said)
        if len(found) != 2:
            return ""
        (one, rows, first), (other, more, second) = found
        speeds, total = (int(rows) / float(first), int(more) / float(second)), int(rows) + int(more)
        share = round(total * speeds[0] / sum(speeds))
        return PLAN.format(one, share, other, total - share)

    def _start(self, job: Job, variables: dict[str, str]) -> Started | None:
        """Start a training run, which waits for its gate.

        Returns None if the time is over, or if a plan is wanted and the compute times aren't known.
        """
        seen = self._newest.get((*job.case, "run"), {}).get("said", "")
        plan = self._plan(seen) if job.way == "plan" else ""
        if time.monotonic() > self._ends or (job.way == "plan" and not plan):
            return None
        folder = self._options.out / f"{job.name}-{job.percent}-{job.way}{job.turn}"
        folder.mkdir(exist_ok=True)
        script = str(HERE / "run_jobs" / f"{job.name}.py")
        launcher = self._options.launcher
        words = [*LAUNCHERS[launcher], script]
        if job.way != "own":
            (folder / "plan.toml").write_text(plan)
            shares = ["--plan", str(folder / "plan.toml")] if plan else ["--devices", self._devices]
            program = [script] if launcher == "torchrun" else words
            words = ["-m", "evener", "run", *shares, "--", sys.executable, *program]
        places = {
            "XDG_STATE_HOME": folder / "state",
            "STEPS": folder / "steps",
            "FOLDER": folder,
            "GATE": folder / "gate",
        }
        own = {name: str(place) for name, place in places.items()}
        own |= {
            "SLOWED": f"100,{job.percent} {self._options.kind}",
            "CORES": self._cores if job.way == "own" else "",
        }
        with (folder / "log.txt").open("w") as output:
            pipes: Any = {"stdout": output, "stderr": output, "start_new_session": True}
            process = subprocess.Popen(
                [sys.executable, *words], env={**self._environment(), **own, **variables}, **pipes
            )
        self._running.append(process)
        return Started(job, process, folder, plan)

    def _environment(self) -> dict[str, str]:
        """Return the environment variables that all training runs share."""
        options = self._options
        paths = (str(HERE / "slowed"), str(HERE.parent), os.environ.get("PYTHONPATH", ""))
        common = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
        given = {"COUNT": options.count, "LENGTH": options.length, "WIDTH": options.width}
        sizes = {**SIZES[options.kind], **{key: value for key, value in given.items() if value}}
        return {**os.environ, **common, **sizes, "OMP_NUM_THREADS": options.threads}

    def _end(self, started: Started) -> dict[str, Any]:
        """Wait for a training run to exit, and read its step times."""
        began, (job, process, folder, plan) = time.monotonic(), started
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = -1
            process.terminate()
            process.wait(30)
        self._running.remove(process)
        ends, processor = (
            [float(each) for each in line.split()]
            for line in (_text(folder / "steps") or "\n").split("\n")
        )
        steps, work = ([1e3 * (b - a) for a, b in pairwise(each)] for each in (ends, processor))
        found = {"program": job.name, "percent": job.percent, "way": job.way, "turn": job.turn}
        found |= {"code": code, "took_s": time.monotonic() - began}
        if len(steps) > WINDOW:
            found |= {
                "first_ms": statistics.median(steps[5:25]),
                "last_ms": statistics.median(steps[-WINDOW:]),
            }
            found["cpu_ms"] = statistics.median(work[-WINDOW:])
        lines = _text(folder / "log.txt").splitlines()
        said = "\n".join(
            line for line in lines if "evener" in line or "rows" in line or "Error" in line
        )
        found |= {
            "said": said[-2500:],
            "plan": plan,
            "steps_ms": [round(each, 2) for each in steps],
        }
        self._keep(found)
        return found

    def _keep(self, found: dict[str, Any]) -> None:
        self._found.append(found)
        (self._options.out / "gpu_run.json").write_text(json.dumps(self._found, indent=1))
        print(
            {name: each for name, each in found.items() if name not in ("steps_ms", "plan")},
            flush=True,
        )


def _steps_to(steps: list[float], most_ms: float) -> int:
    """Return the first step from which the median of ten steps is at most `most_ms`; -1 if none."""
    windows: Iterator[int] = (
        n for n in range(len(steps) - 9) if statistics.median(steps[n : n + 10]) <= most_ms
    )
    return next(windows, -1)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    main()
