"""Each private name of transformers and TRL that evener uses exists and does what is expected."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

if not all(map(find_spec, ("torch", "transformers", "accelerate"))):
    pytest.skip("transformers isn't installed", allow_module_level=True)

import torch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_each_private_name_does_what_it_is_used_for(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from evener.huggingface import private

    class Model(torch.nn.Linear):
        """A model whose loss is a mean over items."""

        def forward(self, rows: torch.Tensor, num_items_in_batch: int = 1) -> torch.Tensor:
            return super().forward(rows).sum() / num_items_in_batch

    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=3, use_cpu=True, report_to=[]
    )
    trainer = Trainer(Model(2, 1), arguments)
    rows = {"rows": torch.ones(2, 2)}
    assert torch.equal(private.prepare_inputs(trainer, rows)["rows"], rows["rows"])
    labels = torch.tensor([[1, 2, -100]])
    trainer.model_accepts_loss_kwargs = True
    assert int(private.count_items(trainer, [{"labels": labels}, {"labels": labels}], "cpu")) == 4
    assert private.output_folder(trainer, None) == str(tmp_path)
    assert private.pass_rows(trainer) == 3
    assert not private.generates_rows(Trainer)
    if find_spec("trl"):
        from trl import GRPOTrainer

        assert private.generates_rows(GRPOTrainer)
