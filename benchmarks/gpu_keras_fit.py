"""Check whether Keras' `fit` reaches the speed that its plan promises, with the right weights.

  python -m benchmarks.gpu_keras_fit [--gpus 0,1] [--small] [--models resnet gru]
  [--roles one multiworker]

A ResNet and a recurrent network of two GRU layers are trained by plain Keras on one GPU, and on two
by the engines towers and multiworker.

First, each engine trains the model for a few steps of shares 3 : 1 in float64, without dropout and
with layer normalization. The weights are compared with those of plain Keras on one GPU. The engines
do this at the same time, because nothing is timed.

Then the engines take turns. Each times the model's steps as a probe does, and then trains by `fit`
over epochs of full batches and a shorter last one. Steady steps are the full batches from the 21st
of an epoch on; the rest of an epoch is its start and its last batch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from tests.support.keras_start import free_peers

FIRST_STEADY = 20  # steps that count as the start of an epoch
PROBED_STEPS, WARM_STEPS = 40, 15
SECONDS = 200.0  # time limit of the whole benchmark
UNTIMED_SECONDS = 100.0  # time limit of its first part, in which weights are compared


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
READY = "ready for the timed part"  # printed by each process after the first part


def main() -> int:
    """Start the processes, which print a line per model and engine; return 1 if one failed."""
    options = parse()
    if options.role:
        run_role(options)
        return 0
    began = time.monotonic()
    roles = {role: Role(role, options) for role in options.roles}
    for role in roles.values():
        role.wait_for_weights(began + UNTIMED_SECONDS)
    failed = 0
    for role in roles.values():
        role.begin_timing()
        failed += not role.wait(began + SECONDS)
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


class Role:
    """The processes of an engine, which start at once and wait before their timed part.

    The first process prints the results.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        ranks = 2 if name == "multiworker" else 1
        peers = ",".join(free_peers(ranks)) if ranks > 1 else ""
        self._children = [self._start(rank, ranks, peers, options) for rank in range(ranks)]

    def _start(
        self, rank: int, ranks: int, peers: str, options: argparse.Namespace
    ) -> subprocess.Popen[str]:
        words = ["--role", self.name, "--rank", str(rank), "--peers", peers]
        words += ["--gpus", options.gpus, "--epochs", str(options.epochs)]
        words += ["--small"] * options.small
        words += ["--models", *options.models]
        own = options.gpus.split(",")[rank] if ranks > 1 else options.gpus
        variables = {
            **os.environ,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": "-1" if options.small else own,
            "NCCL_NVLS_ENABLE": "0",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        command = [sys.executable, "-m", "benchmarks.gpu_keras_fit", *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=variables, text=True, stdin=pipe, stdout=pipe)

    def wait_for_weights(self, deadline: float) -> None:
        """Print the lines of the first part of all processes; kill all that exceed the deadline."""
        self._read_until(deadline, READY)

    def begin_timing(self) -> None:
        """Make the processes start the timed part, if they are still running."""
        for child in self._children:
            assert child.stdin is not None
            with suppress(BrokenPipeError):
                child.stdin.write("go\n")
                child.stdin.close()

    def wait(self, deadline: float) -> bool:
        """Print the lines of the timed part, and return False if a process failed."""
        self._read_until(deadline, None)
        return not any(child.wait() for child in self._children)

    def _read_until(self, deadline: float, last: str | None) -> None:
        """Print the output of each process up to the line `last`, or to its end."""
        killer = threading.Timer(max(1.0, deadline - time.monotonic()), self._kill)
        killer.start()
        for child in self._children:
            assert child.stdout is not None
            for line in child.stdout:
                if line.strip() == last:
                    break
                print(line, end="", flush=True)
        killer.cancel()

    def _kill(self) -> None:
        print(f"{self.name}: over its time", flush=True)
        for child in self._children:
            child.kill()


def run_role(options: argparse.Namespace) -> None:
    """Compare the weights of the models, then wait for the turn and time the models."""
    engine = "multiworker" if options.role == "multiworker" else "towers"
    peers = tuple(options.peers.split(",")) if options.peers else ()
    prepare(options.rank, peers)
    kind = "CPU" if options.small else "GPU"
    devices = (f"{kind}:0",) if peers else (f"{kind}:0", f"{kind}:1")
    sizes = [(SMALL if options.small else FULL)[name] for name in options.models]
    began = time.monotonic()
    for each in sizes:
        with printed_failure(f"{engine}, {each.model}"):
            compare_weights(engine, peers or devices, devices[:1], options.rank, each)
    if options.rank == 0:
        print(f"  ({engine}: weights after {time.monotonic() - began:.0f} s)", flush=True)
    data = [make_data(each) for each in sizes]
    print(READY, flush=True)
    if not sys.stdin.readline():
        return
    began = time.monotonic()
    for each, rows in zip(sizes, data, strict=True):
        if options.epochs:
            each = each._replace(epochs=options.epochs)
        with printed_failure(f"{engine}, {each.model}"):
            if peers:
                run_group(devices, peers, options.rank, each, rows)
            else:
                run_towers(devices, each, rows)
        if options.rank == 0:
            print(f"  ({engine}, {each.model}: {time.monotonic() - began:.0f} s)", flush=True)


def prepare(rank: int, peers: tuple[str, ...]) -> None:
    """Describe the group to TensorFlow, and let it allocate GPU memory as it is needed."""
    import tensorflow as tf

    from evener.keras.tf_devices import make_logical_cpus

    if peers:
        workers = {"cluster": {"worker": peers}, "task": {"type": "worker", "index": rank}}
        os.environ["TF_CONFIG"] = json.dumps(workers)
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if not gpus and not peers:
        make_logical_cpus(2)


@contextmanager
def printed_failure(what: str) -> Iterator[None]:
    """Return a context in which an exception is printed, so that the next model is tried."""
    try:
        yield
    except Exception as error:
        print(f"{what}: {type(error).__name__}: {str(error)[:600]}", flush=True)


def compare_weights(
    engine: str, devices: tuple[str, ...], first: tuple[str, ...], rank: int, sizes: Sizes
) -> None:
    """Print how far the weights of this engine are from those of plain Keras on one device."""
    trained = train_few(engine, devices, sizes)
    if rank == 0:
        print_difference(engine, trained, train_few("", first, sizes), sizes)


def run_group(
    devices: tuple[str, ...], peers: tuple[str, ...], rank: int, sizes: Sizes, data: Any
) -> None:
    """Time a model in this process of a group."""
    probed = probe(devices, sizes, data, rank, peers)
    fitted = fit("multiworker", peers, sizes, data)
    if rank == 0:
        print_times("multiworker", probed, fitted, sizes)


def run_towers(devices: tuple[str, ...], sizes: Sizes, data: Any) -> None:
    """Time a model with the engine towers and with plain Keras."""
    print_times("towers", probe(devices, sizes, data), fit("towers", devices, sizes, data), sizes)
    one = devices[:1]
    print_times("plain Keras on one", probe(one, sizes, data), fit("", one, sizes, data), sizes)


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


def print_difference(name: str, trained: list[Any], alone: list[Any], sizes: Sizes) -> None:
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
