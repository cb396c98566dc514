"""What PyTorch imports at an optimizer's first step, and as it compiles: ranks are forked from a process that has.

Each of them would import it for itself, 1 to 2 s of CPU.
"""

from __future__ import annotations

import torch._dynamo.testing
import torch.distributed.fsdp
import torch.distributed.tensor.experimental._attention
import torch.export._trace
import torch.nn.attention.flex_attention  # noqa: F401
