"""Before a split is measured, its link is checked: ranks use gloo in place of NCCL."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evener.balancer.probes import child_prober
from evener.balancer.probes.child_prober import ChildProber
from evener.balancer.request import Job, Request
from evener.balancer.types import Failed, Observation, Probe, Stage, Timed, layout_of
from evener.devices.cpu import slices
from tests.support.cores import two_cores
from tests.support.frameworks import skip_without
from tests.support.limited_trainings import PLAIN

pytestmark = [two_cores, pytest.mark.slow]
HANGS = (
    PLAIN
    + """
import os
import torch.distributed as dist

def hang(tensor, **options):
    if dist.get_rank() == 1:
        time.sleep(3600)

def corrupt(tensor, **options):
    sums(tensor, **options)
    tensor[0] += 1

sums = dist.all_reduce
"""
)


@pytest.fixture
def split_of(
    tmp_path: Path, shared_servers: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Yield a function that measures a split of a training with the given code, and its link."""
    skip_without("torch")
    monkeypatch.setattr(child_prober, "needs_link_check", lambda *_: True)
    made: list[ChildProber] = []

    def measure(code: str) -> Observation:
        script = tmp_path / "train.py"
        script.write_text(code)
        made.append(ChildProber(Job(Request(), slices(2), f"{script}:build", "torch")))
        probe = Probe(layout_of((8, 8)), Stage.SPLIT, 0.2)
        (seen,) = made[-1].measure((probe,), lambda _: None, threading.Event())
        return seen

    measure.made = made  # type: ignore[attr-defined]
    yield measure
    for prober in made:
        prober.close()


def test_a_split_knows_the_speed_of_its_link(split_of: Any) -> None:
    seen = split_of(PLAIN)
    assert isinstance(seen, Timed), seen
    assert seen.link_bytes_per_second is not None
    assert seen.link_bytes_per_second > 1e6
    facts = split_of.made[-1].facts()
    assert facts.link is not None
    assert (facts.link.ranks, facts.link.bytes_per_second) == (2, seen.link_bytes_per_second)
    assert 0 < facts.gradient_bytes == facts.parameter_bytes


def test_a_link_that_hangs_is_named_soon_with_what_to_do(
    split_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_prober, "LINK_SECONDS", 2.0)
    started = time.monotonic()
    seen = split_of(HANGS + "dist.all_reduce = hang\n")
    assert isinstance(seen, Failed)
    assert "CPU:0 – CPU:1 hangs" in seen.detail
    assert "doctor --links" in seen.detail
    assert time.monotonic() - started < 120


def test_wrong_sums_are_a_failure_of_the_link(split_of: Any) -> None:
    seen = split_of(HANGS + "dist.all_reduce = corrupt\n")
    assert isinstance(seen, Failed)
    assert "wrong sums" in seen.detail
