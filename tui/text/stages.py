"""Short words for the stages of a search."""

from __future__ import annotations

from evener.balancer.types import Stage

STAGE_WORDS: dict[Stage, str] = {
    Stage.SOLO: "alone",
    Stage.REST: "alone",
    Stage.PART: "a part",
    Stage.SPLIT: "split",
    Stage.SHARD: "shards",
    Stage.RACE: "race",
    Stage.PACK: "packed",
    Stage.KNOBS: "knobs",
    Stage.CHECK: "check",
}
