"""The Balance screen: a form that says what to search for, then the running search, then its
verdict and the plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import DescendantFocus
from textual.widget import Widget
from textual.widgets import Button, ContentSwitcher, Input, Static

from evener.balancer.families import FAMILIES
from evener.balancer.number_format import size
from evener.balancer.objectives import OBJECTIVES, find_objective
from evener.balancer.request import ENGINES, INPUTS, MICROS, PRECISIONS, Request
from evener.balancer.search.layouts import LayoutOptions
from evener.balancer.session_state import SessionState
from evener.devices.registry import find_backend
from evener.devices.types import Device
from evener.errors import EvenerError, RequestError
from evener.printable import plain
from evener.workloads import registry

from ..base_app import UsesApp
from ..text.parsing import REQUEST_HELP, make_request, parse_words, request_fields, select_devices
from ..view.cells import Mark, Span, cut, line, text_lines
from ..view.devices import short_name
from ..widgets.balance import BalanceView, LanePanel
from ..widgets.lines import Lines
from ..widgets.lists import ListPanel, OneOf, Ticks
from .base import PanelScreen
from .dialogs import confirm
from .run_dialogs import RunActions, errors_file, plan_dialog

_OWN = "your own"
SPLIT, COMPARE = "find the best split", "compare layouts"
_SEARCH_FIELDS = {
    "budget": "120s",
    "global_batch": "",
    "max_global_batch": "",
    "tolerance": "0.02",
    "max_slowdown": "",
}
_FRAMEWORKS = ("auto", *(name for name in registry.FRAMEWORKS if name != "none"))
_HINTS = REQUEST_HELP | {
    "task": "What to do; left and right choose.",
    "objective": (
        "throughput: tokens/s where rows have lengths, else samples/s; samples-per-joule: "
        "the most efficient."
    ),
    "layouts": f"Some of {', '.join(FAMILIES)}; empty: all that are possible.",
    "engine": (
        f"{REQUEST_HELP['engine'][:-1]}; auto: one process for idle GPUs, else one per device."
    ),
    "global_batch": f"{REQUEST_HELP['global_batch'][:-1]}; empty: free.",
    "own": "Your own workload, file.py:build; typing here ticks the last entry of the list.",
    "framework": "The framework of your own workload; auto: the one that its file imports.",
    "settings": "Parameters of the workload: key=value key=value.",
}
_LABELS = {"own": f"{_OWN} workload", "inputs": "input", "share": "share devices"}
_WORDS = {"set": "settings"}  # for options that the form calls differently
_BY_OPTION = {"set": "settings", "input": "inputs", "workload": "own", "devices": "pick-devices"}
_BUTTON_CELLS = 12
_COMPLAINT_ROWS = 4


def _label(name: str) -> str:
    return _LABELS.get(name) or name.replace("_", " ").replace("pick-", "")


def form_words(text: str) -> tuple[str, str]:
    """A command's complaint in the form's words, and the field that it is about, by its first
    option; "" if by none.
    """
    options = re.findall(r"--([a-z][a-z-]*)", text)
    fields = {option: _BY_OPTION.get(option, option.replace("-", "_")) for option in options}
    shown = re.sub(
        r"--([a-z][a-z-]*)", lambda found: _WORDS.get(found[1]) or found[1].replace("-", " "), text
    )
    return shown, fields[options[0]] if options else ""


class Setup(UsesApp, VerticalScroll):
    """Starts what it says; if that can't be, it marks the field that is wrong and says why."""

    can_focus = False
    _complaint = ""
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+s", "send", "Start", key_display="^s")]

    def compose(self) -> ComposeResult:
        """Devices and workloads above, options below."""
        with Horizontal(id="picks"):
            yield Ticks(id="pick-devices", title="Devices")
            yield Ticks(id="pick-workload", title="Workload", single=True)
        with Vertical(id="options", classes="panel") as options:
            options.border_title = "Options"
            yield from self._options()
        with Horizontal(id="send"):
            yield Button("Start", id="start", variant="success", compact=True)
            yield Lines(id="problem", classes="bar")

    def _options(self) -> Iterable[Widget]:
        choices = {
            "task": (SPLIT, COMPARE),
            "objective": tuple(OBJECTIVES),
            "micro": MICROS,
            "precision": PRECISIONS,
            "inputs": INPUTS,
        }
        choices |= (
            {"share": ("no", "yes")}
            if self._simulated
            else {"engine": ENGINES, "share": ("no", "yes")}
        )
        for name, words in choices.items():
            yield self._row(name, OneOf(words, id=name))
        yield from self._typed_options()

    def _typed_options(self) -> Iterable[Widget]:
        own = Input(placeholder="file.py:build", id="own", compact=True)
        yield self._row(
            "own", own, *(() if self._simulated else (OneOf(_FRAMEWORKS, id="framework"),))
        )
        fields = {"layouts": "", **_SEARCH_FIELDS, "settings": ""}
        for name, default in (fields | {"pace": "0.2"} if self._simulated else fields).items():
            yield self._row(name, Input(default, _HINTS[name], id=name, compact=True))

    def _row(self, name: str, *fields: Widget) -> Widget:
        label = Static(f" {_label(name)}", classes="label", markup=False)
        return Horizontal(label, *fields, classes="field", id=f"row-{name}")

    @property
    def _simulated(self) -> bool:
        devices = self.evener.trainable
        return bool(devices) and find_backend(devices[0].kind).simulated

    def on_mount(self) -> None:
        """List the devices of this machine and the workloads of the registry."""
        devices = self.evener.trainable
        rows = [
            (each.label, f"{_memory(each)}  {short_name(each.name)}".lstrip()) for each in devices
        ]
        self.query_one("#pick-devices", Ticks).offer(rows, frozenset(range(len(rows))))
        entries = [registry.find(name) for name in registry.names()]
        on_cpu = bool(devices) and devices[0].on_cpu
        ticked = registry.names().index(registry.default_name("tensorflow", on_cpu))
        self.query_one("#pick-workload", Ticks).offer(
            [
                *((entry.name, entry.summary) for entry in entries),
                (_OWN, "the function named below; its code is run"),
            ],
            frozenset({ticked}),
        )
        self.on_one_of_changed()

    def on_one_of_changed(self) -> None:
        """Show layouts for a comparison alone, and how much slower it may be for efficiency
        alone.
        """
        self.query_one("#row-layouts").display = self.query_one("#task", OneOf).value == COMPARE
        self.query_one("#row-max_slowdown").display = self._trades_speed
        self.call_after_refresh(self.redraw)

    @property
    def _trades_speed(self) -> bool:
        return find_objective(self.query_one("#objective", OneOf).value).trades_speed

    def redraw(self) -> None:
        """Fill the current size."""
        height = max(len(self.evener.trainable), len(registry.names()) + 1)
        bare = self.screen.has_class("-bare")
        frame = 0 if bare else 2
        others = sum(row.display for row in self.query(".field")) + frame + self._problem_rows
        self.query_one("#picks").styles.height = (
            min(height, max(3, self.size.height - others - frame)) + frame
        )
        for panel in self.query(Ticks):
            panel.redraw()

    def on_resize(self) -> None:
        """Fill the new size."""
        self.call_after_refresh(self.redraw)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Start."""
        event.stop()
        self.action_send()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Tick the user's own workload when its name is typed."""
        if event.input.id == "own" and event.value.strip():
            workloads = self.query_one("#pick-workload", Ticks)
            workloads.tick_only(workloads.count - 1)

    def on_input_submitted(self) -> None:
        """Enter goes on to the next field."""
        self.screen.focus_next()

    def action_send(self) -> None:
        """Read the form and start what it means."""
        try:
            request, devices = self._read()
        except EvenerError as fault:
            self.complain(str(fault))
            return
        self.complain("")
        self.evener.start_session(request, devices)

    def complain(self, text: str) -> None:
        """Show what is wrong with the form and mark the field, until it is sent again."""
        self._complaint, named = form_words(text)
        own = self.query_one("#own", Input).value.partition(":")[0]
        wrong = (
            named
            if named and self.query(f"#{named}")
            else "own"
            if own and own in text
            else "pick-devices"
        )
        for row in self.query(".field"):
            marked = bool(text) and row.id == f"row-{wrong}"
            row.set_class(marked, "-wrong")
            sign = Mark.ALARM if marked else " "
            row.query_one(".label", Static).update(
                f"{sign}{_label((row.id or '').removeprefix('row-'))}"
            )
        if text:
            self.call_after_refresh(self.query_one(f"#{wrong}").focus)
        self._explain()
        self.call_after_refresh(self.redraw)

    @property
    def _problem_rows(self) -> int:
        return max(1, len(self.query_one("#problem", Lines).lines))

    @on(DescendantFocus)
    @on(ListPanel.Moved)
    def _explain(self) -> None:
        """Show the complaint; without one, explain the field or the row under its cursor."""
        problem, field = self.query_one("#problem", Lines), self.screen.focused
        room = (
            problem.size.width or self.app.size.width - _BUTTON_CELLS
        )  # 0 before the first layout
        if self._complaint:
            problem.show(text_lines(self._complaint, room, _COMPLAINT_ROWS, "bad"))
        else:
            row = field.chosen if isinstance(field, Ticks) else None
            text = row[1] if row is not None else _HINTS.get(getattr(field, "id", None) or "", "")
            shown = cut(plain(text), max(1, room - 2))
            problem.show([line(Span(f" {shown}", "dim"))])
        self.query_one("#send").styles.height = problem.styles.height = self._problem_rows

    def _read(self) -> tuple[Request, tuple[Device, ...]]:
        devices = self.evener.trainable
        chosen = sorted(self.query_one("#pick-devices", Ticks).ticked)
        spec = select_devices(self.evener.devices, devices, chosen)
        typed = {field.id or "": field.value for field in (*self.query(Input), *self.query(OneOf))}
        task, own, framework = (
            typed.pop("task"),
            typed.pop("own").strip(),
            typed.pop("framework", None),
        )
        layouts, share = typed.pop("layouts"), typed.pop("share") == "yes"
        if not self._trades_speed:
            del typed["max_slowdown"]
        names, place = registry.names(), min(self.query_one("#pick-workload", Ticks).ticked)
        if place < len(names):
            own, framework = names[place], None
        elif not own:
            raise RequestError(
                "No --workload of your own is named.", "Write train.py:build, or tick another one."
            )
        fields = request_fields(typed) | {"share": share}
        if task == COMPARE:
            words = tuple(parse_words(layouts) or ()) if layouts.strip() else tuple(FAMILIES)
            fields["compare"] = LayoutOptions(families=words)
        named = None if framework == "auto" else framework
        request = make_request(devices=spec, workload=own, framework=named, **fields)
        return request, tuple(devices[position] for position in chosen)


def _memory(device: Device) -> str:
    return size(device.usable_memory_bytes) if device.usable_memory_bytes else ""


class BalanceScreen(RunActions, PanelScreen):
    """Shows the app's session, which continues when another screen is opened."""

    NAME = "balance"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause(True)", "Pause"),
        Binding("p", "pause(False)", "Resume"),
        Binding("x", "stop", "Stop"),
        Binding("c", "go_on", "Continue"),
        Binding("e", "export", "Export"),
        Binding("w", "report", "Report"),
        Binding("t", "traceback", "Traceback"),
        Binding("n", "new", "New search"),
    ]

    @property
    def chosen_run(self) -> str:
        """The run of the session; empty without one."""
        return self.evener.balance.run

    def panels(self) -> Iterable[Widget]:
        """The form, and the search."""
        with ContentSwitcher(initial="setup", id="switch"):
            yield Setup(id="setup")
            yield BalanceView()

    def on_mount(self) -> None:
        """Follow the session."""
        self.watch(self.app, "balance", self._followed)
        self.watch(self.app, "snapshot", self._sampled, init=False)
        self.watch(self.app, "start_fault", self.query_one(Setup).complain, init=False)
        if self.evener.balance == SessionState():
            self.query_one("#pick-devices", Ticks).focus()

    def _followed(self, state: SessionState) -> None:
        shows_search = state != SessionState()
        switch = self.query_one("#switch", ContentSwitcher)
        wanted = "balance" if shows_search else "setup"
        if switch.current != wanted:
            switch.current = wanted
            if shows_search:
                self.query_one(LanePanel).focus()
                self._sampled()
        if shows_search and self.is_current:
            self.query_one(BalanceView).take(state)
        self.refresh_bindings()

    def _sampled(self) -> None:
        """Update the device rows, and nothing else."""
        if self.is_current and self.evener.balance != SessionState():
            self.query_one(LanePanel).take(samples=self.evener.session_samples())

    def redraw(self) -> None:
        """Draw the current state of the session."""
        self.settle_frames()
        self._sampled()
        self.query_one(BalanceView).take(self.evener.balance)
        self.query_one(Setup).redraw()

    def on_resize(self) -> None:
        """Add or remove frames, by the new size."""
        self.redraw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer only the keys that have an effect now."""
        state, replays = self.evener.balance, self.evener.replays
        if replays and action in ("stop", "go_on", "report"):
            return False
        if action in ("pause", "stop"):
            return (
                state.active
                and state.finished is None
                and (action == "stop" or parameters[0] is not state.paused)
            )
        if action in ("export", "report"):
            return state.finished is not None and not self.evener.readonly
        if action == "traceback":
            return bool(state.run or state.seen) and errors_file(state.run) is not None
        if action in ("new", "go_on"):
            return replays or (state.ended and bool(action == "new" or state.run))
        return True

    def action_pause(self, paused: bool) -> None:
        """Pause the search, or resume it."""
        self.evener.pause_session(paused)

    def action_stop(self) -> None:
        """End the search after asking; the best plan so far is kept."""
        question = "Stop the search? The best plan so far is kept."
        confirm(self.evener, "Stop", question, self.evener.stop_session)

    def action_export(self) -> None:
        """Write the plan to a file."""
        finished = self.evener.balance.finished
        if finished is not None:
            self.app.push_screen(plan_dialog(finished.plan))

    def action_new(self) -> None:
        """Return to the form."""
        self.evener.forget_session()
        self.query_one("#pick-devices", Ticks).focus()
