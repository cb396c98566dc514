"""The two themes, and the colours that have a meaning on every screen."""

from __future__ import annotations

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
DARK_MEANINGS, LIGHT_MEANINGS = (
    {f"ev-{name}": colours[light] for name, colours in _MEANINGS.items()} for light in (False, True)
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
