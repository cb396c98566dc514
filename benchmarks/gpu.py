"""Runs evener on NVIDIA GPUs and keeps what it said: `python -m benchmarks.gpu --out DIR --framework torch SECTION...`.

Every figure comes from the command that a user would type. Limits make equal GPUs unequal: a percentage of the
multiprocessors under an MPS daemon that is started here and ended here, and the framework's memory limit. GPU settings
are never touched. `python -m benchmarks.gpu_table DIR...` turns the answers into docs/benchmarks/gpu.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOAD = """
import sys, time, torch
size = 8192
a = torch.randn(size, size, device="cuda:" + sys.argv[1], dtype=torch.bfloat16)
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
"""
PAIR = "gpu:0,1"
CAPPED = "gpu:0@8GiB,gpu:1@5GiB"
WORKLOADS = {"tensorflow": ("keras_mnist", "keras_maxer"), "torch": ("torch_mnist", "torch_maxer")}


def slowed(percent: int) -> str:
    """Both GPUs, the second at a share of its multiprocessors."""
    return f"gpu:0,gpu:1@{percent}%"


class Bench:
    """Runs commands, each with its own time limit, and keeps their answers by name."""

    def __init__(self, out: Path, framework: str, match: str = "", train_seconds: float = 60.0) -> None:
        self.out, self.framework, self.match = out, framework, match
        self.train_seconds = train_seconds
        self.answers: dict[str, Any] = {}
        self.state = out / f"state-{framework}"
        path = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH", ""))))
        self.environment = {
            **os.environ,
            "XDG_STATE_HOME": str(self.state),
            "NCCL_NVLS_ENABLE": "0",
            "PYTHONPATH": path,
        }

    def run(self, name: str, *arguments: str, seconds: float = 200.0, env: dict[str, str] | None = None) -> Any:
        """One evener command: its JSON answer, or what went wrong, kept under `name`, if the name is wanted."""
        if self.match not in name:
            return {}
        command = [sys.executable, "-m", "evener", *arguments]
        began = time.monotonic()
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, env={**self.environment, **(env or {})}
            )
            code, out, err = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as late:
            code, out, err = -1, _text(late.stdout), f"{_text(late.stderr)}\nover {seconds:.0f} s"
        took = time.monotonic() - began
        answer = _parse(out)
        self.answers[name] = {
            "command": ["evener", *arguments],
            "exit_code": code,
            "seconds": round(took, 2),
            "answer": answer,
            "stderr": err[-6000:],
        }
        print(f"{took:7.1f} s  exit {code}  {name}: {_headline(answer)}", flush=True)
        self.save()
        return answer

    def save(self) -> None:
        """Everything so far, so that a run cut short keeps what it had."""
        target = self.out / f"gpu-{self.framework}.json"
        target.write_text(json.dumps(self.answers, indent=1))

    def pack_journals(self) -> None:
        """The journals in one file."""
        with tarfile.open(self.out / f"journals-{self.framework}.tar.gz", "w:gz") as archive:
            for journal in sorted(self.state.glob("evener/runs/*/journal.jsonl")):
                archive.add(journal, journal.relative_to(self.state / "evener" / "runs"))

    def balance(self, name: str, devices: str, workload: str, *more: str, budget: str = "45s", **options: Any) -> Any:
        """`evener balance --json` with a time for probing."""
        return self.run(
            name,
            "balance",
            "--devices",
            devices,
            "--framework",
            self.framework,
            "--workload",
            workload,
            "--budget",
            budget,
            "--json",
            *more,
            **options,
        )


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _parse(out: str) -> Any:
    lines = [line for line in out.splitlines() if line.startswith("{")]
    with contextlib.suppress(ValueError):
        return json.loads(lines[0]) if len(lines) == 1 else [json.loads(line) for line in lines]
    return out[-4000:]


def _headline(answer: Any) -> str:
    if isinstance(answer, dict) and "throughput" in answer:
        batches = "+".join(str(share["batch"]) for share in answer["layout"]["share"])
        return f"{answer['throughput']['samples_per_second']:.0f} samples/s at {batches}: {answer.get('verdict', '')}"
    if isinstance(answer, dict) and "error" in answer:
        return str(answer["error"]["message"])
    return f"{len(answer)} readings" if isinstance(answer, list) else str(answer)[:100]


@contextlib.contextmanager
def mps_daemon(folder: Path) -> Iterator[dict[str, str]]:
    """A daemon of our own, in a folder of its own; ended whatever happens. Yields the variables that reach it."""
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for path in variables.values():
        Path(path).mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **variables}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, env=environment)
    try:
        yield variables
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment, timeout=60)


def look(bench: Bench) -> None:
    """1. What is there."""
    bench.run("doctor", "doctor", "--json")
    bench.run("devices", "devices", "--devices", "gpu", "--json")


def watch(bench: Bench) -> None:
    """1. The monitor under load, and what it costs."""
    gpus = len(bench.run("devices", "devices", "--devices", "gpu", "--json").get("devices", []))
    loads = [subprocess.Popen([sys.executable, "-c", LOAD, str(gpu), "25"]) for gpu in range(gpus)]
    try:
        time.sleep(6)
        monitor = [sys.executable, "-m", "evener", "monitor", "--devices", "gpu", "--json", "-i", "1"]
        bench.answers["monitor"] = _watch(monitor, 15, bench.environment)
        bench.save()
    finally:
        for load in loads:
            load.wait(timeout=60)


def _watch(command: list[str], seconds: float, environment: dict[str, str]) -> dict[str, Any]:
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    time.sleep(seconds)
    child.terminate()
    out, _ = child.communicate(timeout=10)
    usage = os.times()
    return {"answer": _parse(out), "children_cpu_seconds": usage.children_user + usage.children_system}


def control(bench: Bench) -> None:
    """2. Two equal GPUs: the even split."""
    for workload in WORKLOADS[bench.framework]:
        bench.balance(f"control {workload}", PAIR, workload)


def unequal(bench: Bench) -> None:
    """3. The second GPU at 60 % and 30 % of its multiprocessors, free and fixed global batch."""
    with mps_daemon(bench.out / "mps") as variables:
        for workload in WORKLOADS[bench.framework]:
            for percent in (60, 30):
                bench.balance(f"{percent} % {workload}", slowed(percent), workload, env=variables)
            for batch in (256, 2048):
                fixed = ("--global-batch", str(batch))
                bench.balance(f"60 % {workload} at {batch}", slowed(60), workload, *fixed, env=variables)


def caps(bench: Bench) -> None:
    """4. 8 GiB and 5 GiB: real out-of-memory, and the retreat from it."""
    for workload in WORKLOADS[bench.framework]:
        bench.balance(f"caps {workload}", CAPPED, workload, "--tolerance", "0", budget="60s")


def regret(bench: Bench) -> None:
    """5. A grid around the plan, each layout timed by `evener probe`, the winner measured again."""
    workload = WORKLOADS[bench.framework][0]
    with mps_daemon(bench.out / "mps") as variables:
        plan = bench.balance("regret plan", slowed(60), workload, "--global-batch", "4096", env=variables)
        batches = [share["batch"] for share in plan["layout"]["share"]]
        total = sum(batches)
        for turn in range(2):
            for step in (-3, -2, -1, 0, 1, 2, 3):
                first = round(batches[0] + step * total * 0.02)
                _probe_pair(bench, f"regret {turn} {step}", workload, (first, total - first), variables)


def _probe_pair(bench: Bench, name: str, workload: str, shares: tuple[int, int], variables: dict[str, str]) -> None:
    devices = ("--devices", slowed(60), "--framework", bench.framework, "--workload", workload)
    timing = ("--batches", *map(str, shares), "--repeat", "1", "--seconds", "2s", "--json")
    bench.run(name, "probe", *devices, *timing, env=variables, seconds=60)


def training(bench: Bench) -> None:
    """6. The example scripts with their plan: samples/s of real training against the plan's."""
    plan = bench.out / f"training-{bench.framework}.toml"
    script = f"examples/{'torch' if bench.framework == 'torch' else 'keras'}_train.py"
    workload = f"{script}:build" if bench.framework == "torch" else "keras_mnist"
    found = bench.balance("training plan", PAIR, workload, "--global-batch", "4096", "--export", str(plan))
    processes = sum(share["batch"] > 0 for share in found["layout"]["share"])
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if bench.framework == "torch" else []
    rows = ("--rows", "409600") if bench.framework == "torch" else ("--rows", "81920")
    many = ("--epochs", "100000") if bench.framework == "torch" else ()
    command = [
        sys.executable,
        *start,
        script,
        "--plan",
        str(plan),
        "--seconds",
        f"{bench.train_seconds:g}",
        *rows,
        *many,
    ]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=bench.environment
    )
    time.sleep(bench.train_seconds / 2)
    live = bench.run("training live", "monitor", "--devices", "gpu", "--json")
    out, _ = child.communicate(timeout=120)
    bench.answers["training"] = {"command": command[1:], "exit_code": child.returncode, "output": out[-6000:]}
    print(f"training: {out.strip().splitlines()[-1] if out.strip() else 'silent'}; live: {_live(live)}", flush=True)
    bench.save()


def _live(snapshot: Any) -> str:
    devices = snapshot.get("devices", []) if isinstance(snapshot, dict) else []
    return ", ".join(str(device["samples_per_second"]["value"]) for device in devices)


def screen(bench: Bench) -> None:
    """8. The app on a pseudo-terminal: keys in, what it drew out, as a terminal would get it."""
    import fcntl
    import pty
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 44, 150, 0, 0))
    environment = {**bench.environment, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    command = [sys.executable, "-m", "evener", "--devices", PAIR]
    child = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True)
    os.close(slave)
    os.set_blocking(master, False)
    drawn = bytearray()
    for keys, seconds in ((b"", 8.0), (b"2", 2.0), (b"\x13", 60.0), (b"1", 6.0), (b"q", 4.0)):
        os.write(master, keys)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                drawn += os.read(master, 1 << 16)
            time.sleep(0.02)
        (bench.out / f"screen-{bench.framework}-{keys.hex() or 'start'}.ansi").write_bytes(drawn)
    bench.answers["screen"] = {"command": command[1:], "exit_code": child.wait(timeout=20), "bytes": len(drawn)}
    bench.save()


def layouts(bench: Bench) -> None:
    """7. Every way to lay a job on the GPUs, in one verdict."""
    pack = "torch_mnist" if bench.framework == "torch" else "keras_mnist"
    place = ("torch_depth", "torch_tiles", "torch_dataparallel") if bench.framework == "torch" else ("keras_towers",)
    common = ("--framework", bench.framework, "--json")
    bench.run(f"compare {pack}", "compare", "--devices", PAIR, "--workload", pack, *common, seconds=300)
    bench.run(f"compare {pack} mps", "compare", "--devices", "gpu:0", "--workload", pack, "--mps", *common, seconds=300)
    for workload in place:
        bench.run(f"compare {workload}", "compare", "--devices", PAIR, "--workload", workload, *common, seconds=200)


SECTIONS = {
    "look": look,
    "watch": watch,
    "control": control,
    "unequal": unequal,
    "caps": caps,
    "regret": regret,
    "training": training,
    "screen": screen,
    "layouts": layouts,
}


def main() -> None:
    """Run the sections that are named, in order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="+", choices=[*SECTIONS, "all"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--framework", choices=list(WORKLOADS), required=True)
    parser.add_argument("--match", default="", help="only cases whose name holds this")
    parser.add_argument("--train-seconds", type=float, default=60.0, help="how long the example scripts train")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments.out, arguments.framework, arguments.match, arguments.train_seconds)
    chosen = list(SECTIONS) if "all" in arguments.sections else arguments.sections
    try:
        for section in chosen:
            try:
                SECTIONS[section](bench)
            except (OSError, subprocess.SubprocessError, KeyError, TypeError, AttributeError) as error:
                bench.answers[f"{section} broke"] = {"error": f"{type(error).__name__}: {error}"}
                print(f"{section} broke: {type(error).__name__}: {error}", flush=True)
    finally:
        bench.save()
        bench.pack_journals()


if __name__ == "__main__":
    main()
