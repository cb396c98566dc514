"""Waiting until a library's threads sleep."""

from __future__ import annotations

import ctypes
import sys
import threading

import pytest

from evener.system.threads import wait_until_asleep

SET_NAME = 15  # PR_SET_NAME of prctl


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what threads do")
def test_a_thread_that_works_is_waited_for_until_it_sleeps() -> None:
    works, wakes = threading.Event(), threading.Event()
    works.set()

    def work() -> None:
        ctypes.CDLL(None).prctl(SET_NAME, b"evener_works", 0, 0, 0)
        named.set()
        while works.is_set():
            sum(range(1000))
        wakes.wait(60)

    named = threading.Event()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert named.wait(60)
    assert not wait_until_asleep("evener_works", 0.1)
    works.clear()
    assert wait_until_asleep("evener_works", 60)
    wakes.set()
    thread.join(60)
    assert wait_until_asleep("evener_works", 10), "the kernel may list it for a moment"


def test_no_thread_of_a_name_is_no_wait() -> None:
    assert wait_until_asleep("nobody", 0.0)
