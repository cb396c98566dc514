"""Numbers, times and argument lists as text."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.balancer.number_format import duration, rate, size
from evener.balancer.request import Request
from evener.errors import RequestError
from evener.printable import plain
from evener.tui.cli.main import run, spread_lists
from evener.tui.cli.options import SEARCH, TRAINING
from evener.tui.text import parsing
from evener.tui.text.parsing import REQUEST_HELP, make_request, parse_duration, parse_settings


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("120s", 120),
        ("2m", 120),
        ("1.5h", 5400),
        ("90", 90),
        ("250ms", 0.25),
        ("3min", 180),
        ("1h30m", 5400),
        ("5 m", 300),
        ("3 min 20 s", 200),
    ],
)
def test_times_are_read_with_their_units(text: str, seconds: float) -> None:
    assert parse_duration(text, "--budget") == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "-3s", "1e9s", "3 s s", "1h and 2m", "2 minutes", "nan"]
)
def test_what_is_no_time_is_refused_by_name(text: str) -> None:
    with pytest.raises(RequestError, match="--budget"):
        parse_duration(text, "--budget")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.42, "0.4 s"), (12.3, "12 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_times_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(0, 1e15))
def test_durations_never_show_sixty(seconds: float) -> None:
    """59.9 minutes must not be printed as 59 min 60 s."""
    assert "60 s" not in duration(seconds)
    assert "60 min" not in duration(seconds)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12.346, "12.35"),
        (684.21, "684.2"),
        (2123.4, "2 123"),
        (158012, "158 012"),
        (99.996, "100.0"),
    ],
)
def test_rates_keep_four_digits(value: float, text: str) -> None:
    assert rate(value) == text


def test_sizes_are_binary() -> None:
    assert size(512 * 2**20) == "512 MiB"
    assert size(8 * 2**30) == "8 GiB"


@given(st.text(max_size=60), st.sampled_from([1, 20]))
def test_plain_text_can_not_steer_a_terminal(text: str, times: int) -> None:
    """No control, format, separator or surrogate character is left, and the length is bounded."""
    clean = plain(text * times)
    assert len(clean) <= 500
    assert not {unicodedata.category(char) for char in clean} & {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_lists_are_spread_for_the_parser() -> None:
    """--gpus 0 1 --batches 820 568 becomes one option per value."""
    spread = spread_lists(["probe", "--gpus", "0", "1", "--batches", "820", "568", "--repeat", "2"])
    expected = "probe --gpus 0 --gpus 1 --batches 820 --batches 568 --repeat 2"
    assert " ".join(spread) == expected
    assert spread_lists(["probe", "--batches=820,568", "--json"]) == [
        "probe",
        "--batches",
        "820",
        "--batches",
        "568",
        "--json",
    ]
    assert spread_lists(["probe", "--gpus"]) == ["probe", "--gpus"]
    assert spread_lists(["probe", "--gpus", "--json"]) == ["probe", "--gpus", "--json"]


def test_settings_are_json_scalars_or_text() -> None:
    assert parse_settings(["a=1", "b=true", "c=tanh", "d=0.5"]) == {
        "a": 1,
        "b": True,
        "c": "tanh",
        "d": 0.5,
    }
    with pytest.raises(RequestError, match="key=value"):
        parse_settings(["layers"])


def test_every_field_of_a_request_has_one_option() -> None:
    """Every field of a session's request is an option, except `compare`, which is a command."""
    fields = {"budget_seconds": "budget", "input": "inputs"}
    names = {fields.get(name, name) for name in Request.__struct_fields__} - {"compare"}
    assert {*TRAINING, *SEARCH} == names == REQUEST_HELP.keys()
    assert make_request(framework="tensorflow") == Request()


@pytest.mark.parametrize(
    ("installed", "framework"),
    [({"tensorflow", "torch"}, "tensorflow"), ({"torch"}, "torch"), (set(), "tensorflow")],
)
def test_the_framework_is_one_that_is_installed(
    installed: set[str], framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users with only PyTorch needn't name it."""
    monkeypatch.setattr(parsing, "find_spec", lambda name: name in installed or None)
    assert make_request().framework == framework


@pytest.mark.parametrize(
    ("text", "framework"),
    [
        ("import torch.nn as nn", "torch"),
        ("def build():\n    from torch import nn", "torch"),
        ("import keras", "tensorflow"),
        ("import torch, keras", "tensorflow"),
        ("import numpy", "tensorflow"),
    ],
)
def test_the_framework_of_a_file_is_what_it_imports(
    text: str, framework: str, tmp_path: Path
) -> None:
    """It isn't known if the file imports both or neither. An option overrides the guess."""
    path = tmp_path / "train.py"
    path.write_text(text)
    assert make_request(workload=f"{path}:build").framework == framework
    assert make_request(workload=f"{path}:build", framework="torch").framework == "torch"
    assert make_request(workload="package.module:build").framework == "tensorflow"


@pytest.mark.parametrize(
    ("words", "option", "bounds"),
    [
        (["runs", "--most", "x"], "--most x", "a whole number of 1 or more"),
        (["runs", "-n", "0"], "--most 0", "a whole number of 1 or more"),
        (["--web-port", "70000"], "--web-port 70000", "a whole number from 0 to 65535"),
        (["replay", "last", "--speed", "0"], "--speed 0.0", "a number from 0.1 to 1000"),
    ],
)
def test_the_error_for_a_number_out_of_bounds_names_the_bounds(
    words: list[str], option: str, bounds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    assert capsys.readouterr().err == f"evener: {option} can't be used. Give {bounds}.\n"


@pytest.mark.parametrize(
    ("words", "fault", "remedy"),
    [
        (["balance", "--seed", "x"], "--seed x can't be used.", "Give a whole number."),
        (["balance", "--tolerance", "x"], "--tolerance x can't be used.", "Give a number."),
        (["runs", "--sort", "age"], "--sort age can't be used.", "Give created, workload,"),
        (["balance", "--seed"], "--seed needs a value.", "See evener balance --help."),
        (["balance", "--json=1"], "--json takes no value.", "Write --json alone."),
        (["balance", "--sed", "3"], "evener balance has no option --sed.", "Did you mean --seed"),
        (["launch"], "evener launch needs PLAN.", "See evener launch --help."),
        (["demo", "a", "b"], "evener demo has no use for 'a b'.", "See evener demo --help."),
        (["balanse"], "evener has no command balanse.", "balance"),
        (
            ["runs", "zzz"],
            "evener runs has no command zzz.",
            "Commands: list, show, compare, delete.",
        ),
    ],
)
def test_errors_of_the_command_line_are_in_evener_s_words(
    words: list[str], fault: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parser's own text changes with its version and names Python types."""
    assert run(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"evener: {fault} ")
    assert remedy in said


def test_help_knows_its_topics(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "launch"]) == 0
    assert "Usage: evener launch" in capsys.readouterr().out
    assert run(["help"]) == 0
    assert "workload, balance, compare" in capsys.readouterr().out
    assert run(["help", "plan"]) == 2
    assert "There is no help on plan. Topics: workload, balance" in capsys.readouterr().err


def test_a_browser_is_read_only_or_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--web", "--readonly", "--web-control"]) == 2
    assert "Leave one of them out." in capsys.readouterr().err


def test_a_comparison_goes_on_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    """It has the layouts with which it began. A search isn't a comparison."""
    pair = ["--devices", "sim:gtx1080ti,gtx1080", "--budget", "60s"]
    assert run(["compare", *pair, "--layouts", "solo,even"]) == 0
    capsys.readouterr()
    assert run(["compare", "--resume", "last"]) == 0
    resumed = capsys.readouterr().out
    assert "equal shares" in resumed
    assert "pack" not in resumed
    assert run(["compare", "--resume", "last", "--layouts", "solo"]) == 2
    assert "the layouts that it started with" in capsys.readouterr().err
    assert run(["balance", *pair]) == 0
    capsys.readouterr()
    assert run(["compare", "--resume", "last"]) == 2
    assert "evener balance --resume last" in capsys.readouterr().err
