"""The command line of `evener runs`."""

from __future__ import annotations

from typing import Annotated

import typer

from tui.commands.options import JsonOption

runs_app = typer.Typer(help="Past runs: list, show, delete.", invoke_without_command=True)
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, the start of one, or `last`.")]


@runs_app.callback()
def runs(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the runs unless a command says otherwise."""
    if context.invoked_subcommand is None:
        from tui.commands.runs import run_list

        raise typer.Exit(run_list(as_json))


@runs_app.command("list")
def runs_list(as_json: JsonOption = False) -> None:
    """List past runs, the newest first."""
    from tui.commands.runs import run_list

    raise typer.Exit(run_list(as_json))


@runs_app.command("show")
def runs_show(run_id: RunName, as_json: JsonOption = False) -> None:
    """Show a run: what was measured, and its plan."""
    from tui.commands.runs import run_show

    raise typer.Exit(run_show(run_id, as_json))


@runs_app.command("delete")
def runs_delete(
    run_ids: Annotated[list[str], typer.Argument(metavar="RUN...", help="Ids, or starts of them, or `last`.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
) -> None:
    """Delete runs, after asking."""
    from tui.commands.runs import run_delete

    raise typer.Exit(run_delete(run_ids, yes))
