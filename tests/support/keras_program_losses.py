"""Losses as users of Keras write them, each with a small model and its training rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses

ROWS = 33  # four batches of 8 and one row
RANDOM = np.random.default_rng(11)
X = RANDOM.normal(size=(ROWS, 6))
KINDS = RANDOM.integers(0, 3, ROWS)
SORTED = np.sort(KINDS)  # whole batches of one class
VALUES = np.sin(X[:, :1] * 2)
WEIGHTS = RANDOM.uniform(0.2, 3.0, ROWS)
STEPS = 5  # number of steps of a sequence
FLOAT32_LOSSES = ("CTC",)  # TensorFlow always computes these in float32
LENGTHS = RANDOM.integers(1, STEPS + 1, ROWS)
WORDS = np.where(np.arange(STEPS) < LENGTHS[:, None], RANDOM.integers(1, 11, (ROWS, STEPS)), 0)
TAGS = np.where(WORDS > 0, RANDOM.integers(1, 4, WORDS.shape), 0)  # 0 is padding
PIXELS = np.where(
    RANDOM.random((ROWS, 4, 4)) < RANDOM.random((ROWS, 1, 1)),
    RANDOM.integers(0, 3, (ROWS, 4, 4)),
    255,
)
IMAGES = RANDOM.normal(size=(ROWS, 4, 4, 2))

Data = tuple[Any, Any, dict[str, Any]]  # x, y, and the other arguments of fit
Made = tuple[Callable[[], Any], Data]


def dense(
    loss: Any, y: Any, outputs: int = 1, last: str | None = None, base: Any = None, **words: Any
) -> Made:
    """Return two dense layers with this loss."""
    fitted: dict[str, Any] = {
        name: words.pop(name) for name in ("sample_weight", "class_weight") if name in words
    }

    def make() -> Any:
        entry = keras.Input((6,))
        found = layers.Dense(outputs, activation=last)(layers.Dense(7, activation="tanh")(entry))
        model = (base or keras.Model)(entry, found)
        model.compile(keras.optimizers.Adam(0.02), loss, **words)
        return model

    return make, (X, y, fitted)


def by_rows(loss: Any, regularizer: Any = None, **fitted: Any) -> Made:
    """Return a dense layer with three outputs and a loss that has more than one value."""

    def make() -> Any:
        entry = keras.Input((6,))
        model = keras.Model(entry, layers.Dense(3, kernel_regularizer=regularizer)(entry))
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
        return model

    return make, (X, np.cos(X[:, :3]), fitted)


def tagger(loss: Any, mask: bool, y: Any = TAGS, rate: float = 0.3, **fitted: Any) -> Made:
    """Return rows of words of unequal length, each word with a tag."""

    def make() -> Any:
        entry = keras.Input((STEPS,))
        words = layers.Embedding(11, 4, mask_zero=mask)(entry)
        model = keras.Model(entry, layers.Dense(4, activation="softmax")(words))
        model.compile(keras.optimizers.SGD(rate, momentum=0.9), loss)
        return model

    return make, (WORDS, y, fitted)


def segmentation(loss: Any) -> Made:
    """Return a class for each pixel; some pixels have none."""

    def make() -> Any:
        entry = keras.Input((4, 4, 2))
        model = keras.Model(entry, layers.Conv2D(3, 3, padding="same", activation="softmax")(entry))
        model.compile(keras.optimizers.Adam(0.02), loss)
        return model

    return make, (IMAGES, PIXELS, {})


# ---------------------------------------------------------------------- functions of (y, outputs)


def whole_mean(y: Any, outputs: Any) -> Any:
    """Return a single number, as most custom losses do."""
    return tf.reduce_mean(tf.square(tf.cast(y, outputs.dtype) - outputs))


def rmse(y: Any, outputs: Any) -> Any:
    """Return the root of the mean squared error."""
    return tf.sqrt(tf.reduce_mean(tf.square(tf.cast(y, outputs.dtype) - outputs)) + 1e-12)


def concordance(y: Any, outputs: Any) -> Any:
    """Return one minus Lin's concordance correlation coefficient."""
    y = tf.cast(y, outputs.dtype)
    mean_y, mean_p = tf.reduce_mean(y), tf.reduce_mean(outputs)
    joint = tf.reduce_mean((y - mean_y) * (outputs - mean_p))
    spread = tf.math.reduce_variance(y) + tf.math.reduce_variance(outputs) + (mean_y - mean_p) ** 2
    return 1 - 2 * joint / (spread + 1e-9)


def info_nce(y: Any, outputs: Any) -> Any:
    """Return the loss of finding each row's match among all rows."""
    outputs = tf.math.l2_normalize(outputs, 1)
    scores = outputs @ tf.transpose(outputs) + tf.cast(
        tf.cast(y, tf.float64)[:, None] * 0, outputs.dtype
    )
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(scores)[0]), scores)
    )


def cox(y: Any, outputs: Any) -> Any:
    """Return Cox's loss, with a sum for each row over the rows that survive longer."""
    risk = tf.squeeze(outputs, 1)
    alive = tf.cast(tf.cast(y, risk.dtype)[:, None] <= tf.cast(y, risk.dtype)[None, :], risk.dtype)
    return -tf.reduce_mean(risk - tf.math.log(tf.reduce_sum(alive * tf.exp(risk)[None, :], 1)))


def triplet(y: Any, outputs: Any) -> Any:
    """Return the loss of the hardest triplets of a batch."""
    apart = tf.reduce_sum(tf.square(outputs[:, None] - outputs[None, :]), -1)
    same = tf.cast(tf.equal(tf.reshape(y, [-1, 1]), tf.reshape(y, [1, -1])), apart.dtype)
    hardest = tf.reduce_max(apart * same, 1) - tf.reduce_min(apart + 1e3 * same, 1) + 1.0
    return tf.reduce_mean(tf.nn.relu(hardest))


def masked_words(y: Any, outputs: Any) -> Any:
    """Return the loss of TensorFlow's transformer tutorial."""
    mask = tf.cast(y != 0, outputs.dtype)
    each = keras.losses.sparse_categorical_crossentropy(y, outputs) * mask
    return tf.reduce_sum(each) / tf.reduce_sum(mask)


def weighted_classes(y: Any, outputs: Any) -> Any:
    """Return a weighted mean, divided by the weights of the batch's classes as in PyTorch."""
    weights = tf.gather(
        tf.constant([1.0, 5.0, 0.2], outputs.dtype), tf.cast(tf.reshape(y, [-1]), tf.int32)
    )
    each = keras.losses.sparse_categorical_crossentropy(y, outputs)
    return tf.reduce_sum(each * weights) / tf.reduce_sum(weights)


def rows_of_steps(y: Any, outputs: Any) -> Any:
    """Return one number for each step of each row."""
    return tf.square(tf.cast(y, outputs.dtype)[..., None] - outputs)[..., 0]


def soft_dice(y: Any, outputs: Any) -> Any:
    """Return the Dice loss over the whole batch."""
    hot = tf.one_hot(tf.cast(tf.reshape(y, [-1]), tf.int32), 3, dtype=outputs.dtype)
    return 1 - (2 * tf.reduce_sum(hot * outputs) + 1) / (
        tf.reduce_sum(hot) + tf.reduce_sum(outputs) + 1
    )


class OwnReduction(losses.Loss):
    """A Loss with its own `__call__`."""

    def __call__(self, y: Any, outputs: Any, sample_weight: Any = None) -> Any:
        """Return a mean over rows."""
        return tf.reduce_mean(tf.abs(tf.cast(y, outputs.dtype) - outputs))


class OfSteps(losses.Loss):
    """A row's mean crossentropy of its steps."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return a value for each row."""
        return tf.reduce_mean(losses.sparse_categorical_crossentropy(y_true, y_pred), axis=-1)


class ColumnMeans(losses.Loss):
    """A mean over rows for each column of the outputs."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return the means."""
        return tf.reduce_mean(tf.square(tf.cast(y_true, y_pred.dtype) - y_pred), axis=0)


class OwnComputeLoss(keras.Model):
    """Adds a penalty on its outputs."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        """Return means over rows."""
        return (
            tf.reduce_mean(tf.square(y - y_pred))
            + 0.1 * tf.reduce_mean(tf.abs(y_pred))
            + sum(self.losses)
        )


class SumComputeLoss(keras.Model):
    """An ELBO that is a sum over rows."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        """Return a sum."""
        return tf.reduce_sum(tf.square(y - y_pred))


def two_heads(mask: bool, second: Any, first: Any = "sparse_categorical_crossentropy") -> Made:
    """Return tags, and a number for each row. Without `second`, no loss reaches that head."""

    def make() -> Any:
        entry = keras.Input((STEPS,))
        words = layers.Embedding(11, 4, mask_zero=mask)(entry)
        tags = layers.Dense(4, activation="softmax", name="tags")(words)
        row = layers.Dense(1, name="row")(layers.GlobalAveragePooling1D()(words))
        model = keras.Model(entry, {"tags": tags, "row": row})
        model.compile(keras.optimizers.Adam(0.02), {"tags": first, "row": second})
        return model

    return make, (WORDS, {"tags": TAGS, "row": LENGTHS[:, None].astype(float)}, {})


def ctc() -> Made:
    """Return a model with CTC loss, whose labels are shorter than its outputs."""

    def make() -> Any:
        entry = keras.Input((8, 3))
        model = keras.Model(entry, layers.Dense(5)(entry))
        model.compile(keras.optimizers.Adam(0.02), losses.CTC())
        return model

    return make, (RANDOM.normal(size=(ROWS, 8, 3)), RANDOM.integers(1, 5, (ROWS, 3)), {})


def loss_programs() -> dict[str, Made]:
    """Return every loss by its name."""
    kinds = "sparse_categorical_crossentropy"
    soft: dict[str, Any] = {"outputs": 3, "last": "softmax"}
    crossed = losses.SparseCategoricalCrossentropy
    hot = np.eye(3)[KINDS]
    return {
        "crossentropy": dense(kinds, KINDS, **soft, metrics=["accuracy"]),
        "crossentropy, class_weight": dense(
            kinds, KINDS, **soft, class_weight={0: 0.5, 1: 4.0, 2: 1.0}
        ),
        "mse, class_weight of divided labels": dense(
            "mse", KINDS[:, None] * (1 - 1e-9), class_weight={0: 0.5, 1: 4.0, 2: 1.0}
        ),
        "mse, sample_weight": dense("mse", VALUES, sample_weight=WEIGHTS, weighted_metrics=["mae"]),
        "Huber": dense(losses.Huber(0.3), VALUES),
        "Poisson": dense("poisson", KINDS[:, None], last="exponential"),
        "KLDivergence": dense("kl_divergence", hot, **soft),
        "CosineSimilarity": dense("cosine_similarity", hot, **soft),
        "BinaryFocal": dense(losses.BinaryFocalCrossentropy(), hot, outputs=3, last="sigmoid"),
        "own mean": dense(whole_mean, VALUES),
        "own mean, own metric": dense(whole_mean, VALUES, metrics=[whole_mean]),
        "own mean of a weighted batch": dense(whole_mean, VALUES, sample_weight=WEIGHTS),
        "own Loss.__call__": dense(OwnReduction(), VALUES),
        "own compute_loss": dense(None, VALUES, base=OwnComputeLoss),
        "own compute_loss, a sum": dense(None, VALUES, base=SumComputeLoss),
        "rows of steps": tagger(rows_of_steps, False, y=np.cos(WORDS)),
        "sum": dense(crossed(reduction="sum"), KINDS, **soft),
        "sum, weighted": dense(
            losses.MeanSquaredError(reduction="sum"), VALUES, sample_weight=WEIGHTS
        ),
        "a value per row": by_rows(losses.MeanSquaredError(reduction=None)),
        "a value per row, weighted": by_rows(
            losses.MeanSquaredError(reduction="none"), sample_weight=WEIGHTS
        ),
        "a value per row and step": tagger(crossed(reduction=None), True, rate=0.01),
        "a value per row, two heads": two_heads(
            False, losses.MeanSquaredError(reduction=None), OfSteps(reduction=None)
        ),
        "a value per row, regularized": by_rows(
            losses.MeanSquaredError(reduction=None), regularizer="l2"
        ),
        "a value per column": by_rows(ColumnMeans(reduction=None)),
        "mean_with_sample_weight": dense(
            losses.MeanSquaredError(reduction="mean_with_sample_weight"),
            VALUES,
            sample_weight=WEIGHTS,
        ),
        "mean_with_sample_weight, class_weight": dense(
            crossed(reduction="mean_with_sample_weight"),
            KINDS,
            **soft,
            class_weight={0: 0.5, 1: 4.0, 2: 1.0},
        ),
        "mean_with_sample_weight, one class a batch": dense(
            crossed(reduction="mean_with_sample_weight"),
            SORTED,
            **soft,
            class_weight={0: 0.5, 1: 4.0, 2: 1.0},
        ),
        "Dice": dense(losses.Dice(), hot, **soft),
        "Dice of rows": dense(losses.Dice(axis=(1,)), hot, **soft),
        "own dice": dense(soft_dice, KINDS, **soft),
        "Tversky": dense(losses.Tversky(), hot, **soft),
        "Circle": dense(losses.Circle(), KINDS, outputs=4),
        "rmse": dense(rmse, VALUES),
        "concordance": dense(concordance, VALUES),
        "InfoNCE": dense(info_nce, KINDS, outputs=4),
        "Cox": dense(cox, WEIGHTS),
        "triplet": dense(triplet, KINDS, outputs=4),
        "own class weights": dense(weighted_classes, KINDS, **soft),
        "own class weights, one class a batch": dense(weighted_classes, SORTED, **soft),
        "masked by Keras": tagger(kinds, True),
        "masked by Keras, weights of steps": tagger(
            kinds, True, sample_weight=RANDOM.uniform(0.5, 2, WORDS.shape)
        ),
        "masked by Keras, sum": tagger(crossed(reduction="sum"), True, rate=0.01),
        "masked by Keras, full first batch": full_first(),
        "tutorial's masked loss": tagger(masked_words, False),
        "ignore_class": segmentation(crossed(ignore_class=255)),
        "ignore_class of words": tagger(crossed(ignore_class=0), False),
        "two heads, one masked": two_heads(True, "mse"),
        "two heads": two_heads(False, "mse"),
        "a head without a loss": two_heads(False, None),
        "CTC": ctc(),
    }


def full_first() -> Made:
    """Return rows whose first batch has no padding; the others do."""
    make, (words, tags, _) = tagger("sparse_categorical_crossentropy", True)
    words, tags = words.copy(), tags.copy()
    words[:8] = np.maximum(words[:8], 1)
    tags[:8] = np.maximum(tags[:8], 1)
    return make, (words, tags, {})
