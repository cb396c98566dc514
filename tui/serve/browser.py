"""Serve the app to browsers on this machine with textual-serve, one process for each page.

By itself, textual-serve would let any web page that the user visits open and control the app. So
requests must name this machine's loopback address as the host, come from the page served here, and
contain the random token of the printed URL.
"""

from __future__ import annotations

import asyncio
import hmac
import html
import logging
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib.resources import files
from string import Template

from evener.devices.network import is_loopback
from evener.errors import RequestError, as_request_error

try:
    from aiohttp import web
    from textual_serve.server import Server
except ImportError:
    raise RequestError(
        "The browser needs textual-serve.", "Install it: pip install 'evener[web]'."
    ) from None

HOST = "127.0.0.1"
SHUTDOWN_SECONDS = 5.0  # seconds for the visitors' processes to end
MOST_SILENT = 64  # maximum number of open connections without a request from the user's page
SILENT_SECONDS = 10.0  # how long each of them may stay open
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REFUSED = "Open the address that evener printed, in a browser on this machine."
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SilentConnections:
    """The connections that haven't sent a valid request yet.

    At most 64 of them stay open, each for up to 10 seconds.
    """

    def __init__(self) -> None:
        self._ends: dict[web.RequestHandler, asyncio.TimerHandle] = {}  # oldest first

    def add(self, connection: web.RequestHandler) -> None:
        """Add a new connection. If there are too many, the oldest one is closed."""
        if len(self._ends) >= MOST_SILENT:
            self.close(next(iter(self._ends)))
        loop = asyncio.get_running_loop()
        self._ends[connection] = loop.call_later(SILENT_SECONDS, self.close, connection)

    def remove(self, connection: web.RequestHandler) -> None:
        """Remove a connection that has sent a valid request, or has been closed."""
        ends = self._ends.pop(connection, None)
        if ends is not None:
            ends.cancel()

    def close(self, connection: web.RequestHandler) -> None:
        """Close a connection."""
        self.remove(connection)
        connection.force_close()


class BrowserServer(Server):
    """Server that runs `command`, a Textual app, once for each browser page.

    It listens on 127.0.0.1 only, and answers only requests with its random token in the path.
    """

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__(f"exec {shlex.join(command)}", host=HOST)
        self.token = secrets.token_urlsafe(24)
        self._visits: set[asyncio.Task[object]] = set()
        self._silent = SilentConnections()

    async def _make_app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        root = f"/{self.token}"
        app.add_routes(
            [
                web.get(f"{root}/", self._show_page),
                web.get(f"{root}/ws", self._visit),
                web.static(f"{root}/static", self.statics_path),
            ]
        )
        app.on_shutdown.append(self._end_visits)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests without the token, and those from other hosts or pages.

        Adds security headers to the responses to all other requests.
        """
        host = request.headers.get("Host", "")
        origin = request.headers.get("Origin")
        token = request.path.split("/")[1]
        own = origin == f"http://{host}" or (origin is None and not request.path.endswith("/ws"))
        if not (
            own and is_loopback(host) and hmac.compare_digest(token.encode(), self.token.encode())
        ):
            refused = web.Response(status=403, text=REFUSED)
            refused.force_close()
            return refused
        self._silent.remove(request.protocol)
        response = await handler(request)
        if not response.prepared:
            response.headers.update(_page_headers(host))
        return response

    async def _show_page(self, request: web.Request) -> web.Response:
        page = Template((files("evener.tui.serve") / "page.html").read_text("utf-8"))
        websocket = html.escape(f"ws://{request.headers['Host']}/{self.token}/ws")
        return web.Response(text=page.substitute(websocket=websocket), content_type="text/html")

    async def _visit(self, request: web.Request) -> web.StreamResponse:
        visit = asyncio.current_task()
        assert visit is not None
        self._visits.add(visit)
        try:
            return await self.handle_websocket(request)
        finally:
            self._visits.discard(visit)

    async def _end_visits(self, _: web.Application) -> None:
        """End the app of every open page, and wait up to 5 seconds until all have ended."""
        for visit in self._visits:
            visit.cancel()
        if self._visits:
            await asyncio.wait(self._visits, timeout=SHUTDOWN_SECONDS)

    async def run(self, listening: socket.socket) -> int:
        """Serve on the socket `listening` until a signal arrives, and return the exit code.

        The signals are SIGINT, SIGTERM and SIGHUP, and the exit code is 128 plus the signal's
        number. Prints the address to open.
        """
        runner = web.AppRunner(
            await self._make_app(), access_log=None, shutdown_timeout=SHUTDOWN_SECONDS
        )
        await runner.setup()
        connect = runner.server
        assert connect is not None

        def accept() -> web.RequestHandler:
            connection = connect()
            self._silent.add(connection)
            return connection

        loop = asyncio.get_running_loop()
        server = await loop.create_server(accept, sock=listening)
        ended: asyncio.Future[int] = loop.create_future()
        for number in ENDING_SIGNALS:
            loop.add_signal_handler(number, partial(_end, ended, 128 + number))
        port = listening.getsockname()[1]
        print(
            f"evener: open http://{HOST}:{port}/{self.token}/ in a browser on this machine",
            file=sys.stderr,
            flush=True,
        )
        try:
            return await ended
        finally:
            server.close()
            await runner.cleanup()


def serve_browser(command: Sequence[str], port: int) -> int:
    """Serve `command` to browsers on this machine until a signal arrives, and return the exit code.

    `port` 0 takes any free port. Raises RequestError if the port can't be used.
    """
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with as_request_error(
            f"The app can't be served at {HOST}:{port}", "Give a free port to --web-port."
        ):
            listening.bind((HOST, port))
            listening.listen()
        # the server's libraries would print a traceback for each malformed request
        logging.disable(logging.CRITICAL)
        return asyncio.run(BrowserServer(command).run(listening))


def _end(ended: asyncio.Future[int], code: int) -> None:
    if not ended.done():
        ended.set_result(code)


def _page_headers(host: str) -> dict[str, str]:
    """Return the HTTP security headers of a page."""
    # The headers forbid requests to other hosts, frames around the page, and the token in a Referer
    # header.
    sources = {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self' 'unsafe-inline'",
        "font-src": "'self'",
        "img-src": "'self' data:",
        "connect-src": f"'self' ws://{host}",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{what} {where}" for what, where in sources.items()),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }
