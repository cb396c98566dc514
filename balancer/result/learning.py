"""The cost of a free batch in learning, beside its samples/s, by the noise scale of a training
where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from evener.training.noise_scale import ENDLESS, NoiseScale, extra_rows, rate_gain, worth

from ..request import Job
from ..types import Finding, Layout, Result, Said

if TYPE_CHECKING:
    from ..search.search import Search  # which the app's first frame does without

SENTENCES = {
    "learning.unknown": (
        "A larger batch needs more samples for the same loss; how many isn't known{measure:measure}"
    ),
    "learning.worth": "At a noise scale of {scale:scale}, {samples} samples a step are worth "
    "{worth:worth} of as many"
    " in small batches",
    "learning.against": "{samples} samples: about {speed:x} the samples/s of {own}, and "
    "{extra:about_x} "
    "the samples for"
    " the same loss",
    "rate.advice": "For the learning rate of {own} samples a step, try Adam's {root:times} (square "
    "root) or SGD's"
    " {linear:times} (linear, while the batch is below the noise scale)",
    "rate.gain": "For the learning rate of {own} samples a step, try Adam's {root:times} (square "
    "root) or SGD's"
    " {gain:times} (AdaScale)",
    "request.learn": "--learn trains a PyTorch workload of yours on real devices, and "
    "{workload} here "
    "isn't one.\n"
    "Leave --learn out, or give --noise-scale.",
    "request.learn_batch": (
        "--learn trains at your script's own batch, which isn't known.\nAdd --own-batch."
    ),
    "request.learned": (
        "{seconds:g} s were too short for a noise scale, which takes 48 steps.\nGive "
        "--learn more time."
    ),
    "request.no_noise": (
        "No noise scale was measured{name:in}.\nTrain with evener run --noise, some 400 steps."
    ),
}
MEASURES = {
    "": "",
    "run": ": evener run --noise measures it",
    "learn": ": evener balance --learn 60s measures it",
}
Point = tuple[
    int, float, float
]  # global batch, samples/s, samples/s in small batches that learn as fast


def find_learning(job: Job, chosen: Result, search: Search) -> Iterator[Finding]:
    """Findings on a plan's batch: its samples' worth, and its learning rate."""
    request, layout, scale = job.request, chosen.layout, job.request.noise_scale
    own, batch = request.own_batch, layout.global_batch
    if not layout.traits.by_shares:
        return
    if request.global_batch is None:
        unknown = Finding("learning.unknown", {"measure": _find_measure(job, layout)})
        yield _find_worth(scale, own, chosen, search) if scale else unknown
    if own is not None and own != batch:
        gain = rate_gain(own, batch, scale.safe_rows) if scale else None
        values = {
            "samples": batch,
            "own": own,
            "root": (batch / own) ** 0.5,
            "linear": batch / own,
            "gain": gain,
        }
        yield Finding("rate.advice" if scale is None else "rate.gain", values)


def _find_measure(job: Job, layout: Layout) -> str:
    """The key in MEASURES of the command that measures the noise scale of this job's training;
    empty if none does.
    """
    if job.framework != "torch" or job.simulated:
        return ""
    if len(layout.active) > 1:
        return "run"
    return "learn" if ":" in job.workload else ""


def find_frontier(said: Said) -> list[Point]:
    """Each measured batch that is faster than all smaller ones, and its worth; nothing without a
    noise scale.
    """
    return next((one.values["frontier"] for one in said.verdict if "frontier" in one.values), [])


def _find_worth(scale: NoiseScale, own: int | None, chosen: Result, search: Search) -> Finding:
    """What the chosen batch is worth, against the script's `own` where that is known; its values
    have the frontier.
    """
    batch, frontier = chosen.layout.global_batch, list[Point]()
    results = [
        chosen if one.layout == chosen.layout else one for one in search.results()
    ]  # one figure for a layout
    for one in sorted(results, key=lambda one: (one.layout.global_batch, -one.throughput.value)):
        size, rate = one.layout.global_batch, one.throughput.value
        if one.layout.traits.by_shares and (not frontier or rate > frontier[-1][1]):
            frontier.append((size, rate, rate * worth(size, scale.safe_rows)))
    values: dict[str, Any] = {
        "samples": batch,
        "scale": msgspec.to_builtins(scale),
        "worth": [worth(batch, each) for each in (scale.safe_rows, scale.low, scale.high)],
        "frontier": frontier,
    }
    speed = search.model.rate_of(own) if own else 0.0
    if scale.high >= ENDLESS or own is None or own == batch or not speed:
        return Finding("learning.worth", values)
    ends = sorted(extra_rows(own, batch, each) for each in (scale.low, scale.high))
    values |= {"own": own, "extra": [extra_rows(own, batch, scale.rows), *ends]}
    return Finding("learning.against", values | {"speed": chosen.throughput.value / speed})
