"""The two themes, and the colours that have a meaning on every screen."""

from __future__ import annotations

from textual.theme import Theme

_DEVICES_DARK = ("#6cb6ff", "#f0a45d", "#7bd88f", "#d2a8ff", "#f47ba6", "#56d4dd", "#e6d16b", "#a5b4c8")
_DEVICES_LIGHT = ("#0b62c4", "#b35309", "#15803d", "#7e3fc4", "#c0266b", "#0e7490", "#8a6a00", "#556274")


def _meanings(colours: dict[str, str], devices: tuple[str, ...]) -> dict[str, str]:
    """Theme variables: one for each tone of `evener.tui.view.cells` that Textual's themes lack."""
    return {f"ev-{name}": colour for name, colour in colours.items()} | {
        f"ev-device{position}": colour for position, colour in enumerate(devices)
    }


DARK_MEANINGS = _meanings(
    {
        "dim": "#76839a",
        "title": "#93a1b8",
        "strong": "#f2f6fc",
        "accent": "#58b4f0",
        "memory": "#b794f4",
        "power": "#e5b567",
        "speed": "#5fd38d",
        "track": "#2f3a4a",
        "frame": "#2c3646",
        "frame-focus": "#4f8cc9",
        "cursor": "#1f3147",
        "bar": "#161d28",
    },
    _DEVICES_DARK,
)
LIGHT_MEANINGS = _meanings(
    {
        "dim": "#66717f",
        "title": "#4d5866",
        "strong": "#0d1117",
        "accent": "#0b62c4",
        "memory": "#7e3fc4",
        "power": "#9a5b00",
        "speed": "#15803d",
        "track": "#ccd3dc",
        "frame": "#c3cbd6",
        "frame-focus": "#0b62c4",
        "cursor": "#d7e8fb",
        "bar": "#e6ebf2",
    },
    _DEVICES_LIGHT,
)

DARK = Theme(
    name="evener-dark",
    primary="#58b4f0",
    secondary="#b794f4",
    accent="#5fd38d",
    success="#5fd38d",
    warning="#f0b450",
    error="#ff6b70",
    foreground="#d3dbe7",
    background="#0d1219",
    surface="#0d1219",
    panel="#161d28",
    dark=True,
    variables=DARK_MEANINGS | {"footer-key-foreground": "#58b4f0", "footer-background": "#161d28"},
)
LIGHT = Theme(
    name="evener-light",
    primary="#0b62c4",
    secondary="#7e3fc4",
    accent="#15803d",
    success="#15803d",
    warning="#9a5b00",
    error="#c4212b",
    foreground="#1d2530",
    background="#fbfcfe",
    surface="#fbfcfe",
    panel="#e6ebf2",
    dark=False,
    variables=LIGHT_MEANINGS | {"footer-key-foreground": "#0b62c4", "footer-background": "#e6ebf2"},
)
