"""Run evener's commands on GPUs and keep their answers; control the MPS daemon.

All results come from the commands that a user would type. GPU settings are never changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORKLOADS = {"tensorflow": ("keras_mnist", "keras_maxer"), "torch": ("torch_mnist", "torch_maxer")}


class GpuBench:
    """Runs commands with a time limit each, and keeps their answers by name."""

    def __init__(
        self,
        out: Path,
        framework: str,
        gpus: tuple[int, ...],
        match: str,
        budget: str,
        small: bool = False,
    ) -> None:
        self.out, self.framework, self.gpus, self.match, self.budget = (
            out,
            framework,
            gpus,
            match,
            budget,
        )
        self.small = small  # slices of the CPU and small models, to try the commands
        self.kind = "cpu" if small else "gpu"
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
        """The device text of the first two GPUs, without limits."""
        return f"{self.kind}:{self.gpus[0]},{self.gpus[1]}"

    def limited(self, first: str, second: str) -> str:
        """Return the device text of the first two GPUs with limits; an empty text is no limit."""
        pairs = zip(self.gpus[:2], (first, second), strict=True)
        return ",".join(
            f"{self.kind}:{gpu}" + (f"@{limit}" if limit else "") for gpu, limit in pairs
        )

    def mps(self) -> contextlib.AbstractContextManager[dict[str, str]]:
        """Return a context with an MPS daemon; it yields the environment variables for clients."""
        return contextlib.nullcontext({}) if self.small else mps_daemon(self.out / "mps")

    def run(
        self, name: str, *arguments: str, seconds: float = 200.0, env: dict[str, str] | None = None
    ) -> Any:
        """Run a command of evener if `name` matches the filter, and return its JSON answer.

        The answer and the errors are kept under `name`.
        """
        if self.match not in name:
            return {}
        code, out, err, took = self._execute(
            [sys.executable, "-m", "evener", *arguments], seconds, env
        )
        answer = _parse(out)
        self._record(name, ["evener", *arguments], code, took, answer, err)
        print(f"{took:7.1f} s  exit {code}  {name}: {_headline(answer)}", flush=True)
        return answer

    def script(
        self,
        name: str,
        module: str,
        *arguments: str,
        seconds: float,
        env: dict[str, str] | None = None,
    ) -> str:
        """Run another benchmark if `name` matches the filter, and return its standard output.

        The output is kept and printed.
        """
        if self.match not in name:
            return ""
        code, out, err, took = self._execute(
            [sys.executable, "-m", module, *arguments], seconds, env
        )
        self._record(name, [module, *arguments], code, took, out, err)
        print(f"{took:7.1f} s  exit {code}  {name}\n{out[-4000:]}{err[-1500:]}", flush=True)
        return out

    def _execute(
        self, command: list[str], seconds: float, env: dict[str, str] | None
    ) -> tuple[int, str, str, float]:
        """Run a command and return its exit code, output, errors and duration in seconds.

        The exit code is -1 after a timeout; the command's children are killed with it.
        """
        began = time.monotonic()
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        child = subprocess.Popen(
            command, env={**self.environment, **(env or {})}, start_new_session=True, **pipes
        )
        try:
            out, err = child.communicate(timeout=seconds)
            code = child.returncode
        except subprocess.TimeoutExpired:
            out, err = _end(child)
            code, err = -1, f"{err}\nover {seconds:.0f} s"
        except BaseException:
            _end(child)
            raise
        return code, out, err, time.monotonic() - began

    def _record(
        self, name: str, command: list[str], code: int, took: float, answer: Any, err: str
    ) -> None:
        seen = {"command": command, "exit_code": code, "seconds": round(took, 2), "answer": answer}
        self.keep(name, {**seen, "stderr": err[-6000:]})

    def keep(self, name: str, answer: Any) -> None:
        """Keep an answer that doesn't come from a command of evener."""
        self.answers[name] = answer
        self.save()

    def save(self) -> None:
        """Write all answers now, so that an interrupted run loses none."""
        target = self.out / f"gpu-{self.framework}.json"
        target.write_text(json.dumps(self.answers, indent=1))

    def pack_journals(self) -> None:
        """Pack the journals of all runs into one archive."""
        with tarfile.open(self.out / f"journals-{self.framework}.tar.gz", "w:gz") as archive:
            for journal in sorted(self.state.glob("evener/runs/*/journal.jsonl")):
                archive.add(journal, journal.relative_to(self.state / "evener" / "runs"))

    def balance(
        self, name: str, devices: str, workload: str, *more: str, budget: str = "", **options: Any
    ) -> Any:
        """Run `evener balance --json` with a time budget for probing."""
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


def _end(child: subprocess.Popen[str]) -> tuple[str, str]:
    """Stop a command and its children, and return its output and errors."""
    for number, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.communicate(timeout=patience)
    raise AssertionError("A killed process has ended.")


def _parse(out: str) -> Any:
    lines = [line for line in out.splitlines() if line.startswith("{")]
    with contextlib.suppress(ValueError):
        return json.loads(lines[0]) if len(lines) == 1 else [json.loads(line) for line in lines]
    return out[-4000:]


def _headline(answer: Any) -> str:
    if isinstance(answer, dict) and "throughput" in answer:
        batches = "+".join(str(share["batch"]) for share in answer["layout"]["share"])
        return (
            f"{answer['throughput']['samples_per_second']:.0f} samples/s at {batches}: "
            f"{answer.get('verdict', '')}"
        )
    if isinstance(answer, dict) and "error" in answer:
        return str(answer["error"]["message"])
    return f"{len(answer)} readings" if isinstance(answer, list) else str(answer)[:100]


@contextlib.contextmanager
def mps_daemon(folder: Path) -> Iterator[dict[str, str]]:
    """Run an MPS daemon in its own folder; yield the environment variables for its clients.

    The daemon is always stopped at the end. If this process is a client of a daemon already, none
    is started, because a GPU has one daemon at a time.
    """
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield {}
        return
    variables = {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }
    for path in variables.values():
        Path(path).mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **variables}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, env=environment)
    try:
        yield variables
    finally:
        subprocess.run(
            ["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment, timeout=60
        )
