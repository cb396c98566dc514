"""The entries of the command palette: key bindings, app commands, runs and settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, cast

from textual.actions import parse
from textual.binding import Binding
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.dom import DOMNode
from textual.widget import Widget

from evener.printable import plain

from .base_app import BaseApp

OWN_ENTRIES = (
    "show",
    "leave",
    "help",
    "switch_theme",
    "command_palette",
    "settings",
)  # actions that other entries of the palette offer
MOVES = (  # actions within a list or a screen: found by a search, but not listed
    "move",
    "page",
    "focus_next",
    "focus_previous",
    "copy_text",
    "end_filter",
    "refresh",
)
KEY_CELLS = 9  # cells for the key in front of its description
APP_KEYS = {  # keys of the commands of all screens, by the command's title
    "Show Monitor": "1",
    "Show Balance": "2",
    "Show Runs": "3",
    "Show Trainings": "4",
    "Next theme": "T",
    "Settings": ",",
    "Help": "?",
    "Quit": "q",
}

LEAST_SCORE = 0.1  # score of an entry found by `OTHER_WORDS`
OTHER_WORDS = {  # words that users may search for instead, by action
    "export": "export save plan.toml",
    "train_here": "launch run start training",
    "report": "export html page",
    "go_on": "resume longer more budget",
    "stop": "end cancel",
    "new": "form start again",
    "try": "check what fits memory",
    "send": "begin search",
    "signal": "kill stop process",
    "change_interval": "sample faster slower refresh rate interval",
    "change_span": "zoom minutes",
    "step_time": "cursor read value",
    "common_scale": "axes y",
    "toggle_scale": "logarithmic axes",
    "columns": "hide show metrics",
    "alerts": "hot throttled idle warnings",
    "tag": "mark select",
    "filter": "search find",
    "reverse": "order ascending descending",
    "replay": "play again",
    "read_all": "details result verdict",
    "open": "details enter",
    "traceback": "error why failed",
    "delete": "remove",
}


def entry(key: str, words: str | Content, note: str = "") -> Content:
    """Return the text of a palette entry: the key, `words`, and `note` in a dim colour."""
    return Content.assemble(
        (f"{key:>{KEY_CELLS}}  ", "$text-primary"), words, (f"  {note}" if note else "", "$ev-dim")
    )


class OfferedKey(NamedTuple):
    """A key binding that has an effect at the moment.

    `node` is the widget that owns the binding. `title` is the title of that widget's panel, or ""
    for a key of the screen itself.
    """

    node: DOMNode
    binding: Binding
    title: str

    @property
    def action(self) -> str:
        """The name of the action, without namespace and parameters."""
        return parse(self.binding.action)[1]


def offered_keys(screen: Widget) -> Iterator[OfferedKey]:
    """Yield the key bindings of a screen and its panels that have an effect at the moment."""
    seen: set[tuple[str, str]] = set()
    nodes: list[DOMNode] = [screen]
    nodes += [each for each in screen.query("*") if each.can_focus and each.display]
    for node in nodes:
        owner = plain(str(getattr(node, "border_title", "") or ""), 40)
        for bindings in node._bindings.key_to_bindings.values():
            for binding in bindings:
                named = binding.action, "" if binding.action.startswith("screen.") else owner
                if not _has_effect(node, binding) or named in seen:
                    continue
                seen.add(named)
                yield OfferedKey(node, binding, owner if node is not screen else "")


def _has_effect(node: DOMNode, binding: Binding) -> bool:
    if not binding.description or binding.system:
        return False
    namespace, name, parameters = parse(binding.action)
    if name in OWN_ENTRIES:
        return False
    target = {"screen": node.screen, "app": node.app}.get(namespace, node)
    if not hasattr(target, f"action_{name}"):
        return False
    return target.check_action(name, parameters) is True


def _begins(query: str, words: str) -> bool:
    """Return whether each word of the query is the beginning of a word in `words`."""
    asked = query.lower().split()
    return bool(asked) and all(any(one.startswith(each) for one in words.split()) for each in asked)


class KeyDiscovery(DiscoveryHit):
    """A key binding that the command palette lists before the user types anything."""

    @property
    def score(self) -> float:
        """The score that puts key bindings above all other entries of the palette."""
        return 1.0


class PaletteEntry(NamedTuple):
    """A key binding as the command palette lists it.

    - `words`: the panel's title and the description of the key.
    - `moves`: whether the key only moves within a list or screen; such keys are listed only if the
      user searches for them.
    - `other_words`: synonyms that users may search for.
    """

    key: str
    words: str
    command: Callable[[], object]
    moves: bool
    other_words: str


class KeysProvider(Provider):
    """Palette provider for the key bindings that have an effect at the moment."""

    def _entries(self) -> Iterator[PaletteEntry]:
        app = cast(BaseApp, self.app)
        for offered in offered_keys(self.screen):
            key = app.get_key_display(offered.binding)
            panel = f"{offered.title}: " if offered.title else ""
            words = f"{panel}{offered.binding.description}"
            moves = offered.action in MOVES
            other_words = OTHER_WORDS.get(offered.action, "")
            yield PaletteEntry(key, words, partial(_press, app, offered), moves, other_words)

    async def discover(self) -> Hits:
        """Yield all key bindings except those that only move a cursor or the focus."""
        for each in self._entries():
            if not each.moves:
                yield KeyDiscovery(entry(each.key, each.words), each.command, text=each.words)

    async def search(self, query: str) -> Hits:
        """Yield the key bindings whose description or synonyms match the query."""
        matcher = self.matcher(query)
        for each in self._entries():
            score = matcher.match(each.words)
            if not score and _begins(query, each.other_words):
                score = LEAST_SCORE
            if score > 0:
                shown = entry(each.key, matcher.highlight(each.words))
                yield Hit(score, shown, each.command, text=each.words)


class AppProvider(Provider):
    """Palette provider for the app's commands, which shows the keys that run them."""

    async def discover(self) -> Hits:
        """Yield all commands of the app."""
        for title, more, command, *_ in self.app.get_system_commands(self.screen):
            shown = entry(APP_KEYS.get(title, ""), title, more)
            yield DiscoveryHit(shown, command, text=title)

    async def search(self, query: str) -> Hits:
        """Yield the commands whose title matches the query."""
        matcher = self.matcher(query)
        for title, more, command, *_ in self.app.get_system_commands(self.screen):
            score = matcher.match(title)
            if score > 0:
                shown = entry(APP_KEYS.get(title, ""), matcher.highlight(title), more)
                yield Hit(score, shown, command, text=title)


async def _press(app: BaseApp, offered_key: OfferedKey) -> None:
    """Run the action of a key binding, after focusing its panel."""
    node = offered_key.node
    if isinstance(node, Widget) and node.can_focus:
        node.focus()
    await app.run_action(offered_key.binding.action, node)


class RunsProvider(Provider):
    """Palette provider for stored runs, which open on the Runs screen."""

    async def startup(self) -> None:
        """Read the list of runs in a thread."""
        from evener.balancer.store.runs import list_runs

        self._runs = await asyncio.to_thread(list_runs)

    async def search(self, query: str) -> Hits:
        """Yield the runs whose id, workload or devices match the query."""
        matcher = self.matcher(query)
        for run in self._runs:
            words = plain(f"Run {run.run} {run.workload} {' '.join(run.devices)}", 120)
            score = matcher.match(words)
            if score > 0:
                command = partial(self._open, run.run)
                shown = entry("", matcher.highlight(words), f"{run.state}: open it")
                yield Hit(score, shown, command, text=words)

    async def _open(self, name: str) -> None:
        from .screens.runs import RunsScreen

        await self.app.switch_mode("runs")
        screen = self.app.screen
        if isinstance(screen, RunsScreen):
            await screen.go_to(name)


class SettingsProvider(Provider):
    """Palette provider for settings, which open in the settings dialog."""

    async def search(self, query: str) -> Hits:
        """Yield the settings whose label matches the query."""
        from .screens.settings_dialog import LABELS

        app = cast(BaseApp, self.app)
        matcher = self.matcher(query)
        for label in LABELS:
            words = f"Setting: {label}"
            score = matcher.match(words)
            if score > 0:
                show = partial(app.run_action, f"app.settings({label!r})")
                shown = entry("", matcher.highlight(words), "change it")
                yield Hit(score, shown, show, text=words)
