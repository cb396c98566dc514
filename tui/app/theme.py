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


def _theme(name: str, base: tuple[str, ...], meanings: dict[str, str], *, dark: bool) -> Theme:
    """A theme of `base` colours: primary, secondary, accent, warning, error, foreground, background, panel."""
    primary, secondary, accent, warning, error, foreground, background, panel = base
    return Theme(
        name=name,
        primary=primary,
        secondary=secondary,
        accent=accent,
        success=accent,
        warning=warning,
        error=error,
        foreground=foreground,
        background=background,
        surface=background,
        panel=panel,
        dark=dark,
        variables=meanings | {"footer-key-foreground": primary, "footer-background": panel},
    )


_BASE_DARK = ("#58b4f0", "#b794f4", "#5fd38d", "#f0b450", "#ff6b70", "#d3dbe7", "#0d1219", "#161d28")
_BASE_LIGHT = ("#0b62c4", "#7e3fc4", "#15803d", "#9a5b00", "#c4212b", "#1d2530", "#fbfcfe", "#e6ebf2")
DARK = _theme("evener-dark", _BASE_DARK, DARK_MEANINGS, dark=True)
LIGHT = _theme("evener-light", _BASE_LIGHT, LIGHT_MEANINGS, dark=False)
