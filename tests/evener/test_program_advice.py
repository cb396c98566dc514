"""What `evener run` suggests for a script that trains on one device."""

from __future__ import annotations

from tests.support.frameworks import skip_without

skip_without("torch")

import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from evener.program.advice import advise  # noqa: E402


def test_the_loader_has_the_script_s_name_and_its_own_if_the_script_gave_none() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    unset = None
    batches = DataLoader(TensorDataset(torch.zeros(8, 2)), 4)
    assert "batches = torch.utils.data.DataLoader(batches.dataset" in advise(optimizer, batches)
    assert "    loader = torch.utils.data.DataLoader(" in advise(optimizer, unset)
