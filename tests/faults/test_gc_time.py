"""A step's time includes Python's garbage collector, as in a training."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from evener.balancer.probes.gc_clock import GcClock
from evener.balancer.probes.protocol import Build, Prepare, Ran, RunSteps
from evener.balancer.probes.worker import Worker
from evener.workloads.protocol import WorkerSetup

SCRIPT = """
import torch

MADE = 3000  # lists that contain themselves, in each step

class Model(torch.nn.Linear):
    def forward(self, x):
        for _ in range(MADE):
            own = []
            own.append(own)
        return super().forward(x)

def sample_batch(n):
    return torch.zeros(n, 2), torch.zeros(n, 1)

def build():
    model = Model(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss()
"""


def test_the_clock_counts_collections_since_it_was_read() -> None:
    clock = GcClock()
    try:
        gc.collect()
        gc.collect()
        seconds, longest = clock.read()
        assert 0 < longest < seconds
        gc.disable()
        assert clock.read() == (0.0, 0.0)
    finally:
        gc.enable()
        gc.callbacks.remove(clock._note)


@pytest.mark.usefixtures("one_torch_thread")
def test_collections_run_in_the_timed_steps_of_a_probe(own_folder: Path) -> None:
    """A probe without them would be faster than the training: by 6 % with adapters."""
    pytest.importorskip("torch")
    (own_folder / "makes_garbage.py").write_text(SCRIPT)
    worker = Worker()
    try:
        for command in (
            Build(f"{own_folder}/makes_garbage.py:build", "torch", {}, WorkerSetup(("cpu:0",))),
            Prepare((4,)),
        ):
            worker.execute(command)
        ran = worker.execute(RunSteps(20))
    finally:
        gc.callbacks.remove(worker._gc._note)
        sys.modules.pop("makes_garbage", None)
    assert isinstance(ran, Ran)
    assert 0 < ran.longest_gc_seconds <= ran.gc_seconds <= ran.wall_seconds
