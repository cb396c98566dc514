"""Run nanochat's unchanged pretraining on generated texts: `chat.py FOLDER` of its repository."""

from __future__ import annotations

import os
import pickle
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pyarrow
import pyarrow.parquet
import tiktoken
import torch

SPECIAL = ("bos", "user_start", "user_end", "assistant_start", "assistant_end")
TOOLS = ("python_start", "python_end", "output_start", "output_end")
ARGUMENTS = (
    "--device-type cpu --depth 2 --aspect-ratio 16 --head-dim 16 --max-seq-len 32 "
    "--window-pattern L --device-batch-size 4 --total-batch-size 512 --num-iterations 14 "
    "--eval-every -1 --core-metric-every -1 --sample-every -1 --warmup-steps 2"
)


def write_inputs(folder: Path) -> None:
    """Write a tokenizer of single bytes and two files of texts where nanochat looks for them."""
    letters = {bytes([number]): number for number in range(256)}
    marks = {f"<|{name}|>": 256 + place for place, name in enumerate((*SPECIAL, *TOOLS))}
    encoding = tiktoken.Encoding(
        name="bytes", pat_str=".", mergeable_ranks=letters, special_tokens=marks
    )
    for place in ("tokenizer", "base_data_climbmix"):
        (folder / place).mkdir(parents=True)
    (folder / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    lengths = torch.tensor([1] * 256 + [0] * len(marks), dtype=torch.int32)
    torch.save(lengths, folder / "tokenizer" / "token_bytes.pt")
    texts = [
        f"row {number} has {number % 7} letters of {number % 5} kinds" for number in range(512)
    ]
    for number in range(2):
        path = folder / "base_data_climbmix" / f"shard_{number:05}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=64)


if __name__ == "__main__":
    place = Path(f"rank{os.environ['RANK']}").absolute()
    write_inputs(place)
    os.environ["NANOCHAT_BASE_DIR"] = str(place)
    sys.modules["wandb"] = ModuleType("wandb")  # which a run without a name doesn't ask
    sys.path.insert(0, sys.argv[1])
    sys.argv = ["base_train", *ARGUMENTS.split()]
    runpy.run_module("scripts.base_train", run_name="__main__", alter_sys=True)
