"""Sentences about a single sample, row or measurement: no noun after a 1 is plural."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest

from evener.balancer.events import Started
from evener.balancer.result.sentences import write_verdict
from evener.balancer.trials import DryRunDevice, DryRunResult, choose_layout
from evener.balancer.types import solo
from evener.balancer.verdict import Learning, PassStatistics, ShortEpoch, Verdict
from evener.errors import RequestError
from evener.live.journal import RecordedTraining, StartEntry
from evener.plan.file import Evidence, EvidenceKind, Plan, Throughput, make_layout
from evener.plan.layout import Share
from evener.training.noise_scale import NoiseScale
from evener.tui.text.dry_run import dry_run_lines
from evener.tui.text.summaries import event_line, summary_lines, training_report
from tests.support.launched_plan import make_plan
from tests.support.verdicts import candidate, judged, result

PLURAL = re.compile(r"(?<![\d.,])1 (?:samples|rows|steps|measurements)\b(?!/)")
SINGULAR = re.compile(r"(?<![\d.,])1 (?:sample|row|step|measurement)\b")
SHARES = (Share("GPU-aa", 0, "GTX 1080 Ti", 0, 0.0), Share("GPU-bb", 1, "GTX 1080", 0, 0.0))


def learn(**known: object) -> Verdict:
    """Return the verdict of a plan of one sample, with what it costs in learning."""
    scale = NoiseScale(60.0, 50.0, 70.0, 100)
    learning = Learning(1, scale, (0.9, 0.8, 0.95))
    alone = judged(result(candidate("solo", solo(2, 0, 1)), 10))
    return msgspec.structs.replace(alone, learning=msgspec.structs.replace(learning, **known))


def write(verdict: Verdict) -> str:
    """Return all sentences of a verdict, one a line."""
    written = write_verdict(verdict)
    return "\n".join([written.text, *written.warnings])


def compare(*rivals: tuple[EvidenceKind, tuple[int, ...], float]) -> Plan:
    """Return a plan of one sample on each device, with these rivals."""
    evidence = [
        Evidence(
            kind,
            make_layout("solo" if 0 in batches else "split", SHARES, batches),
            Throughput(rate, rate * 0.99, rate * 1.01),
            kind,
        )
        for kind, batches, rate in rivals
    ]
    return make_plan(
        make_layout("split", SHARES, (1, 1)),
        throughput=Throughput(20.0, 19.9, 20.1),
        evidence=tuple(evidence),
    )


def write_plan(plan: Plan) -> str:
    return "\n".join(summary_lines(plan, ("GPU:0", "GPU:1"), "The verdict."))


def start(*shares: int) -> str:
    """Return what is said of a training that began with these shares."""
    entry = StartEntry(0.0, "train.py", "torch", ("GPU:0",), shares, 0.0, "here", 1, 1)
    return "\n".join(training_report(RecordedTraining("none", (entry,))))


def refuse_passes() -> str:
    with pytest.raises(RequestError) as caught:
        choose_layout(1, None, (1,), (2,))
    return str(caught.value)


def with_one(**known: object) -> str:
    return write(msgspec.structs.replace(learn(), learning=None, **known))


DRY_RUN = DryRunResult(
    "train.py:build", "torch", (DryRunDevice("GPU:0", "A", 1 << 33, 1),), ((1, 0.5),), 1.0, 60.0
)
TEXTS: dict[str, Callable[[], str]] = {
    "the worth of a batch": lambda: write(learn()),
    "a batch and the script's own": lambda: write(
        learn(own_batch=8, relative_speed=0.5, extra_samples=(0.9, 0.8, 1.0))
    ),
    "passes": lambda: with_one(pass_statistics=PassStatistics("BatchNorm2d", 1)),
    "data of one row": lambda: with_one(short_epoch=ShortEpoch(0, 2, 1, 0)),
    "a resumed run": lambda: event_line(Started("r1", ("GPU:0",), "a", 60.0, 1), ()) or "",
    "a batch that isn't compared": lambda: write_plan(
        compare(("best_device", (1, 0), 10.0), ("one_device", (0, 4), 12.0))
    ),
    "a training": lambda: start(1),
    "passes of a layout": refuse_passes,
    "a dry run": lambda: "\n".join(dry_run_lines(DRY_RUN)),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_noun_after_one_is_singular(name: str) -> None:
    text = TEXTS[name]()
    assert SINGULAR.search(text), text
    assert not PLURAL.search(text), text
