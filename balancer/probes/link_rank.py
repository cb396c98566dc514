"""One rank of a link measurement: it joins the other ranks, runs all-reduces and checks sums.

A command names the ranks that take part in an all-reduce. Run as a program. Commands and replies
are JSON Lines on standard input and output; the output of libraries goes to standard error. The
program exits when its standard input ends.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import msgspec

from .fork_server import die_with_parent

if TYPE_CHECKING:
    from evener.torch.sums.link import LinkMember


class Join(msgspec.Struct, frozen=True, tag=True):
    """Join the other ranks through this rendezvous file."""

    file: str
    rank: int
    world: int
    device: str  # cuda:0, cpu
    seconds: float  # timeout in seconds for the others to join


class Sum(msgspec.Struct, frozen=True, tag=True):
    """Measure an all-reduce between these ranks, including this one."""

    members: tuple[int, ...]


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """The framework is imported."""


class Joined(msgspec.Struct, frozen=True, tag=True):
    """All ranks have joined."""


class Summed(msgspec.Struct, frozen=True, tag=True):
    """The measured all-reduce.

    The fields are those of `evener.torch.sums.link.LinkSums`; `wrong` describes an incorrect sum.
    """

    latency_seconds: float
    bytes_per_second: float
    wrong: str = ""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The command raised an exception."""

    error: str


LinkCommand = Join | Sum
LinkReply = RankReady | Joined | Summed | RankFailed
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
            reply: LinkReply = rank.execute(_decoder.decode(line))
        except Exception as error:
            reply = RankFailed(f"{type(error).__name__}: {str(error).splitlines()[0][:300]}")
        replies.write(msgspec.json.encode(reply) + b"\n")
    os._exit(0)  # a communicator that hangs would block an orderly exit


class LinkRank:
    """Executes the commands of this process's rank."""

    def __init__(self) -> None:
        self._member: LinkMember | None = None
        self._rank = 0

    def execute(self, command: LinkCommand) -> LinkReply:
        """Execute one command. Raises ValueError for an all-reduce before the ranks have joined."""
        from evener.torch.sums.link import LinkMember

        if isinstance(command, Join):
            self._rank = command.rank
            self._member = LinkMember(command.device, command.rank)
            self._member.join(command.file, command.world, command.seconds)
            return Joined()
        if self._member is None:
            raise ValueError("the ranks haven't met")
        return Summed(*self._member.measure(command.members))


if __name__ == "__main__":
    main()
