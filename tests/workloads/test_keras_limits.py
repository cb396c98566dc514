"""How many rows TensorFlow's GPU kernels count, and that more of them are out of memory's kind."""

from __future__ import annotations

import pytest

keras = pytest.importorskip("keras")

from evener.balancer.probes.exit_causes import error_is_memory  # noqa: E402
from evener.workloads.keras_backend.kernel_limits import MOST_ELEMENTS, TooManyElementsError, check_rows, largest_rows  # noqa: E402


def _network(filters: int) -> object:
    inner = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Conv2D(filters, 3, padding="same")])
    return keras.Sequential([keras.Input((8, 8, 1)), inner, keras.layers.Flatten(), keras.layers.Dense(2)])


@pytest.mark.parametrize("filters", [1, 3, 256])
def test_the_largest_tensor_of_any_layer_sets_the_limit(filters: int) -> None:
    """Also where the layer lies within a model within the model."""
    assert largest_rows(_network(filters)) == MOST_ELEMENTS // (8 * 8 * filters)


def test_one_row_more_is_refused_before_any_kernel_runs() -> None:
    """The refusal retreats as out-of-memory does, where the kernel would end the process."""
    network = _network(256)
    most = largest_rows(network)
    assert most is not None
    check_rows(network, most)
    with pytest.raises(TooManyElementsError, match=f"{most} samples") as refused:
        check_rows(network, most + 1)
    assert error_is_memory([kind.__name__ for kind in type(refused.value).__mro__], str(refused.value))


def test_a_model_without_known_shapes_has_no_limit() -> None:
    """A model written as a class doesn't say what its layers give."""

    class Own(keras.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, inputs: object) -> object:
            return self.dense(inputs)

    model = Own()
    model(keras.ops.ones((2, 4)))
    assert largest_rows(model) is None
    check_rows(model, 1 << 40)
