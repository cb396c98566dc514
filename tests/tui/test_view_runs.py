"""Past runs in a list: names and ratios whole at every width, what repeats told once."""

from __future__ import annotations

import pytest

from balancer.runs import RunSummary
from tui.view.marks import UNICODE
from tui.view.runs import brief_devices, run_lines

RUN = RunSummary(
    "20261121-145431-fb1d",
    "2026-11-21T14:54:31Z",
    ("GPU:0", "GPU:1"),
    "keras_maxer",
    "finished",
    12,
    158_012.0,
    (0.591, 0.409),
)


@pytest.mark.parametrize("width", [80, 100, 118, 200])
def test_a_run_is_told_whole(width: int) -> None:
    """Its id, which is what other commands want, its devices, throughput and ratios."""
    lines, _ = run_lines((RUN,), "", width, 5, UNICODE, 0, 0)
    row = lines[1].text
    assert len(row) <= width
    for text in ("20261121-145431-fb1d", "keras_maxer", "finished", "158 012"):
        assert text in row
    assert "GPU:0,1" in row or "GPU:0, GPU:1" in row
    assert "0.59:0.41" in row or "0.591 : 0.409" in row
    assert ("2026-11-21 14:54:31" in row) == (width >= 110)


def test_devices_of_several_kinds_keep_their_kinds() -> None:
    """Only what repeats is told once."""
    assert brief_devices(("GPU:0", "GPU:2", "GPU:3")) == "GPU:0,2,3"
    assert brief_devices(("GPU:0", "CPU:0")) == "GPU:0, CPU:0"
    assert brief_devices(()) == ""
