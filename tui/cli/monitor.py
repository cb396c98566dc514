"""`evener monitor`: the app, or plain text or JSON, once or every few seconds; `--web`."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated

import typer

from evener.devices.registry import find_backend
from evener.devices.types import Snapshot, Source
from evener.errors import RequestError

from ..text.formatting import json_text
from ..text.parsing import parse_duration
from ..view.cells import ASCII, UNICODE, Marks
from ..view.plain import snapshot_document, snapshot_text
from .options import OUTPUT, AsciiOption, DevicesOption, RayAddressOption, ReadonlyOption, ThemeOption
from .output import draws_screens

Serving = Callable[[Callable[[], Snapshot | None]], contextlib.AbstractContextManager[object]]
SHORTEST_INTERVAL_SECONDS = 0.1
app = typer.Typer()


@app.command()
def monitor(
    devices: DevicesOption = "auto",
    once: Annotated[bool, typer.Option("--once", "-1", help="Print one reading and exit.")] = False,
    as_json: Annotated[bool, OUTPUT("--json", help="Print one JSON object, with -i one on each line.")] = False,
    interval: Annotated[
        str | None, typer.Option("-i", "--interval", help="Time between readings, like 0.5 (seconds) or 2s.")
    ] = None,
    only_visible: Annotated[bool, typer.Option("--only-visible", help="Only devices in CUDA_VISIBLE_DEVICES.")] = False,
    ray_address: RayAddressOption = "",
    metrics: Annotated[
        str | None, OUTPUT("--metrics", metavar="HOST:PORT", help="Serve metrics for Prometheus, like 127.0.0.1:9401.")
    ] = None,
    metrics_public: Annotated[
        bool, OUTPUT("--metrics-public", help="Allow an address that other machines can reach.")
    ] = False,
    readonly: ReadonlyOption = False,
    ascii_only: AsciiOption = False,
    theme: ThemeOption = None,
) -> None:
    """Show the devices: in the app on a terminal, as text or JSON elsewhere; serve metrics meanwhile."""
    serving = _metrics_server(metrics, metrics_public, once)
    if not (once or as_json or interval) and draws_screens():
        from ..start import run_app

        drawn = {"readonly": readonly, "ascii": ascii_only}
        raise typer.Exit(run_app(devices, theme=theme, ray_address=ray_address, serving=serving, **drawn))
    pause = 1.0 if interval is None else _parse_interval(interval)
    loops = not once and bool(interval or metrics)
    newest: deque[Snapshot] = deque(maxlen=1)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(contextlib.closing(_open(devices, only_visible, ray_address)))
        stack.enter_context(serving(lambda: newest[0] if newest else None))
        for snapshot in _snapshots(source, pause, loops=loops):
            newest.append(snapshot)
            if as_json:
                print(json_text(snapshot_document(snapshot)), flush=True)
            elif not metrics:
                print(draw_reading(snapshot, ascii_only), end="", flush=True)


def _metrics_server(address: str | None, public: bool, once: bool) -> Serving:
    """The context that serves metrics, if asked for; RequestError before anything else begins."""
    if address is None:
        if public:
            raise RequestError("--metrics-public goes with --metrics.", "Add --metrics HOST:PORT, or leave it out.")
        return contextlib.nullcontext
    if once:
        raise RequestError("--once ends before anybody can ask for metrics.", "Leave out --once or --metrics.")
    from ..serve.metrics import parse_metrics_address, serving_metrics

    return partial(serving_metrics, parse_metrics_address(address, public))


def _parse_interval(text: str) -> float:
    seconds = parse_duration(text, "-i")
    if not SHORTEST_INTERVAL_SECONDS <= seconds <= 86400:
        raise RequestError(
            f"-i {seconds:g} is not a usable interval.",
            f"Give {SHORTEST_INTERVAL_SECONDS:g} seconds or more; reading more often would slow the devices down.",
        )
    return seconds


def _open(devices: str, only_visible: bool, ray_address: str) -> Source:
    from evener.devices.discover import discover, open_source

    return open_source(discover(devices, only_visible=only_visible, ray_address=ray_address))


def _snapshots(source: Source, pause: float, *, loops: bool) -> Iterator[Snapshot]:
    """Readings: one that has settled, or one every `pause` seconds."""
    _settle(source)
    due = time.monotonic()
    while True:
        yield source.sample()
        if not loops:
            return
        due = max(due + pause, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def _settle(source: Source) -> None:
    """Sample once, and wait until the next sample has rates."""
    source.sample()
    time.sleep(max((find_backend(each.kind).settle_seconds for each in source.devices()), default=0.0))


def draw_reading(snapshot: Snapshot, ascii_only: bool) -> str:
    """The reading as text for standard output: in the width and the colours of its terminal, if it is one."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = shutil.get_terminal_size((132, 24)).columns
    return snapshot_text(snapshot, max(80, width), _marks(ascii_only), colour=colour)


def _marks(ascii_only: bool) -> Marks:
    """Plain ASCII if requested, or if the stream's encoding has nothing else."""
    try:
        "━╸▸…".encode(sys.stdout.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return ASCII if ascii_only else UNICODE


def show_in_browser(devices: str, readonly: bool, port: int, look: Mapping[str, object]) -> int:
    """Serve the app until a signal; the exit code. `look`: options of the app, which True switches on.

    RequestError and DeviceError say at once what is wrong with a request that every visitor's app would refuse.
    """
    from evener.devices.sampler import open_sampler

    from ..serve.browser import serve_browser

    publisher, _ = open_sampler(devices)
    publisher.close()
    given = [
        word for name, value in look.items() if value for word in ([name] if value is True else [name, str(value)])
    ]
    options = [*given, *(["--readonly"] if readonly else [])]
    return serve_browser([sys.executable, "-P", "-m", "evener", "monitor", "--devices", devices, *options], port)
