"""The two themes, and the colours that have a meaning on every screen."""

from __future__ import annotations

from typing import Any

from textual.theme import Theme

_MEANINGS = {  # on dark and on light: one for each tone of `evener.tui.view.cells` that Textual's themes lack
    "dim": ("#76839a", "#66717f"),
    "title": ("#93a1b8", "#4d5866"),
    "strong": ("#f2f6fc", "#0d1117"),
    "accent": ("#58b4f0", "#0b62c4"),
    "memory": ("#b794f4", "#7e3fc4"),
    "power": ("#e5b567", "#9a5b00"),
    "speed": ("#5fd38d", "#15803d"),
    "track": ("#2f3a4a", "#ccd3dc"),
    "frame": ("#2c3646", "#c3cbd6"),
    "frame-focus": ("#4f8cc9", "#0b62c4"),
    "cursor": ("#1f3147", "#d7e8fb"),
    "bar": ("#161d28", "#e6ebf2"),
    "device0": ("#6cb6ff", "#0b62c4"),
    "device1": ("#f0a45d", "#b35309"),
    "device2": ("#7bd88f", "#15803d"),
    "device3": ("#d2a8ff", "#7e3fc4"),
    "device4": ("#f47ba6", "#c0266b"),
    "device5": ("#56d4dd", "#0e7490"),
    "device6": ("#e6d16b", "#8a6a00"),
    "device7": ("#a5b4c8", "#556274"),
}
_BASE = {  # Textual's own
    "primary": ("#58b4f0", "#0b62c4"),
    "secondary": ("#b794f4", "#7e3fc4"),
    "accent": ("#5fd38d", "#15803d"),
    "success": ("#5fd38d", "#15803d"),
    "warning": ("#f0b450", "#9a5b00"),
    "error": ("#ff6b70", "#c4212b"),
    "foreground": ("#d3dbe7", "#1d2530"),
    "background": ("#0d1219", "#fbfcfe"),
    "surface": ("#0d1219", "#fbfcfe"),
    "panel": ("#161d28", "#e6ebf2"),
}


def meanings(*, dark: bool) -> dict[str, str]:
    """The variables that Textual's themes lack."""
    return {f"ev-{key}": colours[not dark] for key, colours in _MEANINGS.items()}


def _theme(name: str, *, dark: bool) -> Theme:
    base: dict[str, Any] = {key: colours[not dark] for key, colours in _BASE.items()}
    footer = {"footer-key-foreground": base["primary"], "footer-background": base["panel"]}
    return Theme(name, dark=dark, variables=meanings(dark=dark) | footer, **base)


DARK = _theme("evener-dark", dark=True)
LIGHT = _theme("evener-light", dark=False)
