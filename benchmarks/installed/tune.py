"""Run torchtune's distributed recipes on a tiny Llama: `tune.py full|lora`.

torchtune's own launcher is `tune run`, which wraps torchrun.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torchtune.training
from omegaconf import OmegaConf
from torchtune.models.llama2 import llama2

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "embed_dim": 32,
    "max_seq_len": 64,
    "intermediate_dim": 64,
}


class Rows(torch.utils.data.Dataset[Any]):
    """Texts of several lengths, whose first two tokens are a prompt and so aren't labels."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        tokens = [(7 * number + 3 * place) % 60 + 4 for place in range(6 + number % 7)]
        return {"tokens": tokens, "labels": [-100] * 2 + tokens[2:]}


class NoTokenizer:
    """A placeholder that is never called, because the rows are already tokenized."""

    pad_id = 0


def make_rows(_tokenizer: Any, **_: Any) -> Rows:
    """Return the data set that the configuration names."""
    return Rows()


def make_settings(folder: Path, adapters: bool) -> Any:
    """Return the configuration of a recipe, as `tune cp` writes it."""
    lora = {
        "lora_attn_modules": ["q_proj", "v_proj"],
        "apply_lora_to_mlp": False,
        "lora_rank": 4,
        "lora_alpha": 8,
    }
    return OmegaConf.create(
        {
            "output_dir": str(folder),
            "tokenizer": {"_component_": "tune.NoTokenizer"},
            "dataset": {"_component_": "tune.make_rows"},
            "seed": 3,
            "shuffle": True,
            "model": {
                "_component_": f"torchtune.models.llama2.{'lora_llama2' if adapters else 'llama2'}",
                **SIZES,
                **(lora if adapters else {}),
            },
            "checkpointer": {
                "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
                "checkpoint_dir": str(folder),
                "checkpoint_files": ["model.pt"],
                "output_dir": str(folder) + "-out",
                "model_type": "LLAMA2",
            },
            "resume_from_checkpoint": False,
            "batch_size": 4,
            "epochs": 2,
            "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.05},
            "lr_scheduler": {
                "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
                "num_warmup_steps": 2,
            },
            "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
            "max_steps_per_epoch": None,
            "gradient_accumulation_steps": 1,
            "clip_grad_norm": None,
            "compile": False,
            "device": "cpu",
            "enable_activation_checkpointing": False,
            "dtype": "fp32",
            "metric_logger": {
                "_component_": "torchtune.training.metric_logging.DiskLogger",
                "log_dir": str(folder / "logs"),
            },
            "log_every_n_steps": 5,
            "log_peak_memory_stats": False,
        }
    )


def train(adapters: bool) -> None:
    """Run the recipe like `tune run`."""
    name = "LoRAFinetuneRecipeDistributed" if adapters else "FullFinetuneRecipeDistributed"
    kind = "lora" if adapters else "full"
    recipes = Path(str(find_spec("torchtune").origin)).parents[1] / "recipes"
    made = runpy.run_path(str(recipes / f"{kind}_finetune_distributed.py"))  # as `tune run` does
    folder = Path(f"rank{os.environ['RANK']}").absolute()
    folder.mkdir()
    # the recipes ask for a GPU's memory even if they don't log it
    torch.cpu.empty_cache = torch.cpu.reset_peak_memory_stats = lambda: None
    torchtune.training.get_memory_stats = lambda **_: {}
    torchtune.training.log_memory_stats = lambda *_: None
    torch.manual_seed(3)
    torch.save(llama2(**SIZES).state_dict(), folder / "model.pt")
    settings = make_settings(folder, adapters)
    if adapters:  # the other recipe creates its own process group
        torch.distributed.init_process_group("gloo")
    recipe = made[name](cfg=settings)
    recipe.setup(cfg=settings)
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    train(sys.argv[1] == "lora")
