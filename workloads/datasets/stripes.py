"""Coloured pictures made in code: stripes whose angle is their class. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

import numpy as np

NOISE = 0.3


def pictures(rows: int, side: int = 32, classes: int = 10, seed: int = 0) -> tuple[Any, Any]:
    """`rows` pictures (rows, side, side, 3) around 0 as float32, and their classes (rows,) as int64."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, rows)
    angles = np.pi * labels / classes
    down, right = np.mgrid[0:side, 0:side].astype(np.float32) / side
    phase = random.uniform(0, 2 * np.pi, (rows, 1, 1, 3))
    along = np.cos(angles)[:, None, None] * right + np.sin(angles)[:, None, None] * down
    waves = np.sin(8 * np.pi * along[..., None] + phase)
    return (waves + NOISE * random.standard_normal(waves.shape)).astype(np.float32), labels
