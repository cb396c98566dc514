"""Write the error that a user sees if a search couldn't train with any layout."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from evener.devices.registry import find_backend
from evener.devices.types import Device
from evener.errors import DeviceError, NoLayoutError

from ..events import ProbeProgress
from ..journal import Header, JournalContents
from ..number_format import count_samples, join_words, size, write_share
from ..request import allows_passes
from ..search.observations import SHARDED
from ..search.subset import search_shards
from ..types import (
    HOST_MEMORY,
    MEASURED_PART,
    Belief,
    Failed,
    ModelState,
    Observation,
    OutOfMemory,
    Timed,
)
from ..verdict import Unfinished
from .judge import SearchEnd, find_repeated_build
from .measurements import PHASES, find_taken_bytes, strip_location
from .sentences import write_repeated_build, write_unfinished
from .state_memory import find_state_memory, write_adapters

OWN_CODE = ("loading", "building", "warming up")  # the phases in which the user's code runs
LONG_PART = 0.5  # fraction of the budget; a phase of the user's code that took more may never end
CODE_REMEDY = "Fix that in your code: the error is the same on every device."
HOST_REMEDY = "Free memory of the host, or let build() need less of it."
REMEDY = "Fix what failed, free memory, or choose another workload or other devices."


def explain_no_plan(
    record: JournalContents, belief: Belief, end: SearchEnd
) -> NoLayoutError | DeviceError:
    """Return the error for a search in which no layout could be measured.

    The error says what happened and what to do. It is a `DeviceError` if every device failed,
    otherwise a `NoLayoutError`.
    """
    header, seen = record.header, record.observations
    ran = any(isinstance(one, Timed) for one in seen)
    largest = [curve.largest_batch or 0 for curve in belief.curves]
    too_large = ran and sum(largest) < (header.request.global_batch or 0)
    if too_large and not allows_passes(header.request, header.framework):
        return _explain_too_large(header, largest, seen)
    failures = [] if too_large and end.late else find_failures(seen, header.devices)
    if not failures:
        return _explain_end(header, ran, end)
    return _explain_failures(record, failures, end)


def _explain_failures(
    record: JournalContents, failures: Sequence[str], end: SearchEnd
) -> NoLayoutError | DeviceError:
    """Return the error for a search in which probes failed or ran out of memory.

    `failures` describes what happened on each device.
    """
    header, seen = record.header, record.observations
    if _lost_every_device(seen):
        remedy = find_backend(header.devices[0].kind).remedy
        return DeviceError(f"No device could be measured: {'; '.join(failures)}.", remedy)
    budget = header.request.budget_seconds
    if budget is not None and not end.interrupted and _may_fit_in_shards(record):
        why = (
            f"The budget of {budget:g} s was over before a step in shards was measured. Without "
            f"shards: {'; '.join(failures)}."
        )
        repeated = find_repeated_build(record.facts, seen)
        if repeated is not None:
            why += f" {write_repeated_build(repeated)}"
        return NoLayoutError(
            why, f"Raise it, as in --budget {2 * budget:g}s: the state fits into shards."
        )
    why = "; ".join((*failures, *_explain_shards(record)))
    if HOST_MEMORY in why:
        return NoLayoutError(f"No layout could be measured: {why}.", HOST_REMEDY)
    if _fails_everywhere(seen):
        why += _locate_workload(header.workload, why)
        return NoLayoutError(f"No layout could be measured: {why}.", CODE_REMEDY)
    memory = find_state_memory(record.facts, seen, header.devices, chosen=None)
    adapters = write_adapters(memory) if memory is not None else []
    remedy, full = REMEDY, _find_full_in_shards(record)
    if full and budget is not None and end.late:
        seconds = fmean(one.elapsed_seconds for one in full)
        remedy = (
            f"Give a longer budget, as in --budget {2 * budget:g}s: another try in shards takes "
            f"about {seconds:.0f} s. Or give a smaller batch, or free memory."
        )
    return NoLayoutError(" ".join([f"No layout could be measured: {why}.", *adapters]), remedy)


def _lost_every_device(observations: Sequence[Observation]) -> bool:
    """Return whether every probe failed because of its device, not the code or memory."""
    return all(
        isinstance(observation, Failed) and observation.cause == "device"
        for observation in observations
    )


def _fails_everywhere(observations: Sequence[Observation]) -> bool:
    """Return whether all probes failed with the same exception from the user's code."""
    # then neither one device nor its memory can be the cause
    raised = [
        observation
        for observation in observations
        if isinstance(observation, Failed) and observation.cause == "raised"
    ]
    errors = {strip_location(one.detail) for one in raised}
    return len(raised) == len(observations) and len(errors) == 1


def _locate_workload(workload: str, reason: str) -> str:
    """Return words that point to the user's function or class that builds the model.

    Returns "" if `reason` already names a line of that file, or if the file can't be read.
    """
    file, _, name = workload.rpartition(":")
    if not file.endswith(".py") or f"{Path(file).name}:" in reason:
        return ""
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, ValueError, SyntaxError):
        return ""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in ast.walk(tree):
        if isinstance(node, functions) and node.name == name:
            return f"; it came from inside the model that {name}() makes, {file}:{node.lineno}"
    return ""


def _explain_shards(record: JournalContents) -> Iterator[str]:
    """Yield a clause that says why the model couldn't be trained in shards.

    Yields nothing if sharding wasn't tried.
    """
    tried = [
        observation for observation in record.observations if observation.probe.stage in SHARDED
    ]
    failed = next((one for one in tried if isinstance(one, Failed)), None)
    full = _find_positions(tried, OutOfMemory) - _find_positions(tried, Timed)
    if failed is not None:
        yield f"in shards it failed: {failed.detail.rstrip('.')}"
    elif full:
        labels = join_words([record.header.devices[i].label for i in sorted(full)])
        yield f"in shards {labels} ran out of memory too, without the state"
    elif whole := _find_full_in_shards(record):
        shares = dict.fromkeys(one.probe.layout.shares for one in whole)
        rows = join_words([" + ".join(map(str, each)) for each in shares])
        yield f"in shards, memory ran out too, with {rows} samples"
    elif tried and record.facts.state is not None:
        yield _explain_large_state(record, record.facts.state, tried)


def _explain_large_state(
    record: JournalContents, state: ModelState, tried: Sequence[Observation]
) -> str:
    """Return a clause with the memory that the model's state and a step take, and what there is."""
    memory_bytes = sum(each or 0 for each in record.header.job.problem.memory_bytes)
    return (
        f"in shards its state of {size(state.state_bytes)} doesn't fit either: the devices have "
        f"{size(memory_bytes)} in all, for that and for a step's rows, which take "
        f"{_write_smallest_steps(record, state, tried)}"
    )


def _find_full_in_shards(record: JournalContents) -> list[OutOfMemory]:
    """Return the probes in which the model was sharded over several devices and memory ran out."""
    return [
        one
        for one in record.observations
        if isinstance(one, OutOfMemory)
        and one.probe.layout.traits.together
        and one.probe.layout.traits.sharded
    ]


def _may_fit_in_shards(record: JournalContents) -> bool:
    """Return whether the model might fit in memory if it is sharded, but that hasn't been tried."""
    tried = [
        observation for observation in record.observations if observation.probe.stage in SHARDED
    ]
    state = record.facts.state
    if state is None or any(one.probe.layout.traits.together for one in tried):
        return False
    problem = msgspec.structs.replace(record.header.job.problem, shards=True, state=state)
    return bool(search_shards(problem, tried).parts)


def _write_smallest_steps(
    record: JournalContents, state: ModelState, tried: Sequence[Observation]
) -> str:
    """Describe how much memory the smallest measured step took on each device.

    The memory of the device's part of the model isn't included.
    """
    held = round(MEASURED_PART * (state.state_bytes - state.gradient_bytes))
    fewest: dict[int, tuple[int, int]] = {}
    for observation in tried:
        layout = observation.probe.layout
        if not isinstance(observation, Timed) or layout.traits.together:
            continue
        for position in layout.active:
            used = observation.memory_bytes[position]
            if used is not None:
                found = (layout.shares[position], max(0, used - held))
                fewest[position] = min(found, fewest.get(position, found))
    written = [
        f"{size(used)} on {record.header.devices[position].label} for {rows} row"
        f"{'s' if rows > 1 else ''}"
        for position, (rows, used) in sorted(fewest.items())
    ]
    return f"{join_words(written)} ({size(state.gathered_bytes)} of it are gathered units)"


def _find_positions(observations: Sequence[Observation], outcome: type[Observation]) -> set[int]:
    """Return the positions of all devices that took part in a probe with this kind of outcome."""
    return {
        i
        for observation in observations
        if isinstance(observation, outcome)
        for i in observation.probe.layout.active
    }


def _explain_end(header: Header, any_succeeded: bool, end: SearchEnd) -> NoLayoutError:
    """Return the error for a search that ended before anything useful was measured.

    The search was interrupted, its budget was spent, or it had nothing to measure. `any_succeeded`
    says whether any probe succeeded.
    """
    budget = header.request.budget_seconds
    what = "a layout of the global batch" if any_succeeded else "anything"
    unfinished = [write_unfinished(one) for one in end.unfinished]
    if end.interrupted:
        return NoLayoutError(
            " ".join([f"The search was stopped before {what} was measured.", *unfinished]),
            f"Go on with evener balance --resume {header.run}.",
        )
    if budget is None or not end.late:
        why = end.why_stopped.rstrip(".")
        return NoLayoutError(f"No layout could be measured: {why}.", REMEDY)
    longer = f"--budget {2 * budget:g}s"
    causes = "an endless loop, or for input(), which has nothing to read"
    # code that has trained in another process ends, and no code of the user builds a built-in model
    is_suspect = ":" in header.workload and not any_succeeded
    own = [one for one in end.unfinished if is_suspect and one.phase in OWN_CODE]
    if any(one.seconds >= LONG_PART * budget for one in own):
        return NoLayoutError(
            " ".join(unfinished), f"Look there for {causes}; or give it more time, as in {longer}."
        )
    over = f"The budget of {budget:g} s was over before {what} was measured."
    if_longer = f" If that isn't enough, look there for {causes}." if own else ""
    return NoLayoutError(" ".join([over, *unfinished]), f"Raise it, as in {longer}.{if_longer}")


def find_unfinished(
    workload: str, devices: Sequence[Device], running: Sequence[ProbeProgress]
) -> tuple[Unfinished, ...]:
    """List the start-up phases that probe processes hadn't finished when the search ended.

    Each entry names the phase, such as importing or building the model, and the devices. It also
    has the time in seconds that the slowest process had spent in this phase.
    """
    found = []
    for phase in ("importing", "loading", "building", "preparing", "warming up"):
        late = [one for one in running if one.phase == phase]
        if not late:
            continue
        positions = sorted({i for one in late for i in one.probe.layout.active})
        shown, what = _name_phase(phase, workload)
        found.append(
            Unfinished(
                shown,
                what,
                max(one.phase_seconds for one in late),
                tuple(devices[i].label for i in positions),
                next((one.where for one in late if one.where), ""),
            )
        )
    return tuple(found)


def _name_phase(phase: str, workload: str) -> tuple[str, str]:
    """Return a start-up phase as shown to users, and the name of the code that it runs."""
    home, _, attribute = workload.rpartition(":")
    name = Path(home).name or workload
    if phase != "building":
        return phase, name
    # no function of the user builds a built-in workload
    return ("building", f"{name}'s {attribute}()") if home else ("preparing", name)


def find_failures(observations: Sequence[Observation], devices: Sequence[Device]) -> list[str]:
    """Describe why each device failed, based on its failed probe with the fewest rows.

    If all devices failed for the same reason, and not for lack of memory, one description covers
    them all.
    """
    smallest = dict(sorted(_find_smallest(observations).items()))
    reasons = []
    for i, one in smallest.items():
        if isinstance(one, Failed):
            reasons.append(_describe_reason(one, devices[i]))
    all_failed = len(reasons) == len(smallest)
    if len(smallest) > 1 and all_failed and len({*reasons}) == 1:
        labels = join_words([devices[i].label for i in smallest])
        return [f"{labels} failed{_join_phase(reasons[0])}"]
    return [_describe(i, one, devices[i]) for i, one in smallest.items()]


def _find_smallest(observations: Sequence[Observation]) -> dict[int, Failed | OutOfMemory]:
    """Return each device's failed probe with the smallest micro-batch, by device position."""
    smallest: dict[int, Failed | OutOfMemory] = {}
    for observation in observations:
        if isinstance(observation, Timed):
            continue
        for i in observation.devices or observation.probe.layout.active:
            rows = observation.probe.layout.pass_rows[i]
            if i not in smallest or rows < smallest[i].probe.layout.pass_rows[i]:
                smallest[i] = observation
    return smallest


def _describe(position: int, failure: Failed | OutOfMemory, device: Device) -> str:
    layout = failure.probe.layout
    samples = count_samples(write_share(layout.shares[position], layout.pass_rows[position]))
    if isinstance(failure, OutOfMemory):
        return f"{device.label} ran out of memory with {samples}"
    return f"{device.label} failed with {samples}{_join_phase(_describe_reason(failure, device))}"


def _join_phase(reason: str) -> str:
    """Return the reason for a failure in a form that can be appended to a sentence.

    The result is " while building: …" or similar. If the reason doesn't begin with a phase, the
    result is ", …".
    """
    phase, colon, rest = reason.partition(": ")
    return f" while {phase}: {rest}" if colon and phase in PHASES else f", {reason}"


def _describe_reason(failure: Failed, device: Device) -> str:
    return failure.detail.removeprefix(f"{device.label}, ").rstrip(".")


def _explain_too_large(
    header: Header, largest: Sequence[int], observations: Sequence[Observation]
) -> NoLayoutError:
    """Return the error for a requested global batch that doesn't fit on all devices together.

    `largest` is the most rows that fit on each device.
    """
    taken, most = find_taken_bytes(observations), sum(largest)
    holds = []
    for i, (device, rows) in enumerate(zip(header.devices, largest, strict=True)):
        held = taken.get(i, 0)
        others = f" (other processes hold {size(held)} of its memory)" if held else ""
        holds.append(f"{device.label} holds {rows}{others}")
    together = f", {most} in all" if len(holds) > 1 else ""
    micro_off = ""
    if header.request.micro == "off":
        micro_off = ", drop --micro off, so that larger shares are computed in several passes,"
    return NoLayoutError(
        f"A global batch of {count_samples(header.request.global_batch or 0)} doesn't fit: "
        f"{join_words(holds)}{together}.",
        f"Take at most {count_samples(most)}{micro_off} or choose other devices.",
    )
