"""The commands for past runs: `evener export`, `evener report`, `evener runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from evener.tui.cli.options import JsonOption

runs_app = typer.Typer(help="Past runs: list, show, delete.", invoke_without_command=True)
ForceOption = Annotated[bool, typer.Option("--force", "-f", help="Replace the file if it is there.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, the beginning of one, or `last`.")]


def export(
    run_id: RunName,
    form: Annotated[
        Literal["toml", "json"] | None, typer.Option("--format", help="Default: by the file's ending, or toml.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A .toml or .json file. Default: standard output.")
    ] = None,
    force: ForceOption = False,
) -> None:
    """Write a past run's plan as TOML or JSON."""
    from evener.tui.cli.commands.runs import run_export

    raise typer.Exit(run_export(run_id, form, output, force))


def report(
    run_id: RunName,
    output: Annotated[Path, typer.Option("-o", "--output", help="An .html, .png or .svg file.")],
    force: ForceOption = False,
) -> None:
    """Write a report of a run: a page with pictures (.html), or one picture (.png, .svg)."""
    from evener.tui.cli.commands.runs import run_report

    raise typer.Exit(run_report(run_id, output, force))


@runs_app.callback()
def runs(context: typer.Context, as_json: JsonOption = False) -> None:
    """Without a command: list the runs."""
    if context.invoked_subcommand is None:
        from evener.tui.cli.commands.runs import run_list

        raise typer.Exit(run_list(as_json))


@runs_app.command("list")
def runs_list(context: typer.Context, as_json: JsonOption = False) -> None:
    """List past runs, the newest first."""
    from evener.tui.cli.commands.runs import run_list

    raise typer.Exit(run_list(as_json or _json_before(context)))


@runs_app.command("show")
def runs_show(context: typer.Context, run_id: RunName, as_json: JsonOption = False) -> None:
    """Show a run: what was measured, and its plan."""
    from evener.tui.cli.commands.runs import run_show

    raise typer.Exit(run_show(run_id, as_json or _json_before(context)))


def _json_before(context: typer.Context) -> bool:
    """Whether `--json` was given between `runs` and the command."""
    return context.parent is not None and bool(context.parent.params.get("as_json"))


@runs_app.command("delete")
def runs_delete(
    run_ids: Annotated[list[str], typer.Argument(metavar="RUN...", help="Ids, beginnings of ids, or `last`.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
) -> None:
    """Delete runs, after asking."""
    from evener.tui.cli.commands.runs import run_delete

    raise typer.Exit(run_delete(run_ids, yes))
