"""`evener replay`: journals from anywhere, replayed in the app and as lines; other files are
refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evener.balancer import journal
from evener.tui.cli.main import run
from evener.tui.screens.runs import RunsScreen
from tests.support.pilots import until

pytestmark = pytest.mark.usefixtures("own_folder")

RECORDED = Path(__file__).parents[1] / "recorded"
JOURNALS = sorted(RECORDED.glob("*.jsonl"))


def test_every_recorded_run_is_played_to_its_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    """Journals of older versions are played, too."""
    assert len(JOURNALS) > 40
    for path in JOURNALS:
        ended = journal.read(path, foreign=True).ended
        assert ended is not None
        assert run(["replay", str(path), "--plain"]) == 0
        assert ended.verdict.split()[0] in capsys.readouterr().out, path.name


@pytest.mark.parametrize(
    "name", ["h200x2-torch_maxer-60percent-4096", "h200x2-torch_llama-texts-256"]
)
async def test_a_journal_opens_in_the_app_and_goes_back_to_the_runs(app_of: Any, name: str) -> None:
    """One journal has schema 1, and one has rows of unequal length."""
    record = journal.read(RECORDED / f"{name}.jsonl", foreign=True)
    app = app_of(replayed=(record, 1e6))
    async with app.run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: app.balance.ended, "its end")
        assert app.current_mode == "balance"
        assert app.balance.finished is not None
        assert not app.balance.fault
        assert not any(app.screen.check_action(name, ()) for name in ("stop", "go_on", "report"))
        await pilot.press("3")
        await until(pilot, lambda: isinstance(app.screen, RunsScreen), "the runs")


def test_a_run_is_played_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    """The lines are those that the search printed, except for the next step."""
    assert run(["balance", "-d", "sim:gtx1080ti,gtx1080", "--noise-scale", "3900"]) == 0
    searched = capsys.readouterr()
    assert "worth in learning" in searched.out
    assert run(["replay", "last"]) == 0
    played = capsys.readouterr()
    assert played.out.splitlines() == [
        line for line in searched.out.splitlines() if not line.startswith("to write the plan")
    ]
    assert played.err.splitlines() == [
        line for line in searched.err.splitlines() if not line.startswith("evener:")
    ]


def test_a_journal_that_others_may_write_is_played_and_what_is_none_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkout may be writable by a group."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(JOURNALS[0].read_bytes())
    path.chmod(0o666)
    assert run(["replay", str(path)]) == 0
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    assert run(["replay", str(link)]) == 0
    with path.open("a") as stream:
        stream.write("{}\n")
    text = tmp_path / "README.md"
    text.write_text("# A title\n\nA text.\n")
    for wrong, said in (
        (str(path), "is broken"),
        (str(text), "isn't the journal of a search"),
        ("nothing", ""),
        (str(tmp_path), "a directory"),
        ("/dev/zero", "not a plain file"),
    ):
        capsys.readouterr()
        assert run(["replay", wrong]) == 2, wrong
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
        assert "Delete" not in line
