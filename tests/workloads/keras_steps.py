"""Run steps of Keras workloads like a probe's child, and return the results.

The fixture `keras_ranks` calls these functions.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from tensorflow.python.eager import context

from evener.balancer.probes.failures import error_is_memory, one_line
from evener.balancer.probes.worker import Worker
from evener.keras import make_logical_cpus, model_digest
from evener.workloads import registry
from evener.workloads.keras_backend import models
from evener.workloads.keras_backend import workload as keras_workload
from evener.workloads.keras_backend.workload import (
    MOST_ELEMENTS,
    TooManyElementsError,
    check_rows,
    largest_rows,
)
from evener.workloads.protocol import WorkerSetup
from evener.workloads.user_code import find_line
from tests.support.keras_twice import count_traces, leave_graphs_alone, trace_faster
from tests.workloads.keras_placed_proof import count_parameters, placed

OWN = """
import keras


def plain(units=4):
    image = keras.Input((6, 6, 1))
    words = keras.Input((5,), dtype="int32")
    seen = keras.layers.Flatten()(image)
    read = keras.layers.Flatten()(keras.layers.Embedding(9, units)(words))
    kind = keras.layers.Dense(3, activation="softmax", name="kind")(seen)
    size = keras.layers.Dense(2, name="size")(read)
    model = keras.Model([image, words], [kind, size])
    model.compile("sgd", ["categorical_crossentropy", "mse"])
    return model


def stack(units=4):
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(units), keras.layers.Dense(1)])
    model.compile("adam", "binary_crossentropy")
    return model


def open_shape():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def wrong_build():
    return keras.layers.Dense(-3)


def uncompiled():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def nothing():
    return 3
"""
SAMPLED = (
    OWN
    + """

def lazy():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


class Wrong(keras.layers.Layer):
    def call(self, x):
        return x["missing"]


def wrong_call():
    model = keras.Sequential([Wrong(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def wrong_loss():
    def loss(y, predicted):
        return predicted.nonsense

    model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(1)])
    model.compile("sgd", loss)
    return model


def sample_batch(n):
    import numpy as np

    return np.ones((n, 7)), np.zeros((n, 1))
"""
)
NO_BATCH = SAMPLED.replace(
    "    return np.ones((n, 7)), np.zeros((n, 1))", "    raise KeyError('labels')"
)
SHORT = SAMPLED.replace("np.ones((n, 7))", "np.ones((n - 1, 7))")


FED = """
import keras
import numpy as np
import tensorflow as tf

X, Y, W = np.arange(40.0).reshape(20, 2) / 40, np.ones((20, 1)), np.ones(20)
DATA = tf.data.Dataset.from_tensor_slices((X, Y))


def build():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def training_data():
    return {given}
"""
FEEDS = {
    "arrays": "X, Y",
    "weighted": "X, Y, W",
    "samples": "DATA",
    "batches": "lambda rows: DATA.shuffle(20).batch(rows)",
    "number": "3",
    "short": "X,",
    "other batch": "lambda rows: DATA.batch(7)",
    "too few": "lambda rows: DATA.take(4).batch(rows)",
    "no dataset": "lambda rows: X",
    "raises": "1 / 0",
    "lengths": "X, Y\n\n\ndef lengths(data):\n    return [1] * 20",
}


def attempt(action: Callable[[], Any]) -> str:
    """Return a line with the error of an action, and the user's line if it is in their code.

    Returns "" without an error.
    """
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {find_line(error) or 'ours'}: {one_line(str(error))}"
    return ""


def losses(
    workload: Any, shares: tuple[int, ...], steps: int, micro: tuple[int, ...] = ()
) -> list[float]:
    """Return the running mean of the loss after each step."""
    workload.prepare(shares, micro)
    seen = []
    for _ in range(steps):
        workload.step()
        workload.synchronize()
        seen.append(float(workload._logs["loss"]))
    return seen


def build(name: str, devices: int = 1, **setup: Any) -> Any:
    """Return a workload whose initial weights are always the same."""
    keras.utils.set_random_seed(11)
    keras_workload.POOL_BYTES = 1 << 21  # creating 64 MiB would take half a second each time
    settings = setup.pop("settings", {})
    return registry.build(
        name, WorkerSetup(tuple(f"CPU:{i}" for i in range(devices)), **setup), settings
    )


def own(folder: str, text: str, name: str) -> Callable[[], Any]:
    """Return an action that builds and steps the user's function of this name."""
    path = Path(folder) / f"train_{abs(hash(text)) % 10_000}.py"
    path.write_text(text)
    return lambda: losses(build(f"{path}:{name}"), (3,), 2)


RUNS_OUT = """
import keras
import numpy as np
import tensorflow as tf

LEFT = []  # what failed steps have left: nothing the first time, then 256 MiB each


def look(n):
    if n > 6:
        LEFT.append(np.ones(1 << 26, np.float32) if LEFT else None)
        raise MemoryError("out of memory")
    return np.int32(0)


class Short(keras.layers.Layer):
    def call(self, x):
        with tf.control_dependencies([tf.numpy_function(look, [tf.shape(x)[0]], tf.int32)]):
            return tf.identity(x)


def build():
    model = keras.Sequential([keras.Input((4,)), Short(), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def sample_batch(n):
    return np.ones((n, 4)), np.ones((n, 1))
"""


def run_out_of_memory(folder: str) -> dict[str, Any]:
    """Return how a child goes on after two steps that ran out of memory, above 6 rows.

    After the second of them, 256 MiB stay allocated.
    """
    path = Path(folder) / "runs_out.py"
    path.write_text(RUNS_OUT)
    worker = Worker()
    worker._workload = workload = build(f"{path}:build")
    losses(workload, (4,), 2)
    recovered = []
    for _ in range(2):
        try:
            losses(workload, (8,), 1)
        except Exception as error:
            recovered.append(worker.recover(error, worker.describe_error(error)).recovered)
    last = losses(workload, (5,), 2)[-1]
    return {"recovered": recovered, "ran": math.isfinite(last)}


def lose(folder: str) -> list[bool]:
    """Return whether the loss is finite, for a model that learns and for one with NaN weights."""
    path = Path(folder) / "lost.py"
    path.write_text(OWN)
    workload = build(f"{path}:plain")
    losses(workload, (4,), 2)
    found = [workload.loss_is_finite()]
    workload.model.set_weights(
        [np.full_like(each, np.nan) for each in workload.model.get_weights()]
    )
    losses(workload, (4,), 1)
    return [*found, workload.loss_is_finite()]


def fed(folder: str, name: str) -> Callable[[], Any]:
    """Return an action that trains a model on the user's `training_data`.

    The batches are smaller and, for arrays, larger than the data.
    """
    path = Path(folder) / f"fed_{name.replace(' ', '_')}.py"
    path.write_text(FED.replace("{given}", FEEDS[name]))

    def action() -> None:
        workload = build(f"{path}:build")
        assert workload.data is not None
        assert workload.facts()["rows"] == ("0" if name == "batches" else str(workload.data.rows))
        losses(workload, (5,), 9)
        if name in ("arrays", "weighted"):
            losses(workload, (50,), 2)

    return action


def apart(one: Any, other: Any) -> float:
    """Return the largest difference between the weights of two workloads."""
    pairs = zip(one.model.get_weights(), other.model.get_weights(), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def alone(_rank: int, folder: str) -> dict[str, Any]:
    """Test workloads on one device and return all results."""
    leave_graphs_alone()
    tempfile.tempdir = folder
    small = {"filters": 4, "dense": 16, "learning_rate": 0.01}
    workload = build("keras_mnist", settings=small)
    traces = count_traces(workload.model)
    seen = losses(workload, (64,), 70)
    memory = workload.max_memory_bytes()
    for share in (5, 64, 7):
        losses(workload, (share,), 1)
    facts = dict(workload.facts())
    (Path(folder) / "compiled.py").write_text(OWN)
    compiled = build(f"{Path(folder) / 'compiled.py'}:stack", xla=True)
    gru = {
        "steps": 5,
        "features": 3,
        "units": 6,
        "layers": 1,
        "dense": 4,
        "classes": 3,
        "use_cudnn": "false",
    }
    gpu_options = context.context().config.gpu_options
    return {
        "first": seen[0],
        "last": seen[-1],
        "memory": memory,
        "traces": len(traces),
        "facts": facts,
        "digest": model_digest(workload.model),
        "other digest": model_digest(build("keras_mnist", settings={**small, "dense": 17}).model),
        "from device": losses(build("keras_mnist", settings=small, input="device"), (8,), 2),
        "compiled": losses(compiled, (8,), 2),
        "by XLA": compiled.model.jit_compile,
        "half": build(
            "keras_mnist", settings=small, precision="mixed_bfloat16"
        ).model.dtype_policy.name,
        "gru": losses(build("keras_gru", settings=gru), (4,), 2),
        "bad cudnn": attempt(lambda: build("keras_gru", settings={"use_cudnn": "maybe"})),
        "no share": attempt(lambda: workload.prepare((0,))),
        "maxer": count_parameters(models.maxer),
        "limits": kernel_limits(),
        "lost": lose(folder),
        "out of memory": run_out_of_memory(folder),
        "fails at once": gpu_options.experimental.disallow_retry_on_allocation_failure,
        "own": {
            name: attempt(own(folder, OWN, name))
            for name in ("plain", "stack", "open_shape", "wrong_build", "uncompiled", "nothing")
        },
        "own sampled": {
            name: attempt(own(folder, SAMPLED, name))
            for name in ("lazy", "wrong_call", "wrong_loss")
        }
        | {"no batch": attempt(own(folder, NO_BATCH, "lazy"))},
        "fed": {name: attempt(fed(folder, name)) for name in FEEDS},
        "own short": attempt(own(folder, SHORT, "lazy")),
        "left": [path.name for path in Path(folder).glob("__autograph*")],
    }


class WithoutShapes(keras.Model):
    """A model without known layer output shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        """Return the model's output."""
        return self.dense(inputs)


def nested(filters: int) -> Any:
    """Return a model whose largest tensor is in a nested model."""
    inner = keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Conv2D(filters, 3, padding="same")]
    )
    return keras.Sequential(
        [keras.Input((8, 8, 1)), inner, keras.layers.Flatten(), keras.layers.Dense(2)]
    )


def kernel_limits() -> dict[str, Any]:
    """Return the largest batches by layer output size, and the error for one row more."""
    open_model, widest = WithoutShapes(), nested(256)
    open_model(keras.ops.ones((2, 4)))
    check_rows(open_model, 1 << 40)
    most = largest_rows(widest) or 0
    check_rows(widest, most)
    try:
        check_rows(widest, most + 1)
    except TooManyElementsError as error:
        is_memory = error_is_memory([kind.__name__ for kind in type(error).__mro__], str(error))
        refused = [str(error), is_memory]
    return {
        "elements": MOST_ELEMENTS,
        "rows": {filters: largest_rows(nested(filters)) for filters in (1, 3, 256)},
        "refused": refused,
        "open": largest_rows(open_model),
    }


def together(_rank: int, folder: str) -> dict[str, Any]:
    """Compare three devices in one process, as towers, with one device."""
    make_logical_cpus(3)
    trace_faster()
    small = {"filters": 4, "dense": 16, "learning_rate": 0.01}
    towers = build("keras_mnist", 3, settings=small)
    one = build("keras_mnist", settings=small)
    plain = losses(one, (12,), 4)
    spread = losses(towers, (7, 4, 1), 4)
    found = {
        "towers": [apart(one, towers), float(np.abs(np.subtract(plain, spread)).max())],
        "losses in passes": [losses(one, (12,), 3, (5,)), losses(towers, (7, 4, 1), 3, (3, 4, 1))],
        "passes": apart(one, towers),
        "left out": losses(towers, (9, 0, 3), 2),
        "again": losses(towers, (20, 2, 6), 2),
        "from device": losses(build("keras_mnist", 2, settings=small, input="device"), (9, 3), 4),
        "engines": [each.facts()["engine"] for each in (one, towers)],
        "memory": towers.max_memory_bytes(),
        "xla": attempt(lambda: build("keras_mnist", 2, xla=True)),
        "shares": attempt(lambda: towers.prepare((3, 4))),
    }
    return found | {"placed": placed()}


def group(rank: int, *peers: str) -> dict[str, Any]:
    """Run one process of a group, which steps with changing shares."""
    trace_faster()
    workload = build("keras_mnist", rank=rank, peers=peers, settings={"filters": 4, "dense": 16})
    traces = count_traces(workload.model)
    sizes = (((9, 3), ()), ((1, 16), (1, 5)), ((30, 2), ()), ((9, 3), (2, 3)))
    seen, traced = [], []
    for shares, micro in sizes:
        seen.append(losses(workload, shares, 3, micro)[-1])
        traced.append(len(traces))
    weights = float(np.sum([np.abs(weight).sum() for weight in workload.model.get_weights()]))
    return {
        "losses": seen,
        "weights": weights,
        "traces": traced,
        "engine": workload.facts()["engine"],
        "refused": attempt(lambda: workload.prepare((4, 0) if rank else (0, 4))),
    }
