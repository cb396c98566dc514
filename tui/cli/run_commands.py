"""The commands for past runs: `evener export`, `evener report`, `evener runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from evener.tui.cli.options import JsonOption

runs_app = typer.Typer(help="Past runs: list them; show, tag, note, delete or prune them.", invoke_without_command=True)
ForceOption = Annotated[bool, typer.Option("--force", "-f", help="Replace the file if it is there.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, the beginning of one, or `last`.")]


def export(
    run_id: RunName,
    form: Annotated[
        Literal["toml", "json"] | None, typer.Option("--format", help="Default: by the file's ending, or toml.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A .toml or .json file. Default: standard output.")
    ] = None,
    schema: Annotated[
        int,
        typer.Option("--schema", min=1, max=2, help="1: without passes, for an older evener that refuses schema 2."),
    ] = 2,
    force: ForceOption = False,
) -> None:
    """Write a past run's plan as TOML or JSON."""
    from evener.tui.cli.commands.export import run_export

    run_export(run_id, form, output, schema, force)


def report(
    run_id: RunName,
    output: Annotated[Path, typer.Option("-o", "--output", help="An .html, .png or .svg file.")],
    force: ForceOption = False,
) -> None:
    """Write a report of a run: a page with pictures (.html), or one picture (.png, .svg)."""
    from evener.tui.cli.commands.export import run_report

    run_report(run_id, output, force)


def runs(
    context: typer.Context,
    states: Annotated[
        str | None, typer.Option("--state", help="Only these: running,finished,stopped,failed,unreadable.")
    ] = None,
    hide_failed: Annotated[bool, typer.Option("--hide-failed", help="Leave out what failed or can't be read.")] = False,
    tag: Annotated[str | None, typer.Option("--tag", help="Only runs with this tag.")] = None,
    workload: Annotated[
        str | None, typer.Option("--workload", "-w", help="Only runs whose workload's name contains this.")
    ] = None,
    order: Annotated[
        Literal["created", "workload", "samples/s", "time"] | None,
        typer.Option("--sort", help="By this, the newest or largest first. Default: created."),
    ] = None,
    most: Annotated[int | None, typer.Option("--most", "-n", min=1, help="At most so many.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List past runs, the newest first: their state, tags and notes, and why they failed."""
    if context.invoked_subcommand is not None:
        return
    from evener.tui.cli.commands.runs import Wanted, run_list

    before = context.parent.params if context.parent is not None else {}  # as in `runs --json list`
    own = (states, hide_failed, tag, workload, order, most)
    given: Any = (value or before.get(name) for name, value in zip(Wanted.__struct_fields__, own, strict=True))
    run_list(Wanted(*given), as_json or _json_before(context))


runs_app.callback()(runs)
runs_app.command("list")(runs)


@runs_app.command("show")
def runs_show(context: typer.Context, run_id: RunName, as_json: JsonOption = False) -> None:
    """Show a run: its state, what was measured, and its plan."""
    from evener.tui.cli.commands.runs import run_show

    run_show(run_id, as_json or _json_before(context))


def _json_before(context: typer.Context) -> bool:
    """Whether `--json` was given between `runs` and the command."""
    return context.parent is not None and bool(context.parent.params.get("as_json"))


@runs_app.command("note")
def runs_note(
    run_id: RunName, text: Annotated[str, typer.Argument(metavar="TEXT", help='The note; "" removes it.')]
) -> None:
    """Write a note on a run; prune keeps it."""
    from evener.tui.cli.commands.runs import run_note

    run_note(run_id, text, (), ())


@runs_app.command("tag")
def runs_tag(
    run_id: RunName,
    tags: Annotated[list[str], typer.Argument(metavar="TAG...", help="One or more words.")],
    remove: Annotated[bool, typer.Option("--remove", "-r", help="Remove these tags instead.")] = False,
) -> None:
    """Tag a run, to find it by `runs --tag`; prune keeps it."""
    from evener.tui.cli.commands.runs import run_note

    run_note(run_id, None, *(((), tags) if remove else (tags, ())))


@runs_app.command("delete")
def runs_delete(
    run_ids: Annotated[list[str], typer.Argument(metavar="RUN...", help="Ids, beginnings of ids, or `last`.")],
    yes: YesOption = False,
) -> None:
    """Delete runs, after asking."""
    from evener.tui.cli.commands.runs import run_delete

    run_delete(run_ids, yes)


@runs_app.command("prune")
def runs_prune(
    older: Annotated[
        str | None, typer.Option("--older-than", help="Only runs that are older, like 30d or 12h.")
    ] = None,
    keep: Annotated[int | None, typer.Option("--keep", min=0, help="Keep the newest so many.")] = None,
    states: Annotated[
        str | None, typer.Option("--state", help="Only runs in these states, like failed,stopped.")
    ] = None,
    only_print: Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted.")] = False,
    yes: YesOption = False,
) -> None:
    """Delete runs that meet all conditions given, after asking; never one that is running, tagged or has a note."""
    from evener.tui.cli.commands.runs import run_prune

    run_prune(older, keep, states, only_print, yes)
