"""One rank of a link measurement, run as a program.

The rank joins the other ranks, runs all-reduces and checks sums. A command names the ranks that
take part in an all-reduce. Commands and replies are JSON Lines on standard input and output. The
output of libraries goes to standard error. The program exits when its standard input ends.
"""

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
    """A command to meet the other ranks, `world` in all, through a file.

    `groups` are the sets of ranks between which all-reduces will be measured.
    """

    file: str
    rank: int
    world: int
    device: str  # cuda:0, cpu
    seconds: float  # timeout in seconds for the others to join
    groups: tuple[tuple[int, ...], ...]


class Sum(msgspec.Struct, frozen=True, tag=True):
    """A command to measure an all-reduce between the ranks `members`, a group of `Join`."""

    members: tuple[int, ...]


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """The first message of a rank, which has imported the framework and waits for commands."""


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """The first reply to `Join`: this rank has its device and waits."""


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The second reply to `Join`: all ranks have joined."""


class Summed(msgspec.Struct, frozen=True, tag=True):
    """The reply to `Sum`: the measured latency and speed of the all-reduce.

    It has the fields of `evener.torch.sums.link.LinkSums`. `wrong` describes an incorrect sum; ""
    if all were correct.
    """

    latency_seconds: float
    bytes_per_second: float
    wrong: str = ""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The reply to a command that raised an exception."""

    error: str


LinkCommand = Join | Sum
LinkReply = RankReady | Arrived | Joined | Summed | RankFailed
_decoder: msgspec.json.Decoder[LinkCommand] = msgspec.json.Decoder(LinkCommand)


def main() -> None:
    """Answer commands until standard input ends.

    The kernel kills this process if its parent exits.
    """
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
    """Executes the commands for this process's rank."""

    def __init__(self) -> None:
        self._member: LinkMember | None = None
        self._rank = 0

    def execute(self, command: LinkCommand) -> Iterator[LinkReply]:
        """Execute one command, and yield the replies.

        Raises ValueError for an all-reduce before the ranks have joined.
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
