"""`evener --web`: the app in a browser, only for this machine's user and through the printed
address.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from evener.tui.cli.main import run
from tests.support.chromium import BROWSER, Chromium
from tests.support.waiting import wait_for

pytest.importorskip("textual_serve")
COMMAND = [sys.executable, "-m", "evener", "--web", "--devices", "sim:gtx1080ti,gtx1080"]


class Served:
    """`evener --web` in its own process."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *options], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        assert self.process.stderr is not None
        said = self.process.stderr.readline().decode()
        found = re.fullmatch(
            r"evener: open (http://127\.0\.0\.1:\d+/[\w-]{32}/) in a browser on this machine\n",
            said,
        )
        assert found, said
        self.url = found[1]
        self.port = urlsplit(self.url).port or 0
        self.root = urlsplit(self.url).path

    def visitors(self) -> list[psutil.Process]:
        """Return the processes that draw for visitors."""
        return [each for each in psutil.Process(self.process.pid).children() if _lives(each)]

    def ask(self, path: str, **headers: str) -> int:
        """Return the status of a response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path, headers=headers)
        status = connection.getresponse().status
        connection.close()
        return status

    def end(self) -> int:
        """End the server and return its exit code."""
        self.process.send_signal(signal.SIGTERM)  # does nothing to a process that has exited
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Yield one server for all tests that don't end it."""
    started = Served()
    yield started
    started.end()


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _drawn(browser: Chromium) -> str:
    """Return what the app has written to the terminal of the newest tab, without escape
    sequences.
    """
    browser.evaluate("0")  # reads what has arrived
    frames = [
        event["params"]["response"]["payloadData"]
        for event in browser.events
        if event.get("method") == "Network.webSocketFrameReceived"
        and event["sessionId"] == browser.session
        and event["params"]["response"]["opcode"] == 2
    ]
    return re.sub(
        r"\x1b\[[^a-zA-Z]*[a-zA-Z]",
        "",
        b"".join(map(base64.b64decode, frames)).decode(errors="replace"),
    )


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is on the path")
def test_a_visitor_sees_the_monitor_and_uses_keys_and_a_closed_tab_ends_its_process(
    tmp_path: Path,
) -> None:
    served, browser = Served(), Chromium(tmp_path / "profile")
    try:
        browser.call(
            "Emulation.setDeviceMetricsOverride",
            width=1500,
            height=700,
            deviceScaleFactor=1,
            mobile=False,
        )
        browser.navigate(served.url)
        wait_for(lambda: "GTX 1080 Ti" in _drawn(browser), "the monitor is drawn", pause=0.05)
        shown = "document.body.classList.contains('-first-byte')"
        wait_for(lambda: browser.evaluate(shown), "the page shows it", pause=0.05)
        assert "send a signal" not in _drawn(browser)
        browser.evaluate("document.querySelector('.xterm-helper-textarea').focus()")
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="?", text="?")
        wait_for(lambda: "send a signal" in _drawn(browser), "the help is drawn", pause=0.05)
        asked = {event["params"]["request"]["url"] for event in browser.events
                 if event.get("method") == "Network.requestWillBeSent"}  # fmt: skip
        sockets = {event["params"]["url"] for event in browser.events
                   if event.get("method") == "Network.webSocketCreated"}  # fmt: skip
        assert all(url.startswith((served.url, "data:")) for url in asked), asked
        assert len(sockets) == 1
        assert all(url.startswith(served.url.replace("http", "ws")) for url in sockets)
        entries = [
            event["params"]["entry"]
            for event in browser.events
            if event.get("method") == "Log.entryAdded"
        ]
        assert [entry for entry in entries if entry["level"] == "error"] == []
        (first,) = served.visitors()
        browser.events.clear()
        browser.new_tab()
        browser.call(
            "Emulation.setDeviceMetricsOverride",
            width=1500,
            height=700,
            deviceScaleFactor=1,
            mobile=False,
        )
        browser.navigate(served.url)
        wait_for(
            lambda: "GTX 1080 Ti" in _drawn(browser),
            "a second visitor sees the monitor",
            pause=0.05,
        )
        assert len(served.visitors()) == 2
        browser.call("Page.close")
        wait_for(lambda: served.visitors() == [first], "its process ends with the tab", pause=0.05)
        assert served.end() == 128 + signal.SIGTERM
        wait_for(lambda: not _lives(first), "the visitors end with the server", pause=0.05)
    finally:
        browser.close()
        served.end()


def test_only_the_printed_address_on_this_machine_is_answered(served: Served) -> None:
    own = f"http://127.0.0.1:{served.port}"
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    upgrade["Sec-WebSocket-Key"] = base64.b64encode(bytes(16)).decode()
    assert served.ask(served.root) == 200
    assert served.ask(f"{served.root}static/js/textual.js", Origin=own) == 200
    refused: list[tuple[str, dict[str, str]]] = [
        ("/", {}),
        ("/ws", upgrade | {"Origin": own}),
        (f"/{'x' * 32}/", {}),
        (f"/{'x' * 32}/ws", upgrade | {"Origin": own}),
        (served.root, {"Host": "evil.example"}),
        (served.root, {"Host": f"evil.example:{served.port}"}),
        (served.root, {"Host": f"x@127.0.0.1:{served.port}"}),
        (served.root, {"Origin": "http://evil.example"}),
        (f"{served.root}ws", upgrade),
        (f"{served.root}ws", upgrade | {"Origin": "http://evil.example"}),
        (f"{served.root}ws", upgrade | {"Origin": "null"}),
        (f"{served.root}ws", upgrade | {"Origin": f"http://localhost:{served.port}"}),
        (f"{served.root}ws", upgrade | {"Origin": "http://evil.example", "Host": "evil.example"}),
    ]
    for path, headers in refused:
        assert served.ask(path, **headers) == 403, (path, headers)
    assert served.ask(f"{served.root}static/") in (403, 404)
    assert served.visitors() == []


def test_it_listens_on_loopback_alone(served: Served) -> None:
    listening = psutil.Process(served.process.pid).net_connections("inet")
    assert [
        (each.laddr.ip, each.laddr.port) for each in listening if each.status == psutil.CONN_LISTEN
    ] == [("127.0.0.1", served.port)]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", served.port), timeout=30)


def test_a_port_in_use_and_a_missing_extra_are_one_line_errors(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--web", "-d", "sim:gtx1080", "--web-port", str(served.port)]) == 2
    assert "Address already in use. Give a free port to --web-port." in capsys.readouterr().err
    assert run(["--web", "-d", "sim:nosuch"]) == 2
    assert "nosuch" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "textual_serve.server", None)
    monkeypatch.delitem(sys.modules, "evener.tui.serve.browser")
    assert run(["--web", "-d", "sim:gtx1080"]) == 2
    assert capsys.readouterr().err == (
        "evener: The browser needs textual-serve. Install it: pip install 'evener[web]'.\n"
    )


@pytest.mark.parametrize(("options", "readonly"), [((), True), (("--web-control",), False)])
def test_the_browser_only_looks_unless_asked(
    options: tuple[str, ...], readonly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []

    def serve(command: list[str], _: int) -> int:
        served.append(command)
        return 0

    monkeypatch.setattr("evener.tui.serve.browser.serve_browser", serve)
    assert run(["--web", "-d", "sim:gtx1080", "--ascii", "--theme", "light", *options]) == 0
    (command,) = served
    assert ("--readonly" in command) == readonly
    assert command[3:] == [
        "evener",
        "monitor",
        "--devices",
        "sim:gtx1080",
        "--ascii",
        "--theme",
        "light",
        *(["--readonly"] if readonly else []),
    ]


def test_a_devices_text_can_start_no_other_command() -> None:
    from evener.tui.serve.browser import BrowserServer

    words = ["evener", "--devices", "x; touch /tmp/y $(id) 'q'"]
    shown = subprocess.run(
        ["sh", "-c", BrowserServer(["printf", "%s\\n", *words]).command],
        capture_output=True,
        text=True,
    )
    assert shown.stdout.splitlines() == words


def test_silent_connections_keep_no_client_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few are accepted at once and not for long, however slowly they send.

    A connection that requested the page stays.
    """
    from evener.tui.serve import browser

    monkeypatch.setattr(browser, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(browser, "MOST_SILENT", 8)
    server = browser.BrowserServer(["true"])

    async def attack(port: int) -> None:
        slow = await _connect(port)
        dripping = asyncio.create_task(_drip(slow))
        idle = [await _connect(port) for _ in range(20)]
        assert await asyncio.wait_for(_count_closed(idle[:12]), 60) == 12
        visitor = await _connect(port)
        assert await _ask_page(visitor, server.token) == b"HTTP/1.1 200 OK\r\n"
        refused = await _connect(port)
        assert b"403" in await _ask_page(refused, "x" * 32)
        await asyncio.wait_for(refused[0].read(), 60)  # to its end
        assert await asyncio.wait_for(_count_closed(idle), 60) == 20
        await asyncio.wait_for(dripping, 60)
        late = await _connect(port)
        dripping = asyncio.create_task(_drip(late))
        await asyncio.wait_for(dripping, 60)
        assert await _ask_page(visitor, server.token) == b"HTTP/1.1 200 OK\r\n"
        for _, writer in (slow, visitor, refused, late, *idle):
            writer.close()

    async def serve() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            running = asyncio.create_task(server.run(listening))
            await asyncio.wait_for(attack(listening.getsockname()[1]), 120)
            signal.raise_signal(signal.SIGTERM)
            assert await asyncio.wait_for(running, 60) == 128 + signal.SIGTERM

    asyncio.run(serve())


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _connect(port: int) -> Connection:
    return await asyncio.open_connection("127.0.0.1", port)


async def _count_closed(connections: Sequence[Connection]) -> int:
    """Return the number of connections that the server has closed."""
    await asyncio.gather(*(reader.read() for reader, _ in connections))
    return len(connections)


async def _drip(connection: Connection) -> None:
    """Send the bytes of a request one by one until the server has closed the connection."""
    reader, writer = connection
    with suppress(ConnectionError):
        writer.write(b"GET / HTTP/1.1\r\nX-Slow: ")
        while not reader.at_eof():
            writer.write(b"x")
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.2)


async def _ask_page(connection: Connection, token: str) -> bytes:
    """Return the first line of the response, after reading its headers and body."""
    reader, writer = connection
    port = writer.get_extra_info("peername")[1]
    writer.write(f"GET /{token}/ HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    assert length is not None
    await reader.readexactly(int(length[1]))
    return head.splitlines(keepends=True)[0]
