"""Invalid requests to the metrics and to the app in a browser get a response or none; nothing is
printed.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

LONG = b"x" * 70_000
ODD = {
    "a long address": b"GET /" + LONG + b" HTTP/1.1\r\n\r\n",
    "a long header": b"GET / HTTP/1.1\r\nA: " + LONG + b"\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n",
    "no request": b"\x00\xff\r\n\r\n",
}


def send(port: int, data: bytes) -> bytes:
    """Return the first bytes of the response, or of its end."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as client,
        suppress(ConnectionError),
    ):
        client.sendall(data)
        return client.recv(12)
    return b""


def test_metrics(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """One client connects and sends nothing, or half a request, until its time is over."""
    pytest.importorskip("prometheus_client")
    from evener.devices.network import Address
    from evener.tui.serve import metrics

    monkeypatch.setattr(metrics._Handler, "timeout", 0.2)
    with metrics.serving_metrics(Address("127.0.0.1", 0), lambda: None):
        port = int(re.findall(r":(\d+)/metrics", capfd.readouterr().err)[0])
        for data in (*ODD.values(), b"", b"GET / HT"):
            send(port, data)
        assert send(port, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").endswith(b"200")
    for thread in threading.enumerate():
        if "process_request" in thread.name:
            thread.join()
    assert capfd.readouterr().err == ""


def test_the_app_in_a_browser() -> None:
    """One request looks like a websocket, but isn't one."""
    pytest.importorskip("textual_serve")
    words = [sys.executable, "-m", "evener", "--web", "--devices", "sim:gtx1080"]
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        found = re.search(r":(\d+)(/[\w-]+/)", process.stderr.readline())
        assert found
        port, root = int(found[1]), found[2]
        own = f"Host: 127.0.0.1:{port}\r\nOrigin: http://127.0.0.1:{port}\r\n\r\n"
        for data in (
            *ODD.values(),
            *(
                f"GET {root}{path} HTTP/1.1\r\n{own}".encode()
                for path in ("ws", "static/" + "a" * 3000)
            ),
        ):
            send(port, data)
        process.send_signal(signal.SIGTERM)
        assert process.stderr.read() == ""
