"""What a session and its children say to each other: one JSON object a line, typed, bounded.

The child obeys and never decides: what to run, for how long, and what an error means is the parent's business.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from evener.workloads.profiling import Transfer
from evener.workloads.protocol import Place

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Devices = msgspec.Meta(min_length=1, max_length=4096)

LONGEST_LINE_BYTES = 256 << 10
LONGEST_TEXT = 2000  # characters of an error that travel


class Begin(msgspec.Struct, frozen=True, tag=True):
    """First words to a child: where it may run, what it may have, and whose child it is."""

    parent_pid: int
    parent_start: float  # seconds since boot at which the parent started: with the pid it names it for good
    cores: tuple[int, ...] = ()  # empty: all


class Build(msgspec.Struct, frozen=True, tag=True):
    """Import the framework and build the workload at its place."""

    workload: str
    framework: str
    settings: dict[str, Any]
    place: Place
    compute: float = 1.0  # share of its speed that it may use: below 1 it spins before each step
    parallelism: float = 1.0  # cores that its step keeps busy
    room_bytes: int | None = None  # the process may grow by so much once the framework is imported; None: no cap


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Make batches of these sizes and run the first step."""

    shares: tuple[int, ...]


class Run(msgspec.Struct, frozen=True, tag=True):
    """Run so many steps as one timed block; again so many, until `seconds` have passed."""

    steps: int
    seconds: float = 0.0


class Profile(msgspec.Struct, frozen=True, tag=True):
    """Run so many steps, then as many under the framework's profiler."""

    steps: int


Order = Begin | Build | Prepare | Run | Profile


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The child lives and has taken its place on the machine."""

    pid: int


class Built(msgspec.Struct, frozen=True, tag=True):
    """The workload stands; `facts` are its own."""

    facts: Annotated[dict[str, str], msgspec.Meta(max_length=200)]


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """The first step of these sizes is done."""

    first_step_seconds: Seconds


class Ran(msgspec.Struct, frozen=True, tag=True):
    """A block is done."""

    steps: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    wall_seconds: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    cpu_seconds: Seconds  # of the whole process, without spinning
    spun_seconds: Seconds  # added to be as slow as told
    memory_bytes: Annotated[tuple[Bytes | None, ...], Devices]  # peak of each own device


class Profiled(msgspec.Struct, frozen=True, tag=True):
    """What moved between devices in the profiled steps, and how long as many took without the profiler."""

    steps: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    seconds: Seconds
    transfers: Annotated[tuple[Transfer, ...], msgspec.Meta(max_length=1000)]


class Trouble(msgspec.Struct, frozen=True, tag=True):
    """An exception ended the order. `types` are its class names, most special first."""

    types: Annotated[tuple[str, ...], msgspec.Meta(max_length=100)]
    text: str
    where: str = ""  # "file.py:12" in the user's own file


Reply = Ready | Built | Prepared | Ran | Profiled | Trouble

orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
replies: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def line(message: Order | Reply) -> bytes:
    """The message as a line."""
    return msgspec.json.encode(message) + b"\n"
