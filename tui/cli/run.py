"""`evener run`: any training program, a process for each device, with shares that follow their speed."""

from __future__ import annotations

import shlex
import tempfile
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from evener.balancer.number_format import duration
from evener.errors import RequestError
from evener.program.notes import ProgramSettings

from ..launch.program import choose_plan, measure_plan, read_command, read_notes, save_plan, set_environment, summarize
from .options import DevicesOption

app = typer.Typer()


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="As you would type it in a shell.")
    ] = None,
    devices: DevicesOption = "auto",
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="Keep the shares of this plan. Default: they follow the devices' speed."),
    ] = None,
    balance: Annotated[
        bool, typer.Option("--balance", help="Measure a plan first, by the program's build() or transformers.Trainer.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="End the program if it can't be balanced. Default: it trains with even shares."),
    ] = False,
    noise: Annotated[
        bool, typer.Option("--noise", help="Measure the gradient's noise scale: what a larger batch costs in learning.")
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts", min=0, help="How often to restart all processes, on the devices left, if one is killed."
        ),
    ] = 0,
) -> int:
    """Start a training program once for each device, as torchrun does, and balance it without changing a line.

    Its global batch, the order of rows and what it learns stay the same; docs/run.md says which programs work.
    """
    from ..launch.job import make_job
    from ..launch.processes import named_output
    from ..launch.restarts import run_job, say

    read = read_command(command or [])
    if balance and plan is not None:
        raise RequestError("--balance measures a plan, and --plan gives one.", "Give one of them.")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="evener-run-") as folder:
        if balance:
            plan = measure_plan(read, devices, Path(folder, "measured.toml"))
        chosen, given = choose_plan(plan, devices, read.identity)
        if noise and len(chosen.layout.active) == 1:
            raise RequestError(
                "--noise compares the processes of a training, and on one device there is one.",
                "Leave --noise out, give two devices, or write Split(noise=True) in the script (docs/learning.md).",
            )
        path = Path(folder, "plan.toml")
        chosen.save(path)
        notes = Path(folder, "notes")
        notes.mkdir()
        set_environment(ProgramSettings(str(notes), read.name, strict, not given, noise))
        job = make_job(path, read.words, None, None, executable=read.executable)
        say(f"{read.name} starts on {', '.join(device.label for process in job.processes for device in process)}")
        with named_output(job.names) as output:
            code = run_job(msgspec.structs.replace(job, output=output), max_restarts)
        left = read_notes(notes)
        if not code:
            say(f"{read.name} has ended, after {duration(time.monotonic() - began)}")
        for line in summarize(chosen, left):
            say(line)
        saved = None if code or (given and not balance) else save_plan(chosen, read, left)
    if saved is not None:
        say(f"these shares again: {shlex.join(['evener', 'run', '--plan', str(saved), '--', *(command or [])])}")
    return code
