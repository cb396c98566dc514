"""Which rank of a group counts as failed, and with which message."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evener.balancer.probes import children
from evener.balancer.probes.children import Child, ChildGroup, Inbox
from evener.balancer.probes.failures import GroupError, RankFailure
from evener.balancer.probes.launch_plan import RankMap
from evener.balancer.probes.protocol import Built, ChildError, Exited, Stack


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time in which the other ranks may say why they stopped: here all messages are
    there.
    """
    monkeypatch.setattr(children, "GRACE_SECONDS", 0.1)


def receive(*messages: tuple[int, Any], seconds: float = 600.0) -> GroupError:
    """Return the error that a group of two raises for these messages while it builds."""
    inbox: Inbox = queue.Queue()
    for message in messages:
        inbox.put(message)
    child = SimpleNamespace(
        find_stack=lambda: Stack("building", "train.py:6", "its stack"),
        find_loss=lambda: "",
    )
    group = ChildGroup([cast(Child, child)] * 2, inbox, RankMap((0, 1)))
    with pytest.raises(GroupError) as caught:
        group.receive(Built, seconds, threading.Event())
    return caught.value


@pytest.mark.parametrize(
    "text", ["collective aborted: shapes differ", "Connection reset by peer", "no such data set"]
)
def test_a_silent_rank_is_not_the_culprit_when_another_failed(text: str) -> None:
    """The silent rank hasn't had all of its time yet, whatever the other rank reports."""
    started = time.monotonic()
    error = receive((1, ChildError(("RuntimeError",), text)))
    assert time.monotonic() - started < 60
    assert [failure.rank for failure in error.failures] == [1]
    assert error.root.detail == f"RuntimeError: {text}"


def test_no_answer_is_reported_for_ranks_that_had_the_time() -> None:
    """Both ranks are named if neither replied."""
    error = receive(seconds=0.2)
    assert {(failure.rank, failure.cause) for failure in error.failures} == {
        (0, "timeout"),
        (1, "timeout"),
    }
    silent = receive((0, Built({})), seconds=0.2)
    assert [failure.rank for failure in silent.failures] == [1]
    assert silent.root.detail.endswith(", at train.py:6")


def test_a_rank_that_only_lost_its_peer_is_not_the_culprit() -> None:
    """The rank whose process exited is, with its last output."""
    error = receive(
        (0, ChildError(("UnavailableError",), "Connection reset by peer")),
        (1, Exited(-11, output="its last words")),
    )
    assert (error.root.rank, error.root.cause) == (1, "signal")
    assert "SIGSEGV" in error.root.detail
    assert error.root.output == "its last words"


def test_running_out_of_memory_comes_before_every_other_failure() -> None:
    """It may have caused the others."""
    memory = RankFailure(1, "raised", "out of memory", out_of_memory=True)
    assert GroupError(RankFailure(0, "device", "gone"), memory).root is memory


def test_a_rank_that_floods_the_inbox_does_not_keep_the_others_waiting() -> None:
    """The time ends all the same."""
    inbox: Inbox = queue.Queue(10)
    ended = threading.Event()

    def flood() -> None:
        while not ended.is_set():
            inbox.put((0, Built({})))

    child = cast(Child, SimpleNamespace(find_loss=lambda: ""))
    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    started = time.monotonic()
    with pytest.raises(GroupError):
        ChildGroup([child] * 2, inbox, RankMap((0, 1))).receive(Built, 600.0, threading.Event())
    ended.set()
    while not inbox.empty():
        inbox.get()
    thread.join(5)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("error", "own"),
    [
        (
            ChildError(
                ("UserCodeError", "EvenerError"), "train.py:3: ValueError: no such data set"
            ),
            True,
        ),
        (
            ChildError(
                ("RequestError", "EvenerError"), "train.py:build returns int, not a Keras model."
            ),
            True,
        ),
        (ChildError(("ValueError",), "shapes differ", "train.py:3"), True),
        (ChildError(("ValueError",), "shapes differ"), False),
        (
            ChildError(("RuntimeError",), "CUDA error: no kernel image is available", "train.py:3"),
            False,
        ),
        (ChildError(("MemoryError",), "Unable to allocate 3 GiB", "train.py:3"), False),
    ],
)
def test_an_error_of_the_user_s_own_is_certain_from_one_of_a_device(
    error: ChildError, own: bool
) -> None:
    """A user's error would occur on every device.

    A GPU's error may pass through the user's lines too.
    """
    assert receive((0, error)).root.user_code is own
