"""Imports what PyTorch imports late: at the first optimizer step, compilation, or start of an
agent.

Ranks are forked from a process with these imports. Each of them would otherwise spend 1 to 2 s of
CPU time on them.
"""

from __future__ import annotations

import torch
import torch._dynamo.testing
import torch.distributed.fsdp
import torch.distributed.launcher.api
import torch.distributed.tensor.experimental._attention
import torch.export._trace
import torch.nn.attention.flex_attention
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

# an agent searches the source of all modules for each record's name: that takes seconds with many
# imports
dynamic_rendezvous.get_method_name = lambda *_: "no_method_name"

# what the compiler creates when it compiles for the first time
torch.compile(lambda rows: rows + 1, backend="eager")(torch.ones(1))
