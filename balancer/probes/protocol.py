"""The messages between the search and its probe processes, and stack dumps on a signal.

Each message is one line of typed JSON with a maximum length. A probe process only executes
commands. Its parent decides what to run, for how long, and what an error means.

When a probe process receives `STACK_SIGNAL`, it writes its stack to standard error. This shows the
parent what a process that doesn't reply is doing. `faulthandler` writes the stack without the
interpreter's help, so this also works in a process that loops, waits or computes.
"""

from __future__ import annotations

import re
import signal
from typing import Annotated, Any, Literal

import msgspec

from evener.shares.curves import Cost, Work
from evener.workloads.protocol import LinkSpeed, WorkerSetup
from evener.workloads.user_code import is_user_file

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Devices = msgspec.Meta(min_length=1, max_length=4096)
LONGEST_LINE_BYTES = 256 << 10  # of a reply: `LONGEST_TRACEBACK` escaped, 6 bytes a character
LONGEST_TEXT = 2000  # characters of an error's text
# characters of a traceback: with every one of them escaped, it still fits on a line
LONGEST_TRACEBACK = 40_000
STACK_SIGNAL = signal.SIGUSR1
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\n", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_IMPORTS = "_find_and_load"  # of Python's import statement
Step = Literal["importing", "loading", "building", "preparing"]


class Build(msgspec.Struct, frozen=True, tag=True):
    """Command: build the workload for this process.

    The reply is `Built`.
    """

    workload: str
    framework: str
    settings: dict[str, Any]
    setup: WorkerSetup
    compute: float = 1.0  # fraction of its speed that it may use: below 1 it spins before each step
    parallelism: float = 1.0  # number of cores that its step keeps busy
    device_ids: tuple[str, ...] = ()  # ids of the place's devices, as the monitor knows them
    # the devices' memory is the host's, as that of CPU slices is
    in_host_memory: bool = False
    # bytes by which the process may grow after the framework's import; None: no cap
    address_space_bytes: int | None = None


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Command: set the shares and passes of a layout, and run the first step.

    - `shares`: how many rows each device of the layout computes per step.
    - `micro`: the most rows that each device computes in a pass; empty means one pass for the whole
      share.
    - `costs`: for each device, how its time depends on the number and length of rows. If given,
      rows are assigned to devices and passes by their lengths.
    - `tokens`: with `costs`, the most tokens of each device in a pass, including padding; 0 for no
      limit.
    - `length`: if above 0, all rows have this length.

    The reply is `Prepared`.
    """

    shares: tuple[int, ...]
    micro: tuple[int, ...] = ()
    costs: tuple[Cost, ...] = ()
    tokens: tuple[int, ...] = ()
    length: int = 0


class RunSteps(msgspec.Struct, frozen=True, tag=True):
    """Command: run blocks of `steps` steps until `seconds` have passed, at least one block.

    The reply is `Ran`.
    """

    steps: int
    seconds: float = 0.0


class KeepBatch(msgspec.Struct, frozen=True, tag=True):
    """Command: use one batch for all further steps if `kept`, or load new batches again.

    The reply is `BatchKept`.
    """

    kept: bool


class MeasureLink(msgspec.Struct, frozen=True, tag=True):
    """Command: time all-reduces between the ranks.

    The reply is `LinkMeasured`.
    """


class TimeOnDevice(msgspec.Struct, frozen=True, tag=True):
    """Command: time a step on the GPU with all kernels enqueued beforehand.

    The reply is `TimedOnDevice`.
    """


class ReleaseMemory(msgspec.Struct, frozen=True, tag=True):
    """Command: release cached memory, because the process will be idle.

    The reply is `MemoryReleased`.
    """


Command = Build | Prepare | RunSteps | KeepBatch | MeasureLink | TimeOnDevice | ReleaseMemory


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Reply: the process has started and finished its imports."""


class Built(msgspec.Struct, frozen=True, tag=True):
    """Reply: the process has built the workload; `facts` describe it."""

    facts: Annotated[dict[str, str], msgspec.Meta(max_length=200)]


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """Reply: the first step with the new shares has run."""

    first_step_seconds: Seconds


class Ran(msgspec.Struct, frozen=True, tag=True):
    """Reply: duration and peak memory of the steps that a RunSteps command asked for."""

    steps: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    wall_seconds: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    cpu_seconds: Seconds  # CPU time of the whole process, without spinning
    spun_seconds: Seconds  # seconds of spinning, which slow the process to its share of speed
    memory_bytes: Annotated[
        tuple[Bytes | None, ...], Devices
    ]  # the most memory that each of its devices held
    # number of steps after which the loss was NaN or infinite; 0: it was finite
    not_finite_step: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0
    work: Work | None = None  # work of all steps in the block; None: rows have no lengths
    # seconds in which its device waited for other ranks' gradients and the all-reduce; None:
    # unknown
    waited_seconds: Seconds | None = None
    input_seconds: Seconds | None = None  # seconds of waiting for rows; None: unknown
    update_seconds: Seconds | None = None  # the optimizer's own step; None: unknown
    # seconds in which its threads were ready to run but had no core; None: not reported by the
    # kernel
    starved_seconds: Seconds | None = None
    taken_by: str = ""  # names of the programs that used the cores meanwhile
    # how often a GPU's allocator had to free cached memory to fulfil a request
    memory_retries: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0
    gc_seconds: Seconds = 0.0  # seconds of Python's garbage collector, included above
    longest_gc_seconds: Seconds = 0.0  # seconds of its longest collection


class BatchKept(msgspec.Struct, frozen=True, tag=True):
    """Reply: whether the workload can use one batch repeatedly."""

    able: bool


class LinkMeasured(msgspec.Struct, frozen=True, tag=True):
    """Reply: the measured speed of all-reduces; None if the workload can't measure it."""

    speed: LinkSpeed | None


class TimedOnDevice(msgspec.Struct, frozen=True, tag=True):
    """Reply: step time in seconds, without the delay of enqueuing kernels; None if unknown."""

    seconds: Seconds | None


class MemoryReleased(msgspec.Struct, frozen=True, tag=True):
    """Reply: how many bytes the process still holds on each of its devices; None means unknown."""

    memory_bytes: Annotated[tuple[Bytes | None, ...], Devices]


class ChildError(msgspec.Struct, frozen=True, tag=True):
    """Reply: a command raised an exception; `types` names its class and base classes."""

    types: Annotated[tuple[str, ...], msgspec.Meta(max_length=100)]
    text: str
    where: str = ""  # "file.py:12": the line of the user's code that raised it, if there is one
    traceback: str = ""
    # memory ran out in a step, and the child is back in its state before that step
    recovered: bool = False
    # memory ran out for the model or its optimizer's state, so fewer rows wouldn't help
    fits_no_rows: bool = False
    # memory of the host that was free when it ran out for the model of a GPU; 0: unknown; None: it
    # didn't run out
    host_free_bytes: int | None = None


Reply = (
    Ready
    | Built
    | Prepared
    | Ran
    | BatchKept
    | LinkMeasured
    | TimedOnDevice
    | MemoryReleased
    | ChildError
)

command_decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
reply_decoder: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def encode_line(message: Command | Reply) -> bytes:
    """Encode a message as one line of JSON."""
    return msgspec.json.encode(message) + b"\n"


class Exited(msgspec.Struct, frozen=True):
    """A probe process has ended, by itself or by a signal."""

    code: int
    cap_share: float = 0.0  # peak memory as a fraction of its cap; 0 without a cap
    # the kernel has killed some process for memory since the child started
    kernel_killed: bool = False
    output: str = ""  # the end of its standard error and standard output


class InvalidReply(msgspec.Struct, frozen=True):
    """A line from a probe process that isn't a valid reply."""

    text: str


class HostLost(msgspec.Struct, frozen=True):
    """The host of a probe process can't be reached any more."""

    text: str


Message = Reply | Exited | InvalidReply | HostLost


def parse_reply(text: bytes) -> Reply | InvalidReply:
    """Decode a line as a reply, or return an InvalidReply with the beginning of the line."""
    try:
        return reply_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return InvalidReply(text[:80].decode(errors="replace"))


class Stack(msgspec.Struct, frozen=True):
    """Stack of a probe process's main thread, to explain a timeout or a slow start.

    `step` says what the process is doing: "importing" in an import statement, "loading" in the
    user's file, "building" in the user's function, else "preparing".
    """

    step: Step
    where: str  # "file.py:12": the line of the user's code; empty: none
    text: str


def read_stack(output: str) -> Stack | None:
    """Find the stack of a probe process's main thread in its standard error output.

    `faulthandler` wrote it there. Returns the newest stack if there are several, and None if there
    is none.
    """
    for text in reversed(_THREAD.split(output)[1:]):
        frames = _FRAME.findall(text)  # the innermost first
        homes = {(file.rpartition("/")[2], function) for file, _, function in frames}
        if ("worker.py", "main") in homes:
            return _describe(frames, homes, text.strip())
    return None


def _describe(frames: list[tuple[str, str, str]], homes: set[tuple[str, str]], text: str) -> Stack:
    own = next((i for i, (file, _, _) in enumerate(frames) if is_user_file(file)), len(frames))
    where = "{}:{}".format(*frames[own]) if own < len(frames) else ""
    step: Step = "preparing"
    if any(function == _IMPORTS for _, _, function in frames[:own]):
        step = "importing"
    elif ("user_code.py", "_import") in homes:
        step = "loading"
    elif homes & {("user_code.py", "find_function"), ("user_code.py", "call")}:
        step = "building"
    return Stack(step, where, text)
