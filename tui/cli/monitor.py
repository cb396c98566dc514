"""The commands `monitor` and `demo`, and the app in a browser."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from evener.devices.registry import find_backend, name_maker
from evener.devices.types import Snapshot, Source
from evener.errors import DeviceError, RequestError
from evener.printable import plain, print_notice

from ..text.formatting import json_text
from ..text.parsing import parse_duration
from ..view.cells import Line, Mark, Span, Tone, cut, text_lines, to_ascii
from ..view.devices import DEVICES, PanelRow, device_rows
from ..view.monitor import PROCESS_COLUMNS, PROCESSES, empty_process_text, host_line, process_rows
from ..view.table import Order, sort_rows, whole_table
from .options import (
    OUTPUT,
    AsciiOption,
    DevicesOption,
    RayAddressOption,
    ReadonlyOption,
    ThemeOption,
)
from .output import draws_screens

if TYPE_CHECKING:
    from evener.plan.file import Link

    from ..view.trainings import TrainingRow

Serving = Callable[[Callable[[], Snapshot | None]], contextlib.AbstractContextManager[object]]
SHORTEST_INTERVAL_SECONDS = 0.1
SHOWN = (
    5,
    11,
    20,
)  # seconds of the demo's training: as planned, while a card is hot, with other shares
app = typer.Typer()


@app.command()
def monitor(
    devices: DevicesOption = "auto",
    once: Annotated[bool, typer.Option("--once", "-1", help="Print one reading and exit.")] = False,
    as_json: Annotated[
        bool, OUTPUT("--json", help="Print one JSON object, with -i one on each line.")
    ] = False,
    interval: Annotated[
        str | None,
        typer.Option("-i", "--interval", help="Time between readings, like 0.5 (seconds) or 2s."),
    ] = None,
    only_visible: Annotated[
        bool, typer.Option("--only-visible", help="Only devices in CUDA_VISIBLE_DEVICES.")
    ] = False,
    ray_address: RayAddressOption = "",
    metrics: Annotated[
        str | None,
        OUTPUT(
            "--metrics",
            metavar="HOST:PORT",
            help="Serve metrics for Prometheus, like 127.0.0.1:9401.",
        ),
    ] = None,
    metrics_public: Annotated[
        bool, OUTPUT("--metrics-public", help="Allow an address that other machines can reach.")
    ] = False,
    readonly: ReadonlyOption = False,
    ascii_only: AsciiOption = False,
    theme: ThemeOption = None,
) -> None:
    """Show the devices: in the app on a terminal, as text or JSON elsewhere; serve metrics
    meanwhile.
    """
    serving = _metrics_server(metrics, metrics_public, once)
    if not (once or as_json or interval) and draws_screens():
        from ..start import run_app

        drawn = {"readonly": readonly, "ascii": ascii_only}
        raise typer.Exit(
            run_app(devices, theme=theme, ray_address=ray_address, serving=serving, **drawn)
        )
    pause = 1.0 if interval is None else _parse_interval(interval)
    loops = not once and bool(interval or metrics)
    newest: deque[Snapshot] = deque(maxlen=1)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(contextlib.closing(_open(devices, only_visible, ray_address)))
        stack.enter_context(serving(lambda: newest[0] if newest else None))
        for snapshot in _snapshots(source, pause, repeat=loops):
            newest.append(snapshot)
            if as_json:
                print(json_text(snapshot_document(snapshot)), flush=True)
            elif not metrics:
                print(draw_reading(snapshot, ascii_only), end="", flush=True)


def _metrics_server(address: str | None, public: bool, once: bool) -> Serving:
    """Return a function that starts the metrics server, or that does nothing if `address` is None.

    Raises RequestError if the options contradict each other or the address is invalid.
    """
    if address is None:
        if public:
            raise RequestError(
                "--metrics-public goes with --metrics.", "Add --metrics HOST:PORT, or leave it out."
            )
        return contextlib.nullcontext
    if once:
        raise RequestError(
            "--once ends before anybody can ask for metrics.", "Leave out --once or --metrics."
        )
    from ..serve.metrics import parse_metrics_address, serving_metrics

    return partial(serving_metrics, parse_metrics_address(address, public))


def _parse_interval(text: str) -> float:
    seconds = parse_duration(text, "-i")
    if not SHORTEST_INTERVAL_SECONDS <= seconds <= 86400:
        raise RequestError(
            f"-i {seconds:g} is not a usable interval.",
            (
                f"Give {SHORTEST_INTERVAL_SECONDS:g} seconds or more; reading more often would "
                f"slow the devices down."
            ),
        )
    return seconds


def _open(devices: str, only_visible: bool, ray_address: str) -> Source:
    from evener.devices.discover import discover, open_source

    return open_source(discover(devices, only_visible=only_visible, ray_address=ray_address))


def _snapshots(source: Source, pause: float, *, repeat: bool) -> Iterator[Snapshot]:
    """Yield a reading of the devices every `pause` seconds, or a single one if `repeat` is False.

    If a later reading fails, the last one is yielded again, marked as stale. Raises DeviceError if
    the devices can't be read at first, or if the single reading fails.
    """
    # The devices are read once before the first snapshot, so that every snapshot has rates.
    from evener.devices.sampler import mark_stale

    last = _read_first(source)
    read_at = due = time.monotonic()
    while True:
        try:
            last = source.sample()
            read_at = time.monotonic()
            reading = last
        except OSError as error:
            if not repeat:
                raise _unreadable(error) from None
            reading = mark_stale(last, time.monotonic() - read_at, error.strerror or str(error))
        yield reading
        if not repeat:
            return
        due = max(due + pause, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def _read_first(source: Source) -> Snapshot:
    """Return a first reading of the devices, after a pause.

    Drivers need the pause before they can measure rates in a second reading. Raises DeviceError if
    the devices can't be read.
    """
    try:
        first = source.sample()
    except OSError as error:
        raise _unreadable(error) from None
    time.sleep(
        max((find_backend(device.kind).settle_seconds for device in source.devices()), default=0.0)
    )
    return first


def _unreadable(error: OSError) -> DeviceError:
    return DeviceError(
        f"The devices can't be read: {error.strerror or error}.",
        "Look at the limits of this process (ulimit -a).",
    )


def draw_reading(snapshot: Snapshot, ascii_only: bool) -> str:
    """Format a reading for standard output, in colour on a terminal unless NO_COLOR is set."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = shutil.get_terminal_size((132, 24)).columns
    text = snapshot_text(snapshot, max(80, width), colour=colour)
    return to_ascii(text) if ascii_only else text


_CODES: dict[Tone, str] = {
    "dim": "2",
    "title": "2",
    "strong": "1",
    "accent": "34",
    "memory": "35",
    "power": "33",
    "speed": "32",
    "good": "32",
    "warn": "33",
    "bad": "1;31",
    "track": "2",
}


def snapshot_text(snapshot: Snapshot, width: int, *, colour: bool) -> str:
    """Format devices, links, processes and training runs as tables of `width` columns."""
    rows: tuple[PanelRow, ...] = device_rows(snapshot)
    grid = PROCESSES._replace(nothing=empty_process_text(snapshot.devices))
    shown = sort_rows(PROCESS_COLUMNS, process_rows(snapshot), Order("memory"))
    parts = [host_line(snapshot, width), *whole_table(DEVICES, rows, width)]
    parts += _link_lines(snapshot, width)
    parts += [Line(), *whole_table(grid, shown, width), *_training_parts(snapshot, width)]
    lines = (*_notes(snapshot), *(_drawn(part) if colour else part.text.rstrip() for part in parts))
    return "\n".join(lines) + "\n"


def _link_lines(snapshot: Snapshot, width: int) -> Iterator[Line]:
    """Yield a line for each measured link between the devices."""
    for link in _list_links(snapshot):
        yield Line((Span(cut(f" link {plain(link.describe())}", width), "dim"),))


def _list_links(snapshot: Snapshot) -> tuple[Link, ...]:
    """Return the stored measurements of links between the devices."""
    # The import takes time, so it is done only for two or more devices.
    if len(snapshot.devices) < 2:
        return ()
    from evener.balancer.store.links import list_links

    return list_links([sample.device for sample in snapshot.devices], snapshot.driver)


def snapshot_document(snapshot: Snapshot) -> dict[str, object]:
    """Return a reading as a JSON document, with the ranks' reports grouped into training runs."""
    document = msgspec.structs.asdict(snapshot) | {"trainings": _join(snapshot)}
    document["links"] = _list_links(snapshot)
    del document["reports"]
    return document


def _notes(snapshot: Snapshot) -> Iterator[str]:
    """Yield the host's name and driver version, then the warnings of the reading."""
    if snapshot.driver:
        maker = name_maker(sample.device for sample in snapshot.devices)
        yield f"{plain(snapshot.host.hostname)}, {maker} driver {plain(snapshot.driver)}"
    yield from (f"{Mark.ALARM} {plain(note)}" for note in snapshot.notes)


def _join(snapshot: Snapshot) -> tuple[TrainingRow, ...]:
    """Group the reports of all processes into training runs and their ranks."""
    # The module that joins reports to trainings is imported only if there are reports.
    if not snapshot.reports:
        return ()
    from ..view.trainings import join_trainings

    return join_trainings(snapshot)


def _training_parts(snapshot: Snapshot, width: int) -> Iterator[Line]:
    """Yield a table of the training runs, then the details of each run that has several ranks."""
    # The table already shows everything about a training with a single process and no id.
    rows = _join(snapshot)
    if not rows:
        return
    from ..view.training_lines import TRAININGS, rank_grid, training_lines

    yield Line()
    yield from whole_table(TRAININGS, rows, width)
    for row in rows:
        if not row.training and len(row.ranks) < 2:
            continue
        yield Line()
        yield from text_lines(row.workload or row.framework, width, 1, "strong")
        yield from whole_table(rank_grid(row.ranks), row.ranks, width)
        yield from training_lines(row, snapshot.at_seconds, width)


def _drawn(line: Line) -> str:
    drawn = []
    for text, tone, _ in line.spans:
        code = _CODES.get(tone)
        drawn.append(f"\x1b[{code}m{text}\x1b[0m" if code and text.strip() else text)
    return "".join(drawn)


def show_in_browser(
    devices: str, readonly: bool, port: int, app_options: Mapping[str, object]
) -> int:
    """Serve the app to browsers on this machine, and return the exit code.

    - `port`: 0 takes any free port.
    - `app_options`: options of `evener monitor` with their values. Options with False, None or ""
      are left out.

    Raises RequestError or DeviceError before serving if the devices are unavailable.
    """
    from evener.devices.sampler import open_sampler

    from ..serve.browser import serve_browser

    publisher, _ = open_sampler(devices)
    publisher.close()
    options = []
    for name, value in {**app_options, "--readonly": readonly}.items():
        if value is True:
            options.append(name)
        elif value:
            options += [name, str(value)]
    return serve_browser(
        [sys.executable, "-P", "-m", "evener", "monitor", "--devices", devices, *options], port
    )


@app.command()
def demo(
    as_text: Annotated[
        bool, typer.Option("--plain", help="Print text, on a terminal too.")
    ] = False,
    ascii_only: AsciiOption = False,
    theme: ThemeOption = None,
) -> None:
    """Show a search and a training on simulated cards: nothing is measured, and nothing is kept."""
    with tempfile.TemporaryDirectory(prefix="evener-demo-") as folder:
        os.environ["XDG_STATE_HOME"] = folder  # where the search keeps its run
        if as_text or not draws_screens():
            _print_demo(ascii_only)
            return
        from ..start import draw_app, has_app, prepare_app

        if not has_app():
            print_notice(
                "The app isn't installed, so the demo is text. In the app: pip install "
                "'evener[app]', then evener demo again."
            )
            _print_demo(ascii_only)
            return
        prepare_app()
        from ..demo import DemoApp

        raise typer.Exit(draw_app(DemoApp(theme=theme or "dark", ascii=ascii_only)))


def _print_demo(ascii_only: bool) -> None:
    """Print the demo as text: a simulated search, then three readings of a training run."""
    from evener.balancer.request import Request
    from evener.balancer.run import open_run
    from evener.balancer.session import Session

    from ..simulated_training import PAIR, TrainingSource
    from .runs import print_events

    with contextlib.closing(Session(open_run(Request(devices=PAIR)))) as session:
        finished = print_events(session.events())
    assert finished is not None
    print("\nA training with this plan; after 10 s SIM:0 gets hot and loses 30 % of its speed.")
    seconds = 0
    cards = TrainingSource(lambda: float(seconds))
    cards.train(finished.plan)
    for seconds in range(max(SHOWN) + 1):
        reading = cards.sample()
        if seconds in SHOWN:
            print(f"\nAfter {seconds} s:\n{draw_reading(reading, ascii_only)}", end="")
