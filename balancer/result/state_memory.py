"""Find which devices can hold a model's parameters, gradients and optimizer state.

A device may hold all of these, a shard of them, or only what is needed to train adapters.
"""

from __future__ import annotations

from collections.abc import Sequence

from evener.devices.types import Device

from ..model_memory import LORA, QLORA, TrainingMethod
from ..number_format import join_words, size
from ..search.observations import SHARDED
from ..types import Facts, Layout, Observation, Timed
from ..verdict import AdapterMemory, StateMemory

FEW = 0.1  # fraction of a model's parameters: if no more are trained, they are adapters


def find_state_memory(
    facts: Facts,
    observations: Sequence[Observation],
    devices: Sequence[Device],
    chosen: Layout | None,
) -> StateMemory | None:
    """Return which devices can hold the model's state.

    Returns None if the workload can't be sharded. If all parameters are trained, the result also
    says how much memory LoRA and QLoRA would need instead. `chosen` is the recommended layout, or
    None if there is none.
    """
    state = facts.state
    if state is None or not state.parameters:
        return None
    whole = {
        position
        for observation in observations
        if _holds_whole(observation)
        for position in observation.probe.layout.active
    }
    held: tuple[tuple[str, int], ...] = ()
    if chosen is not None and chosen.traits.sharded and chosen.state:
        parts = zip(devices, chosen.state, strict=True)
        held = tuple((device.label, round(part * state.state_bytes)) for device, part in parts)
    methods: tuple[TrainingMethod, ...] = ()
    if state.trained > FEW * state.parameters:
        methods = (LORA, QLORA)
    return StateMemory(
        state.state_bytes,
        tuple(devices[position].label for position in sorted(whole)),
        held,
        tuple(_find_adapters(method, state.parameters, devices) for method in methods),
    )


def _holds_whole(observation: Observation) -> bool:
    """Return whether a probe trained with the whole model on each of its devices."""
    layout = observation.probe.layout
    in_parts = observation.probe.stage in SHARDED or layout.traits.sharded or bool(layout.placement)
    return isinstance(observation, Timed) and not in_parts


def _find_adapters(
    method: TrainingMethod, parameters: int, devices: Sequence[Device]
) -> AdapterMemory:
    need = method.bytes_needed(parameters)
    fits = [device.label for device in devices if need < (device.usable_memory_bytes or 0)]
    return AdapterMemory(method.kind, method.description, need, tuple(fits))


def write_state_memory(memory: StateMemory) -> str:
    """Return sentences for users about the memory that the model's state needs.

    Returns "" if one device can hold it and the plan isn't sharded.
    """
    if memory.fits_on and not memory.shard_bytes:
        return ""
    holders = join_words(memory.fits_on) if memory.fits_on else "no device"
    verb = "hold" if len(memory.fits_on) > 1 else "holds"
    state = f"The model's state takes {size(memory.state_bytes)}, which {holders} {verb} alone"
    if memory.shard_bytes:
        parts = join_words([f"{size(part)} on {label}" for label, part in memory.shard_bytes])
        state += f"; in shards it is {parts}"
    return " ".join([f"{state}.", *write_adapters(memory)])


def write_adapters(memory: StateMemory) -> list[str]:
    """Return a sentence about each kind of adapter: how much memory it needs, and where it fits."""
    sentences = []
    for adapter in memory.adapters:
        fits = "no device holds that alone"
        if adapter.fits_on:
            fits = f"that fits {join_words(adapter.fits_on, 'or')} alone"
        need = size(adapter.state_bytes)
        sentences.append(f"{adapter.description} would take about {need} and activations: {fits}.")
    return sentences
