"""Threads post frozen records, stop when requested, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec
import pytest

from evener.balancer.events import ProbeProgress
from evener.balancer.store.runs import EventReplay
from evener.devices.discover import discover, open_source
from evener.devices.processes import send_signal
from evener.devices.sampler import Sampler
from evener.errors import NoLayoutError, RequestError
from evener.tui.base_app import Sampled, SessionEnded, SessionReported, SessionThread
from tests.support.waiting import wait_for


def test_a_newer_tick_replaces_one_that_waits(script: Any) -> None:
    tick = Sampled(script.snapshot())
    assert Sampled(script.snapshot()).can_replace(tick)
    assert not SessionEnded(1).can_replace(tick)


def test_only_progress_of_the_same_probe_is_replaced(events: Any) -> None:
    progress, observed = events[2], events[3]
    other = msgspec.structs.replace(progress, probe=events[4].seen.probe)
    assert SessionReported(1, progress).can_replace(SessionReported(1, progress))
    assert not SessionReported(1, progress).can_replace(SessionReported(2, progress))
    assert not SessionReported(1, progress).can_replace(SessionReported(1, other))
    assert not SessionReported(1, observed).can_replace(SessionReported(1, progress))


def test_simulated_devices_follow_the_load_of_probes() -> None:
    """Memory and power rise with a probe's load and fall at its end."""
    feed = Sampler(open_source(discover("sim:gtx1080ti")), 0.1)
    got: list[Any] = []
    feed.start(got.append)
    try:
        wait_for(lambda: got)
        idle = got[-1].devices[0]
        feed.set_loads({idle.device.id: (1200.0, 800)})
        wait_for(lambda: (got[-1].devices[0].samples_per_second.current or 0) > 1000)
        busy = got[-1].devices[0]
        assert busy.power_watts.current > idle.power_watts.current + 50
        assert busy.memory_used_bytes.current > idle.memory_used_bytes.current
        feed.set_loads({})
        wait_for(lambda: got[-1].devices[0].samples_per_second.current == 0)
        assert feed.history(idle.device.id, "power_watts")
    finally:
        feed.close()
    count = len(got)
    time.sleep(0.25)
    assert len(got) == count, "nothing comes after the end"


def test_a_session_posts_every_event_then_its_end(events: Any, session_of: Any) -> None:
    session, messages = session_of(events), list[Any]()
    thread = SessionThread(lambda: session, messages.append)
    thread.start()
    wait_for(lambda: messages and isinstance(messages[-1], SessionEnded))
    thread.close()
    assert [message.event for message in messages[:-1]] == events
    assert session.calls[-1] == "stop"
    assert "close" in session.calls


def test_closing_ends_a_session_that_still_runs(events: Any, session_of: Any) -> None:
    session, messages = session_of(events, hold=True), list[Any]()
    thread = SessionThread(lambda: session, messages.append)
    thread.start()
    wait_for(lambda: len(messages) == len(events) - 1)
    before = threading.active_count()
    thread.close()
    assert threading.active_count() < before
    assert isinstance(messages[-1], SessionEnded)
    assert session.calls == ["stop", "close"]


def test_a_session_that_cannot_begin_ends_with_its_reason() -> None:
    messages: list[Any] = []

    def make() -> Any:
        raise NoLayoutError("Nothing ran.", "Free memory.")

    thread = SessionThread(make, messages.append)
    thread.start()
    wait_for(lambda: messages)
    assert (messages[0].fault, messages[0].remedy) == ("Nothing ran.", "Free memory.")


def test_a_bug_in_a_session_ends_with_a_message_and_a_log(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    messages: list[Any] = []

    def make() -> Any:
        raise ZeroDivisionError("oops")

    thread = SessionThread(make, messages.append)
    thread.start()
    wait_for(lambda: messages)
    assert "ZeroDivisionError" in messages[0].fault
    logs = list(tmp_path.rglob("crash-*.log"))
    assert len(logs) == 1
    assert str(logs[0]) in messages[0].remedy
    assert "oops" in logs[0].read_text()


def test_a_replay_keeps_order_and_can_be_held_and_ended(events: Any) -> None:
    messages: list[Any] = []
    replay = EventReplay(events, speed=1e6)
    replay.pause()
    SessionThread(lambda: replay, messages.append).start()
    time.sleep(0.1)
    assert not messages
    replay.unpause()
    wait_for(lambda: messages and isinstance(messages[-1], SessionEnded))
    assert [message.event for message in messages[:-1]] == events
    slow = SessionThread(
        lambda: EventReplay(events, speed=0.001, longest_gap_seconds=60.0), messages.append
    )
    slow.start()
    slow.close()
    assert isinstance(messages[-1], SessionEnded)


def _sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_a_signal_goes_to_the_confirmed_process(script: Any) -> None:
    import psutil

    child = _sleeper()
    try:
        row = script.process(child.pid, start_time=psutil.Process(child.pid).create_time())
        send_signal(row, "TERM")
        assert child.wait(60) == -signal.SIGTERM
    finally:
        child.kill()
        child.wait()


def test_a_pid_that_was_reused_gets_no_signal(script: Any) -> None:
    child = _sleeper()
    try:
        with pytest.raises(RequestError, match="another process now"):
            send_signal(script.process(child.pid, start_time=12345.0), "KILL")
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_an_ended_process_gets_no_signal(script: Any) -> None:
    child = _sleeper()
    child.kill()
    child.wait()
    with pytest.raises(RequestError, match="has ended"):
        send_signal(script.process(child.pid), "TERM")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_users_process_gets_no_signal(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    child = subprocess.Popen(["sleep", "60"], user=65534)
    try:
        started = psutil.Process(child.pid).create_time()
        monkeypatch.setattr(os, "geteuid", lambda: 1234)
        with pytest.raises(RequestError, match="another user"):
            send_signal(script.process(child.pid, start_time=started), "TERM")
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_progress_is_a_frozen_record(events: Any) -> None:
    progress = events[2]
    assert isinstance(progress, ProbeProgress)
    with pytest.raises(AttributeError):
        progress.phase = "other"  # type: ignore[misc]
