"""One rank of a link measurement: it joins the other ranks, runs all-reduces with the ranks that a
command names, and checks the results.

Run as a program. Commands and answers are JSON lines on standard input and output; anything a
library prints goes to standard error. It ends when its input ends.
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
    """Meet the other ranks in this file."""

    file: str
    rank: int
    world: int
    device: str  # cuda:0, cpu
    seconds: float  # until the others must be there


class Sum(msgspec.Struct, frozen=True, tag=True):
    """Measure an all-reduce with these ranks, including this one."""

    members: tuple[int, ...]


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """The framework is imported."""


class Joined(msgspec.Struct, frozen=True, tag=True):
    """All ranks have met."""


class Summed(msgspec.Struct, frozen=True, tag=True):
    """The sums have arrived. The fields are those of `evener.torch.sums.link.LinkSums`."""

    latency_seconds: float
    bytes_per_second: float
    wrong: str = ""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The command ended in an exception."""

    error: str


LinkCommand = Join | Sum
LinkReply = RankReady | Joined | Summed | RankFailed
_decoder: msgspec.json.Decoder[LinkCommand] = msgspec.json.Decoder(LinkCommand)


def main() -> None:
    """Answer commands until standard input or the parent process ends."""
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
    os._exit(0)  # a communicator that hangs would keep an orderly exit waiting


class LinkRank:
    """This process as one of the ranks that meet."""

    def __init__(self) -> None:
        self._member: LinkMember | None = None
        self._rank = 0

    def execute(self, command: LinkCommand) -> LinkReply:
        """Carry out one command."""
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
