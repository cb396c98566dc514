"""`evener demo`: a search over two simulated cards and a training by its plan, in the app or as text."""

from __future__ import annotations

import os
import tempfile
from contextlib import closing
from typing import Annotated

import typer

from .options import AsciiOption, ThemeOption
from .output import draws_screens

app = typer.Typer()
SHOWN = (5, 11, 20)  # seconds of the training: as planned, while a card is hot, with other shares


@app.command()
def demo(
    as_text: Annotated[bool, typer.Option("--plain", help="Print text, on a terminal too.")] = False,
    ascii_only: AsciiOption = False,
    theme: ThemeOption = None,
) -> None:
    """Show a search and a training on simulated cards: nothing is measured, and nothing is kept."""
    with tempfile.TemporaryDirectory(prefix="evener-demo-") as folder:
        os.environ["XDG_STATE_HOME"] = folder  # where the search keeps its run
        if as_text or not draws_screens():
            _print_demo(ascii_only)
            return
        from ..start import draw_app, prepare_app

        prepare_app()
        from ..demo import DemoApp

        raise typer.Exit(draw_app(DemoApp(theme=theme or "dark", ascii=ascii_only)))


def _print_demo(ascii_only: bool) -> None:
    """The same as text: the search with its result, and the training at some moments."""
    from evener.balancer.request import Request
    from evener.balancer.run import open_run
    from evener.balancer.session import Session

    from ..simulated_training import PAIR, TrainingSource
    from .monitor import draw_reading
    from .runs import print_events

    with closing(Session(open_run(Request(devices=PAIR)))) as session:
        finished = print_events(session.events())
    assert finished is not None
    print("\nA training by this plan; after 10 s SIM:0 gets hot and loses 30 % of its speed.")
    seconds = 0
    cards = TrainingSource(lambda: float(seconds))
    cards.train(finished.plan)
    for seconds in range(max(SHOWN) + 1):
        reading = cards.sample()
        if seconds in SHOWN:
            print(f"\nAfter {seconds} s:\n{draw_reading(reading, ascii_only)}", end="")
