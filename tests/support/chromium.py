"""A headless browser for tests of pages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)


class Chromium:
    """A headless browser, controlled over its debugging pipe by JSON messages that end in a zero
    byte.
    """

    def __init__(self, profile: Path) -> None:
        assert BROWSER is not None
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()

        def keep() -> None:
            low, high = os.dup(to_read), os.dup(to_write)
            os.dup2(low, 3)
            os.dup2(high, 4)

        switches = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            "--no-first-run",
        ]
        quiet = [
            "--disable-background-networking",
            "--disable-component-update",
            "--hide-scrollbars",
        ]
        self._process = subprocess.Popen(
            [BROWSER, *switches, *quiet, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=keep, close_fds=False,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._rest, self._count, self.session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = next(
            one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"
        )
        self._attach(target["targetId"])

    def call(self, method: str, **parameters: Any) -> Any:
        """Return the result of a command. Events that arrive meanwhile are kept in `events`."""
        self._count += 1
        order = {"id": self._count, "method": method, "params": parameters}
        os.write(
            self._out,
            json.dumps(order | ({"sessionId": self.session} if self.session else {})).encode()
            + b"\0",
        )
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def new_tab(self) -> str:
        """Open another tab for the following calls, and return its id."""
        self.session = ""
        target = str(self.call("Target.createTarget", url="about:blank")["targetId"])
        self._attach(target)
        return target

    def navigate(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        until = time.monotonic() + 60
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            assert time.monotonic() < until, "the page loads"
            self.events.append(self._receive())

    def evaluate(self, script: str) -> Any:
        """Return the value of a script's last expression."""
        return self.call("Runtime.evaluate", expression=script)["result"].get("value")

    def _attach(self, target: str) -> None:
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """Close the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._in, 1 << 16)
            assert more, "the browser lives"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))
