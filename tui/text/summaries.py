"""Text about probes (the measurements of a search), plans, results and training runs."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from evener.balancer.events import Event, Observed, Started
from evener.balancer.jobs import SIMULATED
from evener.balancer.number_format import (
    STATE_ONLY,
    count_nouns,
    count_samples,
    duration,
    group_digits,
    half_width,
    join_words,
    percent,
    rate,
    write_share,
)
from evener.balancer.result.rivals import is_rough, write_gain
from evener.balancer.result.sentences import VerdictText, write_end, write_verdict
from evener.balancer.search.ranking import overlap
from evener.balancer.session_state import (
    RatedLayout,
    SessionState,
    alone_at_batch,
    find_single,
    plan_rate,
    plan_rivals,
    seconds_left,
    throughput_interval,
)
from evener.balancer.statistics import is_known
from evener.balancer.types import Failed, Interval, Layout, Observation, OutOfMemory, Timed
from evener.balancer.verdict import Verdict
from evener.devices.registry import is_simulated
from evener.launch.summary import describe_summary, load_summary
from evener.live.journal import (
    ChangeEntry,
    EndEntry,
    NoiseEntry,
    RecordedTraining,
    RetreatEntry,
    SpeedEntry,
    StartEntry,
    StepsEntry,
)
from evener.plan.file import Evidence, Plan, SearchSummary, Throughput
from evener.plan.layout import Share
from evener.printable import align, plain
from evener.training.noise_scale import describe

from .formatting import Table, energy_cells, folded
from .stages import STAGE_WORDS

DOUBTS = {  # warnings about a measurement, printed after its samples/s
    "not_finite": "loss not finite",
    "slow_start": "still warming up",
    "drift": "speed drifting",
    "noisy": "steps vary a lot",
    "few_steps": "single steps",
    "ran_out": "ran out of memory once",
    "short_of_memory": "memory nearly full",
    "too_short": "timed too briefly",
    "throttled": "steps held back",
    "capped": "at the power limit",
    "disturbed": "other work on the CPU",
    "stalled": "one stall",
    "changed": "speed changed",
}

# CPU:0, building: train.py:6: NameError: name 'x' is not defined (traceback in FILE)
_RAISED = re.compile(r".*?, (?P<phase>[a-z ]+): .*?:\d+: (?P<kind>\w+)(?::|$)", re.DOTALL)
_KEPT_IN = re.compile(r" \((?:traceback|stack|output) in [^)]*\)\.?$")


def list_doubts(measurement: Timed) -> list[str]:
    """Return a short phrase for each warning about a measurement, such as "steps vary a lot"."""
    # A few steps always vary, so "steps vary a lot" is left out after a short measurement.
    codes = [warning.code for warning in measurement.warnings]
    if "too_short" in codes:
        codes = [code for code in codes if code != "noisy"]
    return [DOUBTS[code] for code in codes]


def event_line(event: Event, labels: Sequence[str]) -> str | None:
    """Return the line that a command prints for an event, or None if it prints none."""
    if isinstance(event, Started):
        kept = f", {count_nouns(event.replayed, 'measurement')} kept" if event.replayed else ""
        return f"run {event.run}: {event.workload} on {', '.join(event.devices)}{kept}"
    if isinstance(event, Observed):
        return f"{duration(event.at_seconds):>10}  {_brief_text(event.seen, labels)}"
    return None


def _brief_text(observation: Observation, labels: Sequence[str]) -> str:
    """Describe a measurement in one line. Long errors are shortened."""
    # An exception is only named by its class, because the end of the search reports its message,
    # the source line and the file with the traceback.
    if not isinstance(observation, Failed):
        return observation_text(observation, labels)
    before = f"{_stage_text(observation)} {layout_text(observation.probe.layout, labels)}"
    raised = _RAISED.match(observation.detail)
    if raised is not None:
        return f"{before}: failed while {raised['phase']}, {plain(raised['kind'], 60)}"
    detail = _KEPT_IN.sub("", observation.detail)
    return f"{before}: failed: {plain(detail, 200)}"


def budget_left_text(state: SessionState) -> str:
    """Return the time left of the budget, as in ", at most 1 min left", or "" without a budget."""
    # The clock of simulated devices differs from the wall clock, so their time is marked.
    left = seconds_left(state)
    simulated = is_simulated(state.devices)
    if left is None:
        return ""
    kind = " of simulated time" if simulated else ""
    return f", at most {duration(left)}{kind} left"


def brief_devices(labels: Sequence[str]) -> str:
    """Return device labels in a short form, such as "GPU:0,1" or "2 × NVIDIA H200"."""
    kinds = {label.partition(":")[0] for label in labels}
    numbers = [label.partition(":")[2] for label in labels]
    if len(kinds) == 1 and all(number.isdigit() for number in numbers):
        return f"{kinds.pop()}:{','.join(numbers)}"
    counted = Counter(labels)
    return ", ".join(name if count == 1 else f"{count} × {name}" for name, count in counted.items())


def observation_text(observation: Observation, labels: Sequence[str]) -> str:
    """Describe a measurement in one line by its stage, layout and outcome."""
    return (
        f"{_stage_text(observation)} {layout_text(observation.probe.layout, labels)}: "
        f"{outcome_text(observation, labels)}"
    )


def _stage_text(observation: Observation) -> str:
    """Return the word for the probe's stage, padded to the width of its column."""
    return f"{STAGE_WORDS[observation.probe.stage]:<6}"


def outcome_text(observation: Observation, labels: Sequence[str], plus_minus: str = "± ") -> str:
    """Return a probe's samples/s with its error, or why the probe failed.

    The error is half of the 95 % interval. Warnings about the measurement follow.
    """
    if isinstance(observation, Timed):
        error = half_width(
            observation.throughput.value, observation.throughput.low, observation.throughput.high
        )
        doubts = "".join(f", {words}" for words in list_doubts(observation))
        speed = f"{rate(observation.samples_per_second)} samples/s"
        if observation.tokens and not observation.probe.layout.length:
            tokens = rate(observation.tokens / observation.step_seconds)
            speed = f"{tokens} tokens/s, {percent(observation.padding)} padding, {speed}"
        return f"{speed} {plus_minus}{error}{doubts}"
    if isinstance(observation, OutOfMemory):
        who = ", ".join(labels[i] for i in observation.devices)
        return "out of memory" + (f" on {who}" if who else "")
    return f"failed: {plain(observation.detail, 200)}"


def outcome_name(observation: Observation) -> str:
    """Return a probe's outcome in words: "timed", "out of memory" or "failed"."""
    if isinstance(observation, Timed):
        return "timed"
    return "out of memory" if isinstance(observation, OutOfMemory) else "failed"


def share_text(layout: Layout, device: int) -> str:
    """Say how many rows a device gets per step.

    If the device accumulates gradients over several passes, the rows per pass follow. If the device
    gets no rows, say that it only holds a part of the model's state.
    """
    if not layout.shares[device]:
        return STATE_ONLY
    share = write_share(layout.shares[device], layout.pass_rows[device])
    return f"{share} of {layout.length} tokens" if layout.length else share


def layout_text(layout: Layout, labels: Sequence[str], max_parts: int = 8) -> str:
    """Describe a layout by its devices, their shares and its options.

    If there are more than `max_parts` of these, the description ends with, say, "and 3 more".
    """
    words = [f"{labels[i]}[{share_text(layout, i)}]" for i in layout.active]
    if layout.processes > 1:
        words.insert(0, f"{layout.processes} x")
    words += [f"({plain(word, 40)})" for word in (layout.placement, *layout.knobs) if word]
    if len(words) > max_parts:
        words = [*words[: max_parts - 1], f"and {len(words) - max_parts + 1} more"]
    return " ".join(words)


def summary_lines(
    plan: Plan,
    labels: Sequence[str],
    verdict: str = "",
    width: int | None = None,
    verdict_data: Verdict | None = None,
    next_commands: Sequence[str] = (),
) -> list[str]:
    """Return the lines of a search's result: the plan's shares, its alternatives, and the verdict.

    - `verdict`: the verdict as text, for runs by older versions, which have no `verdict_data`.
    - `width`: where to wrap lines; None doesn't wrap.
    - `verdict_data`: the verdict as data.
    - `next_commands`: commands that the user can run next.
    """
    frontier = frontier_table(verdict_data).lines()
    rivals = [
        part
        for text in rival_lines(plan, labels, with_gains=verdict_data is None)
        for part in folded(text, width, "  ")
    ]
    tables = [
        *about_lines(plan, verdict_data, width),
        *share_table(plan, labels, width),
        "",
        *rivals,
    ]
    if frontier:
        tables += ["", *frontier[:-1]]
    return [*tables, "", *verdict_lines(plan, verdict, width, verdict_data, next_commands)]


def about_lines(plan: Plan, verdict: Verdict | None, width: int | None) -> list[str]:
    """Return lines that name the workload, framework and precision.

    A line about simulated devices comes first if there are any. Returns no lines if `verdict` is
    None, as for runs by older versions.
    """
    if verdict is None:
        return []
    lines = []
    if verdict.simulated:
        lines.append(
            "simulated: the devices' speeds are read from a file, not measured on "
            "hardware, and seconds are simulated"
        )
    framework = "" if plan.framework == "none" else f" with {plan.framework}"
    if plan.workload:
        lines.append(plain(f"workload: {plan.workload}{framework}, {plan.precision}"))
    return [part for text in lines for part in folded(text, width)]


def verdict_lines(
    plan: Plan,
    verdict: str,
    width: int | None,
    verdict_data: Verdict | None = None,
    next_commands: Sequence[str] = (),
) -> list[str]:
    """Return the recommendation, next steps, warnings, and how the search ended.

    If `verdict_data` is None, as for runs by older versions, the text `verdict` is used.
    """
    first, *others = verdict.split("\n")
    written = VerdictText(
        first, "", "", remarks=tuple(others)
    )  # a run by an older version has only the text
    mentioned: Sequence[str] = ()
    if verdict_data is not None:
        written = write_verdict(verdict_data)
        mentioned = (*written.doubts, SIMULATED) if verdict_data.simulated else written.doubts
    head = [line for line in (written.recommendation, written.headline) if line]
    texts = [plain(line, 2000) for line in (*head, *next_commands)]
    texts += [f"warning: {plain(doubt)}" for doubt in written.doubts]
    texts += [plain(remark, 2000) for remark in written.remarks]
    if plan.search.probes:
        texts.append(format_search(plan.search, verdict_data))
    left = [warning for warning in plan.warnings if warning not in mentioned]
    texts += [f"warning: {plain(warning)}" for warning in left]
    return list(chain.from_iterable(folded(text, width, "  ") for text in texts))


def format_search(search: SearchSummary, verdict: Verdict | None = None) -> str:
    """Say how many probes a search ran, how long it took, and why it stopped."""
    # The reason is left out if it would contradict the recommendation to measure again.
    failed = verdict.failed if verdict is not None else 0
    full = search.out_of_memory
    effort = [f"{search.probes} probe{'s' * (search.probes != 1)}"]
    effort += [f"{full} out of memory"] if full or not failed else []
    effort += [f"{failed} failed"] if failed else []
    seconds = duration(search.seconds)
    simulated = verdict is not None and verdict.simulated
    effort.append(f"{seconds} of simulated time" if simulated else seconds)
    why = search.why_stopped if verdict is None else write_end(verdict, search.why_stopped)
    return plain(f"{', '.join(effort)}. {why}".rstrip(), 1000)


def share_table(plan: Plan, labels: Sequence[str], width: int | None = None) -> list[str]:
    """Return a table of the plan's shares and each device's speed, and lines that explain it."""
    alone = alone_at_batch(plan)
    rows = [("device", "name", "share", "ratio", "in the plan", "", "alone")]
    combined = plan.throughput.samples_per_second
    known = is_known(throughput_interval(plan.throughput))
    single = len(plan.layout.active) == 1
    for position, (share, label) in enumerate(zip(plan.layout.share, labels, strict=True)):
        solo = alone.get(position)
        rows.append(
            (
                label + (f" @{plain(share.limit, 32)}" if share.limit else ""),
                plain(share.name, 32),
                format_device_share(share),
                f"{share.ratio:.3f}",
                rate(share.ratio * combined) if share.batch and known else "-",
                "",
                _format_alone(solo),
            )
        )
    total = plan.layout.global_batch
    error = half_width(combined, plan.throughput.low, plan.throughput.high)
    whole = "in all" if single else "together"
    rows.append((whole, "", str(total), "1.000", rate(combined), f"± {error}", ""))
    tokens = (
        f"{rate(plan.throughput.tokens_per_second)} tokens/s, "
        f"{percent(plan.throughput.padding)} padding"
    )
    return [
        *align(rows, numbers_from=2),
        *(part for text in _explain_alone(plan, alone, labels) for part in folded(text, width)),
        *([tokens] if plan.throughput.tokens_per_second else []),
        *([_format_energy(plan.throughput)] if plan.throughput.samples_per_joule else []),
    ]


def format_device_share(share: Share) -> str:
    """Say how many rows a device gets, as in the table of shares.

    If it gets none, say that it is left out or that it only holds a part of the model's state.
    """
    if share.batch:
        return write_share(share.batch, share.micro)
    return STATE_ONLY if share.state else "left out"


def _explain_alone(plan: Plan, solos: dict[int, Evidence], labels: Sequence[str]) -> list[str]:
    """Explain the table's column "alone", which has each device's samples/s when it trains alone.

    `solos` maps the position of a device to its measurement in that column.
    """
    shares = [*plan.layout.active, *(solo.layout.active[0] for solo in solos.values())]
    lines = ["alone: samples/s of a device by itself, at that many samples a step"]
    lines[0] += _explain_faster_alone(plan, solos, labels)
    for share in [one for one in shares if 0 < one.micro < one.batch][:1]:
        passes = write_share(share.batch, share.micro)
        lines.append(f"{passes}: {share.batch} samples, computed in passes of up to {share.micro}")
    return lines if solos else []


def _explain_faster_alone(plan: Plan, solos: dict[int, Evidence], labels: Sequence[str]) -> str:
    """Name the devices that were faster alone than the one that the plan is compared with.

    For each of them, says why the plan isn't compared with it. `solos` maps the position of a
    device to its measurement in the column "alone".
    """
    single = find_single(plan)
    if single is None:
        return ""
    own = plan.layout.batches if plan.layout.traits.alone else ()
    speed, batch = single.throughput.samples_per_second, single.layout.global_batch
    found: dict[str, list[str]] = {}
    for i, solo in solos.items():
        is_faster = solo.throughput.samples_per_second > speed and not (own and own[i])
        if is_faster and single.layout.batches[i] != solo.layout.global_batch:
            found.setdefault(_find_reason(plan, i, solo, batch), []).append(labels[i])
    return "".join(
        f"; {join_words(names)} {'was' if len(names) == 1 else 'were'} {reason}"
        for reason, names in found.items()
    )


def _find_reason(plan: Plan, position: int, solo: Evidence, batch: int) -> str:
    """Return why the plan isn't compared with a device that was faster alone.

    `position` is the position of that device, and `solo` its measurement. `batch` is the global
    batch of the device that the plan is compared with.
    """
    if solo.layout.global_batch != batch:
        return f"faster with another batch than the one of {count_samples(batch)} that is compared"
    if not is_known(throughput_interval(solo.throughput)):
        return "measured alone, too imprecisely to compare"
    within = plan.layout.share[position].ratio * plan.throughput.samples_per_second
    if within > solo.throughput.samples_per_second:
        return "slower alone than in the plan, and not compared"
    return "faster alone than the plan before the plan was measured again, and not compared"


def frontier_table(verdict: Verdict | None) -> Table:
    """Return a table of the samples/s at each batch size, and of what this speed is worth.

    A larger batch learns less per sample. So the column "worth in learning" has the samples/s at
    which training with small batches would learn equally fast. The table is empty if the gradient
    noise scale is unknown.
    """
    learning = verdict.learning if verdict is not None else None
    frontier = learning.frontier if learning is not None else ()
    rows = [(str(batch), rate(speed), rate(value)) for batch, speed, value in frontier]
    return Table("", [("batch", "samples/s", "worth in learning"), *rows], 0)


def _format_energy(throughput: Throughput) -> str:
    """Format samples/J and watts, as in "4.1 samples/J at 610 W"."""
    # If some devices of the plan are idle, the power of active and of idle devices follows.
    efficiency, active, idle = energy_cells(
        throughput.samples_per_second, throughput.active_watts, throughput.idle_watts
    )
    if not throughput.idle_watts:
        return f"{efficiency} samples/J at {active} W"
    total = f"{float(active) + float(idle):.0f}"
    return f"{efficiency} samples/J at {total} W: {active} W, and {idle} W in idle devices"


def _format_alone(solo: Evidence | None) -> str:
    if solo is None:
        return "-"
    (share,) = solo.layout.active
    known = solo.throughput
    speed = rate(known.samples_per_second)
    if not is_known(throughput_interval(known)):
        speed = f"{speed} ± {half_width(known.samples_per_second, known.low, known.high)}"
    return f"{speed} at {write_share(share.batch, share.micro)}"


def gain_text(best: RatedLayout, rated: RatedLayout) -> str:
    """Return the plan's gain over another layout: "+20 %", "tie", or "" if it can't be compared.

    Returns "unclear" if the other layout's speed is too uncertain. If the plan is compared with the
    sum of the speeds that the devices reach alone, returns a percentage of that sum: "95 % of it".
    """
    gain = rated.gain_of(best)
    if gain is None:
        return "" if is_known(rated.rate) else "unclear"
    if rated.kind == "sum":
        return f"{percent(1 + gain)} of it"
    size = write_gain(abs(gain), best.rate, rated.rate)
    if rated.tie:
        return "tie"
    sign = "-" if gain < 0 else "+"
    return f"{sign}{size}"


def rival_lines(plan: Plan, labels: Sequence[str], with_gains: bool = True) -> list[str]:
    """Return a line for each layout that the plan is compared with.

    If `with_gains` is set, each line includes the plan's gain over the layout. Pass False if the
    verdict already states the gains.
    """
    lines = []
    own = plan_rate(plan, tuple(labels))
    for rival in plan_rivals(plan, tuple(labels), at_plan_batch=True):
        if rival.batches == own.batches and plan.layout.traits.by_shares:  # the plan itself
            continue
        if rival.kind == "sum" and len(plan.layout.active) == 1:  # one device can't reach the sum
            continue
        where = f" at {rival.where}{_format_other_batch(own, rival)}" if rival.where else ""
        text = _format_plan_gain(own, rival) if with_gains else _format_remark(own, rival)
        lines.append(f"{rival.name}: {_format_rate(rival.rate)}{where}{text}")
    return lines


def _format_other_batch(plan: RatedLayout, rival: RatedLayout) -> str:
    """Return the batch size of a layout if it differs from the plan's, or ""."""
    # It would be a repetition for a rival on one device, whose share is the whole batch, and for a
    # larger batch, whose name contains its size.
    total = sum(rival.batches)
    alone = len(rival.batches) - rival.batches.count(0) < 2
    if total == sum(plan.batches) or alone or rival.kind == "larger_batch":
        return ""
    return f" = {total} samples a step"


def _format_remark(plan: RatedLayout, rival: RatedLayout) -> str:
    """Return a remark about the speed of a compared layout, without the plan's gain over it."""
    # For the sum of solo throughputs, the note is the fraction of the sum that the plan reaches.
    # For other rivals, it is why no gain is known.
    if rival.gain_of(plan) is None or rival.kind == "sum":
        return _format_plan_gain(plan, rival)
    return f"; {_format_earlier(rival)}" if rival.earlier else ""


def _format_earlier(rival: RatedLayout) -> str:
    return f"measured alternately: {rate(rival.rate.value)} now, {rate(rival.earlier)} earlier"


def _format_rate(interval: Interval) -> str:
    """Return the samples/s, followed by "±" and the error if that is large."""
    if not is_rough(interval):
        return f"{rate(interval.value)} samples/s"
    error = half_width(interval.value, interval.low, interval.high)
    return f"{rate(interval.value)} samples/s ± {error}"


def _explain_unknown_gain(plan: RatedLayout, rival: RatedLayout) -> str:
    """Explain why it isn't known whether the plan is faster than a layout."""
    if not is_known(rival.rate):
        return "; too uncertain to compare"
    if not is_known(plan.rate):
        return "; the plan's figure is too uncertain to compare"
    if len(rival.batches) - rival.batches.count(0) > 1:
        return f"; none was measured near {count_samples(sum(plan.batches))}"
    return (
        "; less than in the plan, so a device alone was not measured at its best batch, or "
        "without the plan's loader workers or options"
    )


def _format_plan_gain(plan: RatedLayout, rival: RatedLayout) -> str:
    """Describe the plan's gain or loss against a layout."""
    gain = rival.gain_of(plan)
    if gain is None:
        return _explain_unknown_gain(plan, rival)
    if rival.kind == "sum":
        part = write_gain(1 + gain, plan.rate, rival.rate)
        bound = ", an upper bound" if gain <= 0 else ""  # errors may add up to more
        return f"{bound}; the plan reaches {part} of it"
    if rival.tie:
        in_turn = "" if overlap(plan.rate, rival.rate) else "measured alternately, "
        return f"; {in_turn}the plan is as fast: too close to call"
    size = write_gain(abs(gain), plan.rate, rival.rate)
    in_turn = "measured alternately, " if rival.paired is not None else ""
    if rival.earlier:
        in_turn = f"{_format_earlier(rival)}; "
    return f"; {in_turn}the plan {'gains' if gain >= 0 else 'loses'} {size}"


LATEST = 1e11  # latest Unix time that can be formatted as a date
WORTH_SAYING = 0.05  # smaller relative changes of steps/s aren't printed


def training_report(training: RecordedTraining) -> Iterator[str]:
    """Yield the lines about a recorded training run, with its state, results and events."""
    start = training.start
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(training.began_at))
    # a script may have no name
    about = ", ".join(filter(None, (start.workload, start.framework, began)))
    failure = f": {training.failure}" if training.failure else ""
    yield plain(f"training {training.run}: {about}", 1000)
    yield plain(f"{training.state}, {duration(training.seconds)}{failure}", 1000)
    yield from _noise_sentences(training)
    summary = load_summary(training.run)
    if summary is not None:
        for line in describe_summary(summary):
            yield plain(line, 1000)
    yield from _report_entries(training)


def _report_entries(training: RecordedTraining) -> Iterator[str]:
    """Yield a line for each start, share change, retry and end of a training run.

    There are also lines for notable changes of its speed.
    """
    last_printed = 0.0
    apart = NoiseEntry | StepsEntry
    entries = [entry for entry in training.entries if not isinstance(entry, apart)]
    for entry, following in zip(entries, (*entries[1:], None), strict=True):
        match entry:
            case StartEntry():
                yield plain(f"  {_clock(entry.at)}  {_start_text(entry)}", 1000)
                last_printed = 0.0
            case SpeedEntry(steps_per_second=steps):
                last = not isinstance(following, SpeedEntry)
                if last or abs(steps - last_printed) > WORTH_SAYING * max(steps, last_printed):
                    speed = f"{steps:.3g} steps/s, {rate(entry.samples_per_second)} samples/s"
                    yield f"  {_clock(entry.at)}  step {group_digits(entry.step)}: {speed}"
                    last_printed = steps
            case ChangeEntry(change=change):
                before = "+".join(map(str, change.before))
                after = "+".join(map(str, change.after))
                moved = f"{change.reason}: {before} → {after}"
                yield plain(f"  {_clock(change.at)}  {moved}", 1000)
            case RetreatEntry(line=line):
                yield plain(f"  {_clock(entry.at)}  {line}", 1000)
            case EndEntry(failure=why):
                ended = f"ended: {why}" if why else "ended"
                yield plain(f"  {_clock(entry.at)}  {ended}", 1000)


def _noise_sentences(training: RecordedTraining) -> Iterator[str]:
    """Yield a sentence about the gradient noise scale that was measured last."""
    # If the first measured value was clearly different, the sentence has both values.
    found = [entry for entry in training.entries if isinstance(entry, NoiseEntry)]
    for entry in found[-1:]:
        first = found[0].scale
        moved = first.high < entry.scale.low or entry.scale.high < first.low
        before = f"; at first {group_digits(round(first.rows))}" if moved else ""
        yield f"{describe(entry.scale, entry.batch, entry.step)}{before}"


def _start_text(start: StartEntry) -> str:
    shares = "+".join(map(str, start.shares))
    began = "started again" if start.reason else "started"
    words = f"{began}: {count_nouns(shares, 'row')} on {', '.join(start.devices)}"
    promise = start.plan_samples_per_second
    words += f"; the plan says {rate(promise)} samples/s" if promise else ""
    return f"{words} ({start.reason})" if start.reason else words


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(min(at, LATEST)))
