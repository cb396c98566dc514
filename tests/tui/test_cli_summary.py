"""A plan and a session's events as lines of text."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from evener.balancer.events import Observed, ProbeProgress, ProbeStarted, Started
from evener.balancer.result.sentences import write_error
from evener.balancer.session_state import SessionState, advance
from evener.balancer.types import (
    Belief,
    Failed,
    Interval,
    Layout,
    OutOfMemory,
    Probe,
    Result,
    Stage,
    Timed,
    layout_of,
    solo,
)
from evener.balancer.verdict import MeasuredRate
from evener.plan.file import (
    Evidence,
    EvidenceKind,
    Fingerprint,
    Kind,
    Plan,
    SearchSummary,
    Share,
    Throughput,
    make_layout,
)
from evener.tui.cli.session_runner import search_screen
from evener.tui.text.summaries import event_line, observation_text, outcome_text, summary_lines
from tests.support.launched_plan import make_plan

SHARES = (Share("GPU-aa", 0, "GTX 1080 Ti", 0, 0.0), Share("GPU-bb", 1, "GTX 1080", 0, 0.0, "60%"))
LABELS = ("GPU:0", "GPU:1")


def evidence(
    evidence_kind: EvidenceKind, name: str, batches: tuple[int, ...], samples_per_second: float
) -> Evidence:
    """Return a rival with an invented throughput."""
    kind: Kind = "solo" if 0 in batches else "split"
    throughput = Throughput(
        samples_per_second, samples_per_second * 0.99, samples_per_second * 1.01
    )
    return Evidence(name, make_layout(kind, SHARES, batches), throughput, evidence_kind)


PLAN = make_plan(
    make_layout("split", SHARES, (820, 568)),
    workload="keras_maxer",
    framework="tensorflow",
    throughput=Throughput(2123.0, 2110.0, 2136.0),
    evidence=(
        evidence("equal_shares", "equal shares", (512, 512), 1810.0),
        evidence("best_device", "best single device", (1024, 0), 1345.0),
        evidence("one_device", "solo GPU:0", (1024, 0), 1345.0),
        evidence("one_device", "solo GPU:1", (0, 512), 875.0),
    ),
    search=SearchSummary(9, 1, 61.5, 0, "the intervals are tight"),
    fingerprint=Fingerprint(
        ("GTX 1080 Ti (11178 MiB)", "GTX 1080 (8192 MiB)"), "580.1", {"tensorflow": "2.21"}, "d"
    ),
    warnings=("readings drifted",),
)


def changed(*rivals: Evidence, **changes: Any) -> Plan:
    """Return the plan with other rivals, if any are given, and other fields."""
    evidence = rivals or PLAN.evidence
    return msgspec.structs.replace(PLAN, evidence=evidence, **changes)


def alone(batches: tuple[int, ...]) -> Plan:
    """Return a plan of one device; a split was measured too."""
    better = evidence("other_shares", "best split", (700, 300), 1900.0)
    return changed(*PLAN.evidence, better, layout=make_layout("solo", SHARES, batches))


FIRST, SINGLE, *OTHERS = PLAN.evidence
ROUGH = msgspec.structs.replace(SINGLE, throughput=Throughput(1345.0, 500.0, 2200.0))
PLANS = {
    "a split": PLAN,
    "gains measured in turn": changed(
        *(msgspec.structs.replace(rival, gain=0.31, paired=True) for rival in PLAN.evidence)
    ),
    "gains of an older plan, which follow from the rates": changed(
        *(msgspec.structs.replace(rival, gain=0.31) for rival in PLAN.evidence)
    ),
    "a figure too uncertain to compare": changed(throughput=Throughput(2123.0, 1000.0, 3246.0)),
    "a rival too uncertain to compare": changed(FIRST, ROUGH, *OTHERS),
    "a rival of far fewer rows": changed(
        evidence("equal_shares", "equal shares", (128, 128), 300.0), SINGLE, *OTHERS
    ),
    "a rival within the error": changed(msgspec.structs.replace(FIRST, tie=True), SINGLE, *OTHERS),
    "the first device alone, not its best batch": alone((512, 0)),
    "the second device alone": alone((0, 512)),
    "a device alone at the plan's batch, faster before": changed(
        evidence("best_device", "best single device", (0, 1388), 1801.0),
        evidence("one_device", "solo GPU:0", (64, 0), 6011.0),
        evidence("one_device", "solo GPU:0 at 1388", (1388, 0), 2271.0),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_reads_as_it_did(name: str, snapshot: Any) -> None:
    """Its table, rivals and warnings are unchanged."""
    pytest.importorskip("syrupy")
    assert "\n".join(summary_lines(PLANS[name], LABELS, "The verdict.")) == snapshot


def test_a_terminal_breaks_sentences_between_words() -> None:
    """No number is cut at the edge. Tables are unchanged, and a pipe gets each sentence whole."""
    verdict = (
        "Split 0.591:0.409 over GPU:0 and GPU:1 (820 + 568 samples): 2 123 samples/s, 17 % "
        "faster than equal shares."
    )
    whole = summary_lines(PLAN, LABELS, verdict)
    assert verdict in whole
    narrow = summary_lines(PLAN, LABELS, verdict, 60)
    assert (
        " ".join(narrow[narrow.index("") :]).split() == " ".join(whole[whole.index("") :]).split()
    )
    assert max(len(line) for line in narrow[narrow.index("", 5) + 1 :]) <= 60


def test_names_can_not_steer_the_terminal() -> None:
    """Escape sequences in a device's name are escaped."""
    evil = msgspec.structs.replace(SHARES[0], name="\x1b[2Jgpu")
    plan = msgspec.structs.replace(PLAN, layout=make_layout("split", (evil, SHARES[1]), (820, 568)))
    assert "\x1b" not in "\n".join(summary_lines(plan, LABELS))


BELIEF = Belief((), "checks the curve of both devices")


def timed(layout: Layout) -> Timed:
    """Return one observation at 0.5 s per step."""
    probe = Probe(layout, Stage.SOLO, 5.0)
    return Timed(probe, 0.5, 0.495, 0.505, 20, (None, None), (None, None), 1.0, 6.0)


def test_progress_follows_a_session() -> None:
    """Each observation is a line. The screen shows what runs, the best so far and the time left."""

    def screen(state: SessionState) -> list[str]:
        return [" ".join(line.text.split()) for line in search_screen(state, 120)]

    started = Started("r1", LABELS, "keras_maxer", 120.0, 0)
    assert event_line(started, ()) == "run r1: keras_maxer on GPU:0, GPU:1"
    probe = Probe(solo(2, 0, 64), Stage.SOLO, 5.0)
    state = advance(advance(SessionState(), started), ProbeStarted(probe, 0.0))
    state = advance(state, ProbeProgress(probe, "measuring", 684.0, 0.012, 3.0))
    assert "█ GPU:0 ● alone: measuring 64 684.0 ±1.2 % – –" in screen(state)
    observed = Observed(
        timed(solo(2, 0, 64)),
        BELIEF,
        Result(solo(2, 0, 64), Interval(128.0, 126.0, 130.0), 1),
        1,
        0,
        6.0,
    )
    line = event_line(observed, LABELS)
    assert line is not None
    assert line.endswith("alone  GPU:0[64]: 128.0 samples/s ± 1.0 %")
    shown = screen(advance(state, observed))
    assert shown[1].startswith("█ GPU:0 ○ waits 128.0 at 64")
    assert "128.0 ±1.6 %" in shown[3]
    assert shown[-2] == "checks the curve of both devices"
    assert shown[-1].startswith("1 probe, 0 out of memory, 6.0 s, at most 1 min 54 s left")


def test_a_figure_has_the_same_error_in_every_place() -> None:
    """This holds even if the interval is wider than the value.

    The lower half then ends at 0, and ± is the upper half.
    """
    noisy = msgspec.structs.replace(timed(solo(2, 0, 64)), low_seconds=0.0, high_seconds=1.2)
    figure = noisy.throughput
    assert (figure.low, figure.high) == (0.0, figure.value * 2.2)
    assert outcome_text(noisy, LABELS).endswith("± 120.0 %")
    plan = msgspec.structs.replace(
        PLAN, throughput=Throughput(figure.value, figure.low, figure.high)
    )
    assert "± 120.0 %" in "\n".join(summary_lines(plan, LABELS))
    shown = MeasuredRate(figure.value, figure.low, figure.high, known=False)
    assert write_error(shown) == "± 120.0 %"


def test_a_failure_is_told_once_in_full() -> None:
    """The end of a search has an exception's message and its file; the log has its kind.

    A failure without an exception is only in the log.
    """
    probe = Probe(solo(2, 0, 8), Stage.SOLO, 5.0)

    def log_line(detail: str) -> str:
        failed = Failed(probe, "raised", detail, (0,), 3.0)
        return event_line(Observed(failed, BELIEF, None, 1, 0, 4.0), LABELS) or ""

    raised = log_line(
        "GPU:0, warming up: /home/a: b/train.py:6: KeyError: 'hiden' (traceback in /s/errors.txt)"
    )
    assert raised.endswith("GPU:0[8]: failed while warming up, KeyError")
    lost = log_line("GPU:0: the device is lost (output in /s/errors.txt)")
    assert lost.endswith("GPU:0[8]: failed: GPU:0: the device is lost")


def test_what_did_not_run_is_said_in_words() -> None:
    """Out of memory names the device. A failure shows its one line, with control characters
    removed.
    """
    probe = Probe(layout_of((1024, 710)), Stage.SPLIT, 5.0)
    words = observation_text(OutOfMemory(probe, (1,), "ResourceExhausted", 3.0), LABELS)
    assert words == "split  GPU:0[1024] GPU:1[710]: out of memory on GPU:1"
    failed = observation_text(
        Failed(probe, "signal", "killed by \x1b[31mSIGKILL", (1,), 3.0), LABELS
    )
    assert "\x1b" not in failed
    assert "SIGKILL" in failed
