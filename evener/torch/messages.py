"""Send values between ranks as JSON."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

Value = TypeVar("Value")


def gather_messages(own: Value, value_type: Any = Any) -> list[Value]:
    """Send a value to all ranks, and return the values of all ranks in rank order.

    Every rank has to call this. The values are decoded as `value_type`. Raises
    msgspec.ValidationError if a value isn't of this type.
    """
    sent = _encode(own)
    sizes = [_number(0) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, _number(len(sent)))
    filled = torch.zeros(int(max(sizes)), dtype=torch.uint8, device=sent.device)
    filled[: len(sent)] = sent
    every = [torch.zeros_like(filled) for _ in sizes]
    dist.all_gather(every, filled)
    return [_decode(each[: int(size)], value_type) for each, size in zip(every, sizes, strict=True)]


def broadcast_message(own: Value, value_type: Any = Any) -> Value:
    """Return rank 0's value on all ranks; the other ranks' values are ignored.

    Every rank has to call this. The value is decoded as `value_type`. Raises
    msgspec.ValidationError if it isn't of this type.
    """
    sent = _encode(own if dist.get_rank() == 0 else None)
    size = _number(len(sent))
    dist.broadcast(size, 0)
    if dist.get_rank() != 0:
        sent = torch.zeros(int(size), dtype=torch.uint8, device=sent.device)
    dist.broadcast(sent, 0)
    received: Value = _decode(sent, value_type)
    return received


def _number(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64, device=_choose_device())


def _encode(value: Any) -> torch.Tensor:
    """Encode a value as JSON, in a tensor of bytes."""
    # by Python's json module, which can represent infinity and NaN
    text = json.dumps(msgspec.to_builtins(value)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(_choose_device())


def _decode(text: torch.Tensor, value_type: Any) -> Any:
    return msgspec.convert(json.loads(text.cpu().numpy().tobytes()), type=value_type)


def _choose_device() -> torch.device:
    """Return the device to send messages from."""
    # the CPU if the default group has a backend for it
    exchanged = [each.partition(":")[0] for each in dist.get_backend_config().split(",")]
    if "cpu" in exchanged:
        return torch.device("cpu")
    return torch.device(exchanged[0], torch.cuda.current_device())
