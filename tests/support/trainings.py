"""Reports of trainings as their ranks write them."""

from __future__ import annotations

from typing import Any

from evener.live.files import LiveDevice, Training
from evener.plan.layout import Knots

AT_SECONDS = 1_790_000_000.0


def make_ranks(
    own: tuple[float, float] = (0.008, 0.158),
    waiting: tuple[float, float] = (0.152, 0.002),
    at_seconds: float = AT_SECONDS,
    ids: tuple[str, str] = ("gpu-0", "gpu-1"),
    curves: tuple[Knots, Knots] = ((), ()),
    most: tuple[int, int] = (0, 0),
    **changed: Any,
) -> tuple[Training, Training]:
    """Return two ranks of a training; by default one was delayed by 150 ms in its backward pass."""
    facts: dict[str, Any] = {
        "training": "t",
        "world": 2,
        "step_s": 0.17,
        "step_spread": 0.04,
        "input_s": 0.002,
    }
    facts |= changed
    first, second = (
        Training(
            "torch",
            "train.py",
            share / facts["step_s"],
            12_345,
            at_seconds - 0.2,
            (
                LiveDevice(
                    ids[rank],
                    rank,
                    share,
                    share / facts["step_s"],
                    micro,
                    own[rank],
                    waiting[rank],
                    curve=curves[rank],
                    most=most[rank],
                ),
            ),
            rank=rank,
            pid=4000 + rank,
            **facts,
        )
        for rank, (share, micro) in enumerate(((820, 410), (568, 568)))
    )
    return first, second
