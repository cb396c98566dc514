"""Save the adapters of a PEFT model that is sharded over several ranks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from .sharded import Sharded
from .whole_model import WholeModel


def find_names(model: Any, sharded: Sharded | WholeModel) -> list[str]:
    """Return the names of the parameters that a checkpoint of a PEFT model must contain.

    These are all trained parameters, and those that PEFT itself saves.
    """
    # PEFT may save more than adapters, such as resized embeddings. A call with a state dict of
    # empty tensors shows what it saves.
    names = [slot.names[0] for slot in sharded.slots]
    trained = [slot.names[0] for slot in sharded.slots if slot.piece.requires_grad]
    save_and_load = import_module("peft.utils.save_and_load")
    wanted: set[int] = set()
    empty = {name: torch.empty(0) for name in names}
    for adapter in model.peft_config:
        saved = save_and_load.get_peft_model_state_dict(model, dict(empty), adapter)
        wanted.update(map(id, saved.values()))
    return [name for name in names if id(empty[name]) in wanted or name in trained]


def export_adapters(folder: Path, model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a PEFT model's adapters to `folder` in PEFT's own format, replacing older files."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".adapters-") as made:
        model.save_pretrained(made, state_dict=dict(tensors))
        paths = [path for path in Path(made).rglob("*") if path.is_file()]
        for path in sorted(paths, key=lambda each: each.suffix != ".safetensors"):
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
            target = folder / path.relative_to(made)
            target.parent.mkdir(exist_ok=True)
            path.replace(target)
