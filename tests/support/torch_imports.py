"""What PyTorch imports at an optimizer's first step, as it compiles, and as an agent starts: ranks
are forked from it.

Each of them would import it for itself, 1 to 2 s of CPU.
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

# an agent looks through the source of all modules for the name of each record: seconds where many
# are imported
dynamic_rendezvous.get_method_name = lambda *_: "no_method_name"

# what the compiler makes as it compiles for the first time
torch.compile(lambda rows: rows + 1, backend="eager")(torch.ones(1))
