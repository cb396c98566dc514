"""The prober of a job's devices: real children, or simulated devices."""

from __future__ import annotations

from pathlib import Path

from ..request import Job
from .child_prober import ChildProber
from .prober import Prober
from .simulated import SimulatedProber


def make_prober(job: Job, start_seconds: float = 0.0, error_file: Path | None = None) -> Prober:
    """A prober whose clock starts at `start_seconds`; tracebacks of children go to `error_file`."""
    if job.machine is not None:
        return SimulatedProber(job.machine, job.request.seed, job.request.pace, start_seconds)
    return ChildProber(job, start_seconds=start_seconds, error_file=error_file)
