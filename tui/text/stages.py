"""The stages of a search in a word or two, the same in the app and in a report."""

from __future__ import annotations

from evener.balancer.types import Stage

STAGE_WORDS: dict[Stage, str] = {
    "solo": "alone",
    "rest": "alone",
    "part": "a part",
    "split": "split",
    "shard": "shards",
    "race": "race",
    "pack": "packed",
    "knobs": "knobs",
    "check": "check",
}
