"""A rank of a measurement of links that goes wrong as its arguments say: `faulty_links FAULT RANK`.

`silent`: it never joins the others. `late`: its sums never end. `p2p`: its sums don't end unless
NCCL_P2P_DISABLE is set. `corrupt`: one value of what arrives is another. `crowd`: more than two
never meet; two answer at once, without PyTorch.
"""

from __future__ import annotations

import os
import sys
import time
from types import ModuleType
from typing import Any

from evener.balancer.probes import link_rank
from evener.balancer.probes.link_rank import (
    Join,
    Joined,
    LinkCommand,
    LinkRank,
    LinkReply,
    Summed,
)

FAULT, FAULTY = sys.argv[1], int(sys.argv[2])


class FaultyRank(LinkRank):
    """A rank with one fault, if it is the one that has it."""

    def execute(self, command: LinkCommand) -> LinkReply:
        faulty = (command.rank if isinstance(command, Join) else self._rank) == FAULTY
        joins = isinstance(command, Join)
        if FAULT == "crowd":
            return _answer_in_pairs(command)
        if faulty and FAULT == "silent" and joins:
            time.sleep(3600)
        hangs = FAULT == "late" or (FAULT == "p2p" and "NCCL_P2P_DISABLE" not in os.environ)
        if faulty and hangs and not joins:
            time.sleep(3600)
        if faulty and FAULT == "corrupt" and not joins:
            return self._sum_wrongly(command)
        return super().execute(command)

    def _sum_wrongly(self, command: LinkCommand) -> LinkReply:
        """Sum as ever, but with one value changed, as a bad riser does."""
        import torch.distributed as dist

        sums = dist.all_reduce

        def corrupt(tensor: Any, **options: Any) -> None:
            sums(tensor, **options)
            tensor[len(tensor) // 2] += 1

        dist.all_reduce = corrupt
        return super().execute(command)


def _answer_in_pairs(command: LinkCommand) -> LinkReply:
    if not isinstance(command, Join):
        return Summed(28e-6, 6e9)
    if command.world > 2:
        time.sleep(3600)
    return Joined()


if __name__ == "__main__":
    if FAULT == "crowd":
        sys.modules["evener.torch.sums.link"] = ModuleType("link")  # it would import PyTorch
    vars(link_rank)["LinkRank"] = FaultyRank
    link_rank.main()
