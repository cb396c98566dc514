"""Other methods to choose a layout, with the same prober and the same number of probes.

The best layout that a method measured counts. A rival is a generator: it yields layouts to measure
at the same time and is sent the observations, or None when its probes are used up. `batch` is None
for a free global batch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator

from evener.balancer.types import Layout, Observation, OutOfMemory, Timed, layout_of, solo
from evener.shares.whole_rows import apportion, even

Asks = Generator[tuple[Layout, ...], list[Observation], None]
Rival = Callable[
    [int, int | None, int], Asks
]  # called with the number of devices, the global batch and the seed

COMMON = 64  # samples; speeds are compared at this batch
START = 8  # samples per device; doubling starts here
GAIN = 0.5  # OmniLearn: gain of a correction
LARGEST_SHARE = 8192  # samples; upper limit of a blind search


def even_split(devices: int, batch: int | None, _seed: int) -> Asks:
    """Split evenly; a free global batch is the largest one, found by doubling and bisection."""
    yield from _largest(lambda total: even(total, devices), devices, batch)


def by_common_speed(devices: int, batch: int | None, _seed: int) -> Asks:
    """Divide rows in proportion to the solo speeds at one common batch."""
    seen = yield tuple(solo(devices, i, COMMON) for i in range(devices))
    rates = [o.samples_per_second if isinstance(o, Timed) else 0.0 for o in _in_order(seen)]
    rates = rates if any(rates) else [1.0] * devices
    yield from _largest(lambda total: apportion(total, rates), devices, batch)


def by_largest_batch(devices: int, batch: int | None, _seed: int) -> Asks:
    """Find each device's largest batch, then divide rows in proportion to the speeds there.

    The largest batch is found by doubling and bisection.
    """
    low, high, rate = [0] * devices, [0] * devices, [0.0] * devices
    while open_devices := [
        i for i in range(devices) if not high[i] or high[i] - low[i] > max(1, 0.03 * low[i])
    ]:
        sizes = {
            i: (low[i] + high[i]) // 2 if high[i] else max(START, 2 * low[i]) for i in open_devices
        }
        for o in _in_order((yield tuple(solo(devices, i, size) for i, size in sizes.items()))):
            (i,) = o.probe.layout.active
            if isinstance(o, Timed):
                low[i], rate[i] = sizes[i], o.samples_per_second
            else:
                high[i] = sizes[i]
    if batch is not None:
        yield (layout_of(apportion(batch, rate)),)
        return
    scale = min(low[i] / rate[i] for i in range(devices) if rate[i])
    yield from _largest(
        lambda total: apportion(total, rate), devices, None, round(scale * sum(rate))
    )


def omnilearn(devices: int, batch: int | None, _seed: int) -> Asks:
    """A proportional controller: each share follows its own speed in the last step.

    Source: OmniLearn by Tyagi and Sharma.
    """
    total, failed, ratios = batch or START * devices, 0, [1.0] * devices
    while True:
        shares = apportion(total, ratios)
        (o,) = yield (layout_of(shares),)
        if isinstance(o, Timed):
            speeds = [
                share / own if own else 0.0
                for share, own in zip(shares, o.device_seconds, strict=True)
            ]
            whole = math.fsum(speeds) or 1.0
            wanted = [speed / whole for speed in speeds]
            now = [share / total for share in shares]
            ratios = [
                max(1e-6, (1 - GAIN) * a + GAIN * b) for a, b in zip(now, wanted, strict=True)
            ]
            if batch is None:
                total = 2 * total if not failed else max(total, round((total + failed) / 2))
        else:
            if batch is not None:
                ratios = [
                    max(1e-6, r * (0.7 if i in _short(o) else 1.0)) for i, r in enumerate(ratios)
                ]
                continue
            failed = total
            total = round(total * 0.7)


def at_random(devices: int, batch: int | None, seed: int) -> Asks:
    """Try random shares of random global batches."""
    rng = random.Random(f"random/{seed}")
    while True:
        parts = [rng.expovariate(1.0) for _ in range(devices)]
        span = math.log(LARGEST_SHARE / START)
        total = batch or round(devices * START * math.exp(rng.uniform(0, span)))
        yield (layout_of(apportion(max(total, devices), parts)),)


def optuna_tpe(devices: int, batch: int | None, seed: int) -> Asks:
    """Use Optuna's tree-structured Parzen estimator after four random trials."""
    import optuna

    yield from _optuna(optuna.samplers.TPESampler(seed=seed, n_startup_trials=4), devices, batch)


def optuna_gp(devices: int, batch: int | None, seed: int) -> Asks:
    """Use Optuna's Gaussian process after four random trials."""
    import optuna

    yield from _optuna(optuna.samplers.GPSampler(seed=seed, n_startup_trials=4), devices, batch)


RIVALS: dict[str, Rival] = {
    "even split": even_split,
    "by speed at one batch": by_common_speed,
    "by largest batch": by_largest_batch,
    "OmniLearn rule": omnilearn,
    "random": at_random,
    "Optuna TPE": optuna_tpe,
    "Optuna GP": optuna_gp,
}


def _optuna(sampler: object, devices: int, batch: int | None) -> Asks:
    """Search the share of each device for a free batch, or its weight for a fixed one.

    A layout that doesn't fit scores 0.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    while True:
        asked = study.ask()
        if batch is None:
            sizes = [
                asked.suggest_int(f"share{i}", 1, LARGEST_SHARE, log=True) for i in range(devices)
            ]
        else:
            sizes = list(
                apportion(
                    batch, [asked.suggest_float(f"weight{i}", 0.01, 1.0) for i in range(devices)]
                )
            )
        (o,) = yield (layout_of(tuple(sizes)),)
        study.tell(asked, o.samples_per_second if isinstance(o, Timed) else 0.0)


def _largest(
    shares: Callable[[int], tuple[int, ...]],
    devices: int,
    batch: int | None,
    start: int | None = None,
) -> Asks:
    """Try the fixed batch once; or find the largest free one by doubling and bisection."""
    if batch is not None:
        yield (layout_of(shares(batch)),)
        return
    low, high = 0, 0
    size = start or START * devices
    while not high or high - low > max(devices, 0.01 * low):
        (o,) = yield (layout_of(shares(size)),)
        if isinstance(o, Timed):
            low = size
        else:
            high = size
        size = (low + high) // 2 if high else 2 * size
        if size < devices:
            return


def _in_order(seen: list[Observation]) -> list[Observation]:
    return sorted(seen, key=lambda o: o.probe.layout.active)


def _short(seen: Observation) -> tuple[int, ...]:
    return seen.devices if isinstance(seen, OutOfMemory) else ()
