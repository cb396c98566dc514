"""How a session is doing, as lines: events in, text out. Knows no screen."""

from __future__ import annotations

from evener.balancer.events import Event, Finished, Observed, ProbeProgress, ProbeStarted, Started
from evener.balancer.types import Failed, Layout, Observation, OutOfMemory, Probe, Result, Timed
from evener.tui.text.formatting import duration, percent, plain, rate


class Progress:
    """Everything that a line of progress needs, kept from the events so far."""

    def __init__(self) -> None:
        self.devices: tuple[str, ...] = ()
        self.running: dict[Probe, ProbeProgress | ProbeStarted] = {}
        self.best: Result | None = None
        self.doing = "starting"
        self.probes = 0
        self.out_of_memory = 0
        self.at_seconds = 0.0
        self.budget_seconds: float | None = None

    def take(self, event: Event) -> str | None:
        """Learn from an event; the line to print where lines can't be rewritten, if it deserves one."""
        self.at_seconds = max(self.at_seconds, getattr(event, "at_seconds", 0.0))
        if isinstance(event, Started):
            self.devices, self.budget_seconds = event.devices, event.budget_seconds
            again = f", {event.replayed} measurements kept" if event.replayed else ""
            return f"run {event.run}: {event.workload} on {', '.join(event.devices)}{again}"
        if isinstance(event, ProbeStarted | ProbeProgress):
            self.running[event.probe] = event
            return None
        if isinstance(event, Observed):
            return self._observed(event)
        if isinstance(event, Finished):
            self.running.clear()
        return None

    def _observed(self, event: Observed) -> str:
        self.running.pop(event.seen.probe, None)
        self.best, self.doing = event.best, event.belief.doing
        self.probes, self.out_of_memory = event.probes, event.out_of_memory
        return f"{duration(event.at_seconds):>10}  {self.observation_words(event.seen)}"

    def observation_words(self, seen: Observation) -> str:
        """What one measurement said, on a line."""
        where = f"{seen.probe.stage:<5} {self.layout_words(seen.probe.layout)}"
        if isinstance(seen, Timed):
            spread = (seen.high_seconds - seen.low_seconds) / 2 / seen.step_seconds
            doubts = "".join(f", {warning.code.replace('_', ' ')}" for warning in seen.warnings)
            return f"{where}: {rate(seen.samples_per_second)} samples/s ± {percent(spread, 1)}{doubts}"
        if isinstance(seen, OutOfMemory):
            who = ", ".join(self.devices[i] for i in seen.devices)
            return f"{where}: out of memory" + (f" on {who}" if who else "")
        assert isinstance(seen, Failed)
        return f"{where}: failed: {plain(seen.detail, 200)}"

    def layout_words(self, layout: Layout) -> str:
        """The devices that compute, with their shares: GPU:0[820] GPU:1[568]."""
        words = [f"{self.devices[i]}[{layout.shares[i]}]" for i in layout.active]
        if layout.processes > 1:
            words.insert(0, f"{layout.processes} x")
        words += [f"({plain(word, 40)})" for word in (layout.placement, *layout.knobs) if word]
        if len(words) > 8:
            words = [*words[:7], f"and {len(words) - 7} more"]
        return " ".join(words)

    def screen(self) -> list[str]:
        """What a terminal shows in place: one line a running measurement, the best so far, the time left."""
        lines = [f"{plain(self.doing, 200)}"]
        lines += [f"  {self._running_words(probe, event)}" for probe, event in list(self.running.items())[:20]]
        if self.best is not None:
            figure = rate(self.best.throughput.value)
            lines.append(f"best so far: {figure} samples/s with {self.layout_words(self.best.layout)}")
        plural = "" if self.probes == 1 else "s"
        counts = f"{self.probes} probe{plural}, {self.out_of_memory} out of memory, {duration(self.at_seconds)}"
        if self.budget_seconds is not None:
            counts += f", at most {duration(max(0.0, self.budget_seconds - self.at_seconds))} left"
        return [*lines, counts]

    def _running_words(self, probe: Probe, event: ProbeProgress | ProbeStarted) -> str:
        where = self.layout_words(probe.layout)
        if isinstance(event, ProbeStarted):
            return f"{where}: starting"
        words = f"{where}: {event.phase}"
        if event.samples_per_second is not None:
            words += f", {rate(event.samples_per_second)} samples/s"
        if event.relative_interval is not None:
            words += f" ± {percent(event.relative_interval, 1)}"
        return words
