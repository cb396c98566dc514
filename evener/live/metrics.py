"""Metrics of this process's training run for experiment trackers."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping, Sequence
from itertools import chain

from .files import LiveDevice, LiveRecord, read_trainings
from .reporter import INTERVAL_SECONDS, Reporter, newest_reporter

PREFIX = "evener/"  # prefix of every name; trackers group metrics by it


class _Cache:
    """The last metrics, and the time until which they can be reused."""

    # `metrics` may be called in every step, but files change only twice a second

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = weakref.ref(reporter)
        self.pid = os.getpid()
        self.until = 0.0  # monotonic seconds
        self.found: dict[str, float] = {}


_cache: _Cache | None = None


def metrics() -> dict[str, float]:
    """Return metrics of the current training run, by names such as "evener/samples_per_second".

    Names such as "evener/rank0/rows" are for one of the ranks on this host. Times are in
    milliseconds. Metrics that are unknown or 0 are left out. Returns {} before the first report.
    """
    global _cache
    reporter = newest_reporter()
    if reporter is None:
        return {}
    cache = _cache
    now = time.monotonic()
    if cache is None or cache.reporter() is not reporter or cache.pid != os.getpid():
        cache = _cache = _Cache(reporter)
    if now >= cache.until:
        own = reporter.read()
        cache.found = join_metrics(_find_local_ranks(own)) if own is not None else {}
        cache.until = now + INTERVAL_SECONDS
    return dict(cache.found)


def _find_local_ranks(own_record: LiveRecord) -> Sequence[LiveRecord]:
    """Return the records of all ranks of this training run on this host.

    `own_record` is this process's record.
    """
    if not own_record.training:
        return (own_record,)
    every = [training for training in read_trainings() if training.training == own_record.training]
    others = [each for each in every if each.pid != os.getpid()]
    return (own_record, *(each for each in others if each.rank != own_record.rank))


def join_metrics(ranks: Sequence[LiveRecord]) -> dict[str, float]:
    """Return the metrics of a training run, computed from the records of its ranks."""
    ranks = sorted(ranks, key=lambda each: each.rank)
    found = _join_training(ranks)
    placed = list(chain.from_iterable(_number_devices(rank) for rank in ranks))
    rows = sum(device.batch for _, device in placed)
    for number, device in placed:
        for name, metric in _describe_device(device, rows).items():
            found[f"rank{number}/{name}"] = metric
    return {f"{PREFIX}{name}": float(metric) for name, metric in found.items()}


def _join_training(ranks: Sequence[LiveRecord]) -> dict[str, float]:
    """Return the metrics of the whole training run, from the records of its ranks."""
    speed = sum(rank.samples_per_second for rank in ranks)
    plan = max(rank.plan_samples_per_second for rank in ranks)
    seen = len({rank.rank for rank in ranks})
    is_whole = seen >= max(rank.world for rank in ranks)
    # rates are summed, and times are the slowest rank's
    joined = {
        "samples_per_second": speed,
        "tokens_per_second": sum(rank.tokens_per_second for rank in ranks),
        "of_plan": speed / plan if plan and is_whole else 0.0,
        "step_ms": 1000 * max(rank.step_s for rank in ranks),
        "input_ms": 1000 * max(rank.input_s for rank in ranks),
        "between_ms": 1000 * max(rank.between_s for rank in ranks),
        "out_of_memory_passes": sum(rank.retreats for rank in ranks),
    }
    return _drop_zeros(joined)


def _describe_device(device: LiveDevice, rows: int) -> dict[str, float]:
    """Return the metrics of one device. `rows` is the number of rows of all devices in a step."""
    own = {
        "rows": device.batch,
        "share": device.batch / rows if rows else 0.0,
        "samples_per_second": device.samples_per_second,
        "own_work_ms": 1000 * device.own_work_s,
    }
    found = _drop_zeros(own)
    if device.own_work_s:
        found["waiting_ms"] = 1000 * device.waiting_s
    return found


def _drop_zeros(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: metric for name, metric in metrics.items() if metric}


def _number_devices(record: LiveRecord) -> Sequence[tuple[int, LiveDevice]]:
    """Return the devices of a record, each with the number that identifies it in metric names.

    If a process has a single device, the number is its rank.
    """
    devices = record.devices or (LiveDevice("", -1, 0, record.samples_per_second),)
    first = max(0, record.rank) if len(devices) == 1 else 0
    return tuple(enumerate(devices, first))
