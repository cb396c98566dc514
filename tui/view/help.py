"""The help page: keys by screen, and what the marks mean."""

from __future__ import annotations

from collections.abc import Sequence

from .cells import Line, Mark, Span, Tone, line, text_lines, wrap

_KEYS = {
    "Everywhere": (
        ("1 2 3 4", "Monitor, Balance, Runs, Trainings"),
        ("Tab", "next panel"),
        ("↑ ↓ j k", "move; Page Up, Page Down, Home, End"),
        ("Enter", "details of the row"),
        ("Ctrl-P", "command palette"),
        ("T", "dark or light"),
        ("? h F1", "this page"),
        ("q, Ctrl-C", "quit, quit at once"),
    ),
    "Lists of processes and runs": (
        ("/", "filter; Esc ends it and removes all marks"),
        ("s F6, S", "sort by the next column, reverse the order"),
        ("Space", "mark: K and d act on all marked rows"),
    ),
    "Monitor, Trainings": (
        ("p", "pause the picture, resume"),
        ("+ -", "sample more or less often"),
        ("r F5", "redraw"),
    ),
    "Monitor": (("K F9", "send a signal, after asking; not with --readonly"),),
    "Balance": (
        ("Ctrl-S", "start what the form says"),
        ("p", "pause: no new probe starts; resume"),
        ("x", "stop; the best plan so far is kept"),
        ("n", "new search, when the last one has ended"),
    ),
    "Runs": (
        ("Space", "compare this run with the one under the cursor"),
        ("r Enter", "replay its journal"),
        ("d Delete", "delete, after asking"),
        ("F5", "reload"),
    ),
    "A run that has ended": (
        ("c", "continue: measure more"),
        ("e", "export the plan as TOML or JSON"),
        ("w", "write the report as HTML"),
        ("t", "the traceback, if something failed"),
    ),
}


def help_lines(notes: Sequence[str], width: int) -> tuple[Line, ...]:
    """The whole page in lines of `width` cells."""
    lines: list[Line] = []
    for title, keys in _KEYS.items():
        lines.append(line(Span(title, "strong")))
        for key, text in keys:
            lines += _entry(key, text, "key", width)
    lines += [line(), line(Span("Figures", "strong")), *_legend(width)]
    if notes:
        lines += [line(), line(Span("This machine", "strong"))]
        lines += [row for note in notes for row in text_lines(note, width, 6, "warn", indent=2)]
    return tuple(lines)


def _entry(sign: str, text: str, tone: Tone, width: int) -> list[Line]:
    rows = wrap(text, max(8, width - 14), 4)
    signs = [sign, *[""] * (len(rows) - 1)]
    return [line(Span(f"  {sign:<12}", tone), Span(row)) for sign, row in zip(signs, rows, strict=True)]


def _legend(width: int) -> list[Line]:
    rows: tuple[tuple[str, str, Tone], ...] = (
        (Mark.NONE, "this device doesn't report it", "dim"),
        (Mark.PENDING, "not read yet: a rate needs two readings", "dim"),
        (f"{Mark.DENIED} denied", "this user may not read it", "dim"),
        (f"{Mark.LOST} lost", "the device or its driver is gone", "bad"),
        (f"{Mark.STALE}62", "an old value; details say how old", "dim"),
        (Mark.ALARM, "the device reported an error; details say which", "bad"),
        ("12P", "12 % of the time throttled: P power, T thermal, B brake, S sync or software, H hardware", "warn"),
        ("history", "samples/s where a training reports them, else utilisation", "speed"),
        ("link", "PCIe and NVLink together, both ways, in bytes/s", "text"),
        ("work", "the part of a training's step that isn't waiting for other ranks", "speed"),
        ("SM TC DR", "multiprocessors, tensor cores, memory bandwidth: per cent busy", "text"),
    )
    return [entry for sign, text, tone in rows for entry in _entry(sign, text, tone, width)]
