"""What ranks tell each other through a process group: JSON, whose types are checked.

PyTorch's own collectives of objects (`all_gather_object`, `broadcast_object_list`) unpickle what
comes, and so run code of whoever can send.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

Told = TypeVar("Told")


def gather_messages(own: Told, kind: Any = Any) -> list[Told]:
    """The values of all ranks, in their order, each of type `kind`; every rank calls it.

    ValidationError of msgspec for a value of another type.
    """
    sent = _encode(own)
    sizes = [_number(0) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, _number(len(sent)))
    filled = torch.zeros(int(max(sizes)), dtype=torch.uint8, device=sent.device)
    filled[: len(sent)] = sent
    every = [torch.zeros_like(filled) for _ in sizes]
    dist.all_gather(every, filled)
    return [_decode(each[: int(size)], kind) for each, size in zip(every, sizes, strict=True)]


def tell_all(own: Told, kind: Any = Any) -> Told:
    """The value that rank 0 has, which is of type `kind`; every rank calls it."""
    sent = _encode(own if dist.get_rank() == 0 else None)
    size = _number(len(sent))
    dist.broadcast(size, 0)
    if dist.get_rank() != 0:
        sent = torch.zeros(int(size), dtype=torch.uint8, device=sent.device)
    dist.broadcast(sent, 0)
    told: Told = _decode(sent, kind)
    return told


def _number(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64, device=_choose_device())


def _encode(value: Any) -> torch.Tensor:
    """The value as JSON of Python's own kind, which has infinity and what is no number."""
    text = json.dumps(msgspec.to_builtins(value)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(_choose_device())


def _decode(text: torch.Tensor, kind: Any) -> Any:
    return msgspec.convert(json.loads(text.cpu().numpy().tobytes()), type=kind)


def _choose_device() -> torch.device:
    """The CPU where the default group exchanges what lies there, else this process's GPU."""
    exchanged = [each.partition(":")[0] for each in dist.get_backend_config().split(",")]
    if "cpu" in exchanged:
        return torch.device("cpu")
    return torch.device(exchanged[0], torch.cuda.current_device())
