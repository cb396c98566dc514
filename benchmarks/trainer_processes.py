"""Start the processes of a training run in advance, and exchange JSON lines with them.

Their imports take 10 s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from evener.devices.terms import parse_limit
from evener.plan.file import Share
from tests.support.torch_start import free_port

MARK = "rank: "  # prefix of a process's messages
PATIENCE_SECONDS = 240.0  # time limit for a message; after that, the training run is taken to hang


class BrokenTrainingError(Exception):
    """A process of the training run exited, or sent nothing for too long."""


def name_build(trainer: str) -> str:
    """Return the `--workload` argument for a trainer's model."""
    file = "trainer_lightning.py" if trainer == "lightning" else "trainer_models.py"
    return f"{Path(__file__).with_name(file)}:build_{trainer}"


class Ranks:
    """The processes of a training run; `places` are their positions among the active shares.

    GPUs are limited to the percentage with which the plan was measured, unless `free`; this needs a
    running MPS daemon. Each process has its own session, like a probe's and like torchrun's,
    because Linux divides cores among sessions.
    """

    def __init__(self, active: Sequence[Share], places: Sequence[int], free: bool = False) -> None:
        self._places = places
        shares, port = [active[place] for place in places], str(free_port())
        visible = ",".join(
            str(share.index) for share in shares if not share.device.startswith("cpu-")
        )
        common = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": visible,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        self.processes: list[Any] = []
        for rank, share in enumerate(shares):
            own = dict(common)
            if len(shares) > 1:
                own |= {"WORLD_SIZE": str(len(shares)), "RANK": str(rank), "LOCAL_RANK": str(rank)}
                own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            percent = (
                parse_limit(share.limit).percent if visible and share.limit and not free else None
            )
            if percent:
                own["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{percent:g}"
            command = [sys.executable, "-m", "benchmarks.trainer_ranks"]
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.processes.append(
                subprocess.Popen(command, env=own, start_new_session=True, **pipes)
            )

    def start(self, words: Sequence[str]) -> None:
        """Send the training options to all processes."""
        for process, place in zip(self.processes, self._places, strict=True):
            self._write(process, json.dumps([*words, "--place", str(place)]))

    def send_line(self, line: str) -> None:
        """Send the same line to all processes."""
        for process in self.processes:
            self._write(process, line)

    def read(self) -> list[Any]:
        """Return the next message of each process; raise BrokenTrainingError if one has exited."""
        watchdog = threading.Timer(PATIENCE_SECONDS, self._kill)
        watchdog.start()
        try:
            return [self._read(process) for process in self.processes]
        finally:
            watchdog.cancel()

    def close(self) -> None:
        """Close the pipes, so that the processes exit."""
        for process in self.processes:
            with suppress(BrokenPipeError):
                process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            for process in self.processes:
                process.wait(timeout=30.0)
        self._kill()

    def _write(self, process: Any, line: str) -> None:
        try:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise BrokenTrainingError("A process of it has ended.") from None

    def _read(self, process: Any) -> Any:
        for line in process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        self._kill()  # the other processes may wait for it
        raise BrokenTrainingError("A process of it has ended.")

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
