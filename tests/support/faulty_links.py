"""A rank of a link measurement with a fault, given by its arguments: `faulty_links FAULT RANK`.

`silent`: that rank never joins the others. `p2p`: no sum ends unless NCCL_P2P_DISABLE is set.
`corrupt`: that rank gets one wrong value; with NCCL_P2P_DISABLE no rank starts, so that no remedy
is found. `crowd`: more than two ranks never join.

PyTorch is imported only where it is needed: by the ranks of `corrupt` and `silent`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from evener.balancer.probes import link_rank
from evener.balancer.probes.link_rank import (
    Arrived,
    Join,
    Joined,
    LinkCommand,
    LinkRank,
    LinkReply,
    Sum,
    Summed,
)

FAULT, FAULTY = sys.argv[1], int(sys.argv[2])


class FaultyRank(LinkRank):
    """A rank of PyTorch, which gets a wrong value if it is the faulty one."""

    def execute(self, command: LinkCommand) -> Iterator[LinkReply]:
        if FAULT == "corrupt" and isinstance(command, Sum) and self._rank == FAULTY:
            self._corrupt_sums()
        return super().execute(command)

    def _corrupt_sums(self) -> None:
        """Change one value of each sum, as a bad riser does."""
        import torch.distributed as dist

        sums = dist.all_reduce

        def corrupt(tensor: Any, **options: Any) -> None:
            sums(tensor, **options)
            tensor[len(tensor) // 2] += 1

        dist.all_reduce = corrupt


class SimulatedRank(LinkRank):
    """A rank without PyTorch, which replies at once or never."""

    def execute(self, command: LinkCommand) -> Iterator[LinkReply]:
        hangs = FAULT == "p2p" and "NCCL_P2P_DISABLE" not in os.environ
        if isinstance(command, Join):
            yield Arrived()
            hangs = FAULT == "crowd" and command.world > 2
        if hangs:
            time.sleep(3600)
        yield Joined() if isinstance(command, Join) else Summed(28e-6, 6e9)


class WaitingRank(LinkRank):
    """A rank that never joins if it is the faulty one, and otherwise waits for the faulty one."""

    def execute(self, command: LinkCommand) -> Iterator[LinkReply]:
        if isinstance(command, Join) and command.rank == FAULTY:
            time.sleep(3600)
        return super().execute(command)


LINK = "evener.torch.sums.link"  # imports PyTorch
RANKS = {"corrupt": FaultyRank, "silent": WaitingRank}

if __name__ == "__main__":
    if FAULT not in RANKS:
        sys.modules[LINK] = ModuleType("link")
    elif FAULT == "corrupt" and "NCCL_P2P_DISABLE" in os.environ:
        sys.exit("no rank starts")
    vars(link_rank)["LinkRank"] = RANKS.get(FAULT, SimulatedRank)
    link_rank.main()
