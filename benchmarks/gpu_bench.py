"""Run evener's commands on GPUs and keep their answers; the MPS daemon that makes equal GPUs unequal.

Every figure comes from the command that a user would type. GPU settings are never touched.
"""

from __future__ import annotations

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


class GpuBench:
    """Runs commands, each with its own time limit, and keeps their answers by name."""

    def __init__(self, out: Path, framework: str, gpus: tuple[int, ...], match: str, budget: str) -> None:
        self.out, self.framework, self.gpus, self.match, self.budget = out, framework, gpus, match, budget
        self.answers: dict[str, Any] = {}
        self.state = out / f"state-{framework}"
        path = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH", ""))))
        self.environment = {
            **os.environ,
            "XDG_STATE_HOME": str(self.state),
            "NCCL_NVLS_ENABLE": "0",
            "PYTHONPATH": path,
        }

    @property
    def pair(self) -> str:
        """The first two GPUs, without limits."""
        return f"gpu:{self.gpus[0]},{self.gpus[1]}"

    def limited(self, first: str, second: str) -> str:
        """The first two GPUs, each with a limit; an empty text is none."""
        pairs = zip(self.gpus[:2], (first, second), strict=True)
        return ",".join(f"gpu:{gpu}" + (f"@{limit}" if limit else "") for gpu, limit in pairs)

    def run(self, name: str, *arguments: str, seconds: float = 200.0, env: dict[str, str] | None = None) -> Any:
        """Run one command of evener, if `name` is wanted, and keep its JSON answer, or its error, by that name."""
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

    def keep(self, name: str, answer: Any) -> None:
        """Keep an answer that isn't from a command of evener."""
        self.answers[name] = answer
        self.save()

    def save(self) -> None:
        """Write everything so far, so that an interrupted run loses nothing."""
        target = self.out / f"gpu-{self.framework}.json"
        target.write_text(json.dumps(self.answers, indent=1))

    def pack_journals(self) -> None:
        """The journals in one file."""
        with tarfile.open(self.out / f"journals-{self.framework}.tar.gz", "w:gz") as archive:
            for journal in sorted(self.state.glob("evener/runs/*/journal.jsonl")):
                archive.add(journal, journal.relative_to(self.state / "evener" / "runs"))

    def balance(self, name: str, devices: str, workload: str, *more: str, budget: str = "", **options: Any) -> Any:
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
            budget or self.budget,
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
    """An MPS daemon in a folder of its own, ended whatever happens. Yields the variables that reach it."""
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for path in variables.values():
        Path(path).mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **variables}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, env=environment)
    try:
        yield variables
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment, timeout=60)
