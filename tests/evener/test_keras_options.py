"""Options of `compile` and `fit` behave with each engine like the table in docs/training.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.frameworks import skip_without
from tests.support.keras_start import Answers

skip_without("tensorflow")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
ENGINES = ("towers", "multiworker", "passes")
GROUP, ONE_PROCESS = ["multiworker"], ["towers", "passes"]


def read_table() -> dict[str, dict[str, str]]:
    """Return the first word of each engine's cell by option."""
    _, _, section = PAGE.read_text().partition("### Options of `compile` and `fit`")
    table, _, _ = section.partition("\n### ")
    row = r"^\| `(\w+)[^|]*\| (.+?) \| (.+?) \| (.+?) \|$"
    rows = re.findall(row, table, re.MULTILINE)
    return {
        name: {
            engine: re.split(r"\W", cell)[0] for engine, cell in zip(ENGINES, cells, strict=True)
        }
        for name, *cells in rows
    }


TABLE = read_table()


@pytest.fixture(scope="module")
def answers(keras_ranks: Callable[..., list[Any]]) -> Answers:
    """Return the results of the options in engines of a group and of one process."""

    def ask(name: str) -> list[Any]:
        engines = GROUP if name == "group" else ONE_PROCESS
        roles = ("worker",) * 2 if name == "group" else ()
        return keras_ranks("tests.support.keras_options.run_options", engines, roles=roles)

    return Answers(ask)


def find_answers(answers: Answers, engine: str) -> list[Any]:
    """Return the results of an engine's options by process."""
    processes = answers("group" if engine in GROUP else "one process")
    return [process[engine] for process in processes]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_page_has_every_option_and_no_other(answers: Answers, engine: str) -> None:
    assert find_answers(answers, engine)[0].keys() == TABLE.keys()


@pytest.mark.parametrize(
    ("engine", "option"), [(engine, option) for engine in ENGINES for option in TABLE]
)
def test_an_option_does_what_the_page_says(answers: Answers, engine: str, option: str) -> None:
    """Weights, losses and metrics are within 1e-9 of plain Keras, or the option is refused."""
    said = TABLE[option][engine]
    first, *others = [process[option] for process in find_answers(answers, engine)]
    assert first["verdict"] == said, first
    for found in others:
        assert (found["verdict"] == "refused") == (said == "refused")
