"""The `evener` command: find the subcommand, run it, and turn errors into exit codes."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from evener.errors import EvenerError, RequestError
from evener.printable import plain

from .options import AsciiOption, DevicesOption, ReadonlyOption, ThemeOption
from .output import OutputError, ReaderGoneError, guard_streams, report_fault

READER_GONE_EXIT_CODE = 141  # a shell's exit code for a process that was ended by SIGPIPE
_LISTS = ("--gpus", "--batches", "--micro")  # options that take several values
_MODULES = {  # the module of each command, in the order of --help
    "balance": "balance",
    "compare": "balance",
    "probe": "probe",
    "devices": "machine",
    "doctor": "machine",
    "monitor": "monitor",
    "launch": "launch",
    "run": "launch",
    "export": "runs",
    "report": "runs",
    "replay": "runs",
    "runs": "runs",
    "demo": "monitor",
}


class _Commands(TyperGroup):
    """Command group that imports a command's module only when the command is used."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # `get_command` imports the missing commands
        self.commands = {**dict.fromkeys(_MODULES), **self.commands}  # type: ignore[dict-item]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command called `cmd_name`, or None if it doesn't exist."""
        if cmd_name not in _MODULES:
            return super().get_command(ctx, cmd_name)
        module = import_module(f"evener.tui.cli.{_MODULES[cmd_name]}")
        return get_group(module.app).commands[cmd_name]


app = typer.Typer(
    name="evener",
    cls=_Commands,
    help=(
        "Find the fastest way to train one model on unequal GPUs. Without a command: open "
        "the full-screen app."
    ),
    epilog="Try it without a GPU: evener demo",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


@app.callback()
def start(
    context: typer.Context,
    devices: DevicesOption = "auto",
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version and exit.")
    ] = False,
    readonly: ReadonlyOption = False,
    ascii_only: AsciiOption = False,
    theme: ThemeOption = None,
    web: Annotated[
        bool, typer.Option("--web", help="Show the app in a browser on this machine, read-only.")
    ] = False,
    web_control: Annotated[
        bool,
        typer.Option(
            "--web-control",
            help="The browser may send signals, start searches and change runs, too.",
        ),
    ] = False,
    web_port: Annotated[
        int,
        typer.Option("--web-port", help="Port for the browser; 0: a free one.", min=0, max=65535),
    ] = 0,
) -> None:
    """Open the app on a terminal, or in a browser; elsewhere print the devices once."""
    if version:
        from evener import __version__

        typer.echo(f"evener {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is not None:
        _refuse_misplaced(context, context.invoked_subcommand)
        return
    if readonly and web_control:
        raise RequestError(
            "--web-control lets the browser act, and --readonly forbids it.",
            "Leave one of them out.",
        )
    if web or web_control or web_port:
        from .monitor import show_in_browser

        look = {"--ascii": ascii_only, "--theme": theme}
        raise typer.Exit(show_in_browser(devices, readonly or not web_control, web_port, look))
    from .monitor import monitor

    monitor(devices, readonly=readonly, ascii_only=ascii_only, theme=theme)


def _refuse_misplaced(context: typer.Context, command: str) -> None:
    """Raise RequestError if an option of the app precedes a subcommand, which would ignore it."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE":
            flag = option.opts[0]
            raise RequestError(
                f"{flag} before {command} is an option of the app and has no effect there.",
                (
                    f"Put it after the command, as in evener {command} {flag} ..., if evener "
                    f"{command} --help lists it."
                ),
            )


@app.command("help")
def show_help(
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="workload, or a command.")
    ] = None,
) -> None:
    """Explain a topic: `evener help workload` shows how to measure your own model."""
    if topic == "workload":
        from ..text.workload_help import workload_help

        typer.echo(workload_help())
        return
    if topic in _MODULES:
        raise typer.Exit(run([topic, "--help"]))
    topics = f"workload, {', '.join(_MODULES)}"
    if topic is not None:
        raise RequestError(f"There is no help on {plain(topic, 40)}.", f"Topics: {topics}.")
    typer.echo(f"evener help TOPIC explains one of: {topics}.\nAll options: evener --help")


def main(arguments: list[str]) -> int:
    """Protect the standard streams, run the command line, and return the exit code."""
    guard_streams()
    code = run(arguments)
    # everything is done, so a key pressed twice must not change the exit code
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def run(arguments: list[str]) -> int:
    """Run the command line and return the exit code. Errors are printed and not raised.

    With `--json`, an error is printed as a JSON object. Exceptions that are bugs in evener are
    still raised.
    """
    of_script = arguments[:1] in (["launch"], ["run"])  # most arguments belong to the script
    as_json = "--json" in arguments and not of_script
    try:
        result = app(
            args=arguments if of_script else spread_lists(arguments),
            standalone_mode=False,
            prog_name="evener",
        )
        sys.stdout.flush()
    except EvenerError as fault:
        return report_fault(fault, as_json and not isinstance(fault, OutputError))
    except typer.Exit as done:
        return done.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except ReaderGoneError:
        return READER_GONE_EXIT_CODE  # the measurements are in the journal
    except Exception as error:
        from .usage_errors import usage_fault

        known = [word for word in arguments[:1] if word in _MODULES]
        usage_error = usage_fault(error, " ".join(["evener", *known]))
        if usage_error is None:
            raise
        return report_fault(usage_error, as_json)
    return result if isinstance(result, int) else 0


def spread_lists(arguments: list[str]) -> list[str]:
    """Repeat the flag before each value of an option that takes a list, as Typer expects.

    `--batches 820 568` and `--batches 820,568` both become `--batches 820 --batches 568`.
    """
    spread: list[str] = []
    current = ""
    values = 0
    for argument in [*arguments, "--"]:
        option, equals, rest = argument.partition("=")
        is_option = argument.startswith("-") and not argument.lstrip("-").isdigit()
        if is_option and current and not values:
            spread.append(current)  # the parser will report the missing value
        if option in _LISTS:
            current = option
            values = 0
            if not equals:
                continue
            argument = rest
            is_option = False
        if is_option:
            current = ""
        values += 1
        if not current:
            spread.append(argument)
            continue
        for value in argument.split(","):
            spread += (current, value)
    return spread[:-1]
