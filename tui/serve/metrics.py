"""Serves metrics for Prometheus over HTTP."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from evener.devices.types import Snapshot
from evener.errors import RequestError, as_request_error

from .address import Address, is_loopback, parse_address

try:
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.exposition import ThreadingWSGIServer

    from .metric_families import metric_families
except ImportError:
    raise RequestError("Metrics need prometheus-client.", "Install it: pip install 'evener[metrics]'.") from None

WHAT_IS_SERVED = "this machine's name, its devices and their load, and the names and speed of your trainings"


class _Reading:
    """The collector that prometheus-client asks at each request."""

    def __init__(self, latest: Callable[[], Snapshot | None]) -> None:
        self._latest = latest

    def collect(self) -> Iterable[Any]:
        """The newest reading's metrics; none before the first reading."""
        snapshot = self._latest()
        return () if snapshot is None else metric_families(snapshot)


class _Handler(WSGIRequestHandler):
    timeout = 10  # for a client that connects and says nothing

    def log_message(self, *_: object) -> None:
        """Log nothing: standard error may be the app's terminal."""


class _Server4(ThreadingWSGIServer):
    request_queue_size = 16

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that says nothing, or has gone, is no defect of the server's."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Server6(_Server4):
    address_family = socket.AF_INET6


def parse_metrics_address(text: str, public: bool) -> Address:
    """The address of the metrics' server; RequestError for one that others can reach, unless that is wanted."""
    address = parse_address(text, "--metrics")
    if not public and not is_loopback(address.authority):
        raise RequestError(
            f"--metrics {text} can be reached from other machines.",
            f"Who reaches it reads {WHAT_IS_SERVED}. Add --metrics-public if that is all right.",
        )
    return address


@contextmanager
def serving_metrics(address: Address, latest: Callable[[], Snapshot | None]) -> Iterator[None]:
    """Serve the latest reading while the block runs. RequestError if the port can't be used."""
    registry = CollectorRegistry()
    registry.register(_Reading(latest))
    metrics: Callable[..., Iterable[bytes]] = make_wsgi_app(registry)
    public = not is_loopback(address.authority)

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if public or is_loopback(environ.get("HTTP_HOST", "")):
            return metrics(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain")])
        return [b"Ask by a loopback address.\n"]

    kind = _Server6 if ":" in address.host else _Server4
    remedy = "Give a free port of this machine to --metrics."
    with as_request_error(f"Metrics can't be served at {address.authority}", remedy):
        server = make_server(*address, answer, kind, _Handler)
    threading.Thread(target=server.serve_forever, name="evener-metrics", daemon=True).start()
    url = f"http://{Address(address.host, server.server_port).authority}/metrics"
    readers = f" for everybody who reaches it: {WHAT_IS_SERVED}" if public else ""
    print(f"evener: metrics at {url}{readers}", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
