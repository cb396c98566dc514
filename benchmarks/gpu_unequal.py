"""Measure `evener run` without a plan on GPUs of unequal speed.

  python -m benchmarks.gpu_unequal --out FOLDER

MPS limits four GPUs of one host to 100, 60, 40 and 25 % (`--parts`). They train in TF32: a DDP loop
with a decoder of 34 million parameters; a Llama of 106 million by transformers.Trainer, by
accelerate, by Lightning, and by TRL's SFTTrainer with LoRA. Each program runs under `evener run`,
under torchrun, and under `evener run --plan` with shares that follow from each device's compute
time (own work). Then three programs run on equal GPUs for 1,000 steps, in which shares must not
change: the loop, a host-bound model and an input-bound one. `watched` is the loop once more, long
enough to look at; it runs only if `--cases` names it. The next program imports its libraries while
one trains. Each result is printed at once and kept in FOLDER/gpu_unequal.json; cases that don't
start within `--seconds` are skipped. `--kind cpu` tries it with tiny sizes on CPU slices
(`--parts 100,50`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.gpu_bench import mps_daemon
from evener.plan.file import load_plan
from evener.plan.solver import solve_shares
from evener.shares.curves import Curve
from tests.support.torch_start import free_port

HERE = Path(__file__).parent
JOBS = HERE / "unequal_jobs"
NEEDED = ("msgspec", "tomli_w", "typer", "rich", "psutil", "platformdirs", "wrapt", "torch")
LOOP = {"WIDTH": 512, "LAYERS": 8, "LENGTH": 256, "ROWS": 128, "WORDS": 8192}
LLAMA = {"WIDTH": 768, "LAYERS": 8, "LENGTH": 256, "ROWS": 48, "WORDS": 32000}
TINY = {"WIDTH": 64, "LAYERS": 8, "LENGTH": 32, "ROWS": 8, "WORDS": 512}
CPU = {"WIDTH": 64, "LAYERS": 1, "LENGTH": 16, "ROWS": 16, "WORDS": 256}
FIRST = 10  # steps that count for no rate
LAST = 40  # steps over which the samples/s are taken
NEAR_FROM = 60  # step from which shares should be near the best
LONGEST_SECONDS = 110.0  # time limit of one training run
WAYS = ("run", "own", "plan")  # a plan needs the compute times that evener run measures
WATCHED, WATCHED_STEPS = "watched", 900
NO_PLAN = {"failed": "no own work is known to make a plan of"}


class Case(NamedTuple):
    """A training run: its program, its launcher, its sizes and the number of steps."""

    name: str
    program: str
    way: str  # launcher: own, run or plan
    sizes: dict[str, int]
    steps: int
    unequal: bool
    input_seconds: float = 0.0  # seconds for a loader worker to read a row


class Started(NamedTuple):
    """The launcher of a training run, which waits for the file `gate` in its folder."""

    case: Case
    process: subprocess.Popen[bytes]
    folder: Path


def list_cases(kind: str) -> list[Case]:
    """Return the training runs in the order of their value."""
    loop, llama, tiny = (LOOP, LLAMA, TINY) if kind == "gpu" else (CPU, CPU, CPU)
    few, many, calm = (50, 130, 1000) if kind == "gpu" else (40, 160, 320)
    equal = {**loop, "ROWS": 48} if kind == "gpu" else loop
    programs = {"loop": loop, "trainer": llama, "accelerated": llama, "lit": llama, "sft": llama}
    compared = [
        Case(name, name, way, sizes, many if way == "run" else few, True)
        for name, sizes in programs.items()
        for way in WAYS
    ]
    return [
        *compared,
        Case("equal", "loop", "run", equal, calm, False),
        Case("host-bound", "loop", "run", tiny, calm, False),
        Case("host-bound", "loop", "own", tiny, calm, False),
        Case("input-bound", "loop", "run", tiny, calm, False, 0.005),
        Case("equal", "loop", "own", equal, few, False),
        Case(WATCHED, "loop", "run", loop, WATCHED_STEPS, True),
    ]


def main() -> None:
    """Run the cases that fit in the time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", default="gpu", choices=("gpu", "cpu"))
    parser.add_argument("--parts", default="100,60,40,25", help="of each GPU, in percent")
    parser.add_argument("--seconds", type=float, default=450.0, help="for all of it")
    parser.add_argument("--cases", default="", help="names, or name:way; all unless given")
    options = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"This Python has no {', '.join(missing)}: put them on PYTHONPATH.")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the daemon, too
    with contextlib.ExitStack() as stack:
        variables = {}
        if options.kind == "gpu":
            # the path must be short for a socket
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mps-"))
            variables = stack.enter_context(mps_daemon(Path(folder)))
        Bench(options, variables).run()


class Bench:
    """Runs the cases and keeps their results."""

    def __init__(self, options: argparse.Namespace, variables: dict[str, str]) -> None:
        self._options, self._variables = options, variables
        self._parts = options.parts.split(",")
        self._world = len(self._parts)
        self._ends = time.monotonic() + options.seconds
        self._found: dict[tuple[str, str], dict[str, Any]] = {}

    def run(self) -> None:
        """Run the requested cases and print each result.

        The case after one is started with it, and waits for its end.
        """
        wanted = set(filter(None, self._options.cases.split(",")))
        cases = [case for case in list_cases(self._options.kind) if _is_wanted(case, wanted)]
        running: list[Started] = []
        try:
            for number, case in enumerate(cases):
                if self._ends - time.monotonic() < 20:
                    print(f"{case.name} by {case.way}: no time left", flush=True)
                    continue
                started = running.pop() if running else self._start(case)
                if started is not None:
                    (started.folder / "gate").touch()
                if number + 1 < len(cases):
                    following = self._start(cases[number + 1])
                    running = [following] if following else []
                self._keep(case, self._end(started) if started else NO_PLAN)
        finally:
            for waiting in running:
                _stop(waiting.process)

    def _keep(self, case: Case, found: dict[str, Any]) -> None:
        """Print and save a result."""
        self._found[case.name, case.way] = found
        print(json.dumps({"case": case.name, "way": case.way, **_short(found)}), flush=True)
        kept = [{"case": key[0], "way": key[1], **each} for key, each in self._found.items()]
        (self._options.out / "gpu_unequal.json").write_text(json.dumps(kept, indent=1))
        self._compare(case.name)

    def _compare(self, name: str) -> None:
        """Print the ratios of a case's launchers that are known by now."""
        run, own, plan = (self._found.get((name, way), {}) for way in ("run", "own", "plan"))
        words = []
        if run.get("last") and own.get("last"):
            words.append(f"{run['last'] / own['last'] - 1:+.1%} over its own launcher")
        if run.get("near") and plan.get("last"):
            words.append(f"{run['near'] / plan['last']:.3f} of the plan from step {NEAR_FROM}")
            words.append(f"{run['last'] / plan['last']:.3f} at the end")
        if plan.get("last") and own.get("last"):
            words.append(f"the plan {plan['last'] / own['last'] - 1:+.1%}")
        if words:
            print(f"== {name}: {', '.join(words)}", flush=True)

    def _start(self, case: Case) -> Started | None:
        """Start a training run, which waits for its gate; None if it needs an unknown plan."""
        folder = self._options.out / f"{case.name}-{case.way}"
        shutil.rmtree(
            folder, ignore_errors=True
        )  # else evener run would start with the shares saved here
        folder.mkdir()
        words = ["torch.distributed.run", "--nproc-per-node", str(self._world)]
        words += ["--master-port", str(free_port())]
        if case.way != "own":
            kind = self._options.kind
            devices = ",".join(f"gpu:{each}" for each in range(self._world))
            shares = ["--devices", devices if kind == "gpu" else f"cpu/{self._world}"]
            if case.way == "plan":
                plan = self._make_plan(self._found.get((case.name, "run"), {}).get("table", []))
                if not plan:
                    return None
                (folder / "plan.toml").write_text(plan)
                shares = ["--plan", str(folder / "plan.toml")]
            words = ["evener", "run", *shares, "--", sys.executable]
        with (folder / "log.txt").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *words, f"{case.program}.py"],
                cwd=JOBS,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=self._environment(case, folder),
            )
        return Started(case, process, folder)

    def _end(self, started: Started) -> dict[str, Any]:
        """Wait for a training run's exit, and read its results."""
        began = time.monotonic()
        try:
            code = started.process.wait(min(self._ends - began, LONGEST_SECONDS))
        except BaseException as error:
            _stop(started.process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = -1
        found = {"code": code, "took_s": round(time.monotonic() - began, 1)}
        log = (started.folder / "log.txt").read_text()
        return {**found, **self._read(started.case, started.folder, log)}

    def _environment(self, case: Case, folder: Path) -> dict[str, str]:
        parts = self._parts if case.unequal else ["100"] * self._world
        paths = (str(HERE.parent), os.environ.get("PYTHONPATH", ""))
        own = {
            **{name: str(size) for name, size in case.sizes.items()},
            "COUNT": str(case.steps),
            "PARTS": ",".join(parts),
            "FOLDER": str(folder),
            "GATE": str(folder / "gate"),
            "INPUT_SECONDS": str(case.input_seconds),
            "XDG_STATE_HOME": str(folder / "state"),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "NCCL_NVLS_ENABLE": "0",
            "HF_HUB_OFFLINE": "1",
        }
        return {**os.environ, **self._variables, **own}

    def _read(self, case: Case, folder: Path, log: str) -> dict[str, Any]:
        """Read the samples/s, share changes, memory and messages of a finished training run."""
        ranks = []
        for rank in range(self._world):
            with contextlib.suppress(OSError, ValueError):
                ranks.append(json.loads((folder / f"{rank}.json").read_text()))
        said = [line for line in log.splitlines() if "evener" in line or "->" in line]
        table = _read_table(folder / "state")
        found: dict[str, Any] = {"table": table, "said": said[-12:]}
        if not ranks or len(ranks[0]["ends"]) <= LAST // 2:
            return {**found, "failed": log[-1500:]}
        steps = [after - before for before, after in pairwise(ranks[0]["ends"])]
        rows = case.sizes["ROWS"] * self._world
        near = steps[NEAR_FROM : NEAR_FROM + LAST]
        found |= {
            "first": round(rows / median(steps[2:10]), 1),
            "near": round(rows / median(near), 1) if len(near) > LAST // 2 else None,
            "last": round(rows / median(steps[FIRST:][-LAST:]), 1),
            "changes": list(_read_changes(folder / "state")),
            "rates_of_tens": [
                round(rows / median(steps[at : at + 10])) for at in range(0, len(steps) - 9, 10)
            ][:20],
        }
        if "total" in ranks[0]:
            found["memory"] = [
                f"{each['allocated'] / 2**30:.1f} GiB taken, {each['reserved'] / 2**30:.1f} kept: "
                f"{each['reserved'] / each['total']:.1%}"
                for each in ranks
            ]
        return found

    def _make_plan(self, table: list[dict[str, Any]]) -> str:
        """Make a plan of the fastest shares by the compute times at two sizes of a share."""
        if len(table) != self._world:
            return ""
        curves = [_draw_line(each) for each in table]
        batch = sum(each["first"] for each in table)
        found = solve_shares(curves, batch, (0,) * len(curves), False)
        assert found is not None
        share = '[[layout.share]]\ndevice = "{}"\nbatch = {}\n'
        return "".join(
            share.format(each["device"], rows) for each, rows in zip(table, found, strict=True)
        )


def _is_wanted(case: Case, wanted: set[str]) -> bool:
    """True if `--cases` names this case, or names none and this isn't the one to look at."""
    if not wanted:
        return case.name != WATCHED
    return bool({case.name, f"{case.name}:{case.way}"} & wanted)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate a launcher, which ends its ranks; kill it if it doesn't exit."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _draw_line(seen: dict[str, Any]) -> Curve:
    """Return the compute time by rows as a line through the times at two sizes of a share.

    If both sizes are about the same, the time is taken to be proportional to rows.
    """
    rows, more = seen["first"], seen["last"]
    seconds, after = seen["first_ms"] / 1e3, seen["last_ms"] / 1e3
    if abs(more - rows) < 0.1 * rows:
        return Curve((0.0,), (0.0,), after / more)
    slope = min(max((after - seconds) / (more - rows), 0.0), after / more)
    return Curve((0.0,), (after - slope * more,), max(slope, 1e-9))


def _read_table(state: Path) -> list[dict[str, Any]]:
    """Read devices, shares and compute times from the training run's summary and plan."""
    for path in sorted(state.glob("evener/runs/*/summary.json")):
        first = json.loads(path.read_text())["first"]
        plan = path.with_name("plan.toml")
        if first is None or not plan.exists():
            continue
        return [
            {
                "device": share.device,
                "first": first["shares"][rank],
                "first_ms": 1e3 * first["own_work_s"][rank],
                "last": share.batch,
                "last_ms": 1e3 * first["last_own_work_s"][rank],
            }
            for rank, share in enumerate(load_plan(plan).layout.active)
        ]
    return []


def _read_changes(state: Path) -> Iterator[str]:
    """Yield each change of shares in the training run's journal, with its first step."""
    for path in sorted(state.glob("evener/runs/*/training.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if entry.get("entry") == "changed":
                change = entry["change"]
                yield f"step {change['step']}: {'+'.join(map(str, change['after']))}"


def _short(found: dict[str, Any]) -> dict[str, Any]:
    """Return what is printed of a result: its rates first, what evener said last."""
    shown = {name: each for name, each in found.items() if name not in ("table", "said")}
    return {**shown, "said": found.get("said")}


if __name__ == "__main__":
    main()
