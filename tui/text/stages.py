"""Short names for the stages of a search, shared by the app and the report."""

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
