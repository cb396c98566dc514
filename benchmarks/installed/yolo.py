"""Train with ultralytics' classification trainer in two processes: `yolo.py FOLDER`.

The `yolo` command starts several processes only for GPUs. Here the same trainer uses gloo. Without
a launcher, it starts its two processes itself, as it does for `device=0,1`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from ultralytics.models.yolo.classify import ClassificationTrainer


class OnCpus(ClassificationTrainer):  # type: ignore[misc]  # ultralytics is not followed
    """Creates a process group on CPUs, as the trainer does on GPUs."""

    def __init__(self, *arguments: Any, **given: Any) -> None:
        super().__init__(*arguments, **given)
        self.world_size = 2
        self.ddp = "LOCAL_RANK" not in os.environ

    def _setup_ddp(self) -> None:
        torch.distributed.init_process_group("gloo")

    def final_eval(self) -> None:
        """Do nothing: with several processes, the last validation asks for a GPU."""


if __name__ == "__main__":
    torch.manual_seed(3)
    trainer = OnCpus(
        overrides={
            "model": "yolo11n-cls.yaml",
            "data": sys.argv[1],
            "imgsz": 32,
            "epochs": 2,
            "batch": 8,
            "device": "cpu",
            "val": False,
            "plots": False,
            "workers": 0,
            "project": "out",
            "pretrained": False,
            "optimizer": "SGD",
            "lr0": 0.01,
            "warmup_epochs": 0,
        }
    )
    trainer.train()
