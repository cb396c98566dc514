"""The form that starts a search: devices, workload, objective and limits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import DescendantFocus
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Button, Input, Static

from evener.balancer.request import ENGINES, INPUTS, MICROS, OBJECTIVES, PRECISIONS, Request
from evener.devices.types import Device
from evener.errors import EvenerError, RequestError
from evener.tui.runtime.base_app import UsesApp
from evener.tui.text.formatting import size
from evener.tui.text.parsing import REQUEST_HELP, make_request, request_fields, select_devices
from evener.tui.view.cells import Span, clean, cut, line
from evener.tui.view.devices import short_name
from evener.tui.widgets.choices import OneOf, Ticks
from evener.tui.widgets.lines import Lines
from evener.workloads import registry

_OWN = "your own"
_CHOICES = {"objective": OBJECTIVES, "micro": MICROS, "precision": PRECISIONS, "inputs": INPUTS}
_ENGINE = {"engine": ENGINES}
_FRAMEWORKS = tuple(name for name in registry.FRAMEWORKS if name != "none")
_FIELDS = {"budget": "120s", "global_batch": "", "max_global_batch": "", "tolerance": "0.02", "settings": ""}
_PACE = {"pace": "0.2"}  # simulated devices
_HINTS = REQUEST_HELP | {
    "engine": f"{REQUEST_HELP['engine'][:-1]}; auto: one process for idle GPUs, else one per device.",
    "global_batch": f"{REQUEST_HELP['global_batch'][:-1]}; empty: free.",
    "own": "Your own workload, file.py:build; typing here ticks the last entry of the list.",
    "framework": "The framework of your own workload.",
    "settings": "Parameters of the workload: key=value key=value.",
}
_LABELS = {"own": f"{_OWN} workload", "inputs": "input"}
_BUTTON_CELLS = 12


class Setup(UsesApp, VerticalScroll):
    """Posts `Submitted` when the form is sent; for a wrong field it shows what is wrong instead."""

    can_focus = False
    _complaint = ""
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+s", "send", "Start", key_display="^s")]

    class Submitted(Message):
        """The form was sent: start this search."""

        def __init__(self, request: Request, devices: tuple[Device, ...]) -> None:
            super().__init__()
            self.request = request
            self.devices = devices

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
        for name, words in (_CHOICES if self._simulated else _CHOICES | _ENGINE).items():
            yield self._row(name, OneOf(words, id=name))
        own = Input(self._own_workload(), "file.py:build", id="own", compact=True)
        yield self._row("own", own, *(() if self._simulated else (OneOf(_FRAMEWORKS, id="framework"),)))
        for name, default in (_FIELDS | _PACE if self._simulated else _FIELDS).items():
            yield self._row(name, Input(default, _HINTS[name], id=name, compact=True))

    def _row(self, name: str, *fields: Widget) -> Widget:
        label = _LABELS.get(name) or name.replace("_", " ")
        return Horizontal(Static(f" {label}", classes="label", markup=False), *fields, classes="field")

    @property
    def _simulated(self) -> bool:
        devices = self.evener.trainable
        return bool(devices) and devices[0].kind == "sim"

    def _own_workload(self) -> str:
        given = self.evener.workload or ""
        return given if ":" in given else ""

    def on_mount(self) -> None:
        """List the devices of this machine and the workloads of the registry."""
        devices = self.evener.trainable
        rows = [(each.label, f"{_memory(each)}  {short_name(each.name)}".lstrip()) for each in devices]
        self.query_one("#pick-devices", Ticks).offer(rows, frozenset(range(len(rows))))
        entries = [registry.find(name) for name in registry.names()]
        kind = devices[0].kind if devices else "gpu"
        given = self.evener.workload or registry.default_name("tensorflow", kind)
        names = [entry.name for entry in entries]
        ticked = len(names) if ":" in given else names.index(given) if given in names else 0
        self.query_one("#pick-workload", Ticks).offer(
            [*((entry.name, entry.summary) for entry in entries), (_OWN, "the function named below; its code is run")],
            frozenset({ticked}),
        )

    def redraw(self) -> None:
        """Fill the current size."""
        height = max(len(self.evener.trainable), len(registry.names()) + 1)
        bare = self.screen.has_class("-bare")
        frame = 0 if bare else 2
        others = len(self.query(".field")) + frame + 1
        self.query_one("#picks").styles.height = min(height, max(3, self.size.height - others - frame)) + frame
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
        """Enter in a field starts too."""
        self.action_send()

    def action_send(self) -> None:
        """Read the form and ask for the search that it means."""
        try:
            request, devices = self._read()
        except EvenerError as fault:
            self.complain(f"{fault.message} {fault.remedy}")
            return
        self.complain("")
        self.post_message(self.Submitted(request, devices))

    def complain(self, text: str) -> None:
        """Show what is wrong with the form, until it is sent again."""
        self._complaint = text
        self.query_one("#problem", Lines).show([line(Span(f" {text}", "bad"))] if text else [])

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        """Explain the field."""
        self._hint(event.widget)

    def on_list_panel_moved(self) -> None:
        """Explain the row."""
        self._hint(self.screen.focused)

    def _hint(self, field: Widget | None) -> None:
        """Explain this field or the row under its cursor, unless a complaint is shown."""
        text = field.note if isinstance(field, Ticks) else _HINTS.get(getattr(field, "id", None) or "", "")
        problem = self.query_one("#problem", Lines)
        if not self._complaint:
            room = problem.size.width or self.app.size.width - _BUTTON_CELLS  # 0 before the first layout
            shown = cut(clean(text), max(1, room - 2), self.evener.marks.ellipsis)
            problem.show([line(Span(f" {shown}", "dim"))])

    def _read(self) -> tuple[Request, tuple[Device, ...]]:
        devices = self.evener.trainable
        chosen = sorted(self.query_one("#pick-devices", Ticks).ticked)
        spec = select_devices(self.evener.devices, devices, chosen)
        fields = (*self.query(Input), *self.query(OneOf))
        typed = {field.id or "": field.value for field in fields}
        own, framework = typed.pop("own").strip(), typed.pop("framework", None)
        names, place = registry.names(), min(self.query_one("#pick-workload", Ticks).ticked)
        if place < len(names):
            own, framework = names[place], None
        elif not own:
            raise RequestError("No workload of your own is named.", "Write train.py:build, or tick another one.")
        request = make_request(devices=spec, workload=own, framework=framework, **request_fields(typed))
        return request, tuple(devices[position] for position in chosen)


def _memory(device: Device) -> str:
    return size(device.usable_memory_bytes) if device.usable_memory_bytes else ""
