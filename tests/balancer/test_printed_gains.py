"""The numbers in a printed result are consistent.

Computing each gain again from the printed numbers beside it gives no contradiction.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evener.balancer import journal
from evener.balancer.events import Finished
from evener.balancer.session_state import SessionState
from evener.balancer.store import runs
from evener.plan.file import parse_plan, to_json
from evener.tui.text.summaries import summary_lines
from evener.tui.view.result_panel import result_lines
from tests.support.printed_gains import find_bar_faults, find_faults
from tests.support.search_outcomes import draw_outcome

NOTHING_LEFT = "Nothing left to measure is expected to change the plan."
RECORDED = sorted((Path(__file__).parents[1] / "recorded").glob("*.jsonl"))


def printed(found: Finished, labels: tuple[str, ...]) -> list[str]:
    """Return the text of a result, as a pipe gets it."""
    return summary_lines(found.plan, labels, found.verdict, None, found.found)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_run_s_text_holds_no_contradiction(path: Path) -> None:
    """The plan that was written then can still be read and shown."""
    record = journal.read(path)
    labels = tuple(device.label for device in record.header.devices)
    found = runs.recover(record)
    assert not list(find_faults(printed(found, labels)))
    assert record.ended is not None
    assert summary_lines(parse_plan(to_json(record.ended.plan)), labels, record.ended.verdict)


@given(st.integers(0, 1 << 32))
@example(100005)  # a device of the race was faster alone before it
@example(100026)  # the fastest split is too uncertain to compare
@example(873)  # a device alone is too uncertain to compare
@example(1749)  # equal shares are the plan, and were measured in other passes, too
@example(2223)  # of two equal devices, one is faster at a small batch, and neither in the table
@example(806579)  # three batches of one device raced, and the fastest of them isn't the first
@example(10000582)  # equal shares are faster, and so uncertain that they just aren't compared
@example(10005225)  # a device ties with another batch than the one with a gain
@example(10008322)  # one device is the plan, and the best split isn't the fastest
@example(10008371)  # two splits have the same shares, on different devices
@example(132305779)  # of two equal devices, the final comparison measured one as slower than before
def test_the_text_of_drawn_searches_holds_no_contradiction(seed: int) -> None:
    """Searches are drawn with random devices, noise, fixed and free batches, and budgets that run
    out. The app's bars agree with the lines.
    """
    chance = random.Random(seed)
    for _ in range(5):
        found, labels = draw_outcome(chance)
        text = printed(found, labels)
        assert not list(find_faults(text)), "\n".join(text)
        state = SessionState(devices=labels, names=labels, finished=found, ended=True)
        screen = [line.text for line in result_lines(state, 160, 99, ())]
        assert not list(find_bar_faults(screen, text)), "\n".join([*screen, *text])


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("+20 % over equal shares", "+30 % over equal shares"),
        ("reaches 95.3 % of it", "reaches 90.3 % of it"),
        ("1.6 % more (", "2.6 % more ("),
        ("reach 2 203 samples/s", "reach 2 303 samples/s"),
        ("1.7 % more ± 2.2 %", "3.7 % more ± 2.2 %"),
        ("+61 % over SIM:0 alone", "61.1 % faster than SIM:0 alone ± 0.4 % (too close to call)"),
        ("694+694 = 1388", "694+694 = 1397"),
        ("Use the plan", "Take the plan"),
        ("Use the plan's unequal shares: 826 + 571", "Use one device: 826"),
        ("Use the plan's unequal shares", "Measure again before you decide"),
        ("together  ", "in all    "),
        ("1 346 at 1008", "900.0 at 1008"),
        ("10.8 % less than the plan", "20.8 % less than the plan"),
        ("reaches 95 % of the sum", "reaches 85 % of the sum"),
        ("886.0            928.1", "946.0            928.1"),
        ("+61 % over SIM:0 alone", "SIM:0 alone is too uncertain to compare (± 30 %)"),
        ("s at 1008\n", "s at 1008; measured alternately: 1 346 now, 928.1 earlier\n"),
        (
            "\n\nequal",
            "\nalone: one; SIM:1 was slower alone than in the plan, and not compared\n\nequal",
        ),
        ("SIM:2 is left out", "SIM:1 is left out"),
        ("13 probes", "One device is the simpler way: SIM:0 alone reached 1 346\n13 probes"),
        (
            "13 probes",
            "warning: SIM:1 and SIM:0 are the same kind of device (GTX), and SIM:1 was 1.5 times "
            "as fast alone at 64 samples a step: suspect what else uses SIM:0.\n13 probes",
        ),
        (NOTHING_LEFT, "Equal shares (694 + 694 on SIM:0 + SIM:1) tie with the plan, and so on."),
        (
            NOTHING_LEFT,
            "The budget left no time to measure SIM:1 alone at 694 samples; --budget 3s",
        ),
        (
            NOTHING_LEFT,
            "Nothing left to measure is expected to gain more than 2 %.\n"
            "The budget left no time to measure equal shares; --budget 30s",
        ),
    ],
)
def test_a_reader_finds_each_kind_of_contradiction(was: str, becomes: str) -> None:
    """Each kind is put into a text that is otherwise correct."""
    text = SOUND.replace(was, becomes)
    assert text != SOUND
    assert not list(find_faults(SOUND.splitlines()))
    assert list(find_faults(text.splitlines()))


SOUND = """\
device    name         share  ratio  in the plan                   alone
SIM:0     GTX 1080 Ti    826  0.591        1 282           1 346 at 1008
SIM:1     GTX 1080       571  0.409        886.0            928.1 at 694
SIM:2     GTX 960   left out  0.000            -                       -
together                1397  1.000        2 168  ± 0.4 %

equal shares: 1 801 samples/s at 694+694 = 1388 samples a step
SIM:0 alone: 1 346 samples/s at 1008
larger batch, 1698 samples: 2 203 samples/s at 1004+694
sum of each alone: 2 274 samples/s, an upper bound; the plan reaches 95.3 % of it

Use the plan's unequal shares: 826 + 571 on SIM:0 + SIM:1.
826 + 571 on SIM:0 + SIM:1   2 168 samples/s ± 0.4 %   +20 % over equal shares, \
+61 % over SIM:0 alone
With a larger batch: 1698 samples a step (1004 + 694 on SIM:0 + SIM:1) reach 2 203 samples/s, \
1.6 % more (measured alternately 1.7 % more ± 2.2 %: too close to call); --tolerance
SIM:2 is left out: the fastest split with it (1397) reached 1 934 samples/s, 10.8 % less than the \
plan.
The plan reaches 95 % of the sum of all devices alone: synchronizing the devices costs 3 ms a step.
13 probes, 0 out of memory, 41 s. Nothing left to measure is expected to change the plan.
"""
