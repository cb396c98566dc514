"""Synthetic training data as NumPy arrays, so that nothing has to be downloaded.

The same arguments always give the same data.
"""

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
NOISE = 0.3


def digits(rows: int, seed: int = 0) -> tuple[Any, Any]:
    """Return noisy images of digits and their labels, as a small replacement for MNIST.

    The images have shape (rows, 28, 28, 1), with values from 0 to 1. Each digit is at a random
    position. The labels have shape (rows,).
    """
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, rows)
    glyphs = _draw_digits()
    height, width = glyphs.shape[1:]
    tops = random.integers(0, SIZE - height + 1, rows)
    lefts = random.integers(0, SIZE - width + 1, rows)
    pictures = np.zeros((rows, SIZE, SIZE), np.float32)
    for picture, label, top, left in zip(pictures, labels, tops, lefts, strict=True):
        picture[top : top + height, left : left + width] = glyphs[label]
    pictures += NOISE * random.standard_normal(pictures.shape, np.float32)
    return np.clip(pictures, 0, 1)[..., None], labels


def _draw_digits() -> Any:
    """Return images of the ten digits, as an array of shape (10, 21, 15)."""
    # Each dot of the font becomes a square of several pixels.
    glyphs = []
    for text in _FONT:
        lines = [[int(dot) for dot in line] for line in text.split()]
        glyphs.append(np.kron(lines, np.ones((_SCALE, _SCALE))))
    return np.array(glyphs, np.float32)


def stripes(rows: int, side: int = 32, classes: int = 10, seed: int = 0) -> tuple[Any, Any]:
    """Return noisy color images of stripes, labeled by the direction of the stripes.

    The images have shape (rows, side, side, 3). The labels have shape (rows,).
    """
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, rows)
    angles = np.pi * labels / classes
    positions = np.mgrid[0:side, 0:side].astype(np.float32)
    down, right = positions / side
    phase = random.uniform(0, 2 * np.pi, (rows, 1, 1, 3))
    by_row = angles[:, None, None]
    along = np.cos(by_row) * right + np.sin(by_row) * down
    of_each_color = along[..., None]
    waves = np.sin(8 * np.pi * of_each_color + phase)
    noise = NOISE * random.standard_normal(waves.shape)
    pictures = waves + noise
    return pictures.astype(np.float32), labels


def sine_waves(
    rows: int, steps: int = 64, features: int = 32, classes: int = 10
) -> tuple[Any, Any]:
    """Return noisy sequences of sine waves, labeled by their frequency.

    The sequences have shape (rows, steps, features). The labels have shape (rows,).
    """
    random = np.random.default_rng(rows)
    labels = random.integers(0, classes, rows)
    phase = random.uniform(0, 2 * np.pi, (rows, 1, features))
    turns = labels[:, None, None] + 1
    times = np.arange(steps)[None, :, None] / steps
    waves = np.sin(2 * np.pi * turns * times + phase)
    noise = NOISE * random.standard_normal((rows, steps, features))
    return (waves + noise).astype(np.float32), labels


def grey_noise(rows: int) -> tuple[Any, Any]:
    """Return images of random grey values from 0 to 255, with random labels.

    The images have shape (rows, 28, 28, 1). A model can't learn anything from them; they only serve
    to measure speed.
    """
    random = np.random.default_rng(rows)
    greys = random.integers(0, 256, (rows, SIZE, SIZE, 1), dtype=np.uint8)
    return greys.astype(np.float32), random.integers(0, 10, rows)


def text_lengths(rows: int, median: float, sigma: float, longest: int, seed: int = 0) -> Any:
    """Return text lengths in tokens, drawn from a lognormal distribution and limited to `longest`.

    They are at least 1. `sigma` is the standard deviation of the logarithm of the lengths.
    """
    lengths = np.random.default_rng(seed).lognormal(np.log(median), sigma, rows)
    return np.clip(np.rint(lengths), 1, longest).astype(np.int64)
