"""Findings of a result as codes with values, and the one table that makes sentences of them.

A template names a value and how it is written: `{loss:loss}` is 9 %, or nothing where a format says so, as `{batch:at}`
does for a layout with as many samples as the chosen one.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable
from typing import Any

from ..families.family import MODES
from ..families.registry import FAMILIES
from ..number_format import join_words, milliseconds, percent, rate
from ..types import Finding
from .layout_names import KNOBS, join_shares

GIB = 1 << 30


DOUBTS = {  # the reason not to trust a verdict, the worst first
    "not_finite": "its loss was not finite",
    "throttled": "steps were held back while it was measured",
    "drift": "its speed drifted while it was measured",
    "disturbed": "other work took CPU time while it was measured",
    "changed": "the machine's speed changed between measurements",
}
UNCERTAIN = {**DOUBTS, "noisy": "its steps vary much", "too_short": "it was timed too shortly"}  # of samples/s
RIVALS = {"even": "the even split", "even_by_rows": "the even split of rows as they come"}
BETWEEN = {  # the parts of a verdict, by the first word of their code; "; " between the others
    **dict.fromkeys(("epoch", "budget", "advice", "unknown", "hosts", "objective"), ". "),
    "figure": ": ",
    "gain": ", ",
    "each": ", though ",
    "cause": "",
    "doubt": "; but ",
    "remedy": "",
}

_FORMATS: dict[str, Callable[[Any], str]] = {
    "rate": lambda speed: f"{rate(speed)} samples/s",
    "tokens": lambda speed: f"{rate(speed)} tokens/s",
    "ms": milliseconds,
    "and": join_words,
    "percent": percent,
    "tenths": lambda share: percent(abs(share), 1),
    "fine": lambda share: percent(share, 1),
    "gain": lambda share: percent(share, 0 if share >= 0.01 else 1),
    "loss": lambda share: percent(share, 0 if share >= 0.02 else 1),
    "rough": lambda share: percent(share, 0 if share >= 0.005 else 1),
    "GiB": lambda size: f"{size / GIB:.1f} GiB",
    "shares": join_shares,
    "ratios": lambda ratios: ":".join(f"{ratio:.3f}" for ratio in ratios),
    "error": lambda share: "" if percent(share, 1) == percent(0.0, 1) else f" ± {percent(share, 1)}",
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
    "against": lambda whole: f", against the {milliseconds(whole[0])} of all {whole[1]}" if whole else "",
    "network": lambda seconds: f", as the network takes {seconds * 1000:.3g} ms of each step" if seconds else "",
    "is": lambda names: "is" if len(names) == 1 else "are",
    "tie": lambda names: "ties" if len(names) == 1 else "tie",
    "fit": lambda rows: f"{rows} sample{'s fit' if rows > 1 else ' fits'}",
    "steps": lambda steps: f"only {steps} step{'s' * (steps > 1)}" if steps else "less than one step",
    "bound": lambda rows: f"; search with --max-global-batch {rows[0]} for {rows[1]}" if rows else "",
    "doubt": lambda code: UNCERTAIN[code],
    "as": lambda code: f", as {UNCERTAIN[code]}" if code else "",
    "again": lambda code: "look at it before you train" if code == "not_finite" else "measure again to be sure",
    "who": lambda label: f"{label}: " if label else "",
    "heat": lambda hot: "heat, power or other work; let it cool" if hot else "other work",
    "slower": lambda change: "slower" if change > 0 else "faster",
    "where": lambda place: f", at {place}" if place else "",
    "begin": lambda text: text.capitalize(),
}

SENTENCES = {
    # the verdict
    "epoch.few_steps": "An epoch is {steps:steps}, as a step takes {batch} of the {rows} rows{bound:bound}",
    "budget.no_split": "The budget of {budget_seconds:g} s was over before any split was measured: starting processes"
    " took {start_seconds:.0f} s of it, and --budget {enough_seconds}s should do",
    "unknown.figure": "The samples/s aren't known ({error:±})",
    "figure.samples": "{samples_per_second:rate}{error:error}",
    "figure.tokens": "{tokens_per_second:tokens}{error:error} ({samples_per_second:rate}, {padding:percent}"
    " padding{gap:gap})",
    "gain.tie": "as fast as {over:over}{batch:at} within the error",
    "gain.faster": "{gain:gain} faster than {over:over}{batch:at}{paired:in_turn}",
    "gain.slower": "{loss:gain} slower than {over:over}{batch:at}{paired:in_turn}",
    "each.slower": "each training takes {times:.1f} times as long",
    "split.unknown": "how fast a split over several devices is isn't known",
    "split.unmeasured": "no split over several devices was measured{batch:near}",
    "split.tie": "a split over {devices:and}{batch:at} is no faster within the error ({samples_per_second:rate})",
    "split.faster": "a split over {devices:and}{batch:at} is {gain:gain} faster{paired:in_turn}"
    " ({samples_per_second:rate})",
    "split.loses": "a split over {devices:and}{batch:at} loses {loss:loss}{paired:in_turn}",
    "cause.longest_part": ", because its longest part alone still takes {longest_seconds:ms}{whole:against}",
    "cause.sync": ", because keeping them in step costs {sync_seconds:ms} a step",
    "cause.unexplained": ": its step takes {step_seconds:ms}{longest_seconds:part}; the rest isn't explained",
    "larger.adds": "{samples} samples a step would add {gain:fine}{paired:in_turn}",
    "larger.adds_about": "{samples} samples a step would add {gain:rough}{paired:in_turn}",
    "knob.same": "{knobs:knobs} makes no difference",
    "knob.loses": "{knobs:knobs} loses {loss:loss}{paired:in_turn}",
    "knob.gives": "{knobs:knobs} gives {gain:loss}{paired:in_turn}",
    "tie.certain": "{layouts:and} {layouts:tie} with it",
    "tie.unclear": "{layouts:and} can't be distinguished from it yet",
    "hosts.left_out": "{hosts:and} {hosts:is} left out: the fastest split over {most} hosts{batch:at,} makes"
    " {samples_per_second:rate}, {loss:loss} less{network_seconds:network}",
    "objective.most": "It trains {amount}, the most of the layouts at most {slowdown:percent} slower than the fastest",
    "objective.more": "It trains {amount}, the most of the layouts at most {slowdown:percent} slower than the fastest,"
    " and {gain:percent} more than the fastest",
    "remedy.measure_on": "{doubt:as}: evener balance --resume {run} --budget +5m measures on",
    "taken.verdict": "others hold memory of {devices:and}, which is left to them",
    "doubt.verdict": "{doubt:doubt}: {doubt:again}",
    # warnings
    "note": "{text}",
    "left_out": "{text}",
    "not_compared.by_rows": "Not compared: {layouts:and}, which train by rows; --objective samples compares by rows.",
    "not_compared.failed": "Not compared: {layout}: {why}.",
    "not_compared.out_of_memory": "Not compared: {layout}: it ran out of memory.",
    "unmeasured.layouts": "The budget left no time to measure {layouts:and}; --budget {enough_seconds}s should do.",
    "unmeasured.packs": "Packs still gained when the budget left no time for a {layouts:and}; --budget"
    " {enough_seconds}s should do.",
    "retreat": "{layout:begin}: {shares:shares} ran out of memory; {instead:shares} was measured instead.",
    "unfinished.importing": "Importing had not ended after {seconds:.0f} s on {devices:and}{where:where}.",
    "unfinished.loading": "The import of {name} had not ended after {seconds:.0f} s on {devices:and}{where:where}.",
    "unfinished.building": "{name} had not returned after {seconds:.0f} s on {devices:and}{where:where}.",
    "unfinished.preparing": "{name} had not been built after {seconds:.0f} s on {devices:and}{where:where}.",
    "unfinished.warming_up": "The first steps of {name} had not ended after {seconds:.0f} s on"
    " {devices:and}{where:where}.",
    "doubt.not_finite": "{device:who}The loss was not finite (NaN or infinite) by step {value:.0f}: nothing is learned"
    " like that; look at the data, the learning rate and the precision.",
    "doubt.disturbed": "{device:who}Other work took CPU time in {value:percent} of the blocks; stop it and measure"
    " again.",
    "doubt.throttled": "{device:who}Some steps were held back (by {value:percent}), as by {hot:heat}; look at evener"
    " monitor, and measure again.",
    "doubt.capped": "{device:who}A device was at its power limit in {value:percent} of the time: the figure is that of"
    " this limit.",
    "doubt.drift": "{device:who}Steps became {value:tenths} {value:slower} while they were timed; measure again with"
    " {longer}.",
    "doubt.changed": "{device:who}The same layout was {value:percent} faster in one measurement than in another, as by"
    " {hot:heat}: gains may be wrong by as much; measure again.",
    "doubt.noisy": "{device:who}The samples/s are only known to within ± {value:tenths}; measure again with {longer}.",
    "doubt.slow_start": "{device:who}Steps were still becoming faster (by {value:percent}) when the warm-up's time was"
    " over.",
    "doubt.stalled": "{device:who}One block took {value:.1f} times as long as the others.",
    "doubt.too_short": "{device:who}Only {value:.2f} s were timed; give {longer}.",
    "taken.memory": "{device}: others hold {size_bytes:GiB} of its memory; the batches here leave it to them.",
    "device.nothing_ran": "{device} was left out, as nothing ran on it: {why}.",
    "device.nothing_fits": "{device} was left out, as not even {rows:fit} in its memory: {why}.",
    "device.failed": "{device} worked at first and then failed every time, so it was left out: {why}.",
    "device.gone": "{device} worked at first and can't be used now: {why}.",
    "passes.statistics": "{layer} sees one pass of {rows} rows, not a device's whole share, so training depends on the"
    " passes; GroupNorm or LayerNorm doesn't, and --micro off makes a plan without passes.",
}


class _Writer(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        write = _FORMATS.get(format_spec)
        return write(value) if write else str(super().format_field(value, format_spec))


def list_sentences() -> dict[str, str]:
    """The template of every code, with those of the families."""
    return SENTENCES | {code: text for family in FAMILIES.values() for code, text in family.sentences().items()}


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
        between = " and " if group == before == "gain" else BETWEEN.get(group, "; ")
        text += (between if text else "") + say(part)
        before = group
    return f"{text}." if text else ""
