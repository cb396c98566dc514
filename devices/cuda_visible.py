"""Which GPU a name means, and which of them CUDA_VISIBLE_DEVICES leaves, as CUDA itself reads it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from evener.devices.types import Device
from evener.errors import RequestError

_INDEX = re.compile(r"\d{1,6}", re.ASCII)


def find_gpu(gpus: Sequence[Device], pick: str) -> Device:
    """The GPU with this index, this UUID, or the only one whose UUID begins so; RequestError names what is there."""
    found = _matching(gpus, pick)
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"{gpu.index} ({gpu.name}, {gpu.id})" for gpu in gpus)
    if found:
        raise RequestError(f"{pick!r} is the beginning of {len(found)} UUIDs.", f"Write more of it: {there}.")
    raise RequestError(f"There is no GPU {pick!r}.", f"This machine has {there}.")


def visible_gpus(gpus: Sequence[Device], variable: str | None) -> tuple[Device, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; None: it isn't set.

    Entries are indices or beginnings of UUIDs; all behind the first that names no GPU are ignored, and a GPU named
    twice hides them all. Source: CUDA C++ programming guide, environment variables.
    """
    if variable is None:
        return tuple(gpus)
    chosen: list[Device] = []
    for text in variable.split(","):
        found = _matching(gpus, text.strip())
        if len(found) != 1:
            break
        if found[0] in chosen:
            return ()
        chosen += found
    return tuple(chosen)


def order_note(gpus: Sequence[Device], variables: Mapping[str, str]) -> str:
    """A warning where CUDA may count unequal GPUs in another order than the driver; else empty.

    CUDA counts the fastest first unless CUDA_DEVICE_ORDER says otherwise; nvidia-smi and this program by the PCI bus.
    """
    named = variables.get("CUDA_VISIBLE_DEVICES", "").split(",")
    by_bus = variables.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if by_bus or len({gpu.name for gpu in gpus}) < 2 or not any(_INDEX.fullmatch(text.strip()) for text in named):
        return ""
    return (
        f"CUDA_VISIBLE_DEVICES={','.join(named)} is read in the order of nvidia-smi; other CUDA programs read it so "
        "only with CUDA_DEVICE_ORDER=PCI_BUS_ID."
    )


def _matching(gpus: Sequence[Device], pick: str) -> list[Device]:
    if _INDEX.fullmatch(pick):
        return [gpu for gpu in gpus if gpu.index == int(pick)]
    wanted = pick.lower()
    if not wanted.startswith(("gpu-", "mig-")):
        return []
    exact = [gpu for gpu in gpus if gpu.id.lower() == wanted]
    return exact or [gpu for gpu in gpus if gpu.id.lower().startswith(wanted)]
