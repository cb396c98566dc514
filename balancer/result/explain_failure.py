"""Why a session ended without a plan, as the fault to raise: what failed, what does not fit, or too short a budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evener.devices.registry import find_backend
from evener.devices.types import Device
from evener.errors import DeviceError, NoLayoutError

from ..events import ProbeProgress
from ..journal import Header, Record
from ..number_format import join_words, write_share
from ..request import allows_passes
from ..types import Belief, Failed, Finding, Observation, OutOfMemory, Timed
from .measurements import find_taken_bytes
from .outcome import RunEnd
from .words import GIB, say_all

HANGS = "Look for an endless loop there; input() gets none. Or"
IMPORTING = "unfinished.importing"
REMEDY = "Fix what failed, free memory, or choose another workload or other devices."


def explain_no_plan(record: Record, belief: Belief, end: RunEnd) -> NoLayoutError | DeviceError:
    """The fault of a run without a plan, by what was seen, what the search believes of the devices, and its ending."""
    header, seen, unfinished = record.header, record.observations, say_all(end.unfinished)
    ran = any(isinstance(one, Timed) for one in seen)
    largest = [curve.largest_batch or 0 for curve in belief.curves]
    too_large = ran and sum(largest) < (header.request.global_batch or 0)
    if too_large and not allows_passes(header.request, header.framework):
        return NoLayoutError(*_too_large(header, largest, seen))
    late = end.late
    failed = "" if too_large and late else list_failures(seen, header.devices)
    if failed and all(isinstance(one, Failed) and one.cause == "device" for one in seen):
        return DeviceError(f"No device could be measured: {failed}.", find_backend(header.devices[0].kind).remedy)
    if failed:
        return NoLayoutError(f"No layout could be measured: {failed}.", REMEDY)
    what = "a layout of the global batch" if ran else "anything"
    if end.interrupted:
        message = " ".join([f"The search was stopped before {what} was measured.", *unfinished])
        return NoLayoutError(message, f"Go on with evener balance --resume {header.run}.")
    budget = header.request.budget_seconds
    if budget is None or not late:
        return NoLayoutError(f"No layout could be measured: {end.why_stopped.rstrip('.')}.", REMEDY)
    more = f"as in --budget {2 * budget:g}s"
    slow = all(one.code == IMPORTING for one in end.unfinished)
    if not slow and ":" in header.workload:
        return NoLayoutError(" ".join(unfinished), f"{HANGS} give it more time, {more}.")
    message = " ".join([f"The budget of {budget:g} s was over before {what} was measured.", *unfinished])
    return NoLayoutError(message, f"Give more, {more}.")


def find_unfinished(workload: str, devices: Sequence[Device], running: Sequence[ProbeProgress]) -> tuple[Finding, ...]:
    """Each phase before measuring in which probes still are: on which devices, how long, and where in the code."""
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
                "devices": [devices[i].label for i in sorted({i for one in late for i in one.probe.layout.active})],
                "where": next((one.where for one in late if one.where), ""),
            }
            found.append(Finding(f"unfinished.{code}", values))
    return tuple(found)


def list_failures(seen: Sequence[Observation], devices: Sequence[Device]) -> str:
    """Each device's smallest failure, or the one failure that all share."""
    smallest: dict[int, Failed | OutOfMemory] = {}
    for one in seen:
        if isinstance(one, Timed):
            continue
        for i in one.devices or one.probe.layout.active:
            if i not in smallest or one.probe.layout.pass_rows[i] < smallest[i].probe.layout.pass_rows[i]:
                smallest[i] = one
    details = {_detail(one, devices[i]) for i, one in smallest.items() if isinstance(one, Failed)}
    if len(smallest) > 1 and len(details) == 1 and all(isinstance(one, Failed) for one in smallest.values()):
        return f"{join_words([devices[i].label for i in sorted(smallest)])} failed, {details.pop()}"
    return "; ".join(_failure(i, smallest[i], devices[i]) for i in sorted(smallest))


def _failure(position: int, seen: Failed | OutOfMemory, device: Device) -> str:
    batch = write_share(seen.probe.layout.shares[position], seen.probe.layout.pass_rows[position])
    if isinstance(seen, OutOfMemory):
        return f"{device.label} ran out of memory with {batch} samples"
    return f"{device.label} failed with {batch} samples, {_detail(seen, device)}"


def _detail(seen: Failed, device: Device) -> str:
    return seen.detail.removeprefix(f"{device.label}, ").rstrip(".")


def _too_large(header: Header, largest: Sequence[int], seen: Sequence[Observation]) -> tuple[str, str]:
    """The message that a fixed global batch is too large for the devices, and its remedy."""
    taken = find_taken_bytes(seen)
    fits = []
    for i, (device, size) in enumerate(zip(header.devices, largest, strict=True)):
        others = f" (others hold {taken[i] / GIB:.1f} GiB of its memory)" if taken.get(i) else ""
        fits.append(f"{device.label} holds {size}{others}")
    more = ", leave out --micro off," if header.request.micro == "off" else ","
    together = f", which is {sum(largest)} together" if len(fits) > 1 else ""
    return (
        f"A global batch of {header.request.global_batch} samples doesn't fit: {join_words(fits)}{together}.",
        f"Take at most {sum(largest)}{more} or other devices.",
    )
