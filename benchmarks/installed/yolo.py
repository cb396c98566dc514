"""Train with ultralytics' classification trainer in two processes: `yolo.py FOLDER`.

The `yolo` command starts several processes only for GPUs; each of these processes runs what that
command would start.
"""

from __future__ import annotations

import sys

import torch
from ultralytics.models.yolo.classify import ClassificationTrainer

if __name__ == "__main__":
    torch.manual_seed(3)
    trainer = ClassificationTrainer(
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
        }
    )
    trainer.train()
