"""The command line: arguments to calls, faults to exit codes.

The code of each command is imported when it runs, so that no headless command pays for a screen or a framework.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from evener.balancer.request import Request
from evener.errors import EvenerError, RequestError
from evener.tui.cli.options import (
    BATCH,
    LENGTH,
    OUTPUT,
    SEARCH,
    TRAINING,
    WHAT,
    AsciiOption,
    DevicesOption,
    ExportOption,
    FormatOption,
    JsonOption,
    ReadonlyOption,
    ReplayOption,
    ThemeOption,
    spread_lists,
    takes_request,
)
from evener.tui.cli.run_commands import export, report, runs_app
from evener.tui.cli.streams import (
    OutputError,
    ReaderGoneError,
    draws_screens,
    guard_streams,
    report_fault,
    usage_fault,
)
from evener.tui.text.parsing import REQUEST_HELP

READER_GONE_EXIT_CODE = 141  # what a shell reports for a process that a closed pipe ended

app = typer.Typer(
    name="evener",
    help="Find the fastest way to train one model on unequal GPUs. Without a command: open the full-screen app.",
    epilog="Try it without a GPU: evener balance --devices sim:gtx1080ti,gtx1080",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


@app.callback()
def start(
    context: typer.Context,
    devices: DevicesOption = "auto",
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version and exit.")] = False,
    readonly: ReadonlyOption = False,
    ascii_only: AsciiOption = False,
    theme: ThemeOption = None,
    replay: ReplayOption = None,
) -> None:
    """Open the app on a terminal; elsewhere print the devices once."""
    if version:
        from evener import __version__

        typer.echo(f"evener {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is not None:
        _refuse_misplaced(context, context.invoked_subcommand)
        return
    if not draws_screens():
        from evener.tui.cli.commands.monitor import run_monitor

        raise typer.Exit(run_monitor(devices, once=True, replay=replay, ascii=ascii_only))
    from evener.tui.app.app import run_app

    raise typer.Exit(run_app(devices, readonly=readonly, ascii=ascii_only, theme=theme, replay=replay))


def _refuse_misplaced(context: typer.Context, command: str) -> None:
    """RequestError if an option of the app precedes a command, which would ignore it."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE":
            flag = option.opts[0]
            raise RequestError(
                f"{flag} before {command} is an option of the app and has no effect there.",
                f"Put it after the command, as in evener {command} {flag} ..., if evener {command} --help lists it.",
            )


@app.command()
@takes_request(*TRAINING, *(name for name in SEARCH if name != "budget"))
def balance(
    request: Request,
    budget: Annotated[
        str | None, LENGTH("--budget", help=f"{REQUEST_HELP['budget']} Default: 120s. With --resume, +5m adds to it.")
    ] = None,
    resume: Annotated[str | None, LENGTH("--resume", help="Go on with a run: its id, or `last`.")] = None,
    dry_run: Annotated[
        bool,
        LENGTH(
            "--dry-run",
            help="Only build and take a few steps on one device; say what fits and how long a search takes.",
        ),
    ] = False,
    export: ExportOption = None,
    as_json: JsonOption = False,
) -> int:
    """Measure real training steps, find the fastest split of the batch over the devices, and write it as a plan.

    Your own model: evener help workload.
    """
    from evener.tui.cli.commands.balance import run_balance

    return run_balance(request, budget, resume=resume, dry_run=dry_run, export=export, as_json=as_json)


@app.command()
@takes_request(*TRAINING, *(name for name in SEARCH if name != "objective"))
def compare(
    request: Request,
    layouts: Annotated[
        str | None,
        WHAT(
            "--layouts",
            help="Some of solo,even,split,pack,place: one device; equal shares; the best shares; several trainings on"
            " one device; parts of the model on several. Default: all that are possible.",
        ),
    ] = None,
    mps: Annotated[bool, WHAT("--mps", help="Also pack under NVIDIA's MPS, which evener starts.")] = False,
    knobs: Annotated[
        str | None, WHAT("--try", help="xla,mixed: also measure the winner with XLA, with mixed precision.")
    ] = None,
    profile: Annotated[bool, WHAT("--profile", help="Also profile the transfers between devices.")] = False,
    export: ExportOption = None,
    form: FormatOption = "table",
    as_json: JsonOption = False,
) -> int:
    """Compare single-device, even, split, packed and placed layouts; the fastest becomes the plan."""
    from evener.tui.cli.commands.compare import run_compare

    return run_compare(
        request, layouts=layouts, mps=mps, knobs=knobs, profile=profile, export=export, form=form, as_json=as_json
    )


@app.command()
@takes_request(*TRAINING, "seed")
def probe(
    request: Request,
    batches: Annotated[list[int], BATCH("--batches", help="Samples per step for each device, like 820 568.")],
    micro: Annotated[list[int] | None, BATCH("--micro", help="Rows of one pass on each device, like 410 568.")] = None,
    gpus: Annotated[list[str] | None, WHAT("--gpus", help="Which devices, like 0 1. Default: the first ones.")] = None,
    repeat: Annotated[int, LENGTH("--repeat", min=1, help="How many runs.")] = 3,
    seconds: Annotated[
        str | None, LENGTH("--seconds", help="Length of each run without warm-up. Default: 10s.")
    ] = None,
    steps: Annotated[
        int | None, LENGTH("--steps", min=1, help="Length in optimizer steps, instead of --seconds.")
    ] = None,
    form: FormatOption = "table",
    as_json: JsonOption = False,
) -> int:
    """Time training at batch sizes that you choose: `evener probe --batches 820 568 --micro 410 568`."""
    from evener.tui.cli.commands.probe import parse_length, run_probe

    length, rows = parse_length(seconds, steps), tuple(micro or ())
    return run_probe(request, gpus, tuple(batches), rows, repeat=repeat, length=length, form=form, as_json=as_json)


@app.command("devices")
def list_devices(devices: DevicesOption = "auto", as_json: JsonOption = False) -> None:
    """List the devices that --devices selects on this machine."""
    from evener.tui.cli.commands.machine import run_devices

    run_devices(devices, as_json)


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Check Python, driver, frameworks and folders. Exit code 0: balance can run, 1: it can't."""
    from evener.tui.cli.commands.machine import run_doctor

    raise typer.Exit(run_doctor(as_json))


@app.command()
def monitor(
    devices: DevicesOption = "auto",
    once: Annotated[bool, typer.Option("--once", "-1", help="Print one reading and exit.")] = False,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, OUTPUT("--csv", help="Print one line for each device.")] = False,
    interval: Annotated[
        str | None, typer.Option("-i", "--interval", help="Time between readings, like 0.5 (seconds) or 2s.")
    ] = None,
    only: Annotated[str | None, typer.Option("-o", "--only", help="Device indices, like 0,2.")] = None,
    only_visible: Annotated[bool, typer.Option("--only-visible", help="Only devices in CUDA_VISIBLE_DEVICES.")] = False,
    record: Annotated[Path | None, OUTPUT("--record", help="Write every reading to this file.")] = None,
    replay: ReplayOption = None,
    readonly: ReadonlyOption = False,
    ascii_only: AsciiOption = False,
    theme: ThemeOption = None,
) -> None:
    """Show the devices: in the app on a terminal, as text, JSON or CSV elsewhere."""
    from evener.tui.text.parsing import parse_duration, parse_indices

    chosen = parse_indices(only)
    if not (once or as_json or as_csv or interval or record) and draws_screens():
        from evener.tui.app.app import run_app

        raise typer.Exit(run_app(devices, readonly=readonly, ascii=ascii_only, theme=theme, replay=replay))
    from evener.tui.cli.commands.monitor import run_monitor

    code = run_monitor(
        devices,
        once=once,
        json=as_json,
        csv=as_csv,
        interval_seconds=None if interval is None else parse_duration(interval, "-i"),
        only=chosen,
        only_visible=only_visible,
        record=record,
        replay=replay,
        ascii=ascii_only,
    )
    raise typer.Exit(code)


app.command("export")(export)
app.command("report")(report)
app.add_typer(runs_app, name="runs")


@app.command("help")
def show_help(
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="workload, or a command.")] = None,
) -> None:
    """Explain a topic: `evener help workload` shows how to measure your own model."""
    if topic == "workload":
        from evener.tui.text.workload_help import workload_help

        typer.echo(workload_help())
        return
    raise typer.Exit(run([*([topic] if topic else []), "--help"]))


def main(arguments: list[str]) -> int:
    """`run` in a process of its own, whose standard streams may be lost at any time."""
    guard_streams()
    code = run(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done; a key pressed twice must not change the exit code
    return code


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; a fault becomes one sentence, never a traceback."""
    as_json = "--json" in arguments
    try:
        result = app(args=spread_lists(arguments), standalone_mode=False, prog_name="evener")
        sys.stdout.flush()
    except EvenerError as fault:
        return report_fault(fault, as_json and not isinstance(fault, OutputError))
    except typer.Exit as done:
        return done.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except ReaderGoneError:
        return READER_GONE_EXIT_CODE  # the journal has what was measured
    except Exception as error:
        misuse = usage_fault(error)
        if misuse is None:
            raise
        return report_fault(misuse, as_json)
    return result if isinstance(result, int) else 0
