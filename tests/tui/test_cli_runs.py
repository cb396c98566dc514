"""`evener runs`: states and filters; resuming with more time."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from evener.balancer import journal
from evener.balancer.journal import JournalContents
from evener.balancer.probes.simulated import SimulatedProber
from evener.balancer.store.locks import lock_run
from evener.balancer.store.runs import journal_path, run_folder
from evener.tui.cli.main import run

pytestmark = pytest.mark.usefixtures("own_folder")

PAIR = "sim:gtx1080ti,gtx1080"


def _ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def _listed(capsys: pytest.CaptureFixture[str], *options: str) -> list[Any]:
    return list(_ask(capsys, "runs", *options)["runs"])


@pytest.fixture
def three_runs(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str, str]:
    """Return the ids of a finished run, a failed one, and one that was cut off."""
    finished = str(_ask(capsys, "balance", "-d", PAIR)["run"])
    too_large = ["--global-batch", "1000000", "--micro", "off"]
    assert run(["balance", "-d", PAIR, "--workload", "torch_maxer", *too_large]) == 1
    failed = str(_listed(capsys)[0]["run"])
    cut_off = str(_ask(capsys, "balance", "-d", "sim:gtx1080", "--budget", "2s")["run"])
    path = journal_path(cut_off)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b'"entry":"ended"' not in line))
    return finished, failed, cut_off


def test_each_run_has_its_state_and_a_failed_one_its_reason(
    three_runs: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A run in progress is running, and there is no advice to finish a failed one."""
    finished, failed, cut_off = three_runs
    with lock_run(run_folder(cut_off)):
        states = {one["run"]: one["state"] for one in _listed(capsys)}
        assert states == {finished: "finished", failed: "failed", cut_off: "running"}
        assert run(["runs"]) == 0
        lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "1000000" in lines[failed]
    assert _listed(capsys, "--state", "stopped")[0]["run"] == cut_off
    assert run(["export", failed]) == 2
    printed = capsys.readouterr().err
    assert "failed and has no plan: " in printed
    assert "--resume" not in printed
    assert run(["runs", "show", failed]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("failed: ")


def test_runs_are_chosen_and_sorted(
    three_runs: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """State and workload can be given before or after `list`, and the number can be limited."""
    finished, failed, cut_off = three_runs

    def names(*options: str) -> list[str]:
        return [one["run"] for one in _listed(capsys, *options)]

    assert names("--state", "stopped,finished") == [cut_off, finished]
    assert names("--workload", "torch") == names("list", "-w", "torch") == [failed]
    assert (
        names("--sort", "time", "-n", "1")
        == names("--sort", "time", "-n", "1", "list")
        == [finished]
    )
    assert run(["runs", "--state", "lost"]) == 2
    assert "unreadable" in capsys.readouterr().err


def test_a_search_that_was_interrupted_says_how_to_go_on_and_one_that_had_ended_that_it_had(
    own_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is below the result."""
    real, calls = SimulatedProber.measure, []

    def interrupted(
        prober: SimulatedProber, probes: Any, report: Any, stop: threading.Event, finished: Any
    ) -> Any:
        calls.append(probes)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
            stop.wait(10)
        return real(prober, probes, report, stop, finished)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedProber, "measure", interrupted)
        assert run(["balance", "-d", PAIR]) == 130
    printed = capsys.readouterr().out
    assert f"to go on: evener balance --resume {_listed(capsys)[0]['run']}" in printed
    assert run(["balance", "--resume", "last"]) == 0
    assert "nothing was measured" not in capsys.readouterr().out
    assert run(["balance", "--resume", "last"]) == 0
    assert (
        "the run had ended, and nothing was measured; for more: evener balance --resume"
        in capsys.readouterr().out
    )


def test_a_finished_run_goes_on_with_a_larger_budget(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It keeps its measurements.

    It continues up to the new budget, also if that is the default, or by +100s.
    """
    first = _ask(capsys, "balance", "-d", PAIR, "--budget", "20s")
    again = _ask(capsys, "balance", "--resume", "last")
    assert again["search"] == first["search"], "without a budget it is as it was"
    larger = _ask(capsys, "balance", "--resume", "last", "--budget", "120s")
    assert larger["search"]["probes"] > first["search"]["probes"]
    assert 60 < larger["search"]["seconds"] <= 121
    extended = _ask(capsys, "balance", "--resume", "last", "--budget", "+100s")
    assert 70 < extended["search"]["seconds"] - larger["search"]["seconds"] <= 101
    (one,) = _listed(capsys)
    assert one["probes"] == extended["search"]["probes"]
    assert run(["balance", "-d", PAIR, "--budget", "+5s"]) == 2
    assert "--resume" in capsys.readouterr().err


@pytest.mark.parametrize("left", [None, b"", b'{"entry":"header","run":'])
def test_last_passes_over_a_run_that_was_stopped_before_it_began(
    own_folder: Path, capsys: pytest.CaptureFixture[str], left: bytes | None
) -> None:
    """It was killed between creating its folder and the journal's first line; `runs` says so."""
    whole = str(_ask(capsys, "balance", "-d", PAIR)["run"])
    never = run_folder("29991231-000000-0000")
    lock_run(never).close()
    if left is not None:
        (never / "journal.jsonl").write_bytes(left)
    assert run(["export", "last", "-o", "plan.toml"]) == 0
    assert run(["report", "last", "-o", "run.html"]) == 0
    assert _ask(capsys, "runs", "show", "last")["run"] == whole
    assert _ask(capsys, "balance", "--resume", "last")["run"] == whole
    first, second = _listed(capsys)
    assert (first["run"], first["state"]) == (never.name, "stopped")
    assert "before it began" in first["trouble"]
    assert second["run"] == whole
    assert run(["export", never.name]) == 2
    assert "before it began" in capsys.readouterr().err
    with lock_run(never):
        assert _listed(capsys)[0]["state"] == "running"
    assert run(["runs", "delete", never.name, "--yes"]) == 0
    assert [one["run"] for one in _listed(capsys)] == [whole]


def test_last_of_runs_that_never_began_is_none(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock_run(run_folder("29991231-000000-0000")).close()
    (run_folder("29991231-000000-0001")).mkdir(mode=0o700)
    (run_folder("29991231-000000-0001") / "training.jsonl").touch(mode=0o600)
    assert run(["runs", "show", "last"]) == 2
    assert "no runs yet" in capsys.readouterr().err
    assert {one["state"] for one in _listed(capsys)} == {"stopped"}


def test_a_short_list_reads_no_older_journals(
    three_runs: tuple[str, str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 10,000 runs, a list of ten took 18 s."""
    finished, failed, cut_off = three_runs
    journal_path(finished).write_bytes(b"broken\n")
    opened: list[Path] = []
    read = journal.read

    def note(path: Path, **options: Any) -> JournalContents:
        opened.append(path)
        return read(path, **options)

    monkeypatch.setattr(journal, "read", note)
    assert [one["run"] for one in _listed(capsys, "-n", "2")] == [cut_off, failed]
    assert opened == [journal_path(cut_off), journal_path(failed)]
