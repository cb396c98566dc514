"""The hooks of a program that `evener run` started: called as it imports the libraries that it trains with."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ..training.launched import PROGRAM, launched_device

_HOOKS = {  # module of the program's -> function of ours that is called with it, once it is imported
    "torch": "loops:hook_torch",
    "accelerate.data_loader": "accelerated:hook_loaders",
    "accelerate.accelerator": "accelerated:hook_accelerator",
    "timm.data.loader": "accelerated:hook_loaders",
    "accelerate.commands.launch": "launchers:hook_accelerate",
    "torch.distributed.launcher.api": "launchers:hook_torchrun",
    "transformers.trainer": "trainers:hook_trainers",
    "lightning.pytorch.loops.fit_loop": "strategies:hook_fit",
    "pytorch_lightning.loops.fit_loop": "strategies:hook_fit",
}


def install() -> None:
    """Register the hooks, in a process that trains on a device of its own."""
    if not (os.environ.get(PROGRAM) and launched_device()):
        return
    from wrapt import register_post_import_hook

    for module, target in _HOOKS.items():
        register_post_import_hook(_call(target), module)


def _call(target: str) -> Callable[[Any], None]:
    """The function `name:function` of this package, which is imported when it is called."""
    name, _, function = target.partition(":")
    return lambda module: getattr(import_module(f"evener.program.{name}"), function)(module)
