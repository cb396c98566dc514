"""Facts that children report about themselves, gathered for the plan's fingerprint and the search."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import msgspec

from evener.devices.registry import all_backends

from ..request import Job, deals_by_cost
from .prober import Facts

_FRAMEWORKS = ("tensorflow", "keras", "torch")


def add_facts(before: Facts, found: Mapping[str, str], engine: str, resolved: Job) -> Facts:
    """The facts with those of one more child; `engine` keeps its split in step, empty if it isn't a split.

    The digest is that of the first: the model's own, which a training script compares with its model, if it has one.
    """
    names = (*_FRAMEWORKS, *(name for backend in all_backends() for name in backend.device_words))
    parts = [resolved.workload, resolved.request.settings, found.get("parameters", "")]
    own = found.get("digest") or blake2b(msgspec.json.encode(parts), digest_size=8).hexdigest()
    by_cost = deals_by_cost(resolved.request, resolved.framework)
    return Facts(
        versions=before.versions | {name: found[name] for name in names if name in found},
        driver=before.driver,
        engine=engine or before.engine,
        workload_digest=before.workload_digest or own,
        batch_statistics=found.get("batch_statistics", ""),
        rows=int(found.get("rows", 0)),
        lengths=tuple(map(int, found.get("lengths", "").split())) if by_cost else (),
        longest_row=int(found.get("longest_row", -1)),
    )
