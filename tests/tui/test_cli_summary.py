"""A plan and a session's events as lines of text."""

from __future__ import annotations

import msgspec

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
    Timed,
    layout_of,
    solo,
)
from evener.balancer.verdict import Figure
from evener.plan.file import (
    Evidence,
    EvidenceKind,
    Fingerprint,
    Kind,
    SearchSummary,
    Share,
    Throughput,
    make_layout,
)
from evener.tui.cli.session_runner import search_screen
from evener.tui.text.summaries import event_line, observation_words, outcome_words, summary_lines
from tests.support.launched_plan import make_plan

SHARES = (Share("GPU-aa", 0, "GTX 1080 Ti", 0, 0.0), Share("GPU-bb", 1, "GTX 1080", 0, 0.0, "60%"))
LABELS = ("GPU:0", "GPU:1")


def evidence(
    evidence_kind: EvidenceKind, name: str, batches: tuple[int, ...], samples_per_second: float
) -> Evidence:
    """A rival with a made-up figure."""
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
        evidence("equal_shares", "even split", (512, 512), 1810.0),
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


def test_the_table_has_every_device_and_the_total() -> None:
    """Share, ratio, samples/s in the layout and alone, and the limit that the device is held to."""
    lines = summary_lines(PLAN, LABELS, "Split 820:568.")
    assert lines[1].split() == [
        "GPU:0",
        "GTX",
        "1080",
        "Ti",
        "820",
        "0.591",
        "1",
        "254",
        "1",
        "345",
        "at",
        "1024",
    ]
    assert lines[2].startswith("GPU:1 @60%")
    assert lines[3].split()[:3] == ["together", "1388", "1.000"]
    assert "Split 820:568." in lines
    assert lines[-1] == "warning: readings drifted"


def test_the_rivals_are_compared() -> None:
    """The gain over the even split and the best single device, and the part of the sum of each."""
    text = "\n".join(summary_lines(PLAN, LABELS))
    assert (
        "even split: 1 810 samples/s at 512+512 = 1024 samples a step; the plan gains 17.3 %"
        in text
    )
    assert "GPU:0 alone: 1 345 samples/s at 1024; the plan gains 57.8 %" in text
    assert (
        "sum of each alone: 2 220 samples/s, an upper bound; the plan reaches 95.6 % of it" in text
    )
    assert "warning: readings drifted" in text


def test_a_gain_measured_in_turn_says_so_and_any_other_follows_from_the_rates() -> None:
    """The machine may have been faster when the plan's figure was measured; older plans don't mark
    paired gains.
    """
    paired = [msgspec.structs.replace(rival, gain=0.31, paired=True) for rival in PLAN.evidence]
    text = "\n".join(summary_lines(msgspec.structs.replace(PLAN, evidence=tuple(paired)), LABELS))
    assert (
        "GPU:0 alone: 1 345 samples/s at 1024; measured alternately, the plan gains 31.0 %" in text
    )
    old = [msgspec.structs.replace(rival, gain=0.31) for rival in PLAN.evidence]
    text = "\n".join(summary_lines(msgspec.structs.replace(PLAN, evidence=tuple(old)), LABELS))
    assert "GPU:0 alone: 1 345 samples/s at 1024; the plan gains 57.8 %" in text


def test_figures_that_are_too_uncertain_are_shown_with_their_error_and_not_compared() -> None:
    """The plan's and a rival's."""
    rough = msgspec.structs.replace(PLAN, throughput=Throughput(2123.0, 1000.0, 3246.0))
    text = "\n".join(summary_lines(rough, LABELS))
    assert "± 52.9 %" in text
    assert "gains" not in text
    assert "the plan's figure is too uncertain to compare" in text
    first, single, *others = PLAN.evidence
    single = msgspec.structs.replace(single, throughput=Throughput(1345.0, 500.0, 2200.0))
    text = "\n".join(
        summary_lines(msgspec.structs.replace(PLAN, evidence=(first, single, *others)), LABELS)
    )
    line = "GPU:0 alone: 1 345 samples/s ± 63.6 % at 1024; too uncertain to compare"
    assert line in text.splitlines()


def test_a_split_of_far_fewer_rows_is_not_compared() -> None:
    far = [evidence("equal_shares", "even split", (128, 128), 300.0), *PLAN.evidence[1:]]
    lines = summary_lines(msgspec.structs.replace(PLAN, evidence=tuple(far)), LABELS)
    (line,) = [one for one in lines if one.startswith("even split: 300.0 samples/s at 128+128")]
    assert line.endswith("; none was measured near 1388 samples")


def test_a_rival_within_the_error_is_no_gain() -> None:
    """As the verdict has it; the figures of this one are apart, so it says how it was measured."""
    tied = [
        msgspec.structs.replace(rival, tie=rival.name == "even split") for rival in PLAN.evidence
    ]
    lines = summary_lines(msgspec.structs.replace(PLAN, evidence=tuple(tied)), LABELS)
    (even,) = [line for line in lines if line.startswith("even split")]
    assert even.endswith("; measured alternately, the plan is as fast: too close to call")
    assert "GPU:0 alone: 1 345 samples/s at 1024; the plan gains 57.8 %" in lines


def test_one_device_is_compared_with_the_best_split_and_the_other_device() -> None:
    """Not with itself at another batch, though it is the best single device."""
    alone = make_layout("solo", SHARES, (512, 0))
    better = evidence("other_shares", "best split", (700, 300), 1900.0)
    plan = msgspec.structs.replace(PLAN, layout=alone, evidence=(*PLAN.evidence, better))
    text = "\n".join(summary_lines(plan, LABELS))
    better_line = "best split: 1 900 samples/s at 700+300 = 1000 samples a step; the plan gains"
    assert f"{better_line} 11.7 %" in text
    assert "sum of each alone" not in text
    assert "even split" not in text
    assert "best single device" not in text
    assert "the other device alone, GPU:1: 875.0 samples/s at 512; the plan gains 142.6 %" in text
    other = msgspec.structs.replace(plan, layout=make_layout("solo", SHARES, (0, 512)))
    text = "\n".join(summary_lines(other, LABELS))
    assert "the other device alone, GPU:0: 1 345 samples/s at 1024" in text


def test_a_device_alone_is_shown_at_the_plan_s_batch_and_says_if_it_was_faster_before() -> None:
    """The table's column and the line below it are of one batch, so that neither contradicts the
    other.
    """
    batch = 1388
    plan = msgspec.structs.replace(
        PLAN,
        evidence=(
            evidence("best_device", "best single device", (0, batch), 1801.0),
            evidence("one_device", "solo GPU:0", (64, 0), 6011.0),
            evidence("one_device", f"solo GPU:0 at {batch}", (batch, 0), 2271.0),
        ),
    )
    lines = summary_lines(plan, LABELS)
    assert lines[1].endswith("2 271 at 1388")
    assert lines[2].endswith("1 801 at 1388")
    line = next(one for one in lines if one.startswith("GPU:1 alone"))
    assert "measured alternately: 1 801 now, 2 271 earlier; the plan gains 17.9 %" in line


def test_a_device_that_is_left_out_is_said_to_be() -> None:
    """A share of 0 is a decision, not a gap."""
    alone = msgspec.structs.replace(PLAN, layout=make_layout("solo", SHARES, (1024, 0)))
    assert "left out" in summary_lines(alone, LABELS)[2]


def test_a_terminal_breaks_sentences_between_words() -> None:
    """No figure is torn at the edge; tables stay as they are, and a pipe gets each sentence
    whole.
    """
    verdict = (
        "Split 0.591:0.409 over GPU:0 and GPU:1 (820 + 568 samples): 2 123 samples/s, 17 % "
        "faster than even."
    )
    whole = summary_lines(PLAN, LABELS, verdict)
    assert verdict in whole
    narrow = summary_lines(PLAN, LABELS, verdict, 60)
    assert (
        " ".join(narrow[narrow.index("") :]).split() == " ".join(whole[whole.index("") :]).split()
    )
    assert max(len(line) for line in narrow[narrow.index("", 5) + 1 :]) <= 60


def test_names_can_not_steer_the_terminal() -> None:
    """Escape sequences in a device's name are shown harmless."""
    evil = msgspec.structs.replace(SHARES[0], name="\x1b[2Jgpu")
    plan = msgspec.structs.replace(PLAN, layout=make_layout("split", (evil, SHARES[1]), (820, 568)))
    assert "\x1b" not in "\n".join(summary_lines(plan, LABELS))


BELIEF = Belief((), "checks the curve of both devices")


def timed(layout: Layout) -> Timed:
    """One observation at 0.5 s a step."""
    probe = Probe(layout, "solo", 5.0)
    return Timed(probe, 0.5, 0.495, 0.505, 20, (None, None), (None, None), 1.0, 6.0)


def test_progress_follows_a_session() -> None:
    """Each observation is a line; the screen shows what runs, the best so far and the time left."""

    def screen(state: SessionState) -> list[str]:
        return [" ".join(line.text.split()) for line in search_screen(state, 120)]

    started = Started("r1", LABELS, "keras_maxer", 120.0, 0)
    assert event_line(started, ()) == "run r1: keras_maxer on GPU:0, GPU:1"
    probe = Probe(solo(2, 0, 64), "solo", 5.0)
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
    """Also one whose interval is wider than it is: the lower half ends at 0, and the upper one is
    what ± says.
    """
    noisy = msgspec.structs.replace(timed(solo(2, 0, 64)), low_seconds=0.0, high_seconds=1.2)
    figure = noisy.throughput
    assert (figure.low, figure.high) == (0.0, figure.value * 2.2)
    assert outcome_words(noisy, LABELS).endswith("± 120.0 %")
    plan = msgspec.structs.replace(
        PLAN, throughput=Throughput(figure.value, figure.low, figure.high)
    )
    assert "± 120.0 %" in "\n".join(summary_lines(plan, LABELS))
    shown = Figure(figure.value, figure.low, figure.high, known=False)
    assert write_error(shown) == "± 120.0 %"


def test_a_failure_is_told_once_in_full() -> None:
    """The end of a search has an exception's sentence and its file; the log has its kind. What is
    no exception has no other place.
    """
    probe = Probe(solo(2, 0, 8), "solo", 5.0)

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
    """Out of memory names the device; a failure shows its one line, harmless."""
    probe = Probe(layout_of((1024, 710)), "split", 5.0)
    words = observation_words(OutOfMemory(probe, (1,), "ResourceExhausted", 3.0), LABELS)
    assert words == "split  GPU:0[1024] GPU:1[710]: out of memory on GPU:1"
    failed = observation_words(
        Failed(probe, "signal", "killed by \x1b[31mSIGKILL", (1,), 3.0), LABELS
    )
    assert "\x1b" not in failed
    assert "SIGKILL" in failed
