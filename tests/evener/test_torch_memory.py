"""The rows that a rank expects its memory to hold: a GPU's with caps and neighbours, or a CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from evener.system.cores import free_memory_bytes
from evener.torch.step.checks import OPTIMIZER_CHECK
from evener.torch.step.memory import MemoryGauge
from evener.torch.step.recovery import free_before_update

GIB = 2**30


class FakeGpu:
    """A GPU of 100 GiB on which a pass takes 10 GiB plus 0.1 GiB per row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fraction, self.others_bytes, self.peak, self.emptied = 1.0, 0.0, 0.0, 0
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: self.stats())
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: self.free())
        monkeypatch.setattr(
            torch.cuda, "get_per_process_memory_fraction", lambda _: self.fraction, raising=False
        )
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty)

    def compute(self, rows: int) -> None:
        self.peak = max(self.peak, (10 + 0.1 * rows) * GIB)

    def stats(self) -> dict[str, float]:
        return {
            "allocated_bytes.all.peak": self.peak,
            "allocated_bytes.all.current": 10 * GIB,
            "reserved_bytes.all.current": self.peak,
        }

    def free(self) -> tuple[float, float]:
        return 100 * GIB - self.others_bytes - self.peak, 100 * GIB

    def empty(self) -> None:
        self.emptied += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


@pytest.mark.parametrize(
    ("at_risk", "fraction", "others", "most"),
    [
        (False, 1.0, 0, 800),  # (90 - 10) / 0.1
        (True, 1.0, 0, 700),
        (False, 0.5, 0, 350),
        (False, 1.0, 40, 440),
        (False, 0.5, 60, 260),  # the neighbour leaves less than the cap
        (False, 0.2, 0, 100),  # the rows that have fit already
    ],
)
def test_a_gpu_holds_what_its_cap_and_its_neighbours_leave(
    gpu: FakeGpu, at_risk: bool, fraction: float, others: int, most: int
) -> None:
    gauge = MemoryGauge(torch.device("cuda", 0), 4)
    gauge.at_risk = at_risk
    for rows in (50, 100):
        gpu.compute(rows)
        first = gauge.measure(rows)
    gpu.fraction, gpu.others_bytes = fraction, others * GIB
    assert first > 0
    assert gauge.measure(100) == pytest.approx(most, abs=1)


def test_one_size_alone_promises_less(gpu: FakeGpu) -> None:
    """With passes of one size, all of the memory may be proportional to rows."""
    gauge = MemoryGauge(torch.device("cuda", 0), 4)
    gauge.at_risk = False
    gpu.compute(100)
    assert gauge.measure(100) == 450  # 90 GiB, of which 100 rows take 20
    gauge.make_room()
    assert gpu.emptied == 1


def test_a_process_on_a_cpu_holds_more_rows_where_the_machine_has_memory_left() -> None:
    gauge = MemoryGauge(torch.device("cpu"), 2)
    assert gauge.measure(16) >= 16
    gauge.make_room()


def test_what_is_free_is_what_the_machine_says(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  8000 kB\nMemAvailable:     2000 kB\n")
    assert 0 < free_memory_bytes(meminfo) <= 2000 * 1024
    assert free_memory_bytes(tmp_path / "none") == 0
    assert free_memory_bytes() > 0


def test_unused_memory_is_returned_before_one_step_of_an_optimizer(gpu: FakeGpu) -> None:
    class Holder:
        pass

    holder = Holder()
    release = OPTIMIZER_CHECK.hooks.hold(holder)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    free_before_update(torch.device("cuda", 0))
    # a later hook, so that PyTorch continues its loop over hooks after evener's
    other = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        for _ in range(3):
            weight.grad = torch.ones(2)
            optimizer.step()
    finally:
        other.remove()
        release()
    assert gpu.emptied == 1
    assert weight.tolist() == [-0.5, -0.5]
