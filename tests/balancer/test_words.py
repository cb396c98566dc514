"""Words as data: every code has a sentence and a line in the docs, and `--json` has the codes
beside the sentences.
"""

from __future__ import annotations

import ast
import json
import random
import re
import string
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from evener.balancer import journal
from evener.balancer.families import FAMILIES
from evener.balancer.request import PRECISIONS
from evener.balancer.result import words
from evener.balancer.result.words import list_sentences, say, say_all, write_verdict
from evener.balancer.store import runs
from evener.balancer.store.runs import find, journal_path
from evener.balancer.types import Cause, Finding, Said, Stop
from evener.tui.cli.main import run
from tests.support.search_outcomes import draw_outcome

ROOT = Path(__file__).parents[2]
CODE = re.compile(r'"([a-z_]+(?:\.[a-z_]+)?)"')
WRITERS = [path for folder in ("balancer", "tui") for path in (ROOT / folder).rglob("*.py")]
COMMANDS = (ROOT / "docs" / "findings.md").read_text()


def written_codes() -> set[str]:
    """The codes that product code writes, as the first argument of Finding; some are put
    together.
    """
    calls = [
        node
        for path in WRITERS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    texts = [
        ast.unparse(call.args[0])
        for call in calls
        if ast.unparse(call.func) == "Finding" and call.args
    ]
    return {literal for text in texts for literal in re.findall(r"f?'([a-z]+\.?[^']*)'", text)}


def test_every_code_that_is_written_has_a_sentence_and_the_other_way_round() -> None:
    """A sentence without a writer is dead; `advice.{...}` stands for every advice."""
    patterns = [re.sub(r"\\{.*?\\}", "[a-z_]+", re.escape(code)) for code in written_codes()]
    codes = list_sentences().keys()
    assert len(patterns) > 60
    assert [one for one in patterns if not any(re.fullmatch(one, code) for code in codes)] == []
    literals = {
        word for path in WRITERS if path.stem != "words" for word in CODE.findall(path.read_text())
    }
    spoken = {
        code
        for code in codes
        if code in literals or any(re.fullmatch(one, code) for one in patterns)
    }
    assert (
        codes - spoken - {code for code in codes if code.partition(".")[0] in ("layout", *FAMILIES)}
        == set()
    )


def test_every_code_and_its_values_are_in_the_docs() -> None:
    """And no other: what is written there is what a program can meet."""
    rows = dict(re.findall(r"^\| `([a-z_]+(?:\.[a-z_]+)?)` \| (.*) \|$", COMMANDS, re.MULTILINE))
    assert rows.keys() >= list_sentences().keys()
    assert {code for code in rows if "." in code} <= list_sentences().keys()
    for code, sentence in list_sentences().items():
        fields = {field for _, field, _, _ in string.Formatter().parse(sentence) if field}
        assert set(re.findall(r"`(\w+)`", rows[code])) == fields, code
    assert all(f"`{stop.name.lower()}`" in COMMANDS for stop in Stop)
    assert all(f"`{cause}`" in COMMANDS for cause in get_args(Cause))


def test_every_format_of_a_sentence_is_known() -> None:
    formats = {
        form
        for text in list_sentences().values()
        for _, _, form, _ in string.Formatter().parse(text)
        if form
    }
    assert all(form in words._FORMATS or re.fullmatch(r"\.\d+f|g", form) for form in formats)


def test_the_parts_of_a_verdict_are_joined_by_what_they_are() -> None:
    gains = [Finding("gain.tie", {"over": over, "batch": None}) for over in ("even", "GPU:0")]
    taken = Finding("taken.verdict", {"devices": ["GPU:1"]})
    assert write_verdict(
        [Finding("figure.samples", {"samples_per_second": 50.0, "error": 0.0}), *gains, taken]
    ) == (
        "50.00 samples/s, as fast as the even split within the error and as fast as GPU:0 "
        "alone within the error;"
        " other processes hold memory of GPU:1, and the plan leaves it to them."
    )
    assert write_verdict([]) == ""


@pytest.mark.parametrize(
    ("count", "said"), [(8, "Split 0.125:"), (16, "Split over 16 devices (160 samples)")]
)
def test_an_advice_for_many_devices_leaves_room_for_what_is_gained(count: int, said: str) -> None:
    """Each device's share is in the table beside it; a terminal of 80 x 24 cuts off what is
    longer.
    """
    ratios, labels = [1 / count] * count, [f"SIM:{i}" for i in range(count)]
    advice = Finding(
        "advice.split",
        {"ratios": ratios, "devices": labels, "shares": [(10, 10)] * count, "knobs": []},
    )
    assert say(advice).startswith(said)
    assert len(say(advice)) < 200


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests" / "recorded").glob("*.jsonl")), ids=lambda path: path.stem
)
def test_a_recorded_run_s_findings_survive_json_and_say_what_its_plan_says(path: Path) -> None:
    outcome = runs.recover(journal.read(path))
    found = msgspec.json.decode(msgspec.json.encode(outcome.findings), type=Said)
    assert say_all(found.warnings) == outcome.plan.warnings
    assert write_verdict(found.verdict) == outcome.verdict
    assert say_all(found.evidence) == tuple(each.name for each in outcome.plan.evidence)
    assert Stop[found.stopped.upper()].value == outcome.plan.search.why_stopped


def test_drawn_searches_too() -> None:
    chance = random.Random(3)
    for _ in range(20):
        outcome, _ = draw_outcome(chance)
        found = msgspec.json.decode(msgspec.json.encode(outcome.findings), type=Said)
        assert write_verdict(found.verdict) == outcome.verdict
        assert say_all(found.warnings) == outcome.plan.warnings
        assert say_all(found.evidence) == tuple(each.name for each in outcome.plan.evidence)


def say_again(findings: list[dict[str, Any]]) -> list[str]:
    """The sentences of findings as JSON has them."""
    return [say(msgspec.convert(one, Finding)) for one in findings]


def test_json_has_the_codes_beside_the_sentences(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a program reads them: each warning at the place of its sentence, and the gain as a
    number.
    """
    assert run(["balance", "-d", "sim:gtx1080ti,gtx1080", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    found = printed["findings"]
    assert [say(msgspec.convert(one, Finding)) for one in found["warnings"]] == printed["warnings"]
    gain = next(one["values"] for one in found["verdict"] if one["code"] == "gain.faster")
    assert gain["over"] == "even"
    assert f"{gain['gain'] * 100:.0f} % faster than the even split" in printed["verdict"]
    assert found["stopped"] in {stop.name.lower() for stop in Stop}
    assert say_again(found["next"]) == printed["next"]
    assert [one["code"] for one in found["next"]] == ["next.export"], (
        "a simulated plan has no script to launch"
    )
    assert run(["runs", "show", "last", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["findings"]
    assert shown == {key: found[key] for key in ("verdict", "warnings", "evidence", "stopped")} | {
        "faults": []
    }


def test_a_run_that_was_cut_off_has_the_findings_of_what_it_measured(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["balance", "-d", "sim:gtx1080ti,gtx1080", "--json"]) == 0
    ended = json.loads(capsys.readouterr().out)["findings"]
    path = journal_path(find("last"))
    path.write_text(
        "".join(
            f"{line}\n" for line in path.read_text().splitlines() if '"entry":"ended"' not in line
        )
    )
    assert run(["runs", "show", "last", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"]["evidence"] == ended["evidence"]


def test_a_fault_s_codes_say_what_its_sentences_say(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the error, and in the run that failed."""
    request = [
        "-d",
        "sim:gtx1080ti,gtx1080",
        "--global-batch",
        "1000000",
        "--micro",
        "off",
        "--json",
    ]
    assert run(["balance", *request]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    what, remedy = error["findings"]
    assert what["code"] == "fault.batch_too_large"
    assert [each["device"] for each in what["values"]["devices"]] == ["SIM:0", "SIM:1"]
    assert what["values"]["together"] == sum(each["rows"] for each in what["values"]["devices"])
    assert [f"{say_again([what])[0]}.", *say_again([remedy])] == [error["message"], error["remedy"]]
    assert run(["runs", "show", "last", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["findings"]["faults"], shown["trouble"]) == (error["findings"], error["message"])
    assert run(["balance", "-d", "sim:gtx1080ti", "--budget", "soon", "--json"]) == 2
    (misread,) = json.loads(capsys.readouterr().out)["error"]["findings"]
    assert (misread["code"], misread["values"]["option"]) == ("request.text", "--budget")


def test_a_dry_run_and_a_probe_have_codes_beside_their_sentences(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["balance", "-d", "sim:gtx1080ti,gtx1080", "--dry-run", "--json"]) == 0
    outlook = json.loads(capsys.readouterr().out)
    parts = [msgspec.convert(one, Finding) for one in outlook["findings"]["verdict"]]
    assert write_verdict(parts) == outlook["verdict"]
    assert parts[1].values["budget_seconds"] == outlook["budget_seconds"]
    machine = (ROOT / "tests/balancer/search/machines/flat_slow_steps.toml").read_text()
    Path("noisy.toml").write_text(re.sub(r"noise = .*", "noise = 0.5", machine))
    assert (
        run(
            [
                "probe",
                "-d",
                "sim:noisy.toml",
                "--batches",
                "64",
                "--seconds",
                "1s",
                "--repeat",
                "2",
                "--json",
            ]
        )
        == 0
    )
    timed = json.loads(capsys.readouterr().out)
    assert [(one["code"], one["values"]["run"]) for one in timed["findings"]["warnings"]] == [
        (f"doubt.{each['code']}", number)
        for number, one in enumerate(timed["runs"], 1)
        for each in one["warnings"]
    ]
    assert say_again(timed["findings"]["warnings"]) == timed["warnings"]
    assert timed["warnings"], "steps vary much on this machine"


@pytest.mark.parametrize(
    ("option", "code", "values"),
    [
        (["--global-batch", "7", "--multiple-of", "2"], "no_multiple", {"batch": 7, "unit": 2}),
        (
            ["--precision", "float8"],
            "word",
            {"option": "--precision", "word": "float8", "words": list(PRECISIONS)},
        ),
        (["--xla"], "simulated", {"option": "--xla"}),
        (["--global-batch", "1"], "too_few_samples", {"batch": 1, "devices": 2, "unit": 1}),
    ],
)
def test_a_request_that_can_t_be_met_has_a_code(
    option: list[str],
    code: str,
    values: dict[str, object],
    own_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is wrong and what to do are the two lines of its sentence, and a program needs
    neither.
    """
    assert run(["balance", "-d", "sim:gtx1080ti,gtx1080", *option, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["findings"] == [{"code": f"request.{code}", "values": values}]
    assert say_again(error["findings"]) == [f"{error['message']}\n{error['remedy']}"]


def test_every_refusal_says_what_to_do() -> None:
    refusals = [text for code, text in list_sentences().items() if code.startswith("request.")]
    assert len(refusals) > 20
    assert all(
        len([line for line in text.split("\n") if line.strip().endswith(".")]) == 2
        for text in refusals
    )
