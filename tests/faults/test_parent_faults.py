"""Kill or stop the session's own process: children exit, and `--resume` continues the journal."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import msgspec
import psutil
import pytest

from evener.balancer import journal
from evener.balancer.events import Event, Finished, Observed, Started
from evener.balancer.journal import AskedEntry, JournalContents, ObservationEntry
from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.balancer.store import runs
from evener.balancer.types import Failed
from tests.support.cores import two_cores
from tests.support.probe_children import list_children, list_probe_children
from tests.support.whole_sessions import finish

KILLS = int(
    os.environ.get("EVENER_KILLS", "8")
)  # number of random moments; 200 or more when run by hand
SIMULATED = Request(devices="sim:gtx1080ti,gtx1080", pace=0.004)
SYNTHETIC = Request(devices="cpu", workload="synthetic", budget_seconds=5.0, max_global_batch=256)
SCRIPT = """
import sys, msgspec
from evener.balancer.run import open_run
from evener.balancer.request import Request
from evener.balancer.session import Session
from evener.balancer.events import ProbeProgress
session = Session(open_run(msgspec.json.decode(sys.argv[1], type=Request), resume=sys.argv[2] or None))
print(session.run_id, flush=True)
for event in session.events():
    print(event.phase if isinstance(event, ProbeProgress) else type(event).__name__, flush=True)
session.close()
"""  # noqa: E501


def start(request: Request, resume: str = "") -> subprocess.Popen[str]:
    """Start a session in its own process."""
    arguments = [sys.executable, "-c", SCRIPT, msgspec.json.encode(request).decode(), resume]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are killed after the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def read_until(process: subprocess.Popen[str], word: str) -> None:
    """Skip the process's output up to a line that is `word`."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == word:
            return
    raise AssertionError(f"it ended without {word}")


def wait_gone(pids: list[int]) -> None:
    """Wait until none of these processes runs."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        if not any(_runs(pid) for pid in pids):
            return
        time.sleep(0.05)
    raise AssertionError(f"still there: {[pid for pid in pids if _runs(pid)]}")


def asked_as_replayed(run: str) -> JournalContents:
    """Return the journal, after checking each request against a replay of the lines before it.

    Each line occurs exactly once: as each failure counts, a doubled or lost line would lead to
    other probes.
    """
    record = journal.read(runs.journal_path(run))
    search = runs.make_search(record.header.job)
    for entry in record.entries:
        if isinstance(entry, AskedEntry):
            assert entry.probes == search.ask()
        elif isinstance(entry, ObservationEntry):
            search.tell(entry.seen)
    return record


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_killed_at_random_moments_a_simulated_run_comes_to_the_undisturbed_plan(
    started: list[subprocess.Popen[str]],
) -> None:
    """No measured probe is repeated, however often and wherever the run is killed."""
    undisturbed, _ = finish(msgspec.structs.replace(SIMULATED, pace=0.0))
    draw = random.Random(os.environ.get("EVENER_SEED", "1"))
    run, measured = "", 0
    for _ in range(KILLS):
        started.append(process := start(SIMULATED, run))
        assert process.stdout is not None
        run = process.stdout.readline().strip()
        time.sleep(draw.uniform(0.0, 0.25))
        process.kill()
        process.wait()
        record = journal.read(runs.journal_path(run))
        probes = [entry.seen.probe for entry in record.seen]
        assert len(probes) == len(set(probes)), "a probe was measured twice"
        assert len(probes) >= measured, "a measurement was lost"
        measured = len(probes)
        if record.ended is not None:
            asked_as_replayed(run)
            assert record.ended.plan.throughput == undisturbed.plan.throughput
            run, measured = "", 0
    final, _ = (
        finish(Request(), run or None)
        if run
        else finish(msgspec.structs.replace(SIMULATED, pace=0.0))
    )
    assert msgspec.structs.replace(final.plan, created="") == msgspec.structs.replace(
        undisturbed.plan, created=""
    )


def test_kill_of_a_child_then_of_the_parent_then_resume(
    started: list[subprocess.Popen[str]],
) -> None:
    """The children notice and exit; the resumed run repeats no measurement and finds a plan."""
    started.append(parent := start(SYNTHETIC))
    assert parent.stdout is not None
    run = parent.stdout.readline().strip()
    read_until(parent, "measuring")
    list_probe_children(parent.pid)[0].kill()
    read_until(parent, "Observed")
    read_until(parent, "measuring")
    pids = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
    assert pids
    parent.kill()
    parent.wait()
    wait_gone(pids)
    before = [entry.seen.probe for entry in journal.read(runs.journal_path(run)).seen]
    assert before
    finished, events = finish(Request(), run)
    assert isinstance(events[0], Started)
    assert events[0].replayed == len(before)
    again = [event.seen for event in events if isinstance(event, Observed)]
    record = asked_as_replayed(run)
    timed = [entry.seen.probe for entry in record.seen]
    assert any(isinstance(entry.seen, Failed) for entry in record.seen)
    assert len(timed) == len(before) + len(again)
    assert finished.plan.search.probes == len(timed)
    assert not list_children()


@pytest.mark.parametrize("frozen", [False, True])
def test_children_end_with_a_parent_that_is_killed_even_if_they_are_stopped(
    started: list[subprocess.Popen[str]], frozen: bool
) -> None:
    """The kernel kills a child that hangs when its parent dies."""
    started.append(parent := start(SYNTHETIC))
    read_until(parent, "measuring")
    children = psutil.Process(parent.pid).children(recursive=True)
    if frozen:
        for child in children:
            child.suspend()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_gone([child.pid for child in children])


@pytest.mark.usefixtures("quick_probes")
def test_a_stop_ends_all_children_at_once(started: list[subprocess.Popen[str]]) -> None:
    """A stop during probes gives the best plan so far, long before the time is over."""
    session = Session(open_run(msgspec.structs.replace(SYNTHETIC, budget_seconds=60.0)))
    seen = 0
    stopped_at = 0.0
    last: Event | None = None
    for last in session.events():
        seen += isinstance(last, Observed)
        if seen == 3 and not stopped_at:
            session.stop()
            stopped_at = time.monotonic()
    assert time.monotonic() - stopped_at < 40.0
    assert not list_children()
    session.close()
    assert isinstance(last, Finished)
    assert last.interrupted
    assert last.plan.search.probes >= 3


def test_a_terminal_s_ctrl_c_reaches_the_parent_alone(started: list[subprocess.Popen[str]]) -> None:
    """Children have their own sessions, so a terminal's signal doesn't reach them."""
    with closing(Session(open_run(SYNTHETIC))) as session:
        events = session.events()
        while not list_probe_children():
            next(events)
        deadline = time.monotonic() + 60.0
        for child in (*list_children(), *list_probe_children()):
            # a starting child has this session until it runs
            while os.getsid(child.pid) != child.pid:
                assert time.monotonic() < deadline
                time.sleep(0.001)
    assert not list_children()


@pytest.mark.usefixtures("quick_probes")
def test_a_child_killed_once_costs_one_probe_and_the_search_goes_on() -> None:
    """The journal has the failed observation, and the retry is measured."""
    session = Session(open_run(SYNTHETIC))
    killed = False
    events: list[Event] = []
    for event in session.events():
        events.append(event)
        if not killed and list_probe_children():
            list_probe_children()[0].kill()
            killed = True
    session.close()
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.plan.layout.global_batch > 0
    outcomes = [type(entry.seen).__name__ for entry in asked_as_replayed(session.run_id).seen]
    assert outcomes.count("Failed") == 1
    assert outcomes.count("Timed") >= 4


@two_cores
def test_a_workload_that_always_dies_is_no_layout_and_says_why() -> None:
    """One sentence has each device's smallest failing batch."""
    from evener.errors import NoLayoutError

    session = Session(open_run(msgspec.structs.replace(SYNTHETIC, settings={"fail": "kill"})))
    with pytest.raises(NoLayoutError, match=r"CPU:0 .*CPU:1 failed.*SIGKILL") as fault:
        list(session.events())
    session.close()
    assert fault.value.exit_code == 1
    assert fault.value.message.count("\n") == 0


def test_a_budget_too_small_to_measure_anything_is_reported() -> None:
    """The message includes a hint."""
    from evener.errors import NoLayoutError

    session = Session(
        open_run(
            msgspec.structs.replace(SYNTHETIC, budget_seconds=0.05, settings={"base_ms": 5000.0})
        )
    )
    with pytest.raises(NoLayoutError, match=r"budget of 0\.05 s was over") as fault:
        list(session.events())
    session.close()
    assert "--budget" in fault.value.remedy
