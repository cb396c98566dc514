"""Train a Keras model with a plan: three added lines, and samples/s at the end.

  evener balance --workload examples/keras_train.py:build --export plan.toml
  evener launch plan.toml examples/keras_train.py

With a plan for keras_mnist or keras_maxer, that network is trained.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from evener.plan.file import Plan

ROWS = 60_000
FEWEST_STEPS = 20  # minimum steps per epoch, so that the time between epochs matters little
MOST_BYTES = 4 << 30


def build() -> Any:
    """Return the compiled Keras model that `--workload examples/keras_train.py:build` measures."""
    from evener.workloads.keras_backend.models import mnist

    return mnist()


def training_data() -> Any:
    """Return the training data (x, y); probes use them too."""
    from evener.workloads.datasets import digits

    return digits(ROWS, seed=1)


def main() -> None:
    """Train with the plan of evener launch."""
    parser = argparse.ArgumentParser(
        description="Train a small network by the plan of evener launch."
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="train for about this long, by the plan's samples/s",
    )
    parser.add_argument(
        "--rows", type=int, default=ROWS, help="the least number of pictures to train on"
    )
    options = parser.parse_args()

    from evener.keras import Report, Split

    split = Split()  # before the first tensor
    plan = split.plan
    assert plan is not None
    make_model, make_data = parts(plan)
    model = split.build(make_model)
    batch = plan.layout.global_batch
    x, y = make_data(whole_batches(options.rows, batch, make_data(1)))
    # counted from the plan instead of a clock, so that all processes run the same number of steps
    steps = max(1, round(options.seconds * plan.throughput.samples_per_second / batch))
    clock = clock_callback(steps, batch)
    model.fit(x, y, epochs=1_000_000, callbacks=[clock, Report(split)], verbose=0)
    held = model.evaluate(*make_data(1000), verbose=0, return_dict=True)

    if split.group is None or split.group.rank == 0:
        measured = plan.throughput.samples_per_second
        print(f"Engine {split.engine}: {split.why}")
        print(f"Shares {', '.join(map(str, split.shares))}: {batch} samples a step.")
        print(
            f"{clock.rate:,.0f} samples/s over {clock.steps} steps; the plan says {measured:,.0f}."
        )
        print(
            "On 1000 other samples: "
            + ", ".join(f"{name} {value:.3f}" for name, value in held.items())
            + "."
        )


def parts(plan: Plan) -> tuple[Any, Any]:
    """Return the plan's network, and the function that makes its rows."""
    if plan.workload == "keras_maxer":
        from evener.workloads.keras_backend.models import maxer, maxer_batch

        return maxer, maxer_batch
    from evener.workloads.datasets import digits

    return build, digits


def whole_batches(rows: int, batch: int, one: tuple[Any, Any]) -> int:
    """Return the number of rows in whole batches for one epoch, as far as they fit into memory."""
    fit: int = MOST_BYTES // sum(array.nbytes for array in one)
    return max(1, min(max(rows, FEWEST_STEPS * batch), fit) // batch) * batch


def clock_callback(wanted: int, batch: int) -> Any:
    """Return a callback that stops after `wanted` steps and measures their samples/s.

    The first steps aren't measured.
    """
    import keras

    class Clock(keras.callbacks.Callback):
        steps, rate, skipped, started = 0, 0.0, max(2, min(20, wanted // 10)), 0.0

        def on_train_batch_end(self, batch_: int, logs: Any = None) -> None:
            if self.skipped:
                self.skipped -= 1
                self.started = self.now(logs)
                return
            self.steps += 1
            if self.steps >= wanted:
                self.rate = self.steps * batch / (self.now(logs) - self.started)
                self.model.stop_training = True

        def now(self, logs: Any) -> float:
            """Return the time at which the devices have finished the step.

            Reading the loss waits for the devices.
            """
            float(logs["loss"])
            return time.perf_counter()

    return Clock()


if __name__ == "__main__":
    main()
