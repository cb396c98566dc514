"""The program that each rank runs when links are measured: times all-reduces between devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from .fork_server import die_with_parent

if TYPE_CHECKING:
    from evener.torch.sums.link import LinkMember


class Join(msgspec.Struct, frozen=True, tag=True):
    """Command: form a process group with the other ranks.

    The ranks meet in `file`. A communicator is created for each of `groups`.
    """

    file: str
    rank: int
    world: int
    device: str  # cuda:0, cpu
    seconds: float  # timeout in seconds for the others to join
    groups: tuple[tuple[int, ...], ...]


class Sum(msgspec.Struct, frozen=True, tag=True):
    """Command: time all-reduces among the ranks in `members`.

    The reply is `Summed`.
    """

    members: tuple[int, ...]


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """Reply: the rank's process has started and imported PyTorch."""


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """Reply: the rank has opened its device and now joins the process group."""


class Joined(msgspec.Struct, frozen=True, tag=True):
    """Reply: the rank has joined the process group."""


class Summed(msgspec.Struct, frozen=True, tag=True):
    """Reply: the measured latency and bandwidth of all-reduces.

    `wrong` describes an incorrect sum; "" if all sums were correct.
    """

    latency_seconds: float
    bytes_per_second: float
    wrong: str = ""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """Reply: a command raised an exception."""

    error: str


LinkCommand = Join | Sum
LinkReply = RankReady | Arrived | Joined | Summed | RankFailed
_decoder: msgspec.json.Decoder[LinkCommand] = msgspec.json.Decoder(LinkCommand)


def main() -> None:
    """Run one rank: execute commands from standard input, and write replies to standard output."""
    die_with_parent()
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    import evener.torch.sums.link  # noqa: F401 - before the deadline of the first command begins

    rank = LinkRank()
    replies.write(msgspec.json.encode(RankReady()) + b"\n")
    for line in sys.stdin.buffer:
        try:
            for reply in rank.execute(_decoder.decode(line)):
                replies.write(msgspec.json.encode(reply) + b"\n")
        except Exception as error:
            failed = RankFailed(f"{type(error).__name__}: {str(error).splitlines()[0][:300]}")
            replies.write(msgspec.json.encode(failed) + b"\n")
    os._exit(0)  # a communicator that hangs would block an orderly exit


class LinkRank:
    """One rank's side of a link measurement: executes the parent's commands."""

    def __init__(self) -> None:
        self._member: LinkMember | None = None
        self._rank = 0

    def execute(self, command: LinkCommand) -> Iterator[LinkReply]:
        """Execute a command of the parent, and yield each reply as soon as it can be sent.

        Raises ValueError if all-reduces are requested before the ranks have joined.
        """
        from evener.torch.sums.link import LinkMember

        if isinstance(command, Join):
            self._rank = command.rank
            self._member = LinkMember(command.device, command.rank)
            yield Arrived()
            self._member.join(command.file, command.world, command.seconds, command.groups)
            yield Joined()
            return
        if self._member is None:
            raise ValueError("the ranks haven't met")
        yield Summed(*self._member.measure(command.members))


if __name__ == "__main__":
    main()
