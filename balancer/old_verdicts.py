"""Convert verdicts in old journals to today's field names."""

from __future__ import annotations

from typing import Any

# fields of the verdict: the old name and today's
RENAMED = (
    ("figure", "rate"),
    ("advice", "recommendation"),
    ("retreats", "replaced"),
    ("few_steps", "short_epoch"),
    ("unequal_twins", "unequal_devices"),
)
# fields of its parts: today's name of the part, the field's old name and its name today
RENAMED_IN = (
    ("chosen", "answer", "description"),
    ("recommendation", "answer", "description"),
    ("rivals", "figure", "rate"),
    ("rivals", "earlier", "earlier_samples_per_second"),
    ("sum_loss", "part", "fraction"),
    ("unequal_devices", "times", "ratio"),
    ("left_out", "what", "kind"),
    ("left_out", "why", "detail"),
    ("replaced", "wished", "original"),
    ("replaced", "instead", "replacement"),
    ("short_epoch", "most", "largest_batch"),
    ("learning", "scale", "noise_scale"),
    ("learning", "speed", "relative_speed"),
    ("learning", "extra", "extra_samples"),
    ("state", "whole_on", "fits_on"),
    ("state", "held", "shard_bytes"),
)


def upgrade_verdict(verdict: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a verdict, as read from JSON, with its fields renamed to today's names.

    The copy is shallow: the objects nested in it are shared with `verdict`, and changed in place.
    """
    upgraded = dict(verdict)
    for old, new in RENAMED:
        _rename(upgraded, old, new)
    for part, old, new in RENAMED_IN:
        _rename(upgraded.get(part), old, new)
    state = upgraded.get("state")
    if isinstance(state, dict):
        _rename(state.get("adapters"), "words", "description")
        _rename(state.get("adapters"), "fits", "fits_on")
    return upgraded


def _rename(value: Any, old: str, new: str) -> None:
    """Rename a key in an object, or in each object of a list; other values are ignored."""
    objects = value if isinstance(value, list) else [value]
    for each in objects:
        if isinstance(each, dict) and old in each:
            each[new] = each.pop(old)
