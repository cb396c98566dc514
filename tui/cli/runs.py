"""The commands for stored runs: `runs`, `export`, `report` and `replay`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import typer

from evener.balancer import journal
from evener.balancer.events import Event, Finished
from evener.balancer.number_format import duration, percent, rate
from evener.balancer.result.sentences import write_training_step
from evener.balancer.session_state import SessionState, advance
from evener.balancer.store import runs as store
from evener.balancer.store.compared import compare_plans, compare_trainings
from evener.balancer.store.runs import RunSummary, State, StoredRun
from evener.balancer.store.trained import Trained
from evener.errors import RequestError
from evener.launch.summary import load_summary
from evener.live.journal import RecordedTraining
from evener.plan.file import Format, to_json, to_toml
from evener.printable import align, plain, print_notice

from ..text.differences import difference_lines
from ..text.formatting import cut_path, folded, harmless_json, json_text, toml_text
from ..text.parsing import parse_max_slowdown, parse_words
from ..text.summaries import (
    brief_devices,
    event_line,
    observation_text,
    summary_lines,
    training_report,
)
from .options import AsciiOption, JsonOption, RunName, ThemeOption
from .output import check_new, check_plan_file, check_replaceable, draws_screens, terminal_columns

_KEYS: dict[str, Callable[[RunSummary], Any]] = {
    "workload": lambda one: one.workload,
    "samples/s": lambda one: -(one.samples_per_second or 0.0),
    "time": lambda one: -one.seconds,
}
_WIDEST_TEXT = 40
MOST_DEVICES = 4  # maximum number of devices named for a run
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]
ForceOption = Annotated[
    bool, typer.Option("--force", "-f", help="Replace the file if it is there.")
]
runs_app = typer.Typer(
    help="Past runs: list them; show or delete them.", invoke_without_command=True
)
app = typer.Typer()
app.add_typer(runs_app, name="runs")


@runs_app.callback()
@runs_app.command("list")
def list_runs(
    context: typer.Context,
    states: Annotated[
        str | None,
        typer.Option(
            "--state",
            metavar="STATE,...",
            help="Only these: running, finished, stopped, failed, unreadable.",
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option("--workload", "-w", help="Only runs whose workload's name contains this."),
    ] = None,
    order: Annotated[
        Literal["created", "workload", "samples/s", "time"] | None,
        typer.Option(
            "--sort",
            metavar="ORDER",
            help="created, workload, samples/s or time; the newest or largest first. "
            "Default: created.",
        ),
    ] = None,
    most: Annotated[
        int | None,
        typer.Option("--most", "-n", min=1, metavar="N", help="List at most this many runs."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List past runs, the newest first: their state, and why they failed."""
    if context.invoked_subcommand is not None:
        # these subcommands take the options too, as in `runs --json list`
        if context.invoked_subcommand in ("list", "show"):
            given = {name: value for name, value in context.params.items() if value}
            context.default_map = {context.invoked_subcommand: given}
        return
    among = _parse_states(states) or get_args(State)

    def matches(one: RunSummary) -> bool:
        return one.state in among and (workload is None or workload in one.workload)

    matching: Iterable[RunSummary] = filter(matches, store.each_run())
    key = _KEYS.get(order or "")
    if key is not None:
        matching = sorted(matching, key=key)
    listed = list(islice(matching, most))  # if unsorted, older journals aren't read
    if as_json:
        print(json_text({"runs": listed}))
    elif listed:
        _print_table(listed)
    elif store.have_runs():
        print_notice("no run matches; evener runs lists all")
    else:
        print_notice("no runs yet; make one with evener balance")


def _parse_states(text: str | None) -> list[State] | None:
    """Return the comma-separated states of `--state`, or None if the option isn't given.

    Raises RequestError for an unknown state.
    """
    words = parse_words(text)
    for word in words or ():
        if word not in get_args(State):
            raise RequestError(
                f"--state {word!r} is not known.", f"Choose from {', '.join(get_args(State))}."
            )
    return words  # type: ignore[return-value]  # checked above


def _print_table(listed: Sequence[RunSummary]) -> None:
    rows = [
        ("run", "state", "workload", "devices", "ratios", "probes", "time", "samples/s", "trained"),
        *map(_row, listed),
    ]
    about = [plain(summary.trouble or _format_shortfall(summary), 1000) for summary in listed]
    lines = zip(align(rows, numbers_from=5), ["trouble" if any(about) else "", *about], strict=True)
    width = terminal_columns()
    for line, text in lines:
        if not text or width is None or len(line) + 2 + len(text) <= width:
            print(f"{line}  {text}".rstrip())
        else:
            print("\n".join([line, *(f"  {part}" for part in folded(text, width - 2))]))


def _format_shortfall(summary: RunSummary) -> str:
    """Explain why training was slower than the plan, or return "" if it wasn't."""
    trained = summary.trained
    if trained is None or not trained.falls_short:
        return ""
    return f"trained {percent(1 - trained.part)} slower: {trained.write_reason()}"


def _row(summary: RunSummary) -> tuple[str, ...]:
    devices = _list_devices(summary)
    ratios = ":".join(f"{ratio:.2f}" for ratio in summary.ratios[:4]) + (
        " …" if len(summary.ratios) > 4 else ""
    )
    speed = rate(summary.samples_per_second) if summary.samples_per_second is not None else "-"
    seconds = duration(summary.seconds) if summary.state != "failed" and summary.seconds else "-"
    mark = "(simulated) " if summary.simulated else ""
    workload = mark + cut_path(plain(summary.workload), _WIDEST_TEXT - len(mark))
    probes = str(summary.probes) if summary.kind == "search" else "-"
    return (
        summary.run,
        summary.state,
        workload,
        devices,
        ratios or "-",
        probes,
        seconds,
        speed,
        "-" if summary.trained is None else _format_trained(summary.trained),
    )


def _list_devices(summary: RunSummary) -> str:
    # A training's devices are given by their product names, each with its count.
    if summary.kind == "training":
        return plain(brief_devices(summary.devices), _WIDEST_TEXT)
    more = " …" if len(summary.devices) > MOST_DEVICES else ""
    return plain(", ".join(summary.devices[:MOST_DEVICES])) + more


def _format_trained(trained: Trained) -> str:
    """Return a table cell with the speed of a plan's last training run, and its number of runs."""
    return f"{rate(trained.samples_per_second)} ({trained.trainings} x)"


@runs_app.command("show")
def show_run(run_id: RunName, as_json: JsonOption = False) -> None:
    """Show a run: its state, measurements and plan; or a training: its speed, shares and
    restarts.
    """
    name = store.find_any(run_id)
    training = store.load_training(name)
    if training is not None:
        print(
            json_text(_training_as_json(training))
            if as_json
            else "\n".join(training_report(training))
        )
        return
    run = store.load_run(name)
    trained = store.find_trained_by(name, run.plan) if run.plan is not None else None
    if as_json:
        print(json_text({**_as_json(run), "trained": trained}))
        return
    labels = tuple(device.label for device in run.header.devices)
    print(
        plain(
            f"run {run.header.run}: {run.header.workload} on {', '.join(labels)}, "
            f"{run.header.created}"
        )
    )
    seconds = run.record.clock_seconds
    print(
        plain(f"{run.state}: {run.trouble}", 1000)
        if run.trouble
        else f"{run.state}, {duration(seconds)}"
    )
    for seen in run.record.observations:
        print(f"  {observation_text(seen, labels)}")
    width = terminal_columns()
    summary = (
        summary_lines(run.end.plan, labels, run.end.verdict, width, run.end.found)
        if run.end
        else None
    )
    print("\n".join(["", *summary] if summary else ["this run has no plan"]))
    if trained is not None:
        print("\n".join(["", *folded(_describe_trained(trained), width)]))


def _describe_trained(trained: Trained) -> str:
    times = "1 training" if trained.trainings == 1 else f"{trained.trainings} trainings"
    return (
        f"{times} with this plan so far; the last reached {rate(trained.samples_per_second)} "
        f"samples/s, {percent(trained.part)} of the plan's"
        + (f": {trained.write_reason()}" if trained.falls_short else "")
    )


def _training_as_json(training: RecordedTraining) -> dict[str, Any]:
    return {
        "run": training.run,
        "state": training.state,
        "trouble": training.failure,
        "seconds": training.seconds,
        "summary": load_summary(training.run),
        "entries": training.entries,
    }


def _as_json(run: StoredRun) -> dict[str, Any]:
    header = msgspec.to_builtins(run.header)
    end = run.end
    return {
        "run": run.header.run,
        **{key: header[key] for key in ("created", "workload", "framework", "request", "devices")},
        "state": run.state,
        "trouble": run.trouble,
        "observations": run.record.observations,
        "plan": run.plan,
        "verdict": end.found if end else None,
        "text": end.verdict.split("\n") if end else [],
        "interrupted": end is None or end.interrupted,
    }


@runs_app.command("compare")
def compare(
    before: Annotated[str, typer.Argument(metavar="A", help="A run, or the beginning of its id.")],
    after: Annotated[
        str, typer.Argument(metavar="B", help="The run to compare it with; `last` is the newest.")
    ],
    most: Annotated[
        str,
        typer.Option("--max-slowdown", metavar="PERCENT", help="How much slower B may be than A."),
    ] = "5%",
    as_json: JsonOption = False,
) -> int:
    """Compare two trainings or two searches, as a check in CI.

    Exit code 1: B is slower by more than --max-slowdown and by more than noise.
    """
    part = parse_max_slowdown(most)
    names = [store.find_any(before), store.find_any(after)]
    trainings = [store.load_training(name) for name in names]
    first, second = trainings
    if first is not None and second is not None:
        found = compare_trainings(first, second)
    elif first is None and second is None:
        plans = [store.load_run(name).require_plan() for name in names]
        found = compare_plans(names[0], plans[0], names[1], plans[1])
    else:
        raise RequestError(
            "One of these runs is a search, and the other one a training.",
            "Compare two of a kind; evener runs lists them.",
        )
    beyond = found.is_beyond(part)
    if as_json:
        document = {"difference": found, "max_slowdown": part, "beyond": beyond}
        print(json_text(document))
    else:
        print("\n".join(difference_lines(found, part)))
    return int(beyond)


@runs_app.command("delete")
def delete_runs(
    run_ids: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Ids, beginnings of ids, or `last`.")
    ],
    yes: YesOption = False,
) -> None:
    """Delete runs, after asking."""
    _delete(list(dict.fromkeys(map(store.find_any, run_ids))), yes)


def _delete(run_ids: Sequence[str], yes: bool) -> None:
    """Delete runs, after asking for confirmation unless `yes` is set.

    Raises RequestError if it can't ask because standard input isn't a terminal.
    """
    if not yes:
        if not sys.stdin.isatty():
            raise RequestError(
                "Deleting runs needs a confirmation.", "Add --yes, or answer on a terminal."
            )
        what = (
            ", ".join(run_ids)
            if len(run_ids) <= 5
            else f"{len(run_ids)} runs, from {run_ids[-1]} to {run_ids[0]}"
        )
        if input(f"Delete {what}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("evener: nothing deleted", file=sys.stderr)
            return
    for name in run_ids:
        store.delete_run(name)
        print_notice(f"deleted {name}")


@app.command()
def export(
    run_id: RunName,
    form: Annotated[
        Format | None,
        typer.Option("--format", help="Default: what the file's name ends in, else toml."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="A .toml or .json file. Default: standard output."),
    ] = None,
    force: ForceOption = False,
) -> None:
    """Write a past run's plan as TOML or JSON."""
    if output is not None:
        check_plan_file(output, "-o")
        if form is not None and output.suffix != f".{form}":
            raise RequestError(
                f"--format {form} and -o {output} differ.",
                "Give one of them; the file name's ending is enough.",
            )
        if not force:
            check_replaceable(output, "Add --force to replace it, or name another file.")
    plan = store.load_run(run_id).require_plan()
    if output is None:
        text = harmless_json(to_json(plan)) if form == "json" else toml_text(to_toml(plan))
        print(text, end="", flush=True)
        return
    plan.save(output)
    train = write_training_step(plan, str(output))
    print_notice(f"plan written to {output}", *([train] if train else ()))


@app.command()
def report(
    run_id: RunName,
    output: Annotated[Path, typer.Option("-o", "--output", help="An .html file.")],
    force: ForceOption = False,
) -> None:
    """Write a report of a run: one HTML page that needs nothing else."""
    from ..text.page import save_report

    check_new(output, force)
    save_report(run_id, output)
    print_notice(f"report written to {output}")


@app.command()
def replay(
    source: Annotated[
        str, typer.Argument(metavar="FILE|RUN", help="A journal, or a run by its id, or `last`.")
    ],
    speed: Annotated[
        float, typer.Option("--speed", min=0.1, max=1000.0, help="Times faster than it ran.")
    ] = 8.0,
    as_text: Annotated[
        bool, typer.Option("--plain", help="Print text, on a terminal too.")
    ] = False,
    ascii_only: AsciiOption = False,
    theme: ThemeOption = None,
) -> None:
    """Replay a run from its journal: in the app on a terminal, as text elsewhere. Nothing is
    measured.
    """
    from evener.balancer.jobs import read_job

    named = Path(source).is_file() or "/" in source
    record = journal.read(Path(source), foreign=True) if named else store.read_run(source)
    read_job(record.header)  # raises its errors before the screen opens
    if as_text or not draws_screens():
        print_events(store.recorded_events(record))
        return
    from ..start import run_app

    raise typer.Exit(run_app("auto", theme=theme, replayed=(record, speed), ascii=ascii_only))


def print_events(events: Iterable[Event]) -> Finished | None:
    """Print the events of a run to standard error, and its result to standard output.

    Returns the event that ended the search, or None if the run has no result.
    """
    state = SessionState()
    for event in events:
        state = advance(state, event)
        line = event_line(event, state.devices)
        if line is not None:
            print(plain(line), file=sys.stderr)
    finished = state.finished
    if finished is not None:
        lines = summary_lines(
            finished.plan, state.devices, finished.verdict, terminal_columns(), finished.found
        )
        print("\n".join(lines))
    return finished
