"""Findings of a search, its faults and next steps as codes with values: the one table that makes
sentences of them.

A template names a value and how it is written: `{loss:loss}` is 9 %, or nothing where a format says
so, as `{batch:at}` does for a layout with as many samples as the chosen one.
"""

from __future__ import annotations

import shlex
import string
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from evener.devices.terms import write_limit
from evener.devices.types import Limit
from evener.errors import EvenerError, RequestError
from evener.plan.file import LARGER_BATCH, SOLO_PREFIX
from evener.training.noise_scale import NoiseScale, write_scale

from ..families import FAMILIES, MODES, MOST_NAMED
from ..number_format import (
    duration,
    factor,
    join_shares,
    join_words,
    millions,
    milliseconds,
    percent,
    rate,
    size,
    step_time,
    write_share,
)
from ..objectives import find_objective
from ..types import Finding
from . import learning

KNOBS = {"xla": "XLA", "mixed": "mixed precision"}

DOUBTS = {  # the reason not to trust a verdict, the worst first
    "not_finite": "its loss was not finite",
    "throttled": "steps were held back while it was measured",
    "drift": "its speed drifted while it was measured",
    "disturbed": "other work took CPU time while it was measured",
    "changed": "the machine's speed changed between measurements",
}
UNCERTAIN = {
    **DOUBTS,
    "noisy": "its steps vary a lot",
    "too_short": "it was timed too briefly",
}  # of samples/s
AT = {  # what a rank is at
    "": "silent",
    "own work": "in own work",
    "sum": "waiting in the all-reduce",
    "update": "in the optimizer's step",
    "between steps": "between steps",
    "input": "waiting for data",
}
OTHERS = {
    "": "",
    "wait": "; the others wait for it",
    "unknown": "; where the others are isn't known yet",
}
RIVALS = {"even": "the even split", "even_by_rows": "the even split by number of rows"}
# the parts of a text, by the first word of their code, or of the codes of two; "; " between the
# others
BETWEEN = {
    **dict.fromkeys(
        (
            "epoch",
            "budget",
            "advice",
            "unknown",
            "hosts",
            "objective",
            "outlook",
            "learning",
            "rate",
        ),
        ". ",
    ),
    "gain gain": " and ",
    "fault failure": ": ",
    "figure": ": ",
    "gain": ", ",
    "each": ", though ",
    "cause": "",
    "doubt": "; but ",
    "remedy": "",
}


def _span(write: Callable[[float], str], each: Sequence[float]) -> str:
    """A figure with its lower and upper end in brackets, if they differ."""
    middle, low, high = map(write, each)
    return middle + f" ({low} - {high})" * (low != high)


_FORMATS: dict[str, Callable[[Any], str]] = {
    "rate": lambda speed: f"{rate(speed)} samples/s",
    "tokens": lambda speed: f"{rate(speed)} tokens/s",
    "ms": milliseconds,
    "and": join_words,
    "or": lambda words: join_words(words, "or"),
    "percent": percent,
    "tenths": lambda share: percent(abs(share), 1),
    "fine": lambda share: percent(share, 1),
    "gain": lambda share: percent(share, 0 if share >= 0.01 else 1),
    "loss": lambda share: percent(share, 0 if share >= 0.02 else 1),
    "rough": lambda share: percent(share, 0 if share >= 0.005 else 1),
    "size": size,
    "millions": millions,
    "duration": duration,
    "share": lambda share: write_share(*share),
    "also": lambda knobs: "".join(f", {KNOBS.get(knob, knob)}" for knob in knobs),
    "apart": lambda shares: f", {join_shares(shares)}" if shares else "",
    "best": lambda another: "another " if another else "best ",
    "another": lambda another: "another " if another else "",
    "layout": lambda layout: say(msgspec.convert(layout, Finding)),
    "layouts": lambda layouts: join_words([say(msgspec.convert(one, Finding)) for one in layouts]),
    "families": lambda names: join_words([FAMILIES[name].plural for name in names]),
    "reached": lambda reached: find_objective(reached["objective"]).write(reached["value"]),
    "fits": lambda devices: join_words([say(Finding("memory.holds", each)) for each in devices]),
    "others": lambda count: f" (other processes hold {size(count)} of its memory)" if count else "",
    "together": lambda rows: f", {rows} in all" if rows else "",
    "unless": lambda off: ", leave out --micro off," if off else ",",
    "what": lambda ran: "a layout of the global batch" if ran else "anything",
    "on": lambda labels: f" on {', '.join(labels)}" if labels else "",
    "command": shlex.join,
    "hosts": lambda hosts: (
        f", on {hosts[0] if len(hosts) == 1 else 'each of its hosts'}" if hosts else ""
    ),
    "framework": lambda name: "" if name == "none" else f" ({name})",
    "built": lambda seconds: f"built in {duration(seconds)} and stepped" if seconds else "stepped",
    "stepped": lambda steps: join_words(
        [f"{step_time(seconds)} with {batch} samples" for batch, seconds in steps]
    ),
    "shares": lambda all_: (
        join_shares(all_) if len(all_) <= MOST_NAMED else str(sum(rows for rows, _ in all_))
    ),
    "ratios": lambda all_: (
        ":".join(f"{one:.3f}" for one in all_) + " " if len(all_) <= MOST_NAMED else ""
    ),
    "devices": lambda all_: join_words(all_) if len(all_) <= MOST_NAMED else f"{len(all_)} devices",
    "error": lambda share: (
        "" if percent(share, 1) == percent(0.0, 1) else f" ± {percent(share, 1)}"
    ),
    "±": lambda share: f"± {percent(share, 1)}",
    "alone": lambda alone: " alone" if alone else "",
    "mode": lambda mode: MODES.get(mode, ""),
    "be": lambda trainings: "are" if trainings > 1 else "is",
    "lose": lambda trainings: "lose" if trainings > 1 else "loses",
    "knobs": lambda knobs: " and ".join(KNOBS.get(knob, knob) for knob in knobs),
    "with": lambda knobs: "".join(f", with {KNOBS.get(knob, knob)}" for knob in knobs),
    "over": lambda rival: RIVALS.get(rival, f"{rival} alone"),
    "at": lambda batch: f" at {batch} samples" if batch else "",
    "at,": lambda batch: f", at {batch} samples," if batch else "",
    "near": lambda batch: f" near {batch} samples" if batch else "",
    "in_turn": lambda paired: ", measured in turn" if paired else "",
    "gap": lambda gap: "" if gap is None else f", the devices' own work within {percent(gap)}",
    "part": lambda seconds: f", its longest part alone {milliseconds(seconds)}" if seconds else "",
    "against": lambda whole: (
        f", against the {milliseconds(whole[0])} of all {whole[1]}" if whole else ""
    ),
    "network": lambda seconds: (
        f", because the network takes {seconds * 1000:.3g} ms of each step" if seconds else ""
    ),
    "is": lambda names: "is" if len(names) == 1 else "are",
    "tie": lambda layouts: "ties" if len(layouts) == 1 else "tie",
    "x": lambda times: f"{factor(times)} x",
    "times": lambda times: f"x {factor(times)}",
    "about_x": lambda each: f"about {_span(factor, each)} x",
    "worth": lambda each: (
        f"at least {percent(each[1])}" if each[2] > 1 - 1e-9 else f"about {_span(percent, each)}"
    ),
    "scale": lambda scale: write_scale(NoiseScale(**scale)),
    "in": lambda name: f" in {name!r}" if name else " here",
    "measure": lambda measure: learning.MEASURES[measure],
    "fit": lambda rows: f"{rows} sample{'s fit' if rows > 1 else ' fits'}",
    "steps": lambda steps: (
        f"only {steps} step{'s' * (steps > 1)}" if steps else "less than one step"
    ),
    "bound": lambda rows: (
        f"; for {rows[1]}, search with --max-global-batch {rows[0]}" if rows else ""
    ),
    "doubt": lambda code: UNCERTAIN[code],
    "as": lambda code: f", because {UNCERTAIN[code]}" if code else "",
    "again": lambda code: (
        "look at it before you train" if code == "not_finite" else "measure again to be sure"
    ),
    "who": lambda label: f"{label}: " if label else "",
    "heat": lambda hot: "heat, power or other work; let it cool" if hot else "other work",
    "slower": lambda change: "slower" if change > 0 else "faster",
    "where": lambda place: f", at {place}" if place else "",
    "doing": lambda doing: AT[doing],
    "perhaps": lambda doing: (
        ", perhaps in an evaluation or a checkpoint" * (doing == "between steps")
    ),
    "seen": lambda missing: " seen here" if missing else "",
    "waiting": lambda others: OTHERS[others],
    "why": lambda reasons: f": {reasons}" if reasons else "",
    "of": lambda user: f" of {user}" if user else "",
    "of_it": lambda part: f" ({part:.0f} % of it)" if part else "",
    "limit": lambda limit: write_limit(msgspec.convert(limit, Limit)),
    "begin": lambda layout: say(msgspec.convert(layout, Finding)).capitalize(),
}

SENTENCES = {
    # the verdict
    "epoch.few_steps": (
        "An epoch is {steps:steps}, because a step takes {batch} of the {rows} rows{bound:bound}"
    ),
    "budget.no_split": "The budget of {budget_seconds:g} s was over before any split was measured: "
    "starting processes"
    " took {start_seconds:.0f} s of it, and --budget {enough_seconds}s should be enough",
    "unknown.figure": "The samples/s are too uncertain ({error:±})",
    "figure.samples": "{samples_per_second:rate}{error:error}",
    "figure.tokens": "{tokens_per_second:tokens}{error:error} ({samples_per_second:rate}, "
    "{padding:percent}"
    " padding{gap:gap})",
    "gain.tie": "as fast as {over:over}{batch:at} within the error",
    "gain.faster": "{gain:gain} faster than {over:over}{batch:at}{paired:in_turn}",
    "gain.slower": "{loss:gain} slower than {over:over}{batch:at}{paired:in_turn}",
    "each.slower": "each training takes {times:.1f} times as long",
    "split.unknown": "the speed of a split over several devices isn't known",
    "split.unmeasured": "no split over several devices was measured{batch:near}",
    "split.tie": (
        "a split over {devices:and}{batch:at} is no faster within the error "
        "({samples_per_second:rate})"
    ),
    "split.faster": "a split over {devices:and}{batch:at} is {gain:gain} faster{paired:in_turn}"
    " ({samples_per_second:rate})",
    "split.loses": "a split over {devices:and}{batch:at} loses {loss:loss}{paired:in_turn}",
    "cause.longest_part": (
        ", because its longest part alone still takes {longest_seconds:ms}{whole:against}"
    ),
    "cause.sync": ", because synchronizing the devices costs {sync_seconds:ms} a step",
    "cause.unexplained": (
        ": its step takes {step_seconds:ms}{longest_seconds:part}; the rest is unexplained"
    ),
    "larger.adds": "{samples} samples a step would be {gain:fine} faster{paired:in_turn}",
    "larger.adds_about": "{samples} samples a step would be {gain:rough} faster{paired:in_turn}",
    "knob.same": "{knobs:knobs} makes no difference",
    "knob.loses": "{knobs:knobs} loses {loss:loss}{paired:in_turn}",
    "knob.gives": "{knobs:knobs} gives {gain:loss}{paired:in_turn}",
    "tie.certain": "{layouts:layouts} {layouts:tie} with it",
    "tie.unclear": "{layouts:layouts} can't be distinguished from it yet",
    "hosts.left_out": "{hosts:and} {hosts:is} left out: the fastest split over {most} "
    "hosts{batch:at,} "
    "reaches"
    " {samples_per_second:rate}, {loss:loss} less{network_seconds:network}",
    "objective.most": "It reaches {reached:reached}, the most among the layouts at most "
    "{slowdown:percent} slower than"
    " the fastest",
    "objective.more": "It reaches {reached:reached}, the most among the layouts at most "
    "{slowdown:percent} slower than"
    " the fastest, and {gain:percent} more than the fastest",
    "remedy.measure_on": (
        "{doubt:as}; to measure longer: evener balance --resume {run} --budget +5m"
    ),
    "taken.verdict": "other processes hold memory of {devices:and}, and the plan leaves it to them",
    "doubt.verdict": "{doubt:doubt}: {doubt:again}",
    # warnings
    "note": "{text}",
    "left_out": "{text}",
    "not_compared.by_rows": "Not compared: {families:families}, which train by rows; "
    "--objective samples "
    "compares by"
    " rows.",
    "not_compared.failed": "Not compared: {layout:layout}: {why}.",
    "not_compared.out_of_memory": "Not compared: {layout:layout}: it ran out of memory.",
    "unmeasured.layouts": "The budget left no time to measure {layouts:layouts}; --budget "
    "{enough_seconds}s "
    "should be"
    " enough.",
    "unmeasured.packs": "Packs were still getting faster when the budget left no time for a"
    " {layouts:layouts}; --budget {enough_seconds}s should be enough.",
    "retreat": (
        "{layout:begin}: {shares:shares} ran out of memory; {instead:shares} was measured instead."
    ),
    "unfinished.importing": (
        "Importing had not ended after {seconds:.0f} s on {devices:and}{where:where}."
    ),
    "unfinished.loading": (
        "The import of {name} had not ended after {seconds:.0f} s on {devices:and}{where:where}."
    ),
    "unfinished.building": (
        "{name} had not returned after {seconds:.0f} s on {devices:and}{where:where}."
    ),
    "unfinished.preparing": (
        "{name} had not been built after {seconds:.0f} s on {devices:and}{where:where}."
    ),
    "unfinished.warming_up": "The first steps of {name} had not ended after {seconds:.0f} s on"
    " {devices:and}{where:where}.",
    "doubt.not_finite": "{device:who}The loss was NaN or infinite at step {value:.0f}, so "
    "nothing is "
    "learned; check the"
    " data, the learning rate and the precision.",
    "doubt.disturbed": "{device:who}Other work took CPU time in {value:percent} of the blocks "
    "of steps; "
    "stop it and"
    " measure again.",
    "doubt.throttled": "{device:who}Some steps were held back (by {value:percent}), perhaps by "
    "{hot:heat}; look at"
    " evener monitor, and measure again.",
    "doubt.capped": "{device:who}A device ran at its power limit for {value:percent} of the "
    "time: the "
    "figure holds for"
    " this limit.",
    "doubt.drift": "{device:who}Steps got {value:tenths} {value:slower} while they were timed; "
    "measure again with"
    " {longer}.",
    "doubt.changed": "{device:who}The same layout was {value:percent} faster in one "
    "measurement than in "
    "another,"
    " perhaps because of {hot:heat}: gains may be off by as much; measure again.",
    "doubt.noisy": (
        "{device:who}The samples/s are only known to within ± {value:tenths}; measure "
        "again with {longer}."
    ),
    "doubt.slow_start": (
        "{device:who}Steps were still getting faster (by {value:percent}) when the warm-up ended."
    ),
    "doubt.stalled": "{device:who}One block took {value:.1f} times as long as the others.",
    "doubt.too_short": "{device:who}Only {value:.2f} s were timed; give {longer}.",
    "taken.memory": "{device}: other processes hold {size_bytes:size} of its memory; the plan's "
    "batches leave it to"
    " them.",
    "device.nothing_ran": "{device} was left out, as nothing ran on it: {why}.",
    "device.nothing_fits": "{device} was left out, as not even {rows:fit} in its memory: {why}.",
    "device.failed": (
        "{device} worked at first and then failed every time, so it was left out: {why}."
    ),
    "device.gone": "{device} worked at first and can't be used now: {why}.",
    "passes.statistics": "{layer} sees one pass of {rows} rows, not a device's whole share, so "
    "training "
    "depends on the"
    " passes; GroupNorm or LayerNorm doesn't, and --micro off makes a plan without passes.",
    # names of the evidence, besides the families' own
    "layout.larger_batch": LARGER_BATCH,
    "layout.alone": SOLO_PREFIX + "{device}",
    # faults, and what failed
    "fault.batch_too_large": (
        "A global batch of {batch} samples doesn't fit: {devices:fits}{together:together}"
    ),
    "memory.holds": "{device} holds {rows}{taken_bytes:others}",
    "fault.no_device": "No device could be measured",
    "fault.no_layout": "No layout could be measured",
    "fault.ended": "No layout could be measured: {why}",
    "fault.interrupted": "The search was stopped before {ran:what} was measured",
    "fault.budget": "The budget of {budget_seconds:g} s was over before {ran:what} was measured",
    "fault.cut_off": "The run {run} ended before anything was measured",
    "fault.no_energy": "{device} reports no energy, so samples per joule can't be compared",
    "fault.no_lengths": (
        "{workload} gives no lengths of its rows, or all are equal, so tokens can't be counted"
    ),
    "fault.out_of_memory": "Out of memory{devices:on}: {why}",
    "fault.training": "The training failed: {why}",
    "fault.workload": "The workload fails: {why}",
    "fault.no_step": "No step ended within {budget_seconds:g} s",
    "fault.no_sample": "Not even one sample fits on {device}",
    "failure.out_of_memory": "{device} ran out of memory with {rows:share} samples",
    "failure.failed": "{device} failed with {rows:share} samples, {why}",
    "failure.shared": "{devices:and} failed, {why}",
    # requests that can't be met: what is wrong, and on a second line what to do
    "request.simulated": "{option} has no effect on simulated devices, whose speeds are "
    "written down.\n"
    "Leave {option} out.",
    "request.engine_framework": (
        "--engine {engine} is TensorFlow's; {framework} has none.\nLeave --engine out."
    ),
    "request.engine_hosts": (
        "--engine {engine} has one process for all devices.\nUse multiworker on several hosts."
    ),
    "request.engine_limit": "{device} is limited to {limit:limit}, which needs its own "
    "process; --engine "
    "{engine} has"
    " one process for all devices.\nUse --engine multiworker, or leave the limit out.",
    "request.no_energy": "CPU slices report no energy, so samples per joule can't be compared.\n"
    "Leave --objective out, or choose GPUs.",
    "request.no_watts": "The power of {device} isn't written down, so samples per joule can't be "
    "compared.\n"
    "Leave --objective out, or give `power_watts` in a machine file.",
    "request.setting": (
        "A setting can't be written to the journal: {why}.\nUse numbers, text and lists."
    ),
    "request.not_installed": (
        "{framework} is not installed.\nInstall it: pip install 'evener[{framework}]'."
    ),
    "request.number": "{option} is {number}.\nGive a whole number from 1 to {largest}.",
    "request.below_a_share": "--max-global-batch {largest} is below one share of {unit} samples.\n"
    "Raise it, or lower --multiple-of.",
    "request.no_multiple": (
        "--global-batch {batch} is not a multiple of {unit}.\nChange it, or --multiple-of."
    ),
    "request.above_largest": (
        "--global-batch {batch} is above --max-global-batch {largest}.\nGive one of them."
    ),
    "request.budget": "--budget is {seconds} seconds.\nGive a time above 0, like 120s or 5m.",
    "request.tolerance": "--tolerance is {tolerance}.\nUse a value of at least 0 and less than 1.",
    "request.max_slowdown": "--max-slowdown is {percent:g}%.\nGive 0% or more and below 100%.",
    "request.pace": "--pace is {pace}.\nGive 0 for no waiting, 1 for real time.",
    "request.word": "{option} {word!r} is not known.\nChoose {words:or}.",
    "request.devices": "{devices} devices can't be balanced.\nName between 1 and {most} devices.",
    "request.memory": (
        "Device {position} has {size_bytes} bytes of memory.\nGive a size above 0, or none."
    ),
    "request.largest_share": (
        "A largest share of {largest} is below {unit}.\nGive {unit} samples or more."
    ),
    "request.too_few_samples": "A global batch of {batch} can't give each of {devices} devices "
    "{unit} or more.\n"
    "Make it larger, or name fewer devices.",
    "request.differs": "--resume continues the run's own request, and {option} differs from it.\n"
    "Leave {option} out, or start a new run.",
    "request.failed_run": (
        "The run {run} failed, and nothing was measured: {why}.\nCorrect that and start a new run."
    ),
    "request.other_devices": "The run {run} was measured on {before}; {where} has {here}.\n"
    "Resume it where it began, or start a new run.",
    "request.text": "{option} {text!r} is not {kind}.\nWrite it like {example}.",
    "request.words": "{text!r} is not a list of words.\nWrite it like solo,even,pack.",
    "request.not_whole": "{option} {text!r} is not a whole number.\nGive samples, like 1024.",
    "request.not_text": "--set {text!r} can't be stored as text.\nWrite it in UTF-8.",
    "request.goes_with": (
        "--max-slowdown goes with --objective {objectives}.\nAdd that, or leave --max-slowdown out."
    ),
    "request.both": "{first} and {second} can't be combined.\nGive one of them.",
    "request.no_runs": "There are no runs yet.\nMake one with evener balance.",
    "request.no_run": "There is no run {name!r}.\nThe last one is {last}; evener runs lists them.",
    "request.no_run_name": "{name!r} is not the name of a run.\nList the runs with evener runs.",
    "request.several_runs": "{count} runs begin with {name!r}.\nWrite more of it, as in {last}.",
    "request.training_run": (
        "The run {run} is a training, and measured nothing.\nSee evener runs show {run}."
    ),
    # what to do then
    "remedy.smaller_batch": "Take at most {rows}{micro_off:unless} or other devices.",
    "remedy.device": "{text}",
    "remedy.layout": "Fix what failed, free memory, or choose another workload or other devices.",
    "remedy.resume": "Go on with evener balance --resume {run}.",
    "remedy.more_budget": "Raise it, as in --budget {budget_seconds:g}s.",
    "remedy.endless_loop": "Look there for an endless loop, or for input(), which has nothing "
    "to read; or "
    "give it more"
    " time, as in --budget {budget_seconds:g}s.",
    "remedy.other_devices": "Leave --objective out, or choose other devices.",
    "remedy.lengths": "Leave --objective out, or see evener help workload.",
    "remedy.smaller_passes": "Use smaller batches or passes (--micro).",
    "remedy.again": "Fix that and try again.",
    "remedy.longer_budget": "Give a longer --budget.",
    "remedy.free_memory": "Free some of its memory.",
    **learning.SENTENCES,
    # next steps
    "next.written": "plan written to {path}",
    "next.export": "to write the plan: evener export {run} -o plan.toml",
    "next.train": "to train by it{hosts:hosts}: {command:command}",
    "next.resume": "to go on: evener balance --resume {run}",
    "next.extend": (
        "the run had ended, and nothing was measured; for more: evener balance --resume "
        "{run} --budget +5m"
    ),
    # a dry run
    "outlook.steps": "{workload}{framework:framework} was {start_seconds:built} on {device}: a "
    "step took"
    " {steps:stepped}",
    "outlook.simulated": (
        "A simulated model was {start_seconds:built} on {device}: a step took {steps:stepped}"
    ),
    "outlook.search": "A search takes at most {budget_seconds:duration}",
    "outlook.nothing_kept": "Nothing was kept",
    # what holds a training up
    "held.all": (
        "All ranks{missing:seen} have been {doing:doing} for {seconds:duration}{doing:perhaps}."
    ),
    "held.silent": (
        "{rank} has been {doing:doing} for {seconds:duration}{doing:perhaps}{others:waiting}."
    ),
    "held.gone": (
        "{rank} has been silent for {seconds:duration}: stopped, or gone; the others wait for it."
    ),
    "held.all_input": "Input takes {seconds:ms} of a step, {part:percent}.",
    "held.input": (
        "{rank} waits for data for {seconds:ms} of a step, {part:percent}{others:waiting}."
    ),
    "held.all_between": "{seconds:ms} pass between steps, {part:percent} of the time, for "
    "example in "
    "logging or"
    " clipping.",
    "held.between": "{rank} takes {seconds:ms} between steps, {part:percent} of the time, for "
    "example "
    "in logging or"
    " clipping{others:waiting}.",
    "held.share": (
        "{rank} takes {own_seconds:ms} for its share; others wait up to {waited_seconds:ms} for it."
    ),
    "held.exchange": "Exchanging gradients takes {seconds:ms} that no computation overlaps.",
    "held.throttled": "{device} is throttled {percent:.0f} % of the time{reasons:why}.",
    "held.neighbour": "Process {pid}{user:of} also computes on {device}{percent:of_it}.",
}
FaultT = TypeVar("FaultT", bound=EvenerError)


class _Writer(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        write = _FORMATS.get(format_spec)
        return write(value) if write else str(super().format_field(value, format_spec))


def list_sentences() -> dict[str, str]:
    """The template of every code, with those of the families."""
    return SENTENCES | {
        code: text for family in FAMILIES.values() for code, text in family.sentences().items()
    }


def say(finding: Finding) -> str:
    """The sentence of a finding; of a part of a verdict, what stands between two semicolons."""
    template = SENTENCES.get(finding.code) or list_sentences()[finding.code]
    return _Writer().vformat(template, (), finding.values)


def say_all(findings: Iterable[Finding]) -> tuple[str, ...]:
    """The sentence of each finding."""
    return tuple(map(say, findings))


def write_verdict(parts: Iterable[Finding]) -> str:
    """The parts of a verdict as the sentences that they make together."""
    text = before = ""
    for part in parts:
        group = part.code.partition(".")[0]
        between = BETWEEN.get(f"{before} {group}") or BETWEEN.get(group, "; ")
        text += (between if text else "") + say(part)
        before = group
    return f"{text}." if text else ""


def make_fault(kind: type[FaultT], *parts: Finding, remedy: Finding) -> FaultT:
    """A fault of this kind that says the parts, then what to do; warnings among them are sentences
    of their own.
    """
    joined = [one for one in parts if one.code.startswith(("fault.", "failure.", "outlook."))]
    sentences = [write_verdict(joined), *(say(one) for one in parts if one not in joined)]
    return kind(" ".join(filter(None, sentences)), say(remedy), (*parts, remedy))


def refuse(fault: Finding) -> RequestError:
    """The fault of a request that can't be met, whose sentence and remedy are the two lines of its
    code.
    """
    message, _, remedy = say(fault).partition("\n")
    return RequestError(message, remedy, (fault,))
