"""Why a session ended without a plan, as the fault to raise: what failed, what does not fit, or too
short a budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from evener.devices.registry import find_backend
from evener.devices.types import Device
from evener.errors import DeviceError, NoLayoutError

from ..events import ProbeProgress
from ..journal import Header, Record
from ..request import allows_passes
from ..search.observations import SHARDED
from ..types import Belief, Failed, Finding, Observation, OutOfMemory, Timed
from .measurements import find_taken_bytes
from .outcome import RunEnd
from .words import make_fault

IMPORTING = "unfinished.importing"
MEND = Finding("remedy.layout")


def explain_no_plan(record: Record, belief: Belief, end: RunEnd) -> NoLayoutError | DeviceError:
    """The fault of a run without a plan, by what was seen, what the search believes of the devices,
    and its ending.
    """
    header, seen = record.header, record.observations
    ran = any(isinstance(one, Timed) for one in seen)
    largest = [curve.largest_batch or 0 for curve in belief.curves]
    too_large = ran and sum(largest) < (header.request.global_batch or 0)
    if too_large and not allows_passes(header.request, header.framework):
        return _explain_too_large(header, largest, seen)
    failures = [] if too_large and end.late else find_failures(seen, header.devices)
    if failures and all(isinstance(one, Failed) and one.cause == "device" for one in seen):
        remedy = Finding("remedy.device", {"text": find_backend(header.devices[0].kind).remedy})
        return make_fault(DeviceError, Finding("fault.no_device"), *failures, remedy=remedy)
    if failures:
        return make_fault(
            NoLayoutError,
            Finding("fault.no_layout"),
            *failures,
            *_find_in_shards(record),
            remedy=MEND,
        )
    return _explain_end(header, ran, end)


def _find_in_shards(record: Record) -> Iterator[Finding]:
    """Why the model can't be trained in shards either, if that was tried."""
    tried = [one for one in record.observations if one.probe.stage in SHARDED]
    failed = next((one for one in tried if isinstance(one, Failed)), None)
    state, sizes = record.facts.state, record.header.job.problem.memory_bytes
    ran = {i for one in tried if isinstance(one, Timed) for i in one.probe.layout.active}
    full = {
        i for one in tried if isinstance(one, OutOfMemory) for i in one.probe.layout.active
    } - ran
    if failed is not None:
        yield Finding(
            "failure.shards_failed", {"cause": failed.cause, "why": failed.detail.rstrip(".")}
        )
    elif full:
        yield Finding(
            "failure.shards_row",
            {"devices": [record.header.devices[i].label for i in sorted(full)]},
        )
    elif tried and state is not None:
        own = {"state_bytes": state.state_bytes, "gathered_bytes": state.gathered_bytes}
        yield Finding("failure.shards", {**own, "memory_bytes": sum(size or 0 for size in sizes)})


def _explain_end(header: Header, ran: bool, end: RunEnd) -> NoLayoutError:
    """The fault of a run that was stopped, or whose search or budget was over; `ran`: something was
    measured.
    """
    budget = header.request.budget_seconds
    if end.interrupted:
        stopped, resume = (
            Finding("fault.interrupted", {"ran": ran}),
            Finding("remedy.resume", {"run": header.run}),
        )
        return make_fault(NoLayoutError, stopped, *end.unfinished, remedy=resume)
    if budget is None or not end.late:
        ended = Finding("fault.ended", {"reason": end.code, "why": end.why_stopped.rstrip(".")})
        return make_fault(NoLayoutError, ended, remedy=MEND)
    longer = {"budget_seconds": 2 * budget}
    slow = all(one.code == IMPORTING for one in end.unfinished)
    if not slow and ":" in header.workload:
        return make_fault(
            NoLayoutError, *end.unfinished, remedy=Finding("remedy.endless_loop", longer)
        )
    over = Finding("fault.budget", {"budget_seconds": budget, "ran": ran})
    return make_fault(
        NoLayoutError, over, *end.unfinished, remedy=Finding("remedy.more_budget", longer)
    )


def find_unfinished(
    workload: str, devices: Sequence[Device], running: Sequence[ProbeProgress]
) -> tuple[Finding, ...]:
    """Each phase before measuring in which probes still are: on which devices, how long, and where
    in the code.
    """
    home, _, attribute = workload.rpartition(":")
    name = Path(home).name or workload
    building = ("building", f"{name}'s {attribute}()") if home else ("preparing", name)
    found = []
    for phase, (code, named) in {
        "importing": ("importing", name),
        "loading": ("loading", name),
        "building": building,
        "preparing": ("preparing", name),
        "warming up": ("warming_up", name),
    }.items():
        late = [one for one in running if one.phase == phase]
        if late:
            values = {
                "name": named,
                "seconds": max(one.phase_seconds for one in late),
                "devices": [
                    devices[i].label
                    for i in sorted({i for one in late for i in one.probe.layout.active})
                ],
                "where": next((one.where for one in late if one.where), ""),
            }
            found.append(Finding(f"unfinished.{code}", values))
    return tuple(found)


def find_failures(seen: Sequence[Observation], devices: Sequence[Device]) -> list[Finding]:
    """Each device's smallest failure, or the one failure that all share."""
    smallest: dict[int, Failed | OutOfMemory] = {}
    for one in seen:
        if isinstance(one, Timed):
            continue
        for i in one.devices or one.probe.layout.active:
            if (
                i not in smallest
                or one.probe.layout.pass_rows[i] < smallest[i].probe.layout.pass_rows[i]
            ):
                smallest[i] = one
    positions = sorted(smallest)
    causes = {
        (one.cause, _why(one, devices[i])) for i, one in smallest.items() if isinstance(one, Failed)
    }
    if (
        len(smallest) > 1
        and len(causes) == 1
        and all(isinstance(one, Failed) for one in smallest.values())
    ):
        ((cause, why),) = causes
        return [
            Finding(
                "failure.shared",
                {"devices": [devices[i].label for i in positions], "cause": cause, "why": why},
            )
        ]
    return [_describe(i, smallest[i], devices[i]) for i in positions]


def _describe(position: int, seen: Failed | OutOfMemory, device: Device) -> Finding:
    layout = seen.probe.layout
    values = {"device": device.label, "rows": [layout.shares[position], layout.pass_rows[position]]}
    if isinstance(seen, OutOfMemory):
        return Finding("failure.out_of_memory", values)
    return Finding("failure.failed", values | {"cause": seen.cause, "why": _why(seen, device)})


def _why(seen: Failed, device: Device) -> str:
    return seen.detail.removeprefix(f"{device.label}, ").rstrip(".")


def _explain_too_large(
    header: Header, largest: Sequence[int], seen: Sequence[Observation]
) -> NoLayoutError:
    """The fault of a fixed global batch that is too large for the devices."""
    taken, most = find_taken_bytes(seen), sum(largest)
    holds = [
        {"device": device.label, "rows": rows, "taken_bytes": taken.get(i, 0)}
        for i, (device, rows) in enumerate(zip(header.devices, largest, strict=True))
    ]
    together = most if len(holds) > 1 else None
    batch = {"batch": header.request.global_batch, "devices": holds, "together": together}
    remedy = Finding(
        "remedy.smaller_batch", {"rows": most, "micro_off": header.request.micro == "off"}
    )
    return make_fault(NoLayoutError, Finding("fault.batch_too_large", batch), remedy=remedy)
