"""Check whether Keras' `fit` reaches the speed that its plan promises, with the right weights.

  python -m benchmarks.gpu_keras_fit [--gpus 0,1] [--small] [--models resnet gru]
  [--roles one multiworker]

A ResNet and a recurrent network of two GRU layers are trained by plain Keras on one GPU, and on two
by the engines towers and multiworker: first as a probe times its steps, then by `fit` over epochs
of full batches and a shorter last one. Steady steps are the full batches from the 21st of an epoch
on; the rest of an epoch is its start and its last batch.

Each engine also trains the model for a few steps of shares 3 : 1 in float64, without dropout and
with layer normalization. The weights are compared with those of plain Keras on one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any, NamedTuple

from tests.support.keras_start import free_peers

FIRST_STEADY = 20  # steps that count as the start of an epoch
PROBED_STEPS, WARM_STEPS = 40, 15
SECONDS = 230.0  # time limit of the whole benchmark


class Sizes(NamedTuple):
    """The sizes of the data and the model, and the number of epochs.

    `side` is the side of the images or the length of the texts. `widths` are those of the ResNet's
    blocks, two each, or of the recurrent layers.
    """

    model: str
    rows: int
    batch: int
    side: int
    widths: tuple[int, ...]
    epochs: int


FULL = {
    "resnet": Sizes("resnet", 50_000, 1024, 32, (64, 128, 256), 3),
    "gru": Sizes("gru", 40_000, 512, 128, (1024, 1024), 3),
}
SMALL = {
    "resnet": Sizes("resnet", 816, 32, 8, (4, 8, 16), 3),
    "gru": Sizes("gru", 816, 32, 8, (8, 8), 3),
}
WORDS = 10_000
ROLES = ("one", "multiworker")
EXACT_BATCH, EXACT_STEPS = 32, 6


def main() -> int:
    """Start the processes, which print a line per engine; return 1 if one failed."""
    options = parse()
    if options.role:
        run_role(options)
        return 0
    began = time.monotonic()
    failed = 0
    for role in options.roles:
        left = SECONDS - (time.monotonic() - began)
        failed += not start_role(role, options, left)
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    return int(failed > 0)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", default="0,1", help="two numbers")
    parser.add_argument("--small", action="store_true", help="on slices of the CPU, to try it")
    parser.add_argument("--epochs", type=int, default=0)
    parser.add_argument("--models", nargs="+", choices=list(FULL), default=list(FULL))
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES))
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--peers", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def start_role(role: str, options: argparse.Namespace, seconds: float) -> bool:
    """Run the processes of a role, the first of which prints; return False if one failed."""
    ranks = 2 if role == "multiworker" else 1
    peers = ",".join(free_peers(ranks)) if ranks > 1 else ""
    children = []
    for rank in range(ranks):
        words = ["--role", role, "--rank", str(rank), "--peers", peers, "--gpus", options.gpus]
        words += ["--small"] * options.small + ["--epochs", str(options.epochs)]
        words += ["--models", *options.models]
        own = options.gpus.split(",")[rank] if ranks > 1 else options.gpus
        seen = "-1" if options.small else own
        variables = {
            **os.environ,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": seen,
            "NCCL_NVLS_ENABLE": "0",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        command = [sys.executable, "-m", "benchmarks.gpu_keras_fit", *words]
        children.append(subprocess.Popen(command, env=variables))
    deadline = time.monotonic() + seconds
    codes = []
    for child in children:
        try:
            codes.append(child.wait(max(1.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            child.kill()
            codes.append(child.wait())
            print(f"{role}: over its time", flush=True)
    return not any(codes)


def run_role(options: argparse.Namespace) -> None:
    """Measure the models in this process."""
    kind = "CPU" if options.small else "GPU"
    began = time.monotonic()
    for name in options.models:
        sizes = (SMALL if options.small else FULL)[name]
        if options.epochs:
            sizes = sizes._replace(epochs=options.epochs)
        if options.role == "multiworker":
            run_group(options, kind, sizes)
        else:
            run_towers(kind, sizes)
        if options.rank == 0:
            spent = time.monotonic() - began
            print(f"  ({options.role}, {name}: {spent:.0f} s so far)", flush=True)


def run_group(options: argparse.Namespace, kind: str, sizes: Sizes) -> None:
    """Measure a model in this process of a group."""
    peers = tuple(options.peers.split(","))
    data = make_data(sizes)
    probed = probe((f"{kind}:0",), sizes, data, options.rank, peers)
    fitted = fit("multiworker", peers, sizes, data)
    if options.rank == 0:
        print_times("multiworker", probed, fitted, sizes)
    trained = train_few("multiworker", peers, sizes)
    if options.rank == 0:
        say_exact("multiworker", trained, train_few("", (f"{kind}:0",), sizes), sizes)


def run_towers(kind: str, sizes: Sizes) -> None:
    """Measure a model with the engine towers and with plain Keras."""
    two = (f"{kind}:0", f"{kind}:1")
    data = make_data(sizes)
    probed = probe(two, sizes, data)
    print_times("towers", probed, fit("towers", two, sizes, data), sizes)
    probed = probe(two[:1], sizes, data)
    print_times("plain Keras on one", probed, fit("", two[:1], sizes, data), sizes)
    trained = train_few("towers", two, sizes)
    say_exact("towers", trained, train_few("", two[:1], sizes), sizes)


def make_data(sizes: Sizes) -> tuple[Any, Any]:
    """Return images of noise or random texts, and one-hot labels."""
    import numpy as np

    random = np.random.default_rng(0)
    x: Any
    if sizes.model == "gru":
        x = random.integers(1, WORDS, (sizes.rows, sizes.side))
    else:
        shape = sizes.rows, sizes.side, sizes.side, 3
        x = random.integers(0, 256, shape, np.uint8).astype(np.float32) / 255
    y = np.eye(10, dtype=np.float32)[random.integers(0, 10, sizes.rows)]
    return x, y


def build(sizes: Sizes, is_exact: bool = False) -> Any:
    """Return the model with normalization and dropout.

    With `is_exact`, it has layer normalization and no dropout, so that any division of the rows
    computes the same.
    """
    import keras
    from keras import layers

    if sizes.model == "gru":
        entry = keras.Input((sizes.side,), dtype="int32")
        flow = layers.Embedding(WORDS, sizes.widths[0])(entry)
        for place, width in enumerate(sizes.widths, 1):
            flow = layers.GRU(width, return_sequences=place < len(sizes.widths))(flow)
    else:
        flow = entry = keras.Input((sizes.side, sizes.side, 3))
        flow = layers.Conv2D(sizes.widths[0], 3, padding="same")(flow)
        for width in sizes.widths:
            for stride in (1 if width == sizes.widths[0] else 2, 1):
                flow = _block(flow, width, stride, is_exact)
        flow = layers.GlobalAveragePooling2D()(flow)
    model = keras.Model(entry, layers.Dense(10)(flow), name=sizes.model)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    optimizer = keras.optimizers.Adam(1e-3)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    return model


def _block(flow: Any, width: int, stride: int, is_exact: bool) -> Any:
    from keras import layers

    normalize = layers.LayerNormalization if is_exact else layers.BatchNormalization
    inner = layers.ReLU()(normalize()(flow))
    inner = layers.Conv2D(width, 3, stride, padding="same")(inner)
    inner = layers.ReLU()(normalize()(inner))
    inner = layers.Dropout(0.0 if is_exact else 0.1)(inner)
    inner = layers.Conv2D(width, 3, padding="same")(inner)
    if stride != 1 or flow.shape[-1] != width:
        flow = layers.Conv2D(width, 1, stride)(flow)
    return layers.Add()([flow, inner])


def probe(
    devices: tuple[str, ...], sizes: Sizes, data: Any, rank: int = 0, peers: tuple[str, ...] = ()
) -> float:
    """Return the samples/s of training steps, as a probe for a plan times them."""
    from evener.workloads.keras_backend.workload import KerasRecipe, KerasWorkload
    from evener.workloads.protocol import WorkerSetup

    setup = WorkerSetup(devices, (None,) * len(devices), rank=rank, peers=peers)
    few = slice(0, 64)

    def recipe() -> KerasRecipe:
        return KerasRecipe(
            build(sizes), lambda n: (data[0][few][:n], data[1][few][:n]), lambda: data
        )

    workload = KerasWorkload(setup, recipe)
    parts = max(len(devices), len(peers))
    workload.prepare([sizes.batch // parts] * parts)
    for _ in range(WARM_STEPS):
        workload.step()
    workload.synchronize()
    began = time.perf_counter()
    for _ in range(PROBED_STEPS):
        workload.step()
    workload.synchronize()
    return PROBED_STEPS * sizes.batch / (time.perf_counter() - began)


class Epoch(NamedTuple):
    """The seconds that the parts of an epoch took."""

    whole: float
    begin: float  # up to step FIRST_STEADY
    steady: float  # of one step after that
    tail: float  # of the last, shorter batch
    host: float  # CPU time of the calling thread in a steady step


def fit(engine: str, devices: tuple[str, ...], sizes: Sizes, data: Any) -> list[Epoch]:
    """Train by `fit` and return the times of its epochs; an empty engine is plain Keras."""
    import keras
    import tensorflow as tf

    from evener.keras import Split

    epochs: list[Epoch] = []
    steps = sizes.rows // sizes.batch

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]
        """Records when epochs and steps end; reads the loss only to end a timed part."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.times = [time.perf_counter()]
            self.computed = [time.thread_time()]

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch + 1 in (FIRST_STEADY, steps, steps + 1):
                float(logs["loss"])  # waits for the devices
                self.times.append(time.perf_counter())
                self.computed.append(time.thread_time())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            began, warm, last, tail = self.times
            _, first, second, _ = self.computed
            steady = (last - warm) / (steps - FIRST_STEADY)
            host = (second - first) / (steps - FIRST_STEADY)
            whole = time.perf_counter() - began
            epochs.append(Epoch(whole, warm - began, steady, tail - last, host))

    if engine:
        split = Split(devices=devices, global_batch=sizes.batch, engine=engine)
        model = split.build(lambda: build(sizes))
    else:
        with tf.device(devices[0]):
            model = build(sizes)
    model.fit(*data, batch_size=sizes.batch, epochs=sizes.epochs, verbose=0, callbacks=[Clock()])
    return epochs


def train_few(engine: str, devices: tuple[str, ...], sizes: Sizes) -> list[Any]:
    """Return the weights after a few steps in float64; an empty engine is plain Keras."""
    import keras
    import tensorflow as tf

    from evener.keras import Split

    few = sizes._replace(rows=EXACT_STEPS * EXACT_BATCH - EXACT_BATCH // 2)
    data = make_data(few)
    before = keras.config.floatx()
    _compute_in("float64")
    try:
        if engine:
            split = Split(devices=devices, ratios=[3, 1], global_batch=EXACT_BATCH, engine=engine)
            model = split.build(lambda: _build_seeded(sizes))
        else:
            with tf.device(devices[0]):
                model = _build_seeded(sizes)
        model.fit(*data, batch_size=EXACT_BATCH, epochs=1, shuffle=False, verbose=0)
        found: list[Any] = model.get_weights()
    finally:
        _compute_in(before)
    return found


def _compute_in(kind: str) -> None:
    """Make layers that are created from now on have weights of this type, and compute in it."""
    import keras

    keras.config.set_floatx(kind)
    keras.config.set_dtype_policy(kind)  # the first layer of a process has fixed it


def _build_seeded(sizes: Sizes) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    return build(sizes, is_exact=True)


def say_exact(name: str, trained: list[Any], alone: list[Any], sizes: Sizes) -> None:
    """Print the largest difference of a weight between an engine and plain Keras."""
    pairs = list(zip(trained, alone, strict=True))
    largest = max(float(abs(one - other).max()) for one, other in pairs)
    print(
        f"{name}, {sizes.model}: after {EXACT_STEPS} steps of 3 : 1 in float64, a weight differs by"
        f" at most {largest:.1e}",
        flush=True,
    )


def print_times(name: str, probed: float, epochs: list[Epoch], sizes: Sizes) -> None:
    """Print the times of one engine."""
    first, *later = epochs
    count = len(later)
    steady = sum(each.steady for each in later) / count
    begin = sum(each.begin for each in later) / count - FIRST_STEADY * steady
    tail = sum(each.tail for each in later) / count
    rows = sizes.rows % sizes.batch
    whole = sum(each.whole for each in later) / count
    host = sum(each.host for each in later) / count
    rate = sizes.batch / steady
    print(
        f"{name}, {sizes.model}: probe {probed:,.0f} samples/s; fit's steady steps {rate:,.0f}"
        f" ({rate / probed:.3f} of the probe's), {1e3 * steady:.2f} ms each,"
        f" {1e3 * host:.2f} ms of them computed by the host's thread;"
        f" whole epochs {sizes.rows / whole:,.0f} ({sizes.rows / whole / probed:.3f});"
        f" an epoch's begin costs {1e3 * begin:.0f} ms,"
        f" its tail of {rows} rows {1e3 * tail:.0f} ms;"
        f" first epoch {first.whole:.1f} s, with a begin of {first.begin:.1f} s"
        f" and a tail of {first.tail:.2f} s",
        flush=True,
    )
    print(
        json.dumps(
            {
                "way": name,
                "model": sizes.model,
                "probe": probed,
                "epochs": [each._asdict() for each in epochs],
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
