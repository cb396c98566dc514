"""Compare recurrent layers on one device and on two: time and accuracy by batch size.

  python examples/keras_gru_digits.py --seeds 3     # 4 x GRU 512 and Dense 128, for GPUs
  python examples/keras_gru_digits.py --seeds 4 --units 32 --layers 2 --epochs 20 --sizes 128 256

The second command is small enough for a CPU. The data are scikit-learn's handwritten digits, 1797
pictures of 8 x 8 dots, read as 8 lines of 8 dots. Such a training has been seen to lose half of its
accuracy on two GPUs; with correctly weighted shares it loses none.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from evener.keras import Split, make_logical_cpus

HEADER = (
    "Epochs",
    "Batch size",
    "acc (1)",
    "val_acc (1)",
    "Time (1)",
    "acc (2)",
    "val_acc (2)",
    "Time (2)",
)


def main() -> None:
    """Train at each batch size on one device and on two; print the table and a verdict."""
    options = parse()
    devices = two_devices()
    data = load(options.seed)
    shares = " : ".join(f"{ratio:g}" for ratio in options.ratios)
    print(
        f"{options.layers} x GRU {options.units}, Dense {options.dense}; "
        f"{' and '.join(devices)} share {shares}\n"
    )
    print("|" + "|".join(HEADER) + "|")
    print("|" + "---:|" * len(HEADER))
    said = []
    for batch in options.sizes:
        seeds = range(options.seed, options.seed + options.seeds)
        results = [
            np.array([train(options, devices[:count], batch, data, seed) for seed in seeds])
            for count in (1, 2)
        ]
        cells = [str(options.epochs), str(batch), *summary(results[0]), *summary(results[1])]
        print("|" + "|".join(cells) + "|", flush=True)
        said.append(verdict(batch, *results))
    print("\n" + "\n".join(said))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[128, 256, 512, 1024], help="batch sizes"
    )
    parser.add_argument("--units", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dense", type=int, default=128)
    parser.add_argument(
        "--ratios", type=float, nargs=2, default=[3.0, 2.0], help="how two devices share a batch"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        help="trainings with other initial weights; the table shows ±",
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    return parser.parse_args()


def two_devices() -> list[str]:
    """Return two GPUs, or two logical CPU devices."""
    import tensorflow as tf

    if len(tf.config.list_physical_devices("GPU")) >= 2:
        return ["GPU:0", "GPU:1"]
    make_logical_cpus(2)
    return ["CPU:0", "CPU:1"]


def load(seed: int) -> tuple[Any, Any, Any, Any]:
    """Return training and validation digits, four to one.

    Digits have the shape (rows, 8, 8) and values from 0 to 1; they are followed by their labels.
    """
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32).reshape(-1, 8, 8), y[order]
    held = len(x) // 5
    return x[held:], y[held:], x[:held], y[:held]


def train(
    options: argparse.Namespace,
    devices: Sequence[str],
    batch: int,
    data: tuple[Any, Any, Any, Any],
    seed: int,
) -> tuple[float, float, float]:
    """Train once; return the accuracy, the validation accuracy and the seconds."""
    import keras

    def make_model() -> Any:
        keras.utils.set_random_seed(seed)
        gru = [
            keras.layers.GRU(options.units, return_sequences=i < options.layers - 1)
            for i in range(options.layers)
        ]
        dense = [
            keras.layers.Dense(options.dense, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
        model = keras.Sequential([keras.Input((8, 8)), *gru, *dense])
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    ratios = options.ratios if len(devices) == 2 else None
    split = Split(devices=devices, ratios=ratios, global_batch=batch)
    model = split.build(make_model)
    x, y, held_x, held_y = data
    started = time.perf_counter()
    log = model.fit(
        x, y, epochs=options.epochs, validation_data=(held_x, held_y), verbose=0
    ).history
    return log["accuracy"][-1], log["val_accuracy"][-1], time.perf_counter() - started


def summary(results: Any) -> list[str]:
    """Return the means of (seeds, 3) results as table cells; several seeds add the spread."""
    accuracy, validation, seconds = results.mean(0)
    if len(results) == 1:
        return [f"{accuracy:.2f}", f"{validation:.2f}", f"{seconds:.1f}"]
    spread = results.std(0, ddof=1)
    return [
        f"{accuracy:.3f} ± {spread[0]:.3f}",
        f"{validation:.3f} ± {spread[1]:.3f}",
        f"{seconds:.1f}",
    ]


def verdict(batch: int, one: Any, two: Any) -> str:
    """Return whether accuracies on two devices lie within the range of one device's seeds.

    The mean over the seeds is compared.
    """
    low, high, mean = one.min(0), one.max(0), two.mean(0)
    parts = []
    for column, name in enumerate(("accuracy", "validation accuracy")):
        where = "within" if low[column] <= mean[column] <= high[column] else "outside"
        parts.append(f"{name} {mean[column]:.4f} {where} {low[column]:.4f} to {high[column]:.4f}")
    return f"Batch {batch}, two devices against {len(one)} seeds of one: {'; '.join(parts)}."


if __name__ == "__main__":
    main()
