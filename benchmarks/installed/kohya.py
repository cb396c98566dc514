"""Run kohya's unchanged train_network.py with a U-Net that a CPU can train: `kohya.py FOLDER ...`.

FOLDER is its repository; all other arguments are the script's own. Its U-Net has the sizes of
Stable Diffusion as constants, which are made small here. On CPUs, accelerate would wrap frozen
models in DistributedDataParallel, too, which fails.
"""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from typing import Any

from accelerate import Accelerator

WIDTH = 32  # channels of each block; its normalizations have 32 groups

_prepare = Accelerator.prepare_model


def prepare_model(accelerator: Any, model: Any, *given: Any, **named: Any) -> Any:
    """Prepare a model if any of its parameters are trained, as accelerate does on GPUs."""
    is_trained = any(each.requires_grad for each in model.parameters())
    return _prepare(accelerator, model, *given, **named) if is_trained else model


if __name__ == "__main__":
    folder = sys.argv.pop(1)
    sys.path.insert(0, folder)
    network = import_module("library.original_unet")
    network.BLOCK_OUT_CHANNELS = (WIDTH,) * 4
    network.TIMESTEP_INPUT_DIM, network.TIME_EMBED_DIM = WIDTH, 4 * WIDTH
    Accelerator.prepare_model = prepare_model
    sys.argv[0] = f"{folder}/train_network.py"
    runpy.run_path(sys.argv[0], run_name="__main__")
