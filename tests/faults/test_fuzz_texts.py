"""Mutate every text that is read from outside.

Each must give a value or one sentence in bounded time, and never reach a terminal raw.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evener.tui.cli.main import run
from tests.support.fuzz_targets import ODD, TARGETS, call, mutations, seeds

EXAMPLES = {
    "machine": 20,
    "journal": 30,
    "snapshot": 30,
}  # benchmarks.fuzz runs more, for any time
CUTS = 20  # cuts per text
LONGEST_SECONDS = 5.0  # CPU time limit for one text


@pytest.mark.parametrize("name", TARGETS)
def test_a_mutated_text_is_a_value_or_a_one_line_error(name: str) -> None:
    """Texts are cut, spliced, reordered, or get huge numbers, deep nesting and invalid bytes."""
    mutated = mutations(seeds(name))

    @settings(
        max_examples=EXAMPLES.get(name, 80), deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(mutated)
    def law(data: bytes) -> None:
        started = time.process_time()
        call(TARGETS[name], data)
        assert time.process_time() - started < LONGEST_SECONDS

    law()


@pytest.mark.parametrize("name", TARGETS)
def test_each_odd_text_alone_is_a_value_or_a_one_line_error(name: str) -> None:
    """An odd text is the whole file, argument or message."""
    for data in (*ODD, b"", b"\n", b"[" * 100_000, b'{"a":' * 20_000, b"9" * 100_000):
        call(TARGETS[name], data)


@pytest.mark.parametrize("name", TARGETS)
def test_a_text_cut_anywhere_is_a_value_or_a_one_line_error(name: str) -> None:
    """Texts are cut off as by a kill or a full disk."""
    for data in seeds(name):
        for end in range(0, len(data), max(1, len(data) // CUTS)):
            call(TARGETS[name], data[:end])


HARMLESS = (
    ("devices", "--devices", "{}"),
    ("balance", "--devices", "sim:t4", "--budget", "{}", "--max-global-batch", "8"),
    (
        "balance",
        "--devices",
        "sim:t4",
        "--max-global-batch",
        "8",
        "--workload",
        "synthetic",
        "--set",
        "base_ms={}",
    ),
    ("balance", "--devices", "sim:t4", "--max-global-batch", "8", "--resume", "{}"),
    ("balance", "--devices", "sim:t4", "--max-global-batch", "8", "--workload", "{}"),
    ("balance", "--devices", "sim:t4", "--max-global-batch", "{}"),
    ("balance", "--devices", "sim:t4", "--max-global-batch", "8", "--tolerance", "{}"),
    ("balance", "--devices", "sim:t4", "--max-global-batch", "8", "--seed", "{}"),
    ("runs", "show", "{}"),
    ("export", "{}"),
    ("probe", "--devices", "sim:t4", "--seconds", "{}", "--batches", "8", "--repeat", "1"),
    (
        "probe",
        "--devices",
        "sim:t4",
        "--gpus",
        "{}",
        "--batches",
        "8",
        "--repeat",
        "1",
        "--seconds",
        "1s",
    ),
    ("probe", "--devices", "sim:t4", "--batches", "{}", "--repeat", "1", "--seconds", "1s"),
    ("monitor", "--devices", "sim:t4", "--once", "-o", "{}"),
    ("{}",),
)
WORDS = st.text(max_size=20) | st.sampled_from(
    (
        "nan",
        "inf",
        "-1",
        "0",
        "1e400",
        "9" * 5000,
        "\x1b[2J",
        "\udcff",
        "\u202e",
        "",
        "-",
        "--",
        "[" * 5000,
        "1_0",
        "٣s",
    )
)


@pytest.mark.parametrize("command", HARMLESS, ids=" ".join)
def test_any_word_on_the_command_line_is_an_exit_code(
    command: tuple[str, ...], own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 0 to 3 and no escape character is printed, as text and as JSON."""

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    @given(WORDS, st.booleans())
    def law(word: str, as_json: bool) -> None:
        if "/" in word or word.endswith(".toml"):
            return
        arguments = [part.replace("{}", word) for part in command]
        code = run([*arguments, "--json"] if as_json and command[0] != "export" else arguments)
        output = capsys.readouterr()
        assert code in (0, 1, 2, 3), (arguments, code)
        assert not set("\x1b\x9b\u202e\x07") & set(output.out + output.err)

    law()
