"""The noise scale of Keras' multiworker beside the truth, at weights that stay: `python -m
benchmarks.noise_keras`.

Three processes on CPU slices train a linear model by 10 + 4 + 2 rows, each epoch with a short last
batch: in one pass, in passes of 4 rows, and with shares that follow own work. The truth is known
from the gradient of each row. Each case is also trained with noise and without; the weights must be
the same to the last bit.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from evener.plan.file import Share, make_layout
from evener.training.noise_scale import NoiseWindow
from tests.support.keras_start import make_configs
from tests.support.launched_plan import make_plan
from tests.support.rank_server import RankServer

SHARES, ROWS, STEPS = (10, 4, 2), 1003, 63  # of an epoch
CASES: dict[str, Any] = {  # rows of a pass, and options
    "one pass": (SHARES, {}),
    "passes": ((4, 4, 2), {}),
    "rebalanced": (SHARES, {"rebalance": True}),
}


def measure(_: int, name: str, epochs: int, seed: int) -> dict[str, Any]:
    """The noise scale of one case, the truth, and whether weights are those without noise; run in
    each process.
    """
    import keras

    from evener.keras_split import Split
    from evener.keras_split.group import KEPT, GroupNoise
    from tests.support.keras_twice import digest, leave_graphs_alone, seeded

    warnings.simplefilter("ignore")
    leave_graphs_alone()
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(ROWS, 4)).astype("float32")
    targets = (inputs.sum(1, keepdims=True) + 2 * random.normal(size=(ROWS, 1))).astype("float32")
    micros, options = CASES[name]
    shares = tuple(Share(f"cpu-{i}-of-3", i, "a slice", 0, 0.0) for i in range(3))
    plan = make_plan(make_layout("split", shares, SHARES, micros=micros), framework="tensorflow")

    def build(rate: float, noise: bool) -> tuple[Split, Any]:
        def make() -> Any:
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(rate), "mse")
            return model

        split = Split(plan, noise=noise, **options)
        return split, seeded(lambda: split.build(make))

    split, model = build(0.0, True)
    split._noise = model.fit.hooks.engine.noise = GroupNoise(NoiseWindow(1), every=1)
    for done in range(0, epochs, KEPT // STEPS):
        model.fit(inputs, targets, epochs=min(KEPT // STEPS, epochs - done), verbose=0)
        split._noise.scale()  # as the monitor does more often
    weights, bias = model.get_weights()
    error = 2 * (inputs @ weights + bias - targets)
    rows = np.concatenate([error * inputs, error], 1)
    found: dict[str, Any] = msgspec.to_builtins(split.noise_scale)
    learned = []
    for noise in (True, False):
        model = build(0.1, noise)[1]
        model.fit(inputs[:160], targets[:160], verbose=0, shuffle=False)
        learned.append(digest(model))
    return found | {
        "truth": float(rows.var(0).sum() / np.square(rows.mean(0)).sum()),
        "same": learned[0] == learned[1],
    }


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=40, help="of 63 steps")
    parser.add_argument("--seed", type=int, default=5, help="of the rows")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    given = parser.parse_args()
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    print(
        "| case | steps | noise scale | interval | truth | off | weights as without |\n|"
        + " --- |" * 7
    )
    with tempfile.TemporaryDirectory() as folder, RankServer("keras") as server:
        for name in given.cases:
            own = Path(folder, name)
            ranks = [{"TF_CONFIG": config} for config in make_configs(("worker",) * len(SHARES))]
            words = ("benchmarks.noise_keras.measure", name, given.epochs, given.seed)
            server.run("tests.support.keras_start.save", own, *words, ranks=ranks, seconds=900)
            found = json.loads((own / "0.json").read_text())
            scale = (
                f"{found['rows']:.2f} | {found['low']:.2f} to {found['high']:.2f} | "
                f"{found['truth']:.2f}"
            )
            off = f"{found['rows'] / found['truth'] - 1:+.1%}"
            print(
                f"| {name} | {found['samples']} | {scale} | {off} | {found['same']} |", flush=True
            )


if __name__ == "__main__":
    main()
