"""The progress of a session as lines: events in, text out. Knows no screen."""

from __future__ import annotations

from collections.abc import Sequence

from evener.balancer.events import Event, Observed, ProbeProgress, Started
from evener.balancer.number_format import duration, half_width, percent, rate, write_share
from evener.balancer.session_state import SessionState, advance, seconds_left
from evener.balancer.types import Layout, Observation, OutOfMemory, Timed

from .formatting import plain

DOUBTS = {  # about one measurement, behind its figure
    "not_finite": "loss not finite",
    "slow_start": "still warming up",
    "drift": "speed drifting",
    "noisy": "steps vary a lot",
    "too_short": "timed too briefly",
    "throttled": "steps held back",
    "capped": "at the power limit",
    "disturbed": "other work on the CPU",
    "stalled": "one stall",
    "changed": "speed changed",
}


class Progress:
    """A session's state, and the lines that show it."""

    def __init__(self) -> None:
        self.state = SessionState()
        self.said: list[str] = []  # to the user, below the other lines
        self.drawn = False  # True while `screen` is on a terminal

    @property
    def devices(self) -> tuple[str, ...]:
        """Labels, in the order of the request."""
        return self.state.devices

    def take(self, event: Event) -> str | None:
        """Apply an event; the line to print for it where lines can't be rewritten, if it deserves one."""
        self.state = advance(self.state, event)
        if isinstance(event, Started):
            kept = f", {event.replayed} measurements kept" if event.replayed else ""
            return f"run {event.run}: {event.workload} on {', '.join(event.devices)}{kept}"
        if isinstance(event, Observed):
            return f"{duration(event.at_seconds):>10}  {observation_words(event.seen, self.devices)}"
        return None

    def screen(self) -> list[str]:
        """The lines that a terminal redraws in place: each running measurement, the best so far, the time left."""
        state = self.state
        lines = [plain(state.belief.doing, 200) if state.belief is not None else "starting"]
        lines += [f"  {_running_words(running, self.devices)}" for running in state.running[:20]]
        if state.best is not None:
            best, where = state.best.throughput, layout_words(state.best.layout, self.devices)
            error = half_width(best.value, best.low, best.high)
            lines.append(f"best so far: {rate(best.value)} samples/s ± {error} with {where}")
        plural = "" if state.probes == 1 else "s"
        counts = f"{state.probes} probe{plural}, {state.out_of_memory} out of memory, {duration(state.at_seconds)}"
        return [*lines, counts + left_words(state), *self.said]


def left_words(state: SessionState) -> str:
    """The rest of the budget in words; simulated devices have other seconds than the clock on the wall."""
    left = seconds_left(state)
    simulated = state.devices and all(label.startswith("SIM:") for label in state.devices)
    return "" if left is None else f", at most {duration(left)}{' of simulated time' if simulated else ''} left"


def _running_words(running: ProbeProgress, labels: Sequence[str]) -> str:
    words = f"{layout_words(running.probe.layout, labels)}: {running.phase}"
    if running.samples_per_second is None and running.phase_seconds >= 1:
        words += f" for {duration(running.phase_seconds)}"
    if running.samples_per_second is not None:
        words += f", {rate(running.samples_per_second)} samples/s"
    if running.relative_interval is not None:
        words += f" ± {percent(running.relative_interval, 1)}"
    return words


def observation_words(seen: Observation, labels: Sequence[str]) -> str:
    """A measurement in words, on a line: its stage, layout and outcome."""
    return f"{seen.probe.stage:<5} {layout_words(seen.probe.layout, labels)}: {outcome_words(seen, labels)}"


def outcome_words(seen: Observation, labels: Sequence[str], plus_minus: str = "± ") -> str:
    """The outcome of one measurement in words: samples/s with doubts, out of memory, or why it failed."""
    if isinstance(seen, Timed):
        error = half_width(seen.throughput.value, seen.throughput.low, seen.throughput.high)
        doubts = "".join(f", {DOUBTS[warning.code]}" for warning in seen.warnings)
        figure = f"{rate(seen.samples_per_second)} samples/s"
        if seen.tokens and not seen.probe.layout.length:
            figure = f"{rate(seen.tokens / seen.step_seconds)} tokens/s, {percent(seen.padding)} padding, {figure}"
        return f"{figure} {plus_minus}{error}{doubts}"
    if isinstance(seen, OutOfMemory):
        who = ", ".join(labels[i] for i in seen.devices)
        return "out of memory" + (f" on {who}" if who else "")
    return f"failed: {plain(seen.detail, 200)}"


def outcome_name(seen: Observation) -> str:
    """The name of an outcome: timed, out of memory or failed."""
    return "timed" if isinstance(seen, Timed) else "out of memory" if isinstance(seen, OutOfMemory) else "failed"


def share_words(layout: Layout, device: int) -> str:
    """A device's share, with its passes: 820 = 2 × 410; and the length of its rows, if a probe is about one."""
    share = write_share(layout.shares[device], layout.pass_rows[device])
    return f"{share} of {layout.length} tokens" if layout.length else share


def layout_words(layout: Layout, labels: Sequence[str], most: int = 8) -> str:
    """The devices that compute, with their shares: GPU:0[820] GPU:1[568]; of more than `most`, some are counted."""
    words = [f"{labels[i]}[{share_words(layout, i)}]" for i in layout.active]
    if layout.processes > 1:
        words.insert(0, f"{layout.processes} x")
    words += [f"({plain(word, 40)})" for word in (layout.placement, *layout.knobs) if word]
    if len(words) > most:
        words = [*words[: most - 1], f"and {len(words) - most + 1} more"]
    return " ".join(words)
