"""`evener report`: one self-contained page. The same run gives the same file."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.balancer import journal
from evener.balancer.number_format import rate
from evener.balancer.store.runs import JOURNAL
from evener.system.files import runs_folder
from evener.tui.cli.main import run
from evener.tui.text.summaries import layout_text, outcome_text
from evener.tui.text.ticks import round_log_ticks, round_ticks

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def a_run(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the id of a balanced run of the two simulated cards."""
    assert run(["balance", "-d", "sim:gtx1080ti,gtx1080", "--json"]) == 0
    return str(json.loads(capsys.readouterr().out)["run"])


class Checker(HTMLParser):
    """Collects what a page would fetch, its defined and referenced names, and unclosed tags."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.names: list[str] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "link", "img", "iframe"):
            self.fetched.append(tag)
        self.fetched += [
            v or ""
            for k, v in attrs
            if k in ("src", "href", "xlink:href") and not (v or "").startswith("#")
        ]
        self.names += [values["id"] or ""] if "id" in values else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_needs_no_network(a_run: str) -> None:
    assert run(["report", a_run, "-o", "report.html"]) == 0
    text = Path("report.html").read_text()
    page = Checker()
    page.feed(text)
    assert page.open == []
    assert page.fetched == []
    assert "url(http" not in text
    assert "@import" not in text
    assert len(page.names) == len(set(page.names)), "no picture's name stands for another's"
    for wanted in (
        "Throughput of each device alone",
        "The plan: split",
        "Ranking",
        "Timeline of probes",
        "equal shares",
    ):
        assert wanted in page.text


def test_the_memory_limit_is_in_the_first_picture(
    a_run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is drawn only if a device ran out of memory."""
    from evener.tui.text.run_report import read_report

    report = read_report(a_run)
    run(["report", a_run, "-o", "report.html"])
    failed = [curve for curve in report.curves if curve.failed_batch is not None]
    assert Path("report.html").read_text().count("out of memory</text>") == len(failed)
    for curve in report.curves:
        assert list(curve.points) == sorted(curve.points)
        assert all(
            curve.failed_batch is None or batch < curve.failed_batch for batch, _ in curve.points
        )


def test_every_figure_of_a_picture_is_in_a_table(a_run: str) -> None:
    """Tables are for readers who can't see pictures: each curve's points, each probe, each layout.

    Headings are marked up.
    """
    from evener.tui.text.run_report import read_report

    report = read_report(a_run)
    run(["report", a_run, "-o", "report.html"])
    text = Path("report.html").read_text()
    page = Checker()
    page.feed(text)
    rows = [
        re.sub("<[^>]+>", "|", row).replace("\N{NO-BREAK SPACE}", " ")
        for row in re.findall("<tr>.*?</tr>", text)
    ]
    for curve in report.curves:
        for batch, figure in curve.points:
            assert any(f"||{curve.label}||{batch}||{rate(figure)}||" in row for row in rows)
    labels = [device.label for device in report.header.devices]
    for entry in report.seen:
        layout, result = (
            layout_text(entry.seen.probe.layout, labels),
            outcome_text(entry.seen, labels),
        )
        assert any(f"||{layout}||{result}||" in row for row in rows)
    assert text.count("<th scope=col") == text.count("<th") > 15


def test_a_page_begins_with_the_gains_and_ends_its_verdict_with_the_commands() -> None:
    """The page of a search on two real GPUs begins as the app's panel does."""
    name = "h200x2-torch_maxer-60percent-4096"
    recorded = Path(__file__).parents[1] / "recorded" / f"{name}.jsonl"
    record = journal.read(recorded)
    folder = runs_folder() / record.header.run
    folder.mkdir(parents=True, mode=0o700)
    (folder / JOURNAL).write_bytes(recorded.read_bytes())
    (folder / JOURNAL).chmod(0o600)
    assert run(["report", record.header.run, "-o", "report.html"]) == 0
    text = Path("report.html").read_text()
    card = text[: text.index("</section>")]
    assert "this plan" in card
    assert "equal shares" in card
    assert "+31" in card
    assert f"evener export {record.header.run} -o plan.toml" in card


@given(st.floats(1e-3, 1e9), st.integers(2, 8))
def test_ticks_are_round_and_few(high: float, most: int) -> None:
    """They start at 0, in steps of 1, 2 or 5 times a power of ten; at most `most`, and
    not too few.
    """
    ticks = round_ticks(high, most)
    assert ticks[0] == 0.0
    assert 1 <= len(ticks) - 1 <= most
    assert len(ticks) - 1 >= most // 3, "a coarser step than it takes"
    assert ticks[-1] <= high * (1 + 1e-6)
    assert all(_is_round(tick / number) for number, tick in enumerate(ticks[1:], 1))


@given(st.integers(1, 1 << 20), st.floats(1.1, 1e6))
def test_ticks_of_batches_are_round_and_within_the_axis(low: int, times: float) -> None:
    ticks = round_log_ticks(low, low * times)
    assert len(ticks) <= 6
    assert all(low <= tick <= low * times and _is_round(tick) for tick in ticks)


def _is_round(number: float) -> bool:
    return f"{number:.6e}"[0] in "125" and set(f"{number:.6e}".split("e")[0][2:]) == {"0"}


def test_the_same_run_gives_the_same_file(a_run: str) -> None:
    run(["report", a_run, "-o", "a.html"])
    run(["report", a_run, "-o", "b.html"])
    assert Path("a.html").read_bytes() == Path("b.html").read_bytes()


@pytest.mark.parametrize(
    ("name", "output", "words"),
    [
        ("last", "report.pdf", ".html"),
        ("last", "nowhere/report.html", "nowhere"),
        ("nothing", "report.html", "nothing"),
    ],
)
def test_bad_input_is_a_one_line_error(
    a_run: str, capsys: pytest.CaptureFixture[str], name: str, output: str, words: str
) -> None:
    assert run(["report", name, "-o", output]) == 2
    assert words in capsys.readouterr().err


def test_what_a_machine_is_called_can_not_break_the_page(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("m.toml").write_text(
        '[[device]]\nname = "<b>&A</b>"\nmemory_mib = 100\nmemory_base_mib = '
        "1.0\nmemory_per_sample_mib = 1.0\n"
        "curve = [[1, 1.0], [10, 2.0]]\n"
    )
    assert run(["balance", "-d", "sim:m.toml", "--json"]) == 0
    capsys.readouterr()
    assert run(["report", "last", "-o", "report.html"]) == 0
    assert "<b>" not in Path("report.html").read_text()


def test_a_page_has_limits_and_begins_with_what_is_doubtful() -> None:
    """Limits are the plan's. The plan has one name, and no other split is called the best."""
    from evener.tui.text.run_report import format_layout, read_report

    assert run(["balance", "-d", "sim:gtx1080ti,gtx1080@60%", "--json"]) == 0
    assert run(["report", "last", "-o", "report.html"]) == 0
    text = Path("report.html").read_text()
    assert "<td>SIM:1 @60%</td>" in text
    assert 0 < text.index("Warning: Measured on simulated devices") < text.index("<h2>")
    report = read_report("last")
    assert report.labels == ("SIM:0", "SIM:1 @60%")
    assert not [bar.name for bar in report.ranking if bar.name == "best split"]
    assert len({format_layout(bar.layout, report.header) for bar in report.ranking}) == len(
        report.ranking
    )


def test_runs_and_reports_say_what_was_simulated(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The list says it before the name, which may be cut; a report in its title and verdict."""
    assert run(["balance", "-d", "sim:gtx1080", "--json"]) == 0
    capsys.readouterr()
    assert run(["runs"]) == 0
    assert "(simulated) keras_maxer" in capsys.readouterr().out
    assert run(["report", "last", "-o", "report.html"]) == 0
    page = Path("report.html").read_text()
    assert "keras_maxer (simulated)</h1>" in page
    assert '<p class="verdict">simulated: ' in page
