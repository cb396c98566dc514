"""Pictures of digits made in code: learnable, the same for the same seed, and nothing to download."""

from __future__ import annotations

from typing import Any

import numpy as np

_FONT = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)  # 5 x 7 dots of each digit
SIZE = 28
_SCALE = 3


def digits(rows: int, seed: int = 0, noise: float = 0.3) -> tuple[Any, Any]:
    """`rows` pictures (rows, 28, 28, 1) in 0 to 1, shifted and noisy, as float32, and their digits (rows,) as int64."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, rows)
    glyphs = np.stack([_glyph(text) for text in _FONT])
    height, width = glyphs.shape[1:]
    tops = random.integers(0, SIZE - height + 1, rows)
    lefts = random.integers(0, SIZE - width + 1, rows)
    pictures = np.zeros((rows, SIZE, SIZE), np.float32)
    row = (np.arange(rows)[:, None, None], tops[:, None, None] + np.arange(height)[None, :, None])
    pictures[(*row, lefts[:, None, None] + np.arange(width)[None, None, :])] = glyphs[labels]
    pictures += noise * random.standard_normal(pictures.shape, np.float32)
    return np.clip(pictures, 0, 1)[..., None], labels


def _glyph(text: str) -> Any:
    dots = np.array([[int(dot) for dot in line] for line in text.split()], np.float32)
    return np.kron(dots, np.ones((_SCALE, _SCALE), np.float32))
