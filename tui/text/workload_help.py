"""The text of `evener help workload`."""

from __future__ import annotations

from evener.printable import align
from evener.workloads import registry

CONTRACT = """\
Your own model: --workload train.py:build, or package.module:build. Each measuring process imports the file, calls
build() and trains what it returns; evener's own process only parses it. So keep your training below
`if __name__ == "__main__":`.

  build()           Keras: returns a compiled model.
                    PyTorch: returns (module, optimizer, loss) and, if you like, the data set.
                    --set name=value gives it parameters.
  training_data()   Beside build(): returns what your training uses. Keras: (x, y) arrays, or a tf.data pipeline of
                    single samples. PyTorch: a data set.
  lengths(dataset)  Beside them, or as `lengths` of the data set, where rows are of unequal length (PyTorch): the tokens
                    of each row. Layouts are then compared by tokens/s.
  sample_batch(n)   Instead of training_data(): returns (x, y) of n rows. Without either, Keras gets made-up rows.

The framework is the one that the file imports; --framework tensorflow or torch names it where that isn't clear."""  # noqa: E501

KERAS_EXAMPLE = """\
import keras
import numpy as np


def build():
    inputs = keras.Input((32,))
    hidden = keras.layers.Dense(256, activation="relu")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(10, activation="softmax")(hidden))
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    return model


def training_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50_000, 32)).astype("float32")
    return x, (x @ rng.normal(size=(32, 10))).argmax(axis=1)


if __name__ == "__main__":
    from evener.keras import Split

    model = Split("plan.toml").build(build)
    model.fit(*training_data(), epochs=2)
"""

TORCH_EXAMPLE = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset


def build():
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()


def training_data():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(50_000, 32, generator=rng)
    return TensorDataset(x, (x @ torch.randn(32, 10, generator=rng)).argmax(dim=1))


if __name__ == "__main__":
    from evener.torch import Split

    split = Split("plan.toml")
    loader = split.loader(training_data(), seed=0)
    model, optimizer, loss = build()
    model = split.wrap(model)
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            mean = split.step(batch, lambda part: loss(model(part.batch[0]), part.batch[1]))
            optimizer.step()
        print(f"rank {split.rank}: loss {mean.item():.3f}")
"""


def workload_help() -> str:
    """Return the list of built-in workloads, how to write a workload, and two examples."""
    entries = [registry.find(name) for name in registry.names()]
    rows = [(f"  {entry.name}", entry.summary) for entry in entries]
    settings = [
        (f"  {entry.name}", " ".join(f"{key}={value}" for key, value in entry.settings.items()))
        for entry in entries
    ]
    return "\n".join(
        [
            f"Built in: --workload NAME. {DEFAULTS}",
            *align(rows, numbers_from=2),
            "",
            "Their settings, for --set key=value:",
            *align(settings, numbers_from=2),
            "",
            CONTRACT,
            "",
            (
                "train_keras.py, whole; evener balance --workload train_keras.py:build --export "
                "plan.toml measures it:"
            ),
            "",
            KERAS_EXAMPLE,
            (
                "train_torch.py, whole; evener launch plan.toml train_torch.py starts it on the "
                "devices of its plan:"
            ),
            "",
            TORCH_EXAMPLE,
        ]
    )


DEFAULTS = (
    f"Default: {registry.default_name('tensorflow', False)} on GPUs and simulated devices,"
    f" {registry.default_name('tensorflow', True)} on CPUs;"
    f" with --framework torch, or where TensorFlow isn't installed, "
    f"{registry.default_name('torch', False)}"
    f" and {registry.default_name('torch', True)}."
)
