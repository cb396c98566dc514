"""Write a verdict as the sentences that users read.

To add a sentence, write a generator function of the verdict and list it in `REMARKS`, or in
`WARNINGS` if it is a reason not to trust the result.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence

import msgspec

from evener.devices.registry import find_backend, is_simulated
from evener.plan.file import Plan
from evener.training.limits import LimitKind, TrainingLimit
from evener.training.noise_scale import write_scale

from ..events import Finished
from ..families import MOST_NAMED as MOST_DEVICES
from ..number_format import (
    count_samples,
    factor,
    half_width,
    join_words,
    milliseconds,
    percent,
    rate,
    relative_error,
    size,
)
from ..number_format import write_error as write_half
from ..objectives import find_objective
from ..search.layouts import TIE
from ..types import Interval
from ..verdict import (
    LayoutKind,
    LeftOut,
    MeasuredRate,
    RateGap,
    RepeatedBuild,
    Rival,
    SumLoss,
    Unfinished,
    Verdict,
    VerdictDoubt,
)
from .advice import find_single
from .rivals import KNOBS, is_rough, printed_gain
from .state_memory import write_state_memory

BETWEEN = "   "  # between the parts of the headline
EXACT = 0.0005  # a relative error that isn't printed, because it rounds to 0.0 %
ALTERNATELY = "measured alternately"
SIMULATED = "simulated: "
MOST_NAMED = 3  # most layouts in a sentence
MOST_TRIES = 4  # most layouts without memory in a sentence; of more, the first and the last
SPLITS = ("equal_shares", "other_shares", "sharded")
PLAIN_PARALLEL = {
    "torch": "plain DDP",
    "tensorflow": "plain MirroredStrategy",
    "none": "plain data parallelism",
}


class VerdictText(msgspec.Struct, frozen=True):
    """The result of a search as text for users."""

    description: str
    rate: str
    gains: str
    recommendation: str = ""  # what to do, in one sentence; empty for verdicts of older versions
    remarks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # reasons not to trust the measurements, and what was left out
    doubts: tuple[str, ...] = ()  # the warnings that are about the measurements

    @property
    def headline(self) -> str:
        """The recommended layout, its speed and its gains over other layouts, in one line."""
        return BETWEEN.join(part for part in (self.description, self.rate, self.gains) if part)

    @property
    def text(self) -> str:
        """The recommendation, the headline and the remarks, one per line, without the warnings."""
        return "\n".join(
            (*([self.recommendation] if self.recommendation else []), self.headline, *self.remarks)
        )


def write_verdict(verdict: Verdict) -> VerdictText:
    """Return the verdict of a search as text for users."""
    mark = SIMULATED if verdict.simulated else ""
    knobs = [KNOBS.get(knob, knob) for knob in verdict.chosen.knobs]
    with_knobs = f", with {join_words(knobs)}" if knobs else ""
    return VerdictText(
        f"{mark}{verdict.chosen.description}{with_knobs}",
        _write_plan_rate(verdict),
        ", ".join(_write_gains(verdict)),
        f"{mark}{_write_advice(verdict)}" if verdict.recommendation is not None else "",
        tuple(line for write in REMARKS for line in write(verdict)),
        tuple(line for write in WARNINGS for line in write(verdict)),
        tuple(_warn_of_doubts(verdict)),
    )


# ---------------------------------------------------------------------- the recommendation


def _write_advice(verdict: Verdict) -> str:
    """Return the recommendation as a sentence.

    If the search was stopped early, the sentence begins with "So far", because a layout that wasn't
    measured may be faster.
    """
    text = _write_action(verdict)
    stopped = verdict.stopped in ("interrupted", "cut_off")
    if stopped and text.startswith("Use "):
        return f"So far: {text[:1].lower()}{text[1:]}"
    return text


def _write_action(verdict: Verdict) -> str:
    advice = verdict.recommendation
    assert advice is not None
    if advice.action == "fix_code":
        return "Fix your code or data first: the loss was NaN or infinite, so nothing is learned."
    if advice.action == "measure_again":
        return f"Measure again before you decide: {_write_reason(verdict, advice.reason)}."
    if advice.action == "one_device":
        return f"Use one device, without a plan: {advice.description}."
    if advice.action == "plain_parallel":
        plain = PLAIN_PARALLEL.get(verdict.framework, PLAIN_PARALLEL["none"])
        return f"Use {plain}, without a plan: {advice.description}."
    return f"Use {PLANS[verdict.chosen.kind]}: {advice.description}."


PLANS: dict[LayoutKind, str] = {
    "equal_shares": "the plan's equal shares",
    "other_shares": "the plan's unequal shares",
    "one_device": "one device, with the plan",
    "sharded": "the plan's shards of the model",
    "side_by_side": "several trainings side by side",
    "placed": "the plan's placement",
}


def _write_reason(verdict: Verdict, reason: str) -> str:
    """Return why the user should measure again, as a clause without a period.

    `reason` is "uncompared", "uncertain", or the code of one of the verdict's doubts.
    """
    value = max((doubt.value for doubt in verdict.doubts if doubt.code == reason), default=0.0)
    if reason == "disturbed":
        return (
            f"other work took CPU time in {percent(value)} of the blocks of steps. Stop it and "
            f"repeat the command; the layout below is the best so far"
        )
    if reason == "changed":
        return (
            f"one layout was {percent(value)} faster in one measurement than in another. Repeat "
            f"the command while less else runs; the layout below is the best so far"
        )
    if reason == "uncompared":
        return (
            "the budget was over before these shares were compared with equal ones or with one "
            "device. Give it more time; the layout below is the best so far"
        )
    return (
        f"the samples/s are only known to {write_error(verdict.rate)}. Measure longer, while "
        f"less else runs; the layout below is the best so far"
    )


# ---------------------------------------------------------------------- the headline


def write_error(measured: MeasuredRate) -> str:
    """Return the error of a speed as a percentage of it, such as "± 3 %".

    The error is half of the width of the speed's interval.
    """
    return f"± {half_width(measured.samples_per_second, measured.low, measured.high)}"


def _write_plan_rate(verdict: Verdict) -> str:
    own = verdict.rate
    speed = f"{rate(own.samples_per_second)} samples/s"
    if not own.known:
        return f"{speed} {write_error(own)}, too uncertain to compare"
    exact = relative_error(own.samples_per_second, own.low, own.high) < EXACT
    shown = "" if exact else f" {write_error(own)}"
    if not own.tokens_per_second:
        return f"{speed}{shown}"
    gap = verdict.chosen.own_work_gap
    within = "" if gap is None else f", the devices' own work within {percent(gap)}"
    tokens = f"{rate(own.tokens_per_second)} tokens/s{shown}"
    return f"{tokens} ({speed}, {percent(own.padding)} padding{within})"


def _write_gains(verdict: Verdict) -> Iterator[str]:
    """Yield phrases with the plan's gains over equal shares, the best split and one device.

    Comparisons that make no sense for the plan's kind of layout are left out.
    """
    if not verdict.rate.known:
        return
    even = _find_even_split(verdict)
    if even is not None:
        over = "equal numbers of rows" if verdict.rate.tokens_per_second else "equal shares"
        yield _write_gain(verdict, even, over)
    split = find_best_split(verdict) if verdict.chosen.kind not in SPLITS else None
    if split is not None:
        yield _write_gain(verdict, split, _name_split(verdict, split))
    single = find_alone(verdict)
    if single is not None:
        yield _write_gain(verdict, single, single.name)
        yield from _write_each_training(verdict, single)


def _write_each_training(verdict: Verdict, single: Rival) -> Iterator[str]:
    """Yield a phrase that says how much longer a job takes if it shares the device with others."""
    chosen = verdict.chosen
    if chosen.trainings > 1 and single.gain is not None:
        seconds = chosen.global_batch * chosen.trainings / verdict.rate.samples_per_second
        times = seconds / (single.global_batch / single.rate.samples_per_second)
        yield f"each training takes {times:.1f} times as long"


def _find_even_split(verdict: Verdict) -> Rival | None:
    """Return the layout with equal shares that the sentences compare the plan with.

    Returns None if there is no such layout, if the plan has neither unequal shares nor a sharded
    model, or if the recommendation is to use one device.
    """
    chosen, advice = verdict.chosen, verdict.recommendation
    if chosen.kind not in ("other_shares", "sharded"):
        return None
    if advice is not None and advice.action == "one_device":
        return None
    evens = [rival for rival in verdict.rivals if rival.kind == "equal_shares"]
    wide = [one for one in evens if len(one.devices) >= len(chosen.devices)]
    # the fewest devices, but at least as many as the plan uses
    even = min(wide, key=lambda one: len(one.devices), default=None)
    return even if even is not None and _can_be_stated(even) else None


def find_best_split(verdict: Verdict) -> Rival | None:
    """Return the best layout over several devices that can be compared with the plan.

    If there is none, returns the best one whose samples/s are too uncertain to compare. Returns
    None if there is no such layout either.
    """
    splits = [rival for rival in verdict.rivals if rival.kind in SPLITS and _can_be_stated(rival)]
    return max(splits, key=lambda one: one.gain is not None, default=None)


def find_alone(verdict: Verdict) -> Rival | None:
    """Return the single device that the sentences compare the plan with, or None.

    It is the first single device among the verdict's rivals, other than the plan's own.
    """
    alone = [rival for rival in verdict.rivals if rival.kind == "one_device"]
    if verdict.chosen.kind == "one_device":
        alone = [one for one in alone if one.devices != verdict.chosen.devices]
    return alone[0] if alone and _can_be_stated(alone[0]) else None


def _name_split(verdict: Verdict, split: Rival) -> str:
    """Return the name of a layout over several devices, followed by the rows of each device.

    If there are many devices, their rows are left out.
    """
    # the global batch is added if it isn't the plan's; for many devices, the shares are left out
    name = _drop_batches(split)
    if split.kind != "equal_shares" and not name.startswith("another "):
        name = f"the {name}"
    other = split.global_batch != verdict.chosen.global_batch
    if len(split.batches) > MOST_DEVICES:
        return name + (f" of {count_samples(split.global_batch)}" if other else "")
    whole = f" = {count_samples(split.global_batch)}" if other else ""
    return f"{name} ({' + '.join(map(str, split.batches))}{whole})"


def _is_plural(name: str) -> bool:
    """Return whether the verb after a layout's name is plural, as in "equal shares are"."""
    plural = ("equal shares", "equal numbers", "shards", "other ")
    return name.removeprefix("the ").startswith(plural)


def _can_be_stated(rival: Rival) -> bool:
    """Return whether sentences for users can compare a layout with the plan.

    They can if the plan's gain over the layout is known, or if the layout's speed is too uncertain
    to compare: then they say that it is uncertain.
    """
    return rival.gain is not None or not rival.rate.known


def _interval(measured: MeasuredRate) -> Interval:
    return Interval(measured.samples_per_second, measured.low, measured.high)


def _write_gain(verdict: Verdict, rival: Rival, rival_name: str) -> str:
    """Return how much faster the plan is than a layout, such as "+20 % over equal shares".

    `rival_name` is the other layout's name in the sentence.
    """
    if not rival.rate.known or rival.gain is None:
        are = "are" if _is_plural(rival_name) else "is"
        return f"{rival_name} {are} too uncertain to compare ({write_error(rival.rate)})"
    if rival.tie:
        return _write_tie(rival, rival_name)
    in_turn = f" ({ALTERNATELY})" if rival.paired else ""
    error = _write_gain_error(verdict, rival)
    if error and rival.difference is not None and _half_width(rival.difference) >= abs(rival.gain):
        return _write_rough_gain(rival.difference, rival_name)
    size_of_gain = percent(abs(rival.gain), 0 if abs(rival.gain) >= 0.01 else 1)
    if rival.gain < 0:
        return f"{size_of_gain}{error} slower than {rival_name}{in_turn}"
    return f"+{size_of_gain}{error} over {rival_name}{in_turn}"


def _write_rough_gain(difference: RateGap, rival_name: str) -> str:
    """Return a gain that is only roughly known, such as "at least 2 % over equal shares".

    If the gain may be less than 1 %, the result says that it isn't certain. `rival_name` is the
    other layout's name in the sentence.
    """
    if difference.low >= 0.01:
        return f"at least {percent(difference.low, 0)} over {rival_name}"
    return f"whether it is faster than {rival_name} isn't certain"


def _write_gain_error(verdict: Verdict, rival: Rival) -> str:
    """Return the error of a gain, such as " ± 2 %", or "" if the measurements are precise."""
    intervals = (_interval(verdict.rate), _interval(rival.rate))
    if rival.difference is None or not (is_rough(*intervals) or _is_doubtful(verdict)):
        return ""
    half = _half_width(rival.difference)
    return f" ± {percent(half, 0 if half >= 0.01 else 1)}" if half >= EXACT else ""


def _is_doubtful(verdict: Verdict) -> bool:
    return verdict.recommendation is not None and verdict.recommendation.action == "measure_again"


def _half_width(difference: RateGap) -> float:
    """Return the error of a relative difference.

    This is half of the interval's width or, if that is larger, the distance from the value to the
    upper bound.
    """
    return max(difference.high - difference.value, (difference.high - difference.low) / 2)


def _write_tie(rival: Rival, rival_name: str) -> str:
    """Describe the difference in speed between the plan and a layout that ties with it.

    The result includes the error of the difference, and why it counts as a tie. `rival_name` is the
    layout's name in the sentence.
    """
    gap = rival.difference
    if gap is None:  # from an older version
        return f"as fast as {rival_name}"
    why = _write_why_equal(gap)
    if abs(gap.value) < EXACT:
        return f"as fast as {rival_name} ± {write_half(_half_width(gap))} ({why})"
    size_of_gap = percent(abs(gap.value), 1)
    word = "faster" if gap.value > 0 else "slower"
    return f"{size_of_gap} {word} than {rival_name} ± {write_half(_half_width(gap))} ({why})"


def _write_why_equal(gap: RateGap) -> str:
    """Return why a difference counts as a tie.

    It may be smaller than the measurement error, or too small to matter.
    """
    how = f"{ALTERNATELY}: " if gap.alternately else ""
    if gap.low <= 0 <= gap.high:
        return f"{how}too close to call"
    return f"{how}under {percent(TIE)}, which counts as equal"


# ---------------------------------------------------------------------- remarks


def _describe_limits(verdict: Verdict) -> Iterator[str]:
    """Yield a description of each bottleneck, with its time in a step and its remedy.

    Bottlenecks that the plan already removes are left out.
    """
    for limit in verdict.limits:
        if limit.taken_away:  # the plan's gain already includes it
            continue
        took = f"{milliseconds(limit.milliseconds / 1e3)} of a step, {percent(limit.share)}"
        by = f" Cause: {limit.by}." if limit.by else ""
        yield (
            f"Limited by {limit.kind.noun}: {took}. {limit.kind.meaning}{by} "
            f"{_write_promise(verdict, limit)} {limit.remedy}"
        )


def _describe_link(verdict: Verdict) -> Iterator[str]:
    """Yield a sentence about the link between the plan's devices.

    Yields nothing if another sentence already mentions the link.
    """
    named = any(limit.kind is LimitKind.EXCHANGE for limit in verdict.limits)
    # the sentence about an exchange that limits the training names the link
    if verdict.link is not None and not named:
        yield f"Link: {verdict.link.describe()}."


MUCH_MORE = 3.0  # relative to a gain: a larger upper bound is meaningless


def _write_promise(verdict: Verdict, limit: TrainingLimit) -> str:
    """Return a sentence with the samples/s that can be expected after a limit is removed."""
    speed = verdict.rate.samples_per_second
    low, high = rate(speed * (1 + limit.gain_low)), rate(speed * (1 + limit.gain_high))
    gain = f"+{percent(limit.gain)}"
    if limit.gain >= 2:
        gain = f"{factor(1 + limit.gain)} times as fast"
    about = f"about {rate(speed * (1 + limit.gain))} samples/s, {gain}"
    span = f" ({low} to {high})"
    if limit.gain_high > MUCH_MORE * (1 + limit.gain):
        span = f" ({low} or more)"
    if low == high:
        span = ""
    how = "Without it, measured" if limit.measured else "Expected with the remedy"
    return f"{how}: {about}{span}."


def _describe_equal_shares(verdict: Verdict) -> Iterator[str]:
    if not verdict.equal_shares or _is_doubtful(verdict):
        return
    what = f"the batch, {_samples(verdict)} a step"
    if verdict.batch_given:
        what = "shares that follow a device which gets slower (rebalance=True in your script)"
    plain = PLAIN_PARALLEL.get(verdict.framework, PLAIN_PARALLEL["none"])
    yield (
        f"Equal shares are right: {plain} trains this as fast; evener adds nothing here but {what}."
    )


def _describe_batch(verdict: Verdict) -> Iterator[str]:
    """Yield a sentence with the global batch that the search chose, if the user requested none."""
    if not verdict.batch_given and verdict.chosen.kind in (*SPLITS, "one_device"):
        yield f"You gave no --global-batch: evener chose {_samples(verdict)} a step."


def _name_better_known_layouts(verdict: Verdict) -> Iterator[str]:
    """Yield sentences about layouts that are faster than the plan and measured more precisely.

    There is one sentence for each layout, up to a maximum. Yields nothing if the plan's own speed
    is known precisely enough.
    """
    if verdict.rate.known:
        return
    own = verdict.rate.samples_per_second
    faster = [rival for rival in verdict.rivals if rival.rate.known]
    faster = [one for one in faster if one.rate.samples_per_second > own]
    for one in faster[:MOST_NAMED]:
        name, speed = one.name[:1].upper() + one.name[1:], rate(one.rate.samples_per_second)
        other = one.global_batch != _batch(verdict)
        at = f" at {count_samples(one.global_batch)} a step" if other else ""
        measured = f"{speed} samples/s {write_error(one.rate)}, which is known more precisely"
        full = _write_why_not(one) if one.why_not == "memory" else ""
        yield f"{name}{at} reached {measured}{full}."


def _suggest_one_device(verdict: Verdict) -> Iterator[str]:
    """Yield a sentence that suggests a single device, if it is as fast as several."""
    if verdict.chosen.kind == "one_device":
        split = find_best_split(verdict)
        if split is not None and split.tie:
            yield "One device is the simpler of the two: it exchanges nothing."
        return
    single = find_single(verdict)
    if single is not None and verdict.chosen.kind in ("equal_shares", "other_shares"):
        speed = rate(single.rate.samples_per_second)
        yield (
            f"One device is the simpler way: {single.name} reached {speed} samples/s, which is as "
            f"fast, and exchanges nothing."
        )


def _describe_split_loss(verdict: Verdict) -> Iterator[str]:
    """Yield a sentence about why several devices are slower than one.

    If no layout over several devices was measured at about the plan's batch size, another sentence
    says so.
    """
    loss = verdict.split_loss
    if verdict.split_unmeasured:
        yield f"No split over several devices was measured near {_samples(verdict)}."
    if loss is None:
        return
    longest = "" if loss.longest_seconds is None else milliseconds(loss.longest_seconds)
    if loss.cause == "exchange" and loss.exchange_seconds is not None:
        cost = milliseconds(loss.exchange_seconds)
        yield f"The split is slower because synchronizing the devices costs {cost} a step."
    elif loss.cause == "longest_part":
        whole = loss.whole_seconds
        all_rows = f", against {milliseconds(whole)} for all {_samples(verdict)}" if whole else ""
        yield (
            f"The split is slower because its longest part alone still takes {longest}{all_rows}."
        )
    else:
        part = f", its longest part alone {longest}" if longest else ""
        step = milliseconds(loss.step_seconds)
        yield f"The split is slower: its step takes {step}{part}; the rest is unexplained."


def _describe_sum_loss(verdict: Verdict) -> Iterator[str]:
    """Yield a sentence about why the plan is slower than the sum of the devices' solo speeds.

    A solo speed is what a device reaches when it trains alone.
    """
    loss = verdict.sum_loss
    if loss is None:
        return
    head = f"The plan reaches {percent(loss.fraction)} of the sum of all devices alone"
    slowed = [
        doubt.device for doubt in verdict.doubts if doubt.code == "throttled" and doubt.device
    ]
    if slowed:
        yield f"{head}: {join_words(slowed)} was held back while the devices trained together."
    else:
        yield f"{head}: {_write_cause(loss)}"


def _write_cause(loss: SumLoss) -> str:
    """Return why training on several devices together loses time, as the end of a sentence."""
    cost = milliseconds(loss.exchange_seconds or 0.0)
    exchange = f"synchronizing the devices costs {cost} a step"
    longest = milliseconds(loss.longest_seconds or 0.0)
    share = f"its longest share alone takes {longest}, as small batches are slower"
    if loss.cause == "exchange":
        return f"{exchange}."
    if loss.cause == "longest_part":
        return f"{share}."
    if loss.cause == "both":
        return f"{share}, and {exchange}."
    lost = f"a step takes {milliseconds(loss.lost_seconds)} longer"
    if loss.exchange_seconds is None:
        return f"{lost}. Why isn't known."
    return f"{lost}. Synchronizing explains {cost} of that; what takes the rest isn't known."


def _describe_state(verdict: Verdict) -> Iterator[str]:
    """Yield sentences about which devices have enough memory for the model's whole state.

    The state is the parameters, the gradients and the optimizer's state."""
    if verdict.state is not None:
        sentences = write_state_memory(verdict.state)
        if sentences:
            yield sentences


def _describe_idle_devices(verdict: Verdict) -> Iterator[str]:
    """Yield a sentence about each working device that the plan doesn't use."""
    for left_out in verdict.left_out:
        if left_out.reason == "not_faster" and verdict.rate.known:
            yield (
                f"{left_out.name} is left out: "
                f"the fastest split with it ({_write_split_with(left_out, verdict)}) reached "
                f"{rate(left_out.samples_per_second)} samples/s, {_write_loss(left_out.loss)}"
                f"{', which is too close to call' if left_out.tie else ''}."
            )
    untried = [left_out.name for left_out in verdict.left_out if left_out.reason == "not_tried"]
    if untried and verdict.stopped in ("interrupted", "cut_off"):
        yield f"No split with {join_words(untried)} was measured before the search was stopped."
    elif untried:
        are, they, them = ("is", "it", "it") if len(untried) == 1 else ("are", "they", "them")
        yield (
            f"{join_words(untried)} {are} left out: by the curves measured alone, {they} would "
            f"gain nothing, so no split with {them} was measured near {_samples(verdict)}."
        )


def _write_split_with(left_out: LeftOut, verdict: Verdict) -> str:
    """Return the rows and the devices of the fastest split with a device that was left out.

    The global batch is added if it isn't the plan's. Verdicts of older versions lack the devices.
    """
    words = left_out.detail
    if left_out.global_batch != verdict.chosen.global_batch:
        words += f" = {count_samples(left_out.global_batch)}"
    return f"{words} {_write_where(left_out.devices)}" if left_out.devices else words


def _write_loss(loss: float) -> str:
    """Return how much slower a layout is than the plan, such as "3.2 % less than the plan".

    `loss` is a fraction of the plan's speed. If it is negative, the result says "more" instead.
    """
    if abs(loss) < EXACT:
        return "no more than the plan"
    return f"{percent(abs(loss), 1)} {'less' if loss > 0 else 'more'} than the plan"


def _samples(verdict: Verdict) -> str:
    return count_samples(verdict.chosen.global_batch)


def _describe_faster_layouts(verdict: Verdict) -> Iterator[str]:
    """Yield sentences about layouts that are faster than the plan, and why they aren't used."""
    if not verdict.rate.known:
        return
    faster = [rival for rival in verdict.rivals if rival.why_not is not None]
    faster.sort(key=lambda one: -one.rate.samples_per_second)
    larger = _pick_named([one for one in faster if one.why_not == "tolerance"])
    if larger:
        found = [
            f"{one.global_batch} samples a step ({_write_batches(one)}) reach "
            f"{_write_faster(verdict, one)}"
            for one in larger
        ]
        part = percent(verdict.tolerance)
        slow = f"at most {part} slower than the fastest (--tolerance {part})"
        why = f"the plan is the smallest batch that is {slow}"
        if any(_relative_gain(verdict, one) > verdict.tolerance for one in larger):
            why = f"when it was chosen, the plan was the smallest batch that is {slow}"
        yield f"With a larger batch: {', '.join(found)}; {why}."
    for one in _pick_named([one for one in faster if one.why_not != "tolerance"]):
        name = one.name
        if one.why_not == "memory":
            name = f"{_drop_batches(one)} ({_write_batches(one)})"
        name = name[:1].upper() + name[1:]
        yield f"{name} reached {_write_faster(verdict, one)}{_write_why_not(one)}."


def _pick_named(rivals: Sequence[Rival]) -> list[Rival]:
    """Return the layouts to name in a sentence.

    These are the first few, and any others that have a line of their own in the result: equal
    shares and single devices.
    """
    listed = [one for one in rivals[MOST_NAMED:] if one.kind in ("equal_shares", "one_device")]
    return [*rivals[:MOST_NAMED], *listed]


def _write_faster(verdict: Verdict, rival: Rival) -> str:
    """Return a layout's samples/s, and how much faster it is than the plan.

    If it ties with the plan, the error of the difference is added.
    """
    speed = rate(rival.rate.samples_per_second)
    words = f"{speed} samples/s, {percent(_relative_gain(verdict, rival), 1)} more"
    gap = rival.difference
    if gap is None or not rival.tie:
        return words
    # the gap of the rival over the plan; `difference` is of the plan over the rival
    value, low = 1 / (1 + gap.value) - 1, 1 / (1 + gap.high) - 1
    error = f"± {write_half(max(value - low, _half_width(gap)))}"
    close = "too close to call" if gap.low <= 0 <= gap.high else f"under {percent(TIE)}"
    if not gap.alternately:
        return f"{words} {error} ({close})"
    more = f"{percent(abs(value), 1)} {'more' if value >= 0 else 'less'}"
    return f"{words} ({ALTERNATELY} {more} {error}: {close})"


def _relative_gain(verdict: Verdict, rival: Rival) -> float:
    """Return how much faster a layout is than the plan, as a fraction of the plan's speed.

    It is computed from the rounded samples/s that users read.
    """
    return printed_gain(rival.rate.samples_per_second, verdict.rate.samples_per_second)


def _write_why_not(rival: Rival) -> str:
    if rival.why_not == "objective":
        return "; the objective decides against it"
    if rival.why_not == "in_turn":
        return f"; {ALTERNATELY}, the plan is {percent(rival.gain or 0.0, 1)} faster"
    if rival.why_not == "tie":
        return "; the plan is simpler"
    if rival.why_not == "memory":
        return ", but nearly ran out of memory: a training by them is likely to fail"
    return ", before the plan was measured again: rates of different times differ by as much"


def _write_batches(rival: Rival) -> str:
    where = _write_where(rival.devices)
    if len(rival.devices) > MOST_DEVICES:
        return where
    return f"{' + '.join(map(str, rival.batches))} {where}"


def _write_where(devices: Sequence[str]) -> str:
    """Return "on" and the names of devices or, if there are many, their number."""
    many = len(devices) > MOST_DEVICES
    return f"on {len(devices)} devices" if many else f"on {' + '.join(devices)}"


def _explain_plus_minus(verdict: Verdict) -> Iterator[str]:
    """Yield a sentence that explains "±", if a comparison was too close to call."""
    gaps = [
        rival.difference for rival in verdict.rivals if rival.tie and rival.difference is not None
    ]
    close = any(gap.low <= 0 <= gap.high for gap in gaps)
    if close and verdict.rate.known:
        yield "± is half of a 95 % interval: a difference below its own ± is too close to call."


def _explain_use_on_real_devices(verdict: Verdict) -> Iterator[str]:
    """Yield a sentence about using plans on real devices, after a search on simulated ones."""
    planned = verdict.recommendation is not None and verdict.recommendation.action == "plan"
    if verdict.simulated and planned and verdict.chosen.kind in (*SPLITS, "one_device"):
        yield (
            "Simulated devices train nothing. On real ones evener balance writes such a plan, and "
            "evener launch plan.toml train.py trains with it."
        )


def _describe_earlier_rate(verdict: Verdict) -> Iterator[str]:
    single = find_alone(verdict)
    if single is not None and single.earlier_samples_per_second and verdict.rate.known:
        now, earlier = rate(single.rate.samples_per_second), rate(single.earlier_samples_per_second)
        yield (
            f"{single.name} at {count_samples(single.global_batch)}, measured alternately with the "
            f"plan: {now} samples/s now, {earlier} earlier."
        )


def _describe_knobs(verdict: Verdict) -> Iterator[str]:
    """Yield a sentence for each tuning option about how it changes the training speed.

    The number of data loader workers is left out.
    """
    if not verdict.rate.known:
        return
    for rival in verdict.rivals:
        if rival.kind != "knobs" or rival.gain is None or _find_workers(verdict, rival) is not None:
            continue
        change = _describe_knob_change(verdict, rival, rival.gain)
        if change:
            yield change


def _describe_knob_change(verdict: Verdict, rival: Rival, gain: float) -> str:
    """Return a sentence about what tuning options change, or "" if nothing is known about them.

    `rival` is the plan's layout with other options, and `gain` the plan's gain over it.
    """
    knobs = rival.knobs or verdict.chosen.knobs
    what = join_words([KNOBS.get(knob, knob) for knob in knobs])
    what = what[:1].upper() + what[1:]
    ending = "" if len(knobs) > 1 or knobs[0] in WORKERS else "s"
    in_turn = f", {ALTERNATELY}" if rival.paired else ""
    if rival.tie:
        return f"{what} make{ending} no difference."
    if rival.knobs:
        return f"{what} lose{ending} {_write_percent_lost(gain)}{in_turn}."
    if rival.batches == verdict.chosen.batches:
        return f"{what} give{ending} {percent(gain, 0 if gain >= 0.02 else 1)}{in_turn}."
    return ""


def _find_workers(verdict: Verdict, rival: Rival) -> str | None:
    """Return how many data loader workers a layout has, as words for a sentence.

    Returns None unless the number of workers is the only difference from the plan.
    """
    knobs = (*rival.knobs, *verdict.chosen.knobs)
    same = (rival.devices, rival.batches) == (verdict.chosen.devices, verdict.chosen.batches)
    only_workers = bool(knobs) and all(knob in WORKERS for knob in knobs)
    if rival.kind != "knobs" or not same or not only_workers:
        return None
    return WORKERS[rival.knobs[0]] if rival.knobs else "as your code has it"


def _describe_workers(verdict: Verdict) -> Iterator[str]:
    """Yield a sentence with the samples/s for each number of data loader workers.

    It also says which number to use."""
    tried = [
        (how, rival.rate)
        for rival in verdict.rivals
        if (how := _find_workers(verdict, rival)) is not None
    ]
    if not tried:
        return
    own = verdict.chosen.knobs
    best = WORKERS[own[0]] if own else "as your code has it"
    found = sorted([(best, verdict.rate), *tried], key=lambda each: -each[1].samples_per_second)
    rates = [f"{how}: {_write_rate(measured)}" for how, measured in found]
    advice = f"Write num_workers={best} for your loader." if own else "Leave your loader as it is."
    yield f"Loader workers, in samples/s: {', '.join(rates)}. {advice}"


def _write_rate(measured: MeasuredRate) -> str:
    speed = rate(measured.samples_per_second)
    return speed if measured.known else f"{speed} {write_error(measured)}"


WORKERS = {f"workers{count}": str(count) for count in (0, 2, 4, 8)}


def _write_percent_lost(gain: float) -> str:
    """Return how much slower a layout is than the plan, in percent.

    `gain` is how much faster the plan is than the layout, as a fraction.
    """
    loss = 1 - 1 / (1 + gain)
    return percent(loss, 0 if loss >= 0.02 else 1)


def _describe_packs(verdict: Verdict) -> Iterator[str]:
    """Yield sentences that compare the plan with several jobs on one device and with placements."""
    others = [rival for rival in verdict.rivals if rival.kind in ("side_by_side", "placed")]
    yield from _describe_slower_layouts(verdict, others)
    tied = [one.name for one in others if one.tie and not one.unclear][:MOST_NAMED]
    unclear = [one.name for one in others if one.tie and one.unclear][:MOST_NAMED]
    if tied:
        yield f"{join_words(tied)} {'ties' if len(tied) == 1 else 'tie'} with it."
    if unclear:
        verb = "wasn't" if len(unclear) == 1 else "weren't"
        yield f"{join_words(unclear)} {verb} measured precisely enough to compare with it."


def _describe_slower_layouts(verdict: Verdict, others: Sequence[Rival]) -> Iterator[str]:
    """Yield sentences that say how much slower the other kinds of layouts are than the plan.

    Only the best layout of each kind is mentioned.
    """
    mentioned: set[str] = {verdict.chosen.kind}
    for rival in others:
        if rival.kind in mentioned or rival.gain is None or rival.tie or rival.gain < 0:
            continue
        mentioned.add(rival.kind)
        in_turn = f", {ALTERNATELY}" if rival.paired else ""
        other = rival.global_batch != _batch(verdict)
        at = f" at {count_samples(rival.global_batch)}" if other else ""
        name = rival.name[:1].upper() + rival.name[1:]
        yield f"{name}{at} loses {_write_percent_lost(rival.gain)}{in_turn}."


def _batch(verdict: Verdict) -> int:
    return verdict.chosen.global_batch


def _describe_objective(verdict: Verdict) -> Iterator[str]:
    reached = verdict.objective
    if reached is None:
        return
    value = find_objective(reached.objective).write(reached.value)
    most = f"the most among the layouts at most {percent(reached.max_slowdown)} slower than the"
    more = "" if reached.gain is None else f", and {percent(reached.gain)} more than the fastest"
    yield f"It reaches {value}, {most} fastest{more}."


def _describe_short_budget(verdict: Verdict) -> Iterator[str]:
    short = verdict.short_budget
    if short is not None:
        yield (
            f"The budget of {short.budget_seconds:g} s was over before any split was measured: "
            f"starting processes took {short.start_seconds:.0f} s of it, and --budget "
            f"{short.enough_seconds}s should be enough."
        )


def _describe_ran_out(verdict: Verdict) -> Iterator[str]:
    """Yield sentences about layouts over several devices if all of them ran out of memory."""
    for one in verdict.ran_out:
        tried = [_write_rows(batch) for batch in one.batches]
        samples = join_words(tried) if len(tried) <= MOST_TRIES else f"{tried[0]} to {tried[-1]}"
        what = "Shards of the model were" if one.in_shards else "Splits were"
        many = " each time" if len(tried) > 1 else ""
        where = f"{len(one.devices)} devices"
        if len(one.devices) <= MOST_DEVICES:
            where = join_words(one.devices, "or")
        alone = verdict.chosen.devices
        plan = f", so the plan is {alone[0]} alone" if len(alone) == 1 else ""
        rows = count_samples(samples)
        yield f"{what} tried with {rows}, and memory ran out{many} on {where}{plan}."
        remedies = []
        if one.lacked_time:
            remedies.append(f"a longer --budget (another try takes about {one.try_seconds:.0f} s)")
        smaller = min(map(sum, one.batches)) - 1
        if verdict.batch_given:
            remedies.append("a smaller --global-batch")
        elif smaller >= min(map(_count_computing, one.batches)):
            remedies.append(f"a smaller batch (--max-global-batch {smaller})")
        if remedies:
            yield f"Give {join_words(remedies, 'or')}."


def _count_computing(batch: Sequence[int]) -> int:
    return sum(rows > 0 for rows in batch)


def _write_rows(batch: Sequence[int]) -> str:
    """Return the rows of each device, as in "1 + 10", or their sum if there are many devices."""
    return str(sum(batch)) if len(batch) > MOST_DEVICES else " + ".join(map(str, batch))


def _describe_code_limit(verdict: Verdict) -> Iterator[str]:
    limit = verdict.code_limit
    if limit is not None:
        yield (
            f"Your code limits the rows on a device: {limit.rows} ran, {limit.failed_rows} failed, "
            f"so shares stay at {limit.rows} or less: {limit.error}."
        )


def _describe_learning(verdict: Verdict) -> Iterator[str]:
    """Yield sentences about how the global batch affects learning and the learning rate."""
    found = verdict.learning
    if found is None:
        return
    if found.noise_scale is not None and found.worth is not None:
        value, low, high = found.worth
        worth = f"about {_write_range(percent(value), percent(low), percent(high))}"
        if high > 1 - 1e-9:
            worth = f"at least {percent(low)}"
        if found.extra_samples is not None and found.relative_speed is not None:
            more = _write_range(*map(factor, found.extra_samples))
            yield (
                f"{count_samples(found.global_batch)}: about {factor(found.relative_speed)} x the "
                f"samples/s of {found.own_batch}, and about {more} x the samples for the same loss."
            )
        else:
            are, many = ("is", "one") if found.global_batch == 1 else ("are", "as many")
            yield (
                f"At a noise scale of {write_scale(found.noise_scale)}, "
                f"{count_samples(found.global_batch)} a step {are} worth {worth} of {many} in "
                f"small batches."
            )
    if found.own_batch and found.adam_rate is not None and found.sgd_rate is not None:
        rule = "linear, while the batch is below the noise scale"
        if found.sgd_rule == "adascale":
            rule = "AdaScale"
        yield (
            f"For the learning rate of {count_samples(found.own_batch)} a step, try Adam's x "
            f"{factor(found.adam_rate)} (square root) or SGD's x {factor(found.sgd_rate)} ({rule})."
        )


def _write_range(middle: str, low: str, high: str) -> str:
    """Return a value with its bounds, in the form "middle (low - high)".

    If both bounds are written the same, only the value is returned.
    """
    return middle if low == high else f"{middle} ({low} - {high})"


def _describe_short_epoch(verdict: Verdict) -> Iterator[str]:
    """Yield a sentence if an epoch has only a few steps, unless the user chose the batch."""
    few = verdict.short_epoch
    if few is None or verdict.batch_given:
        return
    steps = f"only {few.steps} step{'s' * (few.steps > 1)}"
    why = f"a step takes {few.global_batch} of the {few.rows} rows"
    if not few.steps:
        steps = "less than one step"
        why = f"the data has only {count_samples(few.rows)}, and a step takes {few.global_batch}"
    more = ""
    if few.largest_batch:
        more = f"; for 100, search with --max-global-batch {few.largest_batch}"
    yield f"An epoch is {steps}, because {why}{more}."


def _describe_left_out_hosts(verdict: Verdict) -> Iterator[str]:
    hosts = [left_out for left_out in verdict.left_out if left_out.kind == "host"]
    if not hosts:
        return
    names = [host.name for host in hosts]
    one = hosts[0]
    at = f", at {one.global_batch} samples," if one.global_batch else ""
    seconds = one.network_seconds * 1000
    why = f", because the network takes {seconds:.3g} ms of each step" if seconds else ""
    loss = percent(one.loss, 0 if one.loss >= 0.02 else 1)
    yield (
        f"{join_words(names)} {'is' if len(names) == 1 else 'are'} left out: the fastest split "
        f"over {one.hosts} hosts{at} reaches {rate(one.samples_per_second)} samples/s, {loss} "
        f"less{why}."
    )


REMARKS: tuple[Callable[[Verdict], Iterator[str]], ...] = (
    _describe_limits,
    _describe_workers,
    _name_better_known_layouts,
    _describe_equal_shares,
    _suggest_one_device,
    _describe_state,
    _describe_split_loss,
    _describe_sum_loss,
    _describe_idle_devices,
    _describe_faster_layouts,
    _explain_plus_minus,
    _describe_earlier_rate,
    _describe_packs,
    _describe_knobs,
    _describe_left_out_hosts,
    _describe_link,
    _describe_objective,
    _describe_code_limit,
    _describe_short_budget,
    _describe_ran_out,
    _describe_batch,
    _describe_learning,
    _describe_short_epoch,
    _explain_use_on_real_devices,
)


# ---------------------------------------------------------------------- reasons not to trust it


def _warn_of_notes(verdict: Verdict) -> Iterator[str]:
    yield from verdict.notes


def _warn_of_left_out(verdict: Verdict) -> Iterator[str]:
    """Yield warnings about layouts that weren't compared, and about requests that can't be met."""
    yield from (left_out.detail for left_out in verdict.left_out if left_out.kind == "request")
    families = [left_out.name for left_out in verdict.left_out if left_out.reason == "by_rows"]
    if families:
        yield (
            f"Not compared: {join_words(families)}, which train by rows; --objective samples "
            f"compares by rows."
        )
    for left_out in verdict.left_out:
        if left_out.kind == "layout" and left_out.reason == "failed":
            yield f"Not compared: {left_out.name}: {left_out.detail}."
        elif left_out.kind == "layout" and left_out.reason == "out_of_memory":
            yield f"Not compared: {left_out.name}: out of memory."
    yield from _warn_of_time(verdict.left_out)


def _warn_of_time(left_out: Sequence[LeftOut]) -> Iterator[str]:
    missing = [one for one in left_out if one.reason == "no_time"]
    if missing:
        enough = f"--budget {missing[0].enough_seconds}s should be enough"
        names = join_words(
            [f"{one.name}{' again' if one.samples_per_second else ''}" for one in missing]
        )
        yield f"The budget left no time to measure {names}; {enough}."
    growing = [one for one in left_out if one.reason == "packs_growing"]
    if growing:
        enough = f"--budget {growing[0].enough_seconds}s should be enough"
        names = join_words([f"a {one.name}" for one in growing])
        yield f"Packs were still getting faster when the budget left no time for {names}; {enough}."


def _warn_of_retreats(verdict: Verdict) -> Iterator[str]:
    for one in verdict.replaced:
        name = one.name[:1].upper() + one.name[1:]
        yield f"{name}: {one.original} ran out of memory; {one.replacement} was measured instead."


def _warn_of_unfinished(verdict: Verdict) -> Iterator[str]:
    yield from map(write_unfinished, verdict.unfinished)


def write_unfinished(unfinished: Unfinished) -> str:
    """Return a sentence about a process that hadn't finished its start-up when the search ended.

    It says which part of the start-up was running, and for how long.
    """
    what = {
        "importing": "Importing had not ended",
        "loading": f"The import of {unfinished.name} had not ended",
        "building": f"{unfinished.name} had not returned",
        "preparing": f"{unfinished.name} had not been built",
        "warming up": f"The first steps of {unfinished.name} had not ended",
    }[unfinished.phase]
    where = f", at {unfinished.where}" if unfinished.where else ""
    seconds = unfinished.seconds
    after = f"{seconds:.0f} s" if seconds >= 1 else f"{max(0.1, seconds):.1f} s"
    return f"{what} after {after} on {join_words(unfinished.devices)}{where}."


def _warn_of_doubts(verdict: Verdict) -> Iterator[str]:
    """Yield the warnings about the measurements.

    The noise of single measurements isn't mentioned if repeated measurements differ by more.
    """
    changed = max((doubt.value for doubt in verdict.doubts if doubt.code == "changed"), default=0.0)
    for doubt in verdict.doubts:
        if doubt.code == "noisy" and changed > abs(doubt.value):
            continue
        yield write_doubt(doubt, verdict.on_gpus)
    twins = verdict.unequal_devices
    if twins is not None:
        at = f" at {count_samples(twins.batch)} a step" if twins.batch else ""
        yield (
            f"{twins.fast} and {twins.slow} are the same kind of device ({twins.product}), and "
            f"{twins.fast} was {twins.ratio:.1f} times as fast alone{at}: suspect the measurement, "
            f"or something else that uses {twins.slow}."
        )


def write_doubt(doubt: VerdictDoubt, on_gpus: bool, longer: str = "a longer --budget") -> str:
    """Return a warning about a measurement as a sentence, with the device's label if known.

    `on_gpus` means that heat and power limits may be named as causes. `longer` says how the user
    can measure for longer, in words such as "a longer --budget".
    """
    value = doubt.value
    part = percent(doubt.taken)
    taken = f" ({part} of the cores' time in these)" if doubt.taken >= 0.005 else ""
    heat = "heat, power or other work" if on_gpus else "other work"
    slower = "slower" if value > 0 else "faster"
    text = {
        "not_finite": (
            f"The loss was NaN or infinite at step {value:.0f}, so nothing is learned; check the "
            f"data, the learning rate and the precision."
        ),
        "ran_out": (
            f"This layout also ran out of memory, in {value:.0f} of its measurements, and so may a "
            f"training: free memory, or measure again with {longer}."
        ),
        "short_of_memory": (
            f"Memory is nearly full: PyTorch's allocator had to free its cache {value:.1f} times a "
            f"step, which takes time, and a training may run out of memory. Leave more of it free, "
            f"as by a lower limit (--devices gpu:0@10GiB) or fewer rows (--max-global-batch)."
        ),
        "disturbed": (
            f"Other work took CPU time in {percent(value)} of the blocks of steps{taken}; stop it "
            f"and measure again."
        ),
        "throttled": (
            f"Some steps were held back (by {percent(value)}), perhaps by {heat}. The rates and "
            f"shares hold while that lasts; if it passes, measure again. evener monitor shows it."
        ),
        "capped": (
            f"A device ran at its power limit for {percent(value)} of the time: the rate holds "
            f"for this limit."
        ),
        "drift": (
            f"Steps got {percent(abs(value), 1)} {slower} while they were timed; measure again "
            f"with {longer}."
        ),
        "changed": (
            f"The same layout was {percent(value)} faster in one measurement than in another, "
            f"perhaps because of {heat}: gains may be off by as much, whatever their ±; let it "
            f"rest, and measure again."
        ),
        "noisy": (
            f"The samples/s are only known to within ± {percent(abs(value), 1)}; measure again "
            f"with {longer}."
        ),
        "slow_start": f"Steps were still getting faster (by {percent(value)}) when the warm-up "
        f"ended.",
        "stalled": f"One block took {value:.1f} times as long as the others.",
        "few_steps": (
            f"The budget left time to measure {_count_steps(value)} of this layout, so ± is an "
            f"estimate by the search's other single steps; measure again with {longer}."
        ),
        "too_short": f"Only {value:.2f} s were timed; give {longer}.",
    }[doubt.code]
    return f"{doubt.device}: {text}" if doubt.device else text


def _count_steps(count: float) -> str:
    return "a single step" if count == 1 else f"{count:.0f} single steps"


def _warn_of_taken_memory(verdict: Verdict) -> Iterator[str]:
    for one in verdict.taken_memory:
        yield (
            f"{one.device}: other processes hold {size(one.size_bytes)} of its memory; the plan's "
            f"batches leave it to them."
        )


def _warn_of_left_out_devices(verdict: Verdict) -> Iterator[str]:
    for left_out in verdict.left_out:
        if left_out.kind != "device" or left_out.reason in ("not_faster", "not_tried"):
            continue
        fits = f"{count_samples(left_out.rows)} {'fits' if left_out.rows == 1 else 'fit'}"
        why = {
            "nothing_ran": "was left out, as nothing ran on it",
            "nothing_fits": f"was left out, as not even {fits} in its memory",
            "failed": "worked at first and then failed every time, so it was left out",
            "gone": "worked at first and can't be used now",
        }[left_out.reason]
        yield f"{left_out.name} {why}: {left_out.detail}."


def _warn_of_repeated_build(verdict: Verdict) -> Iterator[str]:
    if verdict.repeated_build is not None:
        yield write_repeated_build(verdict.repeated_build)


def write_repeated_build(repeated: RepeatedBuild) -> str:
    """Return a sentence about a model that each process built again."""
    return (
        f"Each process built the model again, which takes {repeated.seconds:.0f} s: a process "
        f"can't be copied after the build, as {repeated.reason}."
    )


def _warn_of_pass_statistics(verdict: Verdict) -> Iterator[str]:
    found = verdict.pass_statistics
    if found is not None:
        yield (
            f"{found.layer} sees one pass of {count_samples(found.rows)}, not a device's whole "
            f"share, so training depends on the passes; GroupNorm or LayerNorm doesn't, and "
            f"--micro off makes a plan without passes."
        )


def _warn_of_slow_bfloat16(verdict: Verdict) -> Iterator[str]:
    if verdict.slow_bfloat16:
        many = len(verdict.slow_bfloat16) > 1
        yield (
            f"{join_words(verdict.slow_bfloat16)} {'have' if many else 'has'} no hardware for "
            f"bfloat16 and {'compute' if many else 'computes'} it slowly, unlike the others: try "
            f"float16 or float32."
        )


WARNINGS: tuple[Callable[[Verdict], Iterator[str]], ...] = (
    _warn_of_notes,
    _warn_of_left_out,
    _warn_of_retreats,
    _warn_of_unfinished,
    _warn_of_doubts,
    _warn_of_taken_memory,
    _warn_of_left_out_devices,
    _warn_of_repeated_build,
    _warn_of_pass_statistics,
    _warn_of_slow_bfloat16,
)


# ---------------------------------------------------------------------- why the search ended


def write_end(verdict: Verdict, reason: str) -> str:
    """Return a sentence about why the search ended.

    `reason` is the sentence that the search itself gave. Returns "" if the sentence would
    contradict the recommendation to measure again.
    """
    again = verdict.recommendation is not None and verdict.recommendation.action == "measure_again"
    if again and verdict.stopped in ("settled", "unsure", "tied", "only_one"):
        return ""
    if verdict.stopped == "settled" and verdict.tolerance:
        part = percent(verdict.tolerance)
        return f"Nothing left to measure is expected to gain more than {part} (--tolerance)."
    if verdict.stopped != "tied":
        return reason
    tied = [rival for rival in verdict.rivals if rival.tie][:MOST_NAMED]
    if not tied:
        return "The turns that are left would not make the samples/s more certain."
    names = join_words([f"{_drop_batches(one)} ({_write_batches(one)})" for one in tied])
    one_layout = len(tied) == 1 and not _is_plural(tied[0].name)
    tie = "ties" if one_layout else "tie"
    return (
        f"{names[:1].upper()}{names[1:]} {tie} with the plan, and the turns that are left would "
        f"not change that."
    )


def _drop_batches(rival: Rival) -> str:
    """Return a layout's name without the row counts per device that some names end with."""
    return rival.name.removesuffix(f", {' + '.join(map(str, rival.batches))}")


# ---------------------------------------------------------------------- what to do next


def write_next_steps(
    run: str, finished: Finished, path: str, has_measured: bool
) -> tuple[str, ...]:
    """Return the commands that are useful after a search, one line each.

    - `path`: the plan file that was written, or "".
    - `has_measured`: whether anything new was measured; False for a resumed run that had already
      ended.
    """
    steps = [f"plan written to {path}"] if path else []
    if recommends_plan(finished):
        train = write_training_step(finished.plan, path or "plan.toml")
        write = [] if path else [f"to write the plan: evener export {run} -o plan.toml"]
        steps += [*write, *([train] if train else ())]
    alone = find_one_device_command(finished)
    if alone:
        steps.append(f"to train on it: {alone}")
    if finished.interrupted:
        steps.append(f"to go on: evener balance --resume {run}")
    elif not has_measured:
        steps.append(
            f"the run had ended, and nothing was measured; for more: evener balance --resume {run} "
            f"--budget +5m"
        )
    elif _needs_time(finished):
        steps.append(f"to measure longer: evener balance --resume {run} --budget +5m")
    return tuple(steps)


def _needs_time(finished: Finished) -> bool:
    """Return whether the result is so uncertain that a longer search would help."""
    found = finished.found
    if found is None:
        return False
    uncompared = found.recommendation is not None and found.recommendation.reason == "uncompared"
    return uncompared or not found.rate.known


def recommends_plan(finished: Finished) -> bool:
    """Return whether the user should train with the plan rather than without one.

    Returns False for simulated devices. Returns True for runs of older versions, which stored no
    recommendation.
    """
    found = finished.found
    if found is None or found.recommendation is None:
        return True
    return found.recommendation.action == "plan" and not found.simulated


def find_one_device_command(finished: Finished) -> str:
    """Return the shell command that runs the user's script on the recommended device alone.

    Returns "" if something other than one real device is recommended, or if there is no script.
    """
    found = finished.found
    if found is None or found.recommendation is None or found.simulated:
        return ""
    script = finished.plan.workload.rpartition(":")[0]
    if found.recommendation.action != "one_device" or not script:
        return ""
    (label,) = found.recommendation.devices
    host, _, own = label.rpartition("/")
    kind, _, number = own.lower().partition(":")
    shares = finished.plan.layout.share
    ids = [share.device for share in shares if (share.host, str(share.index)) == (host, number)]
    if not ids:
        return ""
    visible = find_backend(kind).show(ids[:1])
    before = [f"{name}={shlex.quote(value)}" for name, value in visible.items()]
    return " ".join([*before, shlex.join(["python", script])])


def write_training_step(plan: Plan, path: str) -> str:
    """Return a line with the command that trains with the plan, and with the hosts to run it on.

    Returns "" if the plan can't be launched by a command.
    """
    command = find_training_command(plan, path)
    hosts = [host for host in dict.fromkeys(share.host for share in plan.layout.active) if host]
    where = f", on {hosts[0] if len(hosts) == 1 else 'each of its hosts'}" if hosts else ""
    return f"to train with it{where}: {command}" if command else ""


def find_training_command(plan: Plan, path: str) -> str:
    """Return the `evener launch` command that trains with a plan.

    Returns "" for simulated devices, built-in workloads, and layouts without shares.
    """
    script = plan.workload.rpartition(":")[0]
    simulated = is_simulated(share.device for share in plan.layout.active)
    if not plan.layout.traits.by_shares or simulated or not script:
        return ""
    return shlex.join(["evener", "launch", path, script])
