"""The devices of a cluster below a row for each host, which can be folded."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from evener.balancer.number_format import rate
from evener.devices.types import DeviceSample, Reading, State

from .cells import Line, Span, clean, cut, pad, span_cells
from .figures import gib
from .marks import Marks


class HostRow(msgspec.Struct, frozen=True):
    """A host with its devices, which stand below it unless it is folded."""

    host: str
    samples: tuple[DeviceSample, ...]
    folded: bool

    @property
    def is_lost(self) -> bool:
        """True if none of the host's devices can be read."""
        return all(sample.utilization_percent.state is State.LOST for sample in self.samples)


PanelRow = DeviceSample | HostRow


def group_rows(samples: Sequence[DeviceSample], folded: Collection[str]) -> tuple[PanelRow, ...]:
    """The samples, below their hosts where devices name some, without those of folded hosts."""
    rows: list[PanelRow] = []
    for host in dict.fromkeys(sample.device.host for sample in samples):
        own = tuple(sample for sample in samples if sample.device.host == host)
        if host:
            rows.append(HostRow(host, own, host in folded))
        rows += [] if host and host in folded else own
    return tuple(rows)


def draw_host(row: HostRow, width: int, marks: Marks, here: bool) -> Line:
    """A host's line: folded or not, its name, and what its devices do together; or why it is lost."""
    count = len(row.samples)
    head = (
        Span(f" {marks.folded if row.folded else marks.descending} ", "dim"),
        Span(f"{clean(row.host, 40)} ", "title"),
        Span(f"{count} device{'s' * (count != 1)} ", "dim"),
    )
    if row.is_lost:
        note = Span(cut(clean(row.samples[0].note, 300), max(0, width - span_cells(head)), marks.ellipsis), "bad")
        return Line(pad((*head, note), width), here)
    busy = _current([sample.utilization_percent for sample in row.samples])
    used = _current([sample.memory_used_bytes for sample in row.samples])
    speed = _current([sample.samples_per_second for sample in row.samples])
    figures = [f"{sum(busy) / len(busy):.0f} % busy"] if busy else []
    figures += [f"{gib(sum(used))} GiB used"] if used else []
    figures += [f"{rate(sum(speed))} samples/s"] if speed else []
    text = cut(f" {marks.dot} ".join(figures), max(0, width - span_cells(head)), marks.ellipsis)
    return Line(pad((*head, Span(text, "text")), width), here)


def _current(readings: Sequence[Reading]) -> list[float]:
    return [reading.current for reading in readings if reading.current is not None]
