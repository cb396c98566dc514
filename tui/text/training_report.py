"""A training as its journal has it: how fast it was, and when and why its shares changed or it started again."""

from __future__ import annotations

import time
from collections.abc import Iterator

from evener.balancer.number_format import rate
from evener.balancer.store.trainings import TrainingRecord
from evener.live.journal import ChangeEntry, EndEntry, SpeedEntry, StartEntry

from .formatting import count_words, duration, plain

LATEST = 1e11  # seconds since the epoch that a date can be made of
WORTH_SAYING = 0.05  # the least relative difference from the steps/s of the last line


def training_report(training: TrainingRecord) -> Iterator[str]:
    """Lines for the terminal: the whole, then each start, change, and speed that differs from the one before."""
    start = training.start
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(training.began_at))
    yield plain(f"training {training.run}: {start.workload}, {start.framework}, {began}", 1000)
    yield plain(
        f"{training.state}, {duration(training.seconds)}" + (f": {training.failure}" * bool(training.failure)), 1000
    )
    said = 0.0
    for entry, following in zip(training.entries, (*training.entries[1:], None), strict=True):
        match entry:
            case StartEntry():
                yield plain(f"  {_clock(entry.at)}  {_start_words(entry)}", 1000)
                said = 0.0
            case SpeedEntry(steps_per_second=steps):
                last = not isinstance(following, SpeedEntry)
                if last or abs(steps - said) > WORTH_SAYING * max(steps, said):
                    speed = f"{steps:.3g} steps/s, {rate(entry.samples_per_second)} samples/s"
                    yield f"  {_clock(entry.at)}  step {count_words(entry.step)}: {speed}"
                    said = steps
            case ChangeEntry(change=change):
                shares = " → ".join("+".join(map(str, each)) for each in (change.before, change.after))
                yield plain(f"  {_clock(change.at)}  {change.reason}: {shares}", 1000)
            case EndEntry(failure=failure):
                yield plain(f"  {_clock(entry.at)}  ended" + f": {failure}" * bool(failure), 1000)


def _start_words(start: StartEntry) -> str:
    shares = "+".join(map(str, start.shares))
    words = f"{'started again' if start.reason else 'started'}: {shares} rows on {', '.join(start.devices)}"
    promise = start.plan_samples_per_second
    words += f"; the plan says {rate(promise)} samples/s" if promise else ""
    return f"{words} ({start.reason})" if start.reason else words


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(min(at, LATEST)))
