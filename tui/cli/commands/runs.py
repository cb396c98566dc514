"""`evener runs`: past runs listed, shown, annotated and deleted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, get_args

import msgspec

from evener.balancer.store import runs
from evener.balancer.store.runs import Run, RunSummary, State
from evener.errors import RequestError
from evener.tui.cli.streams import terminal_columns
from evener.tui.text.formatting import duration, folded, note_words, plain, rate
from evener.tui.text.parsing import parse_duration, parse_words
from evener.tui.text.plan_summary import summary_lines
from evener.tui.text.progress import observation_words
from evener.tui.text.safe_documents import json_text
from evener.tui.text.tables import align

_KEYS: dict[str, Callable[[RunSummary], Any]] = {
    "workload": lambda one: one.workload,
    "samples/s": lambda one: -(one.samples_per_second or 0.0),
    "time": lambda one: -one.seconds,
}
_WIDEST_TEXT = 40


class Wanted(msgspec.Struct, frozen=True):
    """Which runs a list shows, and in what order."""

    states: str | None = None
    hide_failed: bool | None = None
    tag: str | None = None
    workload: str | None = None
    order: str | None = None  # a key of _KEYS; else the newest first
    most: int | None = None

    def choose(self, found: Sequence[RunSummary]) -> list[RunSummary]:
        """The chosen ones of `found`, which has the newest first."""
        states = parse_states(self.states) or get_args(State)
        chosen = [
            one
            for one in found
            if one.state in states
            and not (self.hide_failed and one.state in ("failed", "unreadable"))
            and (self.tag is None or self.tag in one.tags)
            and (self.workload is None or self.workload in one.workload)
        ]
        return sorted(chosen, key=_KEYS.get(self.order or "", lambda _: 0))[: self.most]


def parse_states(text: str | None) -> list[State] | None:
    """`failed,stopped` as states; RequestError for another word."""
    words = parse_words(text)
    for word in words or ():
        if word not in get_args(State):
            raise RequestError(f"--state {word!r} is not known.", f"Choose from {', '.join(get_args(State))}.")
    return words  # type: ignore[return-value]  # checked above


def run_list(wanted: Wanted, as_json: bool) -> None:
    """List the runs that are wanted."""
    found = runs.list_runs()
    listed = wanted.choose(found)
    if as_json:
        print(json_text({"runs": listed}))
        return
    if not listed:
        words = "no run matches; evener runs lists all" if found else "no runs yet; make one with evener balance"
        print(f"evener: {words}", file=sys.stderr)
        return
    _print_table(listed)


def _print_table(listed: Sequence[RunSummary]) -> None:
    rows = [("run", "state", "workload", "devices", "ratios", "probes", "time", "samples/s"), *map(_row, listed)]
    about = [_about(one) for one in listed]
    lines = zip(align(rows, numbers_from=5), ["notes" if any(about) else "", *about], strict=True)
    width = terminal_columns()
    for line, text in lines:
        if not text or width is None or len(line) + 2 + len(text) <= width:
            print(f"{line}  {text}".rstrip())
        else:
            print("\n".join([line, *(f"  {part}" for part in folded(text, width - 2))]))


def _row(summary: RunSummary) -> tuple[str, ...]:
    devices = ", ".join(summary.devices[:4]) + (" …" if len(summary.devices) > 4 else "")
    ratios = ":".join(f"{ratio:.2f}" for ratio in summary.ratios[:4]) + (" …" if len(summary.ratios) > 4 else "")
    figure = rate(summary.samples_per_second) if summary.samples_per_second is not None else "-"
    seconds = duration(summary.seconds) if summary.state != "failed" and summary.seconds else "-"
    workload = plain(summary.workload, _WIDEST_TEXT)
    return (summary.run, summary.state, workload, devices, ratios or "-", str(summary.probes), seconds, figure)


def _about(summary: RunSummary) -> str:
    """Tags, note, and why it failed."""
    words = (" ".join(f"#{tag}" for tag in summary.tags), summary.note, summary.trouble)
    return plain("; ".join(word for word in words if word), 1000)


def run_show(name: str, as_json: bool) -> None:
    """Print what a run measured, and its plan if it has one."""
    run = runs.load_run(name)
    if as_json:
        print(json_text(_as_json(run)))
        return
    labels = tuple(device.label for device in run.header.devices)
    print(plain(f"run {run.header.run}: {run.header.workload} on {', '.join(labels)}, {run.header.created}"))
    print(plain(f"{run.state}: {run.trouble}", 1000) if run.trouble else f"{run.state}, {duration(run.seconds)}")
    about = (" ".join(f"#{tag}" for tag in run.note.tags), run.note.note)
    print("".join(f"{plain(line, 1000)}\n" for line in about if line), end="")
    for seen in run.observations:
        print(f"  {observation_words(seen, labels)}")
    if run.plan is None:
        print("this run has no plan")
        return
    print("\n".join(["", *summary_lines(run.plan, labels, run.verdict, terminal_columns())]))


def _as_json(run: Run) -> dict[str, Any]:
    header = msgspec.to_builtins(run.header)
    return {
        "run": run.header.run,
        **{key: header[key] for key in ("created", "workload", "framework", "request", "devices")},
        "state": run.state,
        "trouble": run.trouble,
        "note": run.note.note,
        "tags": run.note.tags,
        "observations": run.observations,
        "plan": run.plan,
        "verdict": run.verdict,
        "interrupted": run.interrupted,
    }


def run_note(name: str, note: str | None, add_tags: Sequence[str], remove_tags: Sequence[str]) -> None:
    """Change the note or the tags of a run, and print them."""
    found = runs.annotate_run(name, note, add_tags, remove_tags)
    words = note_words(found.note, found.tags) or "no tags, no note"
    print(f"evener: {runs.find(name)}: {plain(words, 1200)}", file=sys.stderr)


def run_delete(names: Sequence[str], yes: bool) -> None:
    """Delete runs, after asking."""
    _delete(list(dict.fromkeys(runs.find(name) for name in names)), yes)


def run_prune(older: str | None, keep: int | None, states: str | None, only_print: bool, yes: bool) -> None:
    """Delete every run that meets all conditions, after asking."""
    if older is None and keep is None and states is None:
        raise RequestError("Nothing says which runs to delete.", "Give --older-than 30d, --keep 20 or --state failed.")
    seconds = None if older is None else parse_duration(older, "--older-than")
    found = runs.choose_prunable(runs.list_runs(), older_seconds=seconds, keep=keep, states=parse_states(states) or ())
    if not found:
        print("evener: no run matches; those with a note or a tag are kept", file=sys.stderr)
    elif only_print:
        _print_table(found)
    else:
        _delete([one.run for one in found], yes)


def _delete(found: Sequence[str], yes: bool) -> None:
    """Delete these; asks first on a terminal, and needs --yes elsewhere."""
    if not yes:
        if not sys.stdin.isatty():
            raise RequestError("Deleting runs needs a confirmation.", "Add --yes, or answer on a terminal.")
        what = ", ".join(found) if len(found) <= 5 else f"{len(found)} runs, from {found[-1]} to {found[0]}"
        if input(f"Delete {what}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("evener: nothing deleted", file=sys.stderr)
            return
    for name in found:
        runs.delete_run(name)
        print(f"evener: deleted {name}", file=sys.stderr)
