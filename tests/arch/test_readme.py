"""README is short, and its pictures match its text."""

from __future__ import annotations

import os
import re
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

from docs.animation import animate
from docs.chart import draw_results, read_results

REPO = Path(__file__).resolve().parents[2]
README = (REPO / "README.md").read_text(encoding="utf-8")
LARGEST_PICTURE_BYTES = 3 << 20


def test_it_is_read_in_one_go() -> None:
    """README has at most two pages, and no code line that scrolls."""
    assert len(README.splitlines()) <= 150
    blocks = re.findall(r"^```\w*\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 125


def test_a_new_machine_is_set_up_by_two_short_commands() -> None:
    """A script of the checkout has the installation commands; pyproject.toml has their extras."""
    commands = re.findall(r"^\./setup\.sh.*", README, re.MULTILINE)
    assert len(commands) == 2
    assert max(map(len, commands)) <= 100
    script = (REPO / "setup.sh").read_text()
    extras = set(",".join(re.findall(r"extras=([\w,-]+)", script)).strip(",").split(","))
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert extras <= project["optional-dependencies"].keys()
    assert os.access(REPO / "setup.sh", os.X_OK)


def test_its_chart_is_that_of_its_table() -> None:
    """The chart is the one that `make pictures` draws from the table."""
    rows = read_results(README)
    assert len(rows) > 4
    assert (REPO / "docs" / "pictures" / "results.svg").read_text() == draw_results(rows)


def test_its_links_and_pictures_are_there() -> None:
    """Links and pictures exist, and pictures are small enough to load at once."""
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", README)]
    assert len(targets) > 15
    assert [target for target in targets if not (REPO / target).exists()] == []
    assert [
        t
        for t in targets
        if t.endswith(".svg") and (REPO / t).stat().st_size > LARGEST_PICTURE_BYTES
    ] == []


def test_its_first_example_has_a_fixed_global_batch() -> None:
    """The first example fixes the global batch.

    A free one may be so large that a network takes too few steps to learn.
    """
    first = re.search(r"evener balance[^\n`]*", README)
    assert first is not None
    assert "--global-batch" in first[0]


def test_a_moving_picture_draws_what_stays_once() -> None:
    """An animation of two frames that differ in one row draws the other rows once.

    Two groups alternate; a reader without animations sees the second.
    """
    frame = (REPO / "docs" / "pictures" / "monitor.svg").read_text()
    clock = re.search(r"\d\d:\d\d:\d\d", frame)
    assert clock is not None
    moving = animate([frame, frame.replace(clock[0], "23:59:59")], [1, 2], "font-family: monospace")
    drawing = ET.fromstring(moving)
    groups = [each for each in drawing.iter() if each.tag.endswith("}g") and "class" in each.attrib]
    assert len(groups) == 2
    assert [clock[0] in "".join(group.itertext()) for group in groups] == [True, False]
    assert ".f0{visibility:hidden;" in moving
    assert ".f1{visibility:visible;" in moving
    assert "33.333%{visibility:hidden}" in moving
