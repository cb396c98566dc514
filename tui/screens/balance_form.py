"""The form that starts a search."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import DescendantFocus
from textual.widget import Widget
from textual.widgets import Button, Input, Static

from evener.balancer.families import FAMILIES
from evener.balancer.number_format import rate, size
from evener.balancer.objectives import OBJECTIVES, find_objective
from evener.balancer.request import ENGINES, INPUTS, MICROS, PRECISIONS, Request
from evener.balancer.search.layouts import LayoutOptions
from evener.balancer.store import runs
from evener.balancer.store.runs import RunSummary
from evener.devices.registry import find_backend
from evener.devices.types import Device
from evener.errors import EvenerError, RequestError
from evener.printable import plain
from evener.workloads import registry
from evener.workloads.user_code import find_models, names_a_file

from ..base_app import UsesApp
from ..text.parsing import REQUEST_HELP, make_request, parse_words, request_fields, select_devices
from ..view.cells import Mark, text_lines
from ..view.devices import short_name
from ..view.teaching import search_lesson
from ..widgets.lines import Lines
from ..widgets.lists import ListPanel, OneOf, Ticks

SPLIT, COMPARE = "find the best split", "compare layouts"
ANOTHER = "another file"
FEWER, ALL = "hidden", "shown"
HINT_ROWS = 3
COMPLAINT_ROWS = 4
MOST_DEVICE_ROWS = 6
LEAST_MODEL_ROWS, MOST_MODEL_ROWS = 3, 16
LESSON_ROWS = 9  # lines of the lesson below the form, which says what a search does
ROWS_BESIDE_LESSON = 6  # minimum number of lines for models if the lesson is shown
_BUTTON_CELLS = 30
_FRAMEWORKS = ("auto", *(name for name in registry.FRAMEWORKS if name != "none"))
_MORE_FIELDS = {"max_global_batch": "", "tolerance": "0.02", "max_slowdown": "", "settings": ""}
HINTS = REQUEST_HELP | {
    "pick-workload": (
        "The model to balance: a function of yours that returns it, whose code is run, or one of "
        "evener's own, to try it out."
    ),
    "pick-devices": "Devices to share the batch. Space leaves one out, or takes it back.",
    "own": (
        "The file and its function that returns your model, like train.py:build; its code is run. "
        "What it may return: evener help workload."
    ),
    "global_batch": (
        "Samples of one training step, over all devices together. Empty: evener finds the batch "
        "that trains fastest."
    ),
    "budget": (
        "Longest time to measure, like 90s or 5m. The devices train your model meanwhile; nothing "
        "that they learn is kept."
    ),
    "more": "Right shows all other options: precision, passes, the objective and more.",
    "task": "Find the best split, or compare it with other layouts, as several trainings at once.",
    "objective": (
        "What to maximise. throughput: tokens/s where rows have lengths, else samples/s; "
        "samples-per-joule: the most efficient."
    ),
    "layouts": f"Some of {', '.join(FAMILIES)}; empty: all that are possible.",
    "micro": (
        "auto: a share that doesn't fit in memory is computed in several passes, as in gradient "
        "accumulation; off: it must fit at once."
    ),
    "engine": (
        f"{REQUEST_HELP['engine'][:-1]}; auto: one process for idle GPUs, else one per device."
    ),
    "tolerance": (
        "Of several global batches evener takes the smallest that is nearly the fastest: 0.02 lets "
        "it be 2 % slower."
    ),
    "framework": "The framework of your own model; auto: the one that its file imports.",
    "settings": "Parameters of the model: key=value key=value.",
    "pace": "Simulated devices: real seconds for each simulated one; 0 doesn't wait.",
}
_LABELS = {
    "own": "file",
    "pick-workload": "model",
    "pick-devices": "devices",
    "inputs": "input",
    "share": "share devices",
    "more": "more options",
}
_WORDS = {"set": "settings"}  # the form's labels for options with other names
_BY_OPTION = {"set": "settings", "input": "inputs", "workload": "own", "devices": "pick-devices"}


def field_label(name: str) -> str:
    """Return the label of a form field."""
    return _LABELS.get(name) or name.replace("_", " ")


def to_form_terms(text: str) -> tuple[str, str]:
    """Reword an error message for the form, with labels of fields instead of command-line options.

    Also returns the field of the first option in the message, or "" if it names none.
    """
    options = re.findall(r"--([a-z][a-z-]*)", text)
    fields = {option: _BY_OPTION.get(option, option.replace("-", "_")) for option in options}
    shown = re.sub(
        r"--([a-z][a-z-]*)", lambda found: _WORDS.get(found[1]) or found[1].replace("-", " "), text
    )
    return shown, fields[options[0]] if options else ""


class Model(NamedTuple):
    """An entry in the list of models.

    - `name`: the workload, or "" for the entry that asks the user for a file.
    - `label`: how the list shows the name.
    - `note`: the text next to the label.
    - `own`: whether it is the user's own model; False for evener's built-in ones.
    """

    name: str
    label: str
    note: str
    own: bool


def list_models(
    found_models: Sequence[str], last_run: RunSummary | None, now: float
) -> list[Model]:
    """Return the models to choose from, first the user's own, then the built-in ones.

    - `found_models`: functions found in the current folder, as file.py:function.
    - `last_run`: the last search for one of the user's own models, which is listed first.
    - `now`: the current time in Unix seconds.
    """
    models: list[Model] = []
    if last_run is not None:
        models.append(
            Model(
                last_run.workload,
                _short_path(last_run.workload),
                _last_balanced_text(last_run, now),
                True,
            )
        )
    known = {_full_name(model.name) for model in models}
    new = [name for name in found_models if _full_name(name) not in known]
    models += [Model(name, name, "a function of yours", True) for name in new]
    models.append(Model("", ANOTHER, "choose it to name it, as file.py:build", True))
    built_in = [registry.find(name) for name in registry.names()]
    models += [Model(each.name, each.name, f"built in: {each.summary}", False) for each in built_in]
    return models


def _full_name(workload: str) -> str:
    """Return a workload's name, with its file as an absolute path."""
    # With absolute paths, two spellings of the same file give equal names.
    home, _, function = workload.rpartition(":")
    return f"{Path(home).absolute()}:{function}"


def _short_path(workload: str) -> str:
    """Return a workload's name, with a relative path if its file is in the current folder."""
    home, _, function = workload.rpartition(":")
    path, here = Path(home), Path.cwd()
    short = path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path
    return f"{short}:{function}"


def _last_balanced_text(last_run: RunSummary, now: float) -> str:
    """Return a note that says how many days ago the last search ran, and its samples/s."""
    made = time.strptime(last_run.created.removesuffix("Z"), "%Y-%m-%dT%H:%M:%S")
    days = max(0.0, now - _utc_seconds(made)) / 86400
    ago = "today" if days < 1 else f"{days:.0f} day{'s' * (days >= 1.5)} ago"
    speed = last_run.samples_per_second
    return f"last time, {ago}" + (f": {rate(speed)} samples/s" if speed else "")


def _utc_seconds(moment: time.struct_time) -> float:
    import calendar

    return float(calendar.timegm(moment))


def find_last_own(summaries: Sequence[RunSummary]) -> RunSummary | None:
    """Return the newest search for one of the user's own models, or None.

    Skips models whose file doesn't exist any more.
    """
    for summary in sorted(summaries, key=lambda each: each.created, reverse=True):
        home = summary.workload.rpartition(":")[0]
        own = summary.kind == "search" and bool(home) and names_a_file(home)
        if own and Path(home).is_file():
            return summary
    return None


class BalanceForm(UsesApp, Vertical):
    """The form with the options of a search, hints, and buttons for the search and a dry run."""

    can_focus = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "send", "Start", key_display="Ctrl-S"),
        Binding("ctrl+t", "try", "Dry run", key_display="Ctrl-T"),
        Binding("ctrl+o", "more", "More options", key_display="Ctrl-O"),
    ]

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's name
        super().__init__(id=id)
        self._complaint = ""
        self._models: list[Model] = []
        self._user_chose_model = False  # whether the user has chosen the model

    def compose(self) -> ComposeResult:
        """Yield the fields, a line for hints and errors, the buttons, and a help text."""
        with VerticalScroll(id="fields", can_focus=False, classes="panel") as fields:
            fields.border_title = "Balance a model"
            yield self._row("pick-workload", Ticks(id="pick-workload", title="", single=True))
            yield self._row("own", Input(placeholder="file.py:build", id="own", compact=True))
            yield self._row("pick-devices", Ticks(id="pick-devices", title=""))
            yield self._row("global_batch", self._input("global_batch", "", "empty: the fastest"))
            yield self._row("budget", self._input("budget", "120s", "90s, 5m or none"))
            yield self._row("more", OneOf((FEWER, ALL), id="more"))
            yield from self._more_rows()
        yield Lines(id="problem")
        with Horizontal(id="send"):
            yield Button("Start", id="start", variant="success", compact=True)
            yield Button("Dry run, 10 s", id="try", variant="primary", compact=True)
            if self.evener.readonly:
                yield Static(" Read-only: no search starts here.", id="readonly", markup=False)
        yield Lines(id="ahead")

    def _more_rows(self) -> Iterator[Widget]:
        choices: dict[str, Sequence[str]] = {
            "task": (SPLIT, COMPARE),
            "objective": tuple(OBJECTIVES),
            "micro": MICROS,
            "precision": PRECISIONS,
            "inputs": INPUTS,
            "share": ("no", "yes"),
        }
        fields = {"layouts": "", **_MORE_FIELDS}
        if self._simulated:
            fields["pace"] = "0.2"
        else:
            choices |= {"engine": ENGINES, "framework": _FRAMEWORKS}
        for name, words in choices.items():
            yield self._row(name, OneOf(words, id=name), more=True)
        for name, default in fields.items():
            yield self._row(name, self._input(name, default, ""), more=True)

    def _input(self, name: str, default: str, placeholder: str) -> Input:
        return Input(default, placeholder, id=name, compact=True)

    def _row(self, name: str, field: Widget, *, more: bool = False) -> Widget:
        label = Static(f" {field_label(name)}", classes="label", markup=False)
        classes = "field -more" if more else "field"
        return Horizontal(label, field, classes=classes, id=f"row-{name}")

    @property
    def _simulated(self) -> bool:
        devices = self.evener.trainable
        return bool(devices) and find_backend(devices[0].kind).simulated

    def on_mount(self) -> None:
        """Fill the lists of devices and models."""
        devices = self.evener.trainable
        rows = [
            (device.label, f"{_memory(device)}  {short_name(device.name)}".lstrip())
            for device in devices
        ]
        self.query_one("#pick-devices", Ticks).offer(rows, frozenset(range(len(rows))))
        for button in self.query(Button):
            button.display = not self.evener.readonly
        self._offer_models((), None)
        self.run_worker(self.find_own_models())
        self.show_rows()

    async def find_own_models(self) -> None:
        """List the user's own models, from the last search and from files in the current folder."""
        found = await asyncio.to_thread(find_models, Path.cwd())
        last = await asyncio.to_thread(_read_last_own)
        self._offer_models(found, last)

    def _offer_models(self, found_models: Sequence[str], last_run: RunSummary | None) -> None:
        # A model that the user has ticked stays ticked. Otherwise the first of the user's own
        # models is ticked, or the default built-in model if there are none.
        panel = self.query_one("#pick-workload", Ticks)
        before = (
            self._models[min(panel.ticked)] if self._user_chose_model and panel.ticked else None
        )
        self._models = list_models(found_models, last_run, time.time())
        names = [model.name for model in self._models]
        devices = self.evener.trainable
        on_cpu = bool(devices) and devices[0].on_cpu
        wanted = registry.default_name("tensorflow", on_cpu)
        if found_models or last_run is not None:
            wanted = names[0]
        if before is not None and before.name in names:
            wanted = before.name
        rows = [(model.label, model.note) for model in self._models]
        panel.offer(rows, frozenset({names.index(wanted)}))
        self.show_rows()

    @property
    def model(self) -> Model:
        """The chosen model."""
        return self._models[min(self.query_one("#pick-workload", Ticks).ticked)]

    def on_one_of_changed(self) -> None:
        """Update which fields are shown, after the user has changed one of the choices."""
        self.show_rows()

    def show_rows(self) -> None:
        """Show the fields that the current choices need, and hide the others."""
        # The path is needed for "another file", and the other rows are under "more". Of these, the
        # layouts are needed for a comparison, and the largest slowdown for an objective that
        # accepts lower speed.
        if not self._models:
            return
        more = self.query_one("#more", OneOf).value == ALL
        for row in self.query(".-more"):
            row.display = more
        self.query_one("#row-own").display = not self.model.name
        compares = self.query_one("#task", OneOf).value == COMPARE
        self.query_one("#row-layouts").display = more and compares
        self.query_one("#row-max_slowdown").display = more and self._trades_speed
        self.call_after_refresh(self.redraw)

    @property
    def _trades_speed(self) -> bool:
        return find_objective(self.query_one("#objective", OneOf).value).trades_speed

    def redraw(self) -> None:
        """Divide the height between the lists, and explain how a search works if there is room."""
        height = self.size.height - HINT_ROWS - 1
        bare = self.screen.has_class("-bare")
        frame = 0 if bare else 2
        self.set_class(not bare and self.query_one("#more", OneOf).value == FEWER, "-roomy")
        self.query_one("#fields").styles.max_height = max(LEAST_MODEL_ROWS, height)
        devices = max(1, min(len(self.evener.trainable), MOST_DEVICE_ROWS))
        plain_rows = sum(row.display for row in self.query(".field")) - 2
        margins = plain_rows + 2 if self.has_class("-roomy") else 0
        spare = height - frame - devices - plain_rows - margins
        if spare - LESSON_ROWS >= ROWS_BESIDE_LESSON:
            spare -= LESSON_ROWS
        models = max(LEAST_MODEL_ROWS, min(self._count_model_rows(), spare, MOST_MODEL_ROWS))
        for name, rows in (("pick-workload", models), ("pick-devices", devices)):
            self.query_one(f"#row-{name}").styles.height = rows
            panel = self.query_one(f"#{name}", Ticks)
            panel.styles.height = rows
            panel.redraw()
        ahead = self.query_one("#ahead", Lines)
        ahead.show(search_lesson(*ahead.size))
        self._explain()

    def _count_model_rows(self) -> int:
        """Return the height in lines that the list of models needs."""
        # There is room for the user's own models, and for the first built-in model, whose line says
        # how many more follow. Without own models, there is room for all built-in ones.
        own = [model for model in self._models if model.own]
        return len(own) + 1 if any(model.name for model in own) else len(self._models)

    def on_resize(self) -> None:
        """Fit the form into the new size."""
        self.call_after_refresh(self.redraw)

    @on(Button.Pressed, "#start")
    def _pressed_start(self, event: Button.Pressed) -> None:
        event.stop()
        self.action_send()

    @on(Button.Pressed, "#try")
    def _pressed_try(self, event: Button.Pressed) -> None:
        event.stop()
        self.action_try()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Choose "another file" as soon as the user types a file name."""
        if event.input.id == "own" and event.value.strip() and self.model.name:
            names = [model.name for model in self._models]
            self.query_one("#pick-workload", Ticks).tick_only(names.index(""))
            self._user_chose_model = True
            self.show_rows()

    def on_input_submitted(self) -> None:
        """Move to the next field."""
        self.screen.focus_next()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action is possible. A read-only app allows no searches or dry runs."""
        return action not in ("send", "try") or not self.evener.readonly

    def action_more(self) -> None:
        """Show the less common options of a search, or hide them."""
        self.query_one("#more", OneOf).action_change(1)

    def action_send(self) -> None:
        """Start the search, or show the first error in the form."""
        read = self._read_or_complain()
        if read is not None:
            self.evener.start_session(*read)

    def action_try(self) -> None:
        """Try the model in a dry run, or show the first error in the form."""
        from .dry_run import DryRunDialog

        read = self._read_or_complain()
        if read is not None:
            self.app.push_screen(DryRunDialog(read[0]), self._after_dry_run)

    def _after_dry_run(self, start_search: bool | None) -> None:
        """Start the search if the user chose that at the end of the dry run."""
        if start_search:
            self.action_send()

    def _read_or_complain(self) -> tuple[Request, tuple[Device, ...]] | None:
        try:
            read = self._read()
        except EvenerError as fault:
            self.complain(str(fault))
            return None
        self.complain("")
        return read

    def complain(self, text: str) -> None:
        """Show an error and focus the field that caused it. An empty text removes the error."""
        self._complaint, named = to_form_terms(text)
        wrong = self._find_field_at_fault(text, named)
        if text and self.query_one(f"#row-{wrong}").has_class("-more"):
            self._show_more()
        for row in self.query(".field"):
            marked = bool(text) and row.id == f"row-{wrong}"
            row.set_class(marked, "-wrong")
            sign = Mark.ALARM if marked else " "
            name = (row.id or "").removeprefix("row-")
            row.query_one(".label", Static).update(f"{sign}{field_label(name)}")
        if text:
            self.call_after_refresh(self.query_one(f"#{wrong}").focus)
        self._explain()
        self.call_after_refresh(self.redraw)

    def _find_field_at_fault(self, text: str, option_field: str) -> str:
        """Return the id of the form field that an error message is about.

        `option_field` is the field of the option that the message names, or "" if it names none. In
        that case, the message is about the model if it contains the model's file, and otherwise
        about the devices.
        """
        if option_field == "own" and self.model.name:
            return "pick-workload"
        if option_field and self.query(f"#{option_field}"):
            return option_field
        file = (self.model.name or self.query_one("#own", Input).value).rpartition(":")[0]
        if file and file in text:
            return "pick-workload" if self.model.name else "own"
        return "pick-devices"

    def _show_more(self) -> None:
        field = self.query_one("#more", OneOf)
        if field.value != ALL:
            field.action_change(1)

    @on(ListPanel.Moved)
    @on(Ticks.Ticked)
    def _chosen(self) -> None:
        """Update which fields are shown, after the user has chosen another model or device."""
        focused = self.screen.focused
        if focused is not None and focused.id == "pick-workload":
            self._user_chose_model = True
        self.show_rows()

    @on(DescendantFocus)
    def _explain(self) -> None:
        """Show the error or, if there is none, a hint about the focused field."""
        problem, field = self.query_one("#problem", Lines), self.screen.focused
        room = problem.size.width or self.app.size.width  # 0 before the first layout
        if self._complaint:
            rows = text_lines(self._complaint, room, COMPLAINT_ROWS, "bad")
            problem.styles.height = max(HINT_ROWS, len(rows))
            problem.show(rows)
            return
        problem.styles.height = HINT_ROWS
        problem.show(text_lines(self._hint(field), room, HINT_ROWS, "dim"))

    def _hint(self, field: Widget | None) -> str:
        """Return the hint for a field. In a list, it begins with the note on the current entry."""
        name = (field.id if field is not None else None) or ""
        hint = HINTS.get(name, "")
        if isinstance(field, Ticks) and field.chosen is not None:
            return f"{plain(field.chosen[0])}: {plain(field.chosen[1])}. {hint}"
        return hint

    def _read(self) -> tuple[Request, tuple[Device, ...]]:
        devices = self.evener.trainable
        chosen = sorted(self.query_one("#pick-devices", Ticks).ticked)
        spec = select_devices(self.evener.devices, devices, chosen)
        typed = {field.id or "": field.value for field in (*self.query(Input), *self.query(OneOf))}
        del typed["more"]
        task, framework = typed.pop("task"), typed.pop("framework", None)
        file = typed.pop("own").strip()
        layouts, share = typed.pop("layouts"), typed.pop("share") == "yes"
        if not self._trades_speed:
            del typed["max_slowdown"]
        model = self.model
        workload = model.name or file
        if not workload:
            raise RequestError(
                "No --workload of your own is named.", "Write train.py:build, or tick another one."
            )
        fields = request_fields(typed) | {"share": share}
        if task == COMPARE:
            words = tuple(parse_words(layouts) or ()) if layouts.strip() else tuple(FAMILIES)
            fields["compare"] = LayoutOptions(families=words)
        named = framework if model.own and framework != "auto" else None
        request = make_request(devices=spec, workload=workload, framework=named, **fields)
        return request, tuple(devices[position] for position in chosen)


def _read_last_own() -> RunSummary | None:
    """Return the last search for one of the user's own models, or None if runs can't be read."""
    try:
        return find_last_own(runs.list_runs())
    except EvenerError:
        return None


def _memory(device: Device) -> str:
    return size(device.usable_memory_bytes) if device.usable_memory_bytes else ""
