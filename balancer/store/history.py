"""What past runs measured of devices, for the lists that show it."""

from __future__ import annotations

from collections.abc import Sequence

from evener.balancer.store import runs
from evener.balancer.types import Timed
from evener.devices.types import Device
from evener.errors import EvenerError

MOST_RUNS = 20  # looked at, the newest first


def rates_alone(devices: Sequence[Device]) -> tuple[float | None, ...]:
    """Each device's highest samples/s alone in the newest run that measured all of them; None without such a run."""
    wanted = [device.id for device in devices]
    for summary in runs.list_runs()[:MOST_RUNS]:
        try:
            run = runs.load_run(summary.run)
        except EvenerError:
            continue
        best: dict[str, float] = {}
        for seen in run.observations:
            layout = seen.probe.layout
            if isinstance(seen, Timed) and layout.kind == "solo":
                name = run.header.devices[layout.active[0]].id
                best[name] = max(best.get(name, 0.0), seen.samples_per_second)
        if all(name in best for name in wanted):
            return tuple(best[name] for name in wanted)
    return (None,) * len(wanted)
