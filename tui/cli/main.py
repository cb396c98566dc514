"""The command line: arguments to calls, faults to exit codes.

Every command lives in a module under `evener.tui.cli.commands` and is imported when it runs, so that no headless
command pays for a screen, and none for a framework.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from evener.errors import EvenerError, RequestError
from evener.tui.cli.options import (
    BudgetOption,
    DevicesOption,
    EngineOption,
    ExportOption,
    FrameworkOption,
    GlobalBatchOption,
    InputOption,
    JsonOption,
    MaxGlobalBatchOption,
    MultipleOption,
    ObjectiveOption,
    PaceOption,
    PrecisionOption,
    ResumeOption,
    SeedOption,
    SetOption,
    ShareOption,
    ToleranceOption,
    WorkloadOption,
    XlaOption,
)
from evener.tui.cli.run_commands import export, report, runs_app
from evener.tui.cli.streams import OutputError, ReaderGoneError, draws_screens, guard_streams

READER_GONE_EXIT_CODE = 141  # what a shell says of a process that a closed pipe ended

app = typer.Typer(
    name="evener",
    help="Find the fastest way to train one model on GPUs that aren't equal. Without a command: the full-screen app.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


@app.callback()
def start(
    context: typer.Context,
    devices: DevicesOption = "auto",
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version and stop.")] = False,
    readonly: Annotated[bool, typer.Option("--readonly", help="The app sends no signals to processes.")] = False,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Draw with plain ASCII characters.")] = False,
    theme: Annotated[str | None, typer.Option("--theme", help="dark or light.")] = None,
    replay: Annotated[Path | None, typer.Option("--replay", help="Show what `monitor --record` wrote.")] = None,
) -> None:
    """Open the app on a terminal; elsewhere print the devices once."""
    if version:
        from evener import __version__

        typer.echo(f"evener {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is not None:
        given = (devices != "auto", readonly, ascii_only, theme is not None, replay is not None)
        _refuse_misplaced(given, context.invoked_subcommand)
        return
    if not draws_screens():
        from evener.tui.cli.commands.monitor import run_monitor

        raise typer.Exit(run_monitor(devices, once=True, replay=replay, ascii=ascii_only))
    from evener.tui.app.app import run_app

    raise typer.Exit(run_app(devices, readonly=readonly, ascii=ascii_only, theme=theme, replay=replay))


def _refuse_misplaced(given: tuple[bool, ...], command: str) -> None:
    """RequestError if an option of the app stands before a command, which would take no notice of it."""
    for option, is_given in zip(("--devices", "--readonly", "--ascii", "--theme", "--replay"), given, strict=True):
        if is_given:
            raise RequestError(
                f"{option} before {command} is the app's own and changes nothing there.",
                f"Write it behind, as in evener {command} {option} ..., if evener {command} --help has it.",
            )


@app.command()
def balance(
    devices: DevicesOption = "auto",
    workload: WorkloadOption = None,
    framework: FrameworkOption = "tensorflow",
    global_batch: GlobalBatchOption = None,
    max_global_batch: MaxGlobalBatchOption = None,
    multiple_of: MultipleOption = 1,
    objective: ObjectiveOption = "throughput",
    budget: BudgetOption = "120s",
    tolerance: ToleranceOption = 0.02,
    seed: SeedOption = 0,
    export: ExportOption = None,
    resume: ResumeOption = None,
    settings: SetOption = None,
    precision: PrecisionOption = "float32",
    xla: XlaOption = False,
    inputs: InputOption = "host",
    engine: EngineOption = "auto",
    pace: PaceOption = 0.0,
    share: ShareOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest split of the batch over the devices, by real training steps, and write it as a plan."""
    from evener.tui.cli.commands.balance import run_balance
    from evener.tui.cli.options import make_request

    request = make_request(
        devices=devices,
        workload=workload,
        framework=framework,
        settings=settings or [],
        global_batch=global_batch,
        max_global_batch=max_global_batch,
        multiple_of=multiple_of,
        objective=objective,
        budget=budget,
        tolerance=tolerance,
        seed=seed,
        precision=precision,
        xla=xla,
        inputs=inputs,
        engine=engine,
        pace=pace,
        share=share,
    )
    raise typer.Exit(run_balance(request, resume=resume, export=export, as_json=as_json))


@app.command()
def compare(
    devices: DevicesOption = "auto",
    workload: WorkloadOption = None,
    framework: Annotated[str | None, typer.Option("--framework", help="tensorflow or torch.")] = None,
    layouts: Annotated[
        str | None, typer.Option("--layouts", help="Some of solo,even,split,pack,place; without: all that can be had.")
    ] = None,
    mps: Annotated[bool, typer.Option("--mps", help="Pack under an MPS daemon of its own too.")] = False,
    knobs: Annotated[
        str | None, typer.Option("--try", help="xla,mixed: measure the winner with XLA, with mixed precision.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Then show what moves between devices, and how long.")
    ] = False,
    global_batch: GlobalBatchOption = None,
    max_global_batch: MaxGlobalBatchOption = None,
    multiple_of: MultipleOption = 1,
    budget: BudgetOption = "120s",
    tolerance: ToleranceOption = 0.02,
    seed: SeedOption = 0,
    export: ExportOption = None,
    settings: SetOption = None,
    precision: PrecisionOption = "float32",
    xla: XlaOption = False,
    inputs: InputOption = "host",
    engine: EngineOption = "auto",
    pace: PaceOption = 0.0,
    share: ShareOption = False,
    as_json: JsonOption = False,
) -> None:
    """Rank every way to lay the job on the devices: one, even, split, packed, placed; the winner becomes the plan."""
    from evener.tui.cli.commands.compare import run_compare
    from evener.tui.cli.options import framework_of, make_request

    request = make_request(
        devices=devices,
        workload=workload,
        framework=framework_of(workload, framework),
        settings=settings or [],
        global_batch=global_batch,
        max_global_batch=max_global_batch,
        multiple_of=multiple_of,
        budget=budget,
        tolerance=tolerance,
        seed=seed,
        precision=precision,
        xla=xla,
        inputs=inputs,
        engine=engine,
        pace=pace,
        share=share,
    )
    code = run_compare(request, layouts=layouts, mps=mps, knobs=knobs, profile=profile, export=export, as_json=as_json)
    raise typer.Exit(code)


@app.command()
def probe(
    batches: Annotated[list[int], typer.Option("--batches", help="Samples for each device.")],
    gpus: Annotated[list[str] | None, typer.Option("--gpus", help="Indices; without: the first devices.")] = None,
    devices: DevicesOption = "auto",
    workload: WorkloadOption = None,
    framework: FrameworkOption = "tensorflow",
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Training runs to time.")] = 3,
    seconds: Annotated[
        str | None, typer.Option("--seconds", help="How long each run lasts, warm-up not counted; 10s unless said.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Each run lasts at least so many optimizer steps instead.")
    ] = None,
    settings: SetOption = None,
    seed: SeedOption = 0,
    precision: PrecisionOption = "float32",
    xla: XlaOption = False,
    inputs: InputOption = "host",
    engine: EngineOption = "auto",
    share: ShareOption = False,
    as_json: JsonOption = False,
) -> None:
    """Time training at batch sizes that you choose: `evener probe --gpus 0 1 --batches 820 568`."""
    from evener.tui.cli.commands.probe import length_of, run_probe
    from evener.tui.cli.options import make_request

    request = make_request(
        devices=devices,
        workload=workload,
        framework=framework,
        settings=settings or [],
        seed=seed,
        precision=precision,
        xla=xla,
        inputs=inputs,
        engine=engine,
        share=share,
    )
    length = length_of(seconds, steps)
    raise typer.Exit(run_probe(request, gpus, tuple(batches), repeat=repeat, length=length, as_json=as_json))


app.command("export")(export)
app.command("report")(report)
app.add_typer(runs_app, name="runs")


@app.command("devices")
def list_devices(devices: DevicesOption = "auto", as_json: JsonOption = False) -> None:
    """List what `--devices` means on this machine."""
    from evener.tui.cli.commands.devices import run_devices

    raise typer.Exit(run_devices(devices, as_json))


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Check Python, driver, frameworks, folders; exit 0: well, 1: something to know, 2: balance can't run."""
    from evener.tui.cli.commands.doctor import run_doctor

    raise typer.Exit(run_doctor(as_json))


@app.command()
def monitor(
    devices: DevicesOption = "auto",
    once: Annotated[bool, typer.Option("--once", "-1", help="Print one reading and stop.")] = False,
    as_json: JsonOption = False,
    interval: Annotated[
        str | None, typer.Option("-i", "--interval", help="Time between readings, like 0.5 (seconds) or 2s.")
    ] = None,
    only: Annotated[str | None, typer.Option("-o", "--only", help="Device indices, like 0,2.")] = None,
    only_visible: Annotated[bool, typer.Option("--only-visible", help="Those in CUDA_VISIBLE_DEVICES.")] = False,
    record: Annotated[Path | None, typer.Option("--record", help="Write every reading to this file.")] = None,
    replay: Annotated[Path | None, typer.Option("--replay", help="Read from such a file instead.")] = None,
    readonly: Annotated[bool, typer.Option("--readonly", help="The app sends no signals to processes.")] = False,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Draw with plain ASCII characters.")] = False,
) -> None:
    """Show the devices: the app on a terminal, plain lines or JSON elsewhere."""
    from evener.tui.cli.options import parse_indices
    from evener.tui.text.formatting import parse_duration

    chosen = parse_indices(only)
    if not (once or as_json or interval or record) and draws_screens():
        from evener.tui.app.app import run_app

        raise typer.Exit(run_app(devices, readonly=readonly, ascii=ascii_only, replay=replay))
    from evener.tui.cli.commands.monitor import run_monitor

    raise typer.Exit(
        run_monitor(
            devices,
            once=once,
            json=as_json,
            interval_seconds=None if interval is None else parse_duration(interval, "-i"),
            only=chosen,
            only_visible=only_visible,
            record=record,
            replay=replay,
            ascii=ascii_only,
        )
    )


def main(arguments: list[str]) -> int:
    """`run` in a process of its own, whose standard streams may be lost at any time."""
    guard_streams()
    return run(arguments)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; every fault ends in one sentence, never in a traceback."""
    from evener.tui.cli.fault_output import report_fault, usage_fault
    from evener.tui.cli.options import spread_lists

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
        return READER_GONE_EXIT_CODE  # what was measured is in the journal
    except Exception as error:
        misuse = usage_fault(error)
        if misuse is None:
            raise
        return report_fault(misuse, as_json)
    return result if isinstance(result, int) else 0
