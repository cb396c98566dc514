"""Text of a dry run, which tries a model for a few steps before a search."""

from __future__ import annotations

from evener.balancer.number_format import count_samples, size
from evener.balancer.trials import DryRunDevice, DryRunResult
from evener.printable import align, plain


def dry_run_lines(result: DryRunResult) -> list[str]:
    """Return lines that say what was tried, and a table of what fits in each device's memory."""
    return [
        *(f"note: {plain(note)}" for note in result.notes),
        plain(result.write_tried(), 1000),
        "",
        *align(
            [("device", "name", "memory", "fits at once"), *map(_row, result.devices)],
            numbers_from=2,
        ),
        "",
        result.write_rest(),
    ]


def _row(device: DryRunDevice) -> tuple[str, str, str, str]:
    memory = "unknown" if device.memory_bytes is None else size(device.memory_bytes)
    rows = device.largest_batch
    most = "unknown" if rows is None else f"about {count_samples(rows)}"
    return (device.label, plain(device.name, 32), memory, most)
