"""Words as data: every code has a sentence and a line in the docs, and `--json` has the codes beside the sentences."""

from __future__ import annotations

import json
import random
import re
import string
from pathlib import Path

import msgspec
import pytest

from evener.balancer import journal
from evener.balancer.result import words
from evener.balancer.result.words import list_sentences, say, say_all, write_verdict
from evener.balancer.search.decisions import Stop
from evener.balancer.store import replay
from evener.balancer.types import Finding, Said
from evener.tui.cli.main import run
from tests.support.search_outcomes import draw_outcome

ROOT = Path(__file__).parents[2]
CODE = re.compile(r'"([a-z]+\.[a-z_]+)"')
WRITERS = [path for path in (ROOT / "balancer" / "result").glob("*.py") if path.stem != "words"]
COMMANDS = (ROOT / "docs" / "commands.md").read_text()


def test_every_code_that_is_found_has_a_sentence() -> None:
    found = {code for path in WRITERS for code in CODE.findall(path.read_text())}
    assert len(found) > 30
    assert found <= list_sentences().keys()


def test_every_code_and_its_values_are_in_the_docs() -> None:
    """And no other: what is written there is what a program can meet."""
    rows = dict(re.findall(r"^\| `([a-z_]+(?:\.[a-z_]+)?)` \| (.*) \|$", COMMANDS, re.MULTILINE))
    assert rows.keys() >= list_sentences().keys()
    for code, sentence in list_sentences().items():
        fields = {field for _, field, _, _ in string.Formatter().parse(sentence) if field}
        assert set(re.findall(r"`(\w+)`", rows[code])) == fields, code
    assert all(f"`{stop.name.lower()}`" in COMMANDS for stop in Stop)


def test_every_format_of_a_sentence_is_known() -> None:
    formats = {form for text in list_sentences().values() for _, _, form, _ in string.Formatter().parse(text) if form}
    assert all(form in words._FORMATS or re.fullmatch(r"\.\d+f|g", form) for form in formats)


def test_the_parts_of_a_verdict_are_joined_by_what_they_are() -> None:
    gains = [Finding("gain.tie", {"over": over, "batch": None}) for over in ("even", "GPU:0")]
    taken = Finding("taken.verdict", {"devices": ["GPU:1"]})
    assert write_verdict([Finding("figure.samples", {"samples_per_second": 50.0, "error": 0.0}), *gains, taken]) == (
        "50.00 samples/s, as fast as the even split within the error and as fast as GPU:0 alone within the error;"
        " others hold memory of GPU:1, which is left to them."
    )
    assert write_verdict([]) == ""


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "recorded").glob("*.jsonl")), ids=lambda path: path.stem)
def test_a_recorded_run_s_findings_survive_json_and_say_what_its_plan_says(path: Path) -> None:
    outcome = replay.recover(journal.read(path))
    found = msgspec.json.decode(msgspec.json.encode(outcome.findings), type=Said)
    assert say_all(found.warnings) == outcome.plan.warnings
    assert write_verdict(found.verdict) == outcome.verdict
    assert Stop[found.stopped.upper()].value == outcome.plan.search.why_stopped


def test_drawn_searches_too() -> None:
    chance = random.Random(3)
    for _ in range(20):
        outcome, _ = draw_outcome(chance)
        found = msgspec.json.decode(msgspec.json.encode(outcome.findings), type=Said)
        assert write_verdict(found.verdict) == outcome.verdict


def test_json_has_the_codes_beside_the_sentences(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a program reads them: each warning at the place of its sentence, and the gain as a number."""
    assert run(["balance", "-d", "sim:gtx1080ti,gtx1080", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    found = printed["findings"]
    assert [say(msgspec.convert(one, Finding)) for one in found["warnings"]] == printed["warnings"]
    gain = next(one["values"] for one in found["verdict"] if one["code"] == "gain.faster")
    assert gain["over"] == "even"
    assert f"{gain['gain'] * 100:.0f} % faster than the even split" in printed["verdict"]
    assert found["stopped"] in {stop.name.lower() for stop in Stop}
