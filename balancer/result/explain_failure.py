"""Builds the error for a session that ended without a plan.

The error says what failed, what doesn't fit, or that the budget was too short.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from evener.devices.registry import find_backend
from evener.devices.types import Device
from evener.errors import DeviceError, NoLayoutError

from ..events import ProbeProgress
from ..journal import Header, JournalContents
from ..number_format import join_words, size, write_share
from ..request import allows_passes
from ..search.observations import SHARDED
from ..types import Belief, Failed, ModelState, Observation, OutOfMemory, Timed
from ..verdict import Unfinished
from .judge import SearchEnd
from .measurements import PHASES, find_taken_bytes, strip_location
from .sentences import write_unfinished
from .state_memory import find_state_memory, write_adapters

IMPORTING = "importing"  # the phase of imports, whose duration isn't the user's fault
CODE_REMEDY = "Fix that in your code: the error is the same on every device."
REMEDY = "Fix what failed, free memory, or choose another workload or other devices."


def explain_no_plan(
    record: JournalContents, belief: Belief, end: SearchEnd
) -> NoLayoutError | DeviceError:
    """Return the error for a run without a plan.

    It is built from the run's observations, the search's predictions for the devices, and the
    reason why the run ended.
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
    return _explain_failures(record, failures)


def _explain_failures(
    record: JournalContents, failures: Sequence[str]
) -> NoLayoutError | DeviceError:
    """Return the error for a run whose devices have failed, with remedies."""
    header, seen = record.header, record.observations
    if _lost_all(seen):
        remedy = find_backend(header.devices[0].kind).remedy
        return DeviceError(f"No device could be measured: {'; '.join(failures)}.", remedy)
    why = "; ".join((*failures, *_explain_shards(record)))
    if _fails_everywhere(seen):
        why += _find_maker(header.workload, why)
        return NoLayoutError(f"No layout could be measured: {why}.", CODE_REMEDY)
    memory = find_state_memory(record.facts, seen, header.devices, chosen=None)
    adapters = write_adapters(memory) if memory is not None else []
    return NoLayoutError(" ".join([f"No layout could be measured: {why}.", *adapters]), REMEDY)


def _lost_all(seen: Sequence[Observation]) -> bool:
    """True if every probe failed because its device couldn't be used."""
    return all(isinstance(one, Failed) and one.cause == "device" for one in seen)


def _fails_everywhere(seen: Sequence[Observation]) -> bool:
    """True if every observation is the same exception.

    The cause is then neither a single device nor its memory.
    """
    raised = [one for one in seen if isinstance(one, Failed) and one.cause == "raised"]
    errors = {strip_location(one.detail) for one in raised}
    return len(raised) == len(seen) and len(errors) == 1


def _find_maker(workload: str, why: str) -> str:
    """Return the end of an error message, which says where the workload's function is defined.

    It is for an error that names no line of the user's code, such as an error inside a layer.
    """
    file, _, name = workload.rpartition(":")
    if not file.endswith(".py") or f"{Path(file).name}:" in why:
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
    """Explain why the model can't be trained in shards either, if shards were tried."""
    tried = [one for one in record.observations if one.probe.stage in SHARDED]
    failed = next((one for one in tried if isinstance(one, Failed)), None)
    full = _active(tried, OutOfMemory) - _active(tried, Timed)
    if failed is not None:
        yield f"in shards it failed: {failed.detail.rstrip('.')}"
    elif full:
        labels = join_words([record.header.devices[i].label for i in sorted(full)])
        yield f"in shards {labels} ran out of memory too, without the state"
    elif tried and record.facts.state is not None:
        sizes = record.header.job.problem.memory_bytes
        yield _explain_state(record.facts.state, sum(each or 0 for each in sizes))


def _explain_state(state: ModelState, memory_bytes: int) -> str:
    """Explain that the model can't be sharded either, if its state exceeds the devices' memory.

    `memory_bytes` is the memory of all devices together.
    """
    return (
        f"in shards its state of {size(state.state_bytes)} doesn't fit either: the devices have "
        f"{size(memory_bytes)} in all, for that and, on each, {size(state.gathered_bytes)} of "
        f"gathered units and the activations of a row"
    )


def _active(seen: Sequence[Observation], outcome: type[Observation]) -> set[int]:
    """Return the positions of the devices whose probes had this outcome."""
    return {i for one in seen if isinstance(one, outcome) for i in one.probe.layout.active}


def _explain_end(header: Header, ran: bool, end: SearchEnd) -> NoLayoutError:
    """Return the error for a run that was stopped, or whose search or budget ended.

    `ran` is True if something was measured.
    """
    budget = header.request.budget_seconds
    what = "a layout of the global batch" if ran else "anything"
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
    slow = all(one.phase == IMPORTING for one in end.unfinished)
    if not slow and ":" in header.workload:
        return NoLayoutError(
            " ".join(unfinished),
            f"Look there for an endless loop, or for input(), which has nothing to read; or give "
            f"it more time, as in {longer}.",
        )
    over = f"The budget of {budget:g} s was over before {what} was measured."
    return NoLayoutError(" ".join([over, *unfinished]), f"Raise it, as in {longer}.")


def find_unfinished(
    workload: str, devices: Sequence[Device], running: Sequence[ProbeProgress]
) -> tuple[Unfinished, ...]:
    """Return the phases before measuring in which probes are still running.

    Each phase has its devices, the longest time spent in it, and the line of the user's code if
    it is known.
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
    """Return a phase in the user's terms, and its object.

    The object is the workload, or the function that builds the workload. A workload without a
    function of the user's is prepared, not built.
    """
    home, _, attribute = workload.rpartition(":")
    name = Path(home).name or workload
    if phase != "building":
        return phase, name
    return ("building", f"{name}'s {attribute}()") if home else ("preparing", name)


def find_failures(seen: Sequence[Observation], devices: Sequence[Device]) -> list[str]:
    """Describe each device's smallest failure, or the one failure that all devices share."""
    smallest = _find_smallest(seen)
    positions = sorted(smallest)
    failed = {i: one for i, one in smallest.items() if isinstance(one, Failed)}
    reasons = {_describe_reason(one, devices[i]) for i, one in failed.items()}
    if len(smallest) > 1 and len(failed) == len(smallest) and len(reasons) == 1:
        labels = join_words([devices[i].label for i in positions])
        return [f"{labels} failed{_join_phase(reasons.pop())}"]
    return [_describe(i, smallest[i], devices[i]) for i in positions]


def _find_smallest(seen: Sequence[Observation]) -> dict[int, Failed | OutOfMemory]:
    """Return for each device's position the failure with the fewest rows in a pass."""
    smallest: dict[int, Failed | OutOfMemory] = {}
    for one in seen:
        if isinstance(one, Timed):
            continue
        for i in one.devices or one.probe.layout.active:
            rows = one.probe.layout.pass_rows[i]
            if i not in smallest or rows < smallest[i].probe.layout.pass_rows[i]:
                smallest[i] = one
    return smallest


def _describe(position: int, seen: Failed | OutOfMemory, device: Device) -> str:
    layout = seen.probe.layout
    samples = f"{write_share(layout.shares[position], layout.pass_rows[position])} samples"
    if isinstance(seen, OutOfMemory):
        return f"{device.label} ran out of memory with {samples}"
    return f"{device.label} failed with {samples}{_join_phase(_describe_reason(seen, device))}"


def _join_phase(why: str) -> str:
    """Return a clause after "failed" with the phase: while warming up: ValueError."""
    phase, colon, rest = why.partition(": ")
    return f" while {phase}: {rest}" if colon and phase in PHASES else f", {why}"


def _describe_reason(seen: Failed, device: Device) -> str:
    return seen.detail.removeprefix(f"{device.label}, ").rstrip(".")


def _explain_too_large(
    header: Header, largest: Sequence[int], seen: Sequence[Observation]
) -> NoLayoutError:
    """Return the error for a fixed global batch that is too large for the devices."""
    taken, most = find_taken_bytes(seen), sum(largest)
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
        f"A global batch of {header.request.global_batch} samples doesn't fit: "
        f"{join_words(holds)}{together}.",
        f"Take at most {most} samples{micro_off} or choose other devices.",
    )
