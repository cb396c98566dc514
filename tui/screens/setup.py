"""The form that starts a search: devices, workload, objective and bounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import DescendantFocus
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Button, Input, Static

from evener.balancer.request import ENGINES, INPUTS, OBJECTIVES, PRECISIONS, Request
from evener.errors import EvenerError, RequestError
from evener.tui.text.formatting import size
from evener.tui.view.cells import Span, clean, cut, line
from evener.tui.view.devices import short_name
from evener.tui.view.setup import request_fields, subset
from evener.tui.widgets.choices import OneOf, Ticks
from evener.tui.widgets.lines import Lines
from evener.workloads import registry

if TYPE_CHECKING:
    from evener.devices.types import Device
    from evener.tui.app.app import EvenerApp

_OWN = "your own"
_CHOICES = {"objective": OBJECTIVES, "precision": PRECISIONS, "input": INPUTS}
_ENGINE = {"engine": ENGINES}
_FRAMEWORKS = tuple(name for name in registry.FRAMEWORKS if name != "none")
_TOLD = {
    "objective": "what the search makes as large as it can",
    "precision": "what the training computes in",
    "input": "host: batches come from host memory, as in training; device: they don't",
    "engine": "how TensorFlow keeps a split in step; auto: one process for free GPUs, else one for each device",
    "own": "measured in place of a workload of the list: what is typed here ticks the last one there",
    "framework": "what your own function builds its model in",
}
_FIELDS = {
    "budget": ("120s", "time for probing, like 120s or 5m; none: until sure"),
    "global_batch": ("", "fixed samples per step; empty: free"),
    "max_global_batch": ("", "at most so many samples"),
    "tolerance": ("0.02", "within it of the best, the smallest global batch wins"),
    "settings": ("", "the workload's parameters: key=value key=value"),
}
_PACE = {"pace": ("0.2", "simulated devices: 1 takes real time, 0 none")}


_BUTTON_CELLS = 12


class Setup(VerticalScroll):
    """Posts `Wanted` when the form is sent; a wrong field is said and nothing starts."""

    can_focus = False
    _complaint = ""
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+s", "send", "Start", key_display="^s")]

    class Wanted(Message):
        """This search is to be started."""

        def __init__(self, request: Request, devices: tuple[Device, ...]) -> None:
            super().__init__()
            self.request = request
            self.devices = devices

    @property
    def evener(self) -> EvenerApp:
        """The app, by its own type."""
        return cast("EvenerApp", self.app)

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
        fields = _FIELDS | _PACE if self._simulated else _FIELDS
        for name, (default, hint) in fields.items():
            yield self._row(name, Input(default, hint, id=name, compact=True))

    def _row(self, name: str, *fields: Widget) -> Widget:
        words = f"{_OWN} workload" if name == "own" else name.replace("_", " ")
        return Horizontal(Static(f" {words}", classes="label", markup=False), *fields, classes="field")

    @property
    def _simulated(self) -> bool:
        devices = self.evener.known_devices
        return bool(devices) and devices[0].kind == "sim"

    def _own_workload(self) -> str:
        given = self.evener.workload or ""
        return given if ":" in given else ""

    def on_mount(self) -> None:
        """Offer what this machine and the registry have."""
        devices = self.evener.known_devices
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
        """Fill a new size."""
        height = max(len(self.evener.known_devices), len(registry.names()) + 1)
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
        """A workload of one's own that is named is the one that is meant."""
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
        self.post_message(self.Wanted(request, devices))

    def complain(self, text: str) -> None:
        """Say what is wrong with the form, until it is sent again."""
        self._complaint = text
        self.query_one("#problem", Lines).show([line(Span(f" {text}", "bad"))] if text else [])

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        """Say what the field is for."""
        self._hint(event.widget)

    def on_list_panel_moved(self) -> None:
        """Say what the row stands for, whole."""
        self._hint(self.screen.focused)

    def _hint(self, field: Widget | None) -> None:
        """What this field or the row under its cursor means, unless there is something to complain about."""
        told = {**_TOLD, **{name: hint for name, (_, hint) in (_FIELDS | _PACE).items()}}
        text = field.note if isinstance(field, Ticks) else told.get(getattr(field, "id", None) or "", "")
        problem = self.query_one("#problem", Lines)
        if not self._complaint:
            room = problem.size.width or self.app.size.width - _BUTTON_CELLS  # none before it is laid out
            shown = cut(clean(text), max(1, room - 2), self.evener.marks.ellipsis)
            problem.show([line(Span(f" {shown}", "dim"))])

    def _read(self) -> tuple[Request, tuple[Device, ...]]:
        from evener.tui.cli.options import make_request

        known = self.evener.known_devices
        chosen = sorted(self.query_one("#pick-devices", Ticks).ticked)
        spec = subset(self.evener.devices, known, chosen)
        names = registry.names()
        place = min(self.query_one("#pick-workload", Ticks).ticked)
        workload = names[place] if place < len(names) else ""
        fields = request_fields(spec, *self._workload(workload), self._typed())
        return make_request(**fields), tuple(known[position] for position in chosen)  # type: ignore[arg-type]

    def _workload(self, name: str) -> tuple[str, str]:
        """What is measured, and its framework; without the name of a known workload the person's own."""
        if name:
            framework = registry.find(name).framework
            return name, framework if framework != "none" else "tensorflow"
        own = self.query_one("#own", Input).value.strip()
        if not own:
            raise RequestError("No workload of your own is named.", "Write it like train.py:build, or tick another.")
        return own, "tensorflow" if self._simulated else self.query_one("#framework", OneOf).value

    def _typed(self) -> Mapping[str, str]:
        typed = {field.id or "": field.value for field in self.query(Input)}
        return typed | {choice.id or "": choice.value for choice in self.query(OneOf)}


def _memory(device: Device) -> str:
    return size(device.usable_memory_bytes) if device.usable_memory_bytes else ""
