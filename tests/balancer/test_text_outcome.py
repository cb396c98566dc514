"""The result of a search over rows of unequal length: the plan, the verdict and the tables.

They are made from its journal.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import pytest

from evener.balancer.journal import FactsEntry, Header, JournalContents, ObservationEntry
from evener.balancer.request import Request, assigns_by_cost
from evener.balancer.run import open_run
from evener.balancer.search.layouts import LayoutOptions
from evener.balancer.session import Session
from evener.balancer.store import runs
from evener.balancer.types import Facts
from evener.devices.types import Device
from evener.errors import RequestError
from evener.plan.file import parse_plan, to_toml
from evener.shares.curves import Cost
from evener.tui.text.ranking_tables import ranking_json, ranking_table
from evener.tui.text.summaries import observation_text, share_table
from tests.support.text_machines import TextMachine

FAST, SLOW = Cost(0.001, 2e-5, 1e-8), Cost(0.002, 4e-5, 2e-8)
LABELS = ("CPU:0", "CPU:1")
DEVICES = tuple(Device(f"cpu-{i}-of-2", i, "AMD EPYC", "cpu", 8 << 30) for i in range(2))


def recorded(**asked: Any) -> JournalContents:
    """Return the journal of a search over two devices, one half as fast as the other."""
    request = Request(framework="torch", workload="torch_text", global_batch=64, **asked)
    header = Header("run", "2026-01-01T00:00:00Z", request, DEVICES, "torch_text", "torch", "0")
    machine = TextMachine((FAST, SLOW))
    _, seen = machine.searched(
        request.compare or LayoutOptions(("solo", "even", "split")), global_batch=64
    )
    entries = (FactsEntry(Facts(engine="ddp", rows=4096, lengths=machine.lengths)),)
    return JournalContents(
        header, (*entries, *(ObservationEntry(one, float(i)) for i, one in enumerate(seen))), 0
    )


@pytest.fixture(scope="module")
def record() -> JournalContents:
    return recorded()


def test_the_plan_has_costs_and_tokens_per_second(record: JournalContents) -> None:
    """Ratios are those of the cost. What is written is read again."""
    plan, verdict = (found := runs.recover(record)).plan, found.verdict
    first, second = plan.layout.share
    assert first.cost is not None
    assert second.cost is not None
    assert second.cost.per_token_s == pytest.approx(2 * first.cost.per_token_s, rel=0.1)
    assert plan.layout.global_batch == first.batch + second.batch == 64
    assert first.ratio == pytest.approx(2 / 3, abs=0.02)
    assert math.isclose(first.ratio + second.ratio, 1)
    lengths = record.facts.lengths
    mean = sum(lengths) / len(lengths)
    assert plan.throughput.tokens_per_second == pytest.approx(
        plan.throughput.samples_per_second * mean
    )
    assert 0 < plan.throughput.padding < 0.15
    even = next(one for one in plan.evidence if one.name == "equal shares")
    assert not even.layout.by_cost
    assert even.throughput.padding > 0.5
    assert {"solo CPU:0", "solo CPU:1"} <= {one.name for one in plan.evidence}
    assert parse_plan(to_toml(plan)) == plan
    assert "An epoch is" not in verdict, "the batch was given"
    answer = verdict.split("\n")[1]
    assert answer.startswith("64 rows on CPU:0 + CPU:1, their cost split 0.6")
    assert "tokens/s" in verdict
    assert re.search(r"% padding, the devices' own work within \d+(\.\d)? %\)", verdict)
    assert re.search(r"\+\d+ % over equal numbers of rows", verdict)


def test_tables_have_tokens_and_padding(record: JournalContents) -> None:
    search = runs.make_search(record.header.job, record.facts, record.observations)
    report = search.report()
    assert report is not None
    head, *rows = ranking_table(report, LABELS).rows
    assert head[2:5] == ("tokens/s", "padding", "samples/s")
    assert all(row[3].endswith(" %") for row in rows)
    layouts = ranking_json(report, LABELS)["layouts"]
    assert all(one["tokens_per_second"] > one["samples_per_second"] for one in layouts)
    assert "tokens/s, " in share_table(runs.recover(record).plan, LABELS)[-1]
    words = [observation_text(entry.seen, LABELS) for entry in record.seen]
    assert any("of 64 tokens]: " in each and "tokens/s" not in each for each in words)
    assert any("tokens/s, " in each and "padding" in each for each in words)


def test_requested_packs_and_placements_are_reported_as_left_out() -> None:
    plan = runs.recover(recorded(compare=LayoutOptions(scaling=False))).plan
    assert plan.warnings[0].startswith("Not compared: packs and placements, which train by rows")


def test_a_journal_gives_back_what_was_seen(record: JournalContents) -> None:
    entries = list(record.entries[1:])
    assert msgspec.json.decode(msgspec.json.encode(entries), type=list[ObservationEntry]) == entries


@pytest.mark.parametrize(
    ("asked", "framework", "by_cost"),
    [
        ({}, "torch", True),
        ({"objective": "tokens"}, "torch", True),
        ({"objective": "samples"}, "torch", False),
        ({"micro": "off"}, "torch", False),
        ({"input": "device"}, "torch", False),
        ({}, "tensorflow", False),
    ],
)
def test_when_rows_are_assigned_by_cost(
    asked: dict[str, Any], framework: str, by_cost: bool
) -> None:
    assert assigns_by_cost(Request(**asked), framework) is by_cost


@pytest.mark.usefixtures("own_folder")
def test_tokens_of_rows_without_lengths_can_not_be_counted() -> None:
    session = Session(open_run(Request("sim:t4,t4", objective="tokens", budget_seconds=20.0)))
    with pytest.raises(RequestError, match="gives no lengths of its rows"):
        list(session.events())
    session.close()
