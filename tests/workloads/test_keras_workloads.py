"""Keras workloads as a probe steps them: alone, over several devices of a process, and in a group
of processes.

Placed on two devices, a network's outputs, gradients and trained weights are those of one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.frameworks import skip_without
from tests.support.keras_start import Answers, free_peers

skip_without("tensorflow")
# one wait for all processes, on a machine that may be busy
pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

STEPS = "tests.workloads.keras_steps"


@pytest.fixture(scope="module")
def seen(
    keras_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> Answers:
    """What the processes of each function of keras_steps.py found."""
    folder = str(tmp_path_factory.mktemp("own"))

    def step(name: str) -> list[Any]:
        if name == "group":
            return keras_ranks(f"{STEPS}.group", *free_peers(2), world=2)
        return keras_ranks(f"{STEPS}.{name}", folder)

    return Answers(step)


def test_the_small_network_learns(seen: Any) -> None:
    """Its pictures are made in code, but there is something to learn in them."""
    found = seen("alone")[0]
    assert found["last"] < 0.8 * found["first"]


def test_one_trace_serves_all_sizes(seen: Any) -> None:
    """Whatever the batch, with variables made before it; one more for passes. A group also traces
    a measurement of how parts add up before each.
    """
    assert seen("alone")[0]["traces"] == 1
    for found in seen("group"):
        assert found["traces"] == [2, 4, 4, 4]  # after each size; passes from the second on


def test_facts_name_versions_and_the_model(seen: Any) -> None:
    """The digest is the one that a training script computes; another model has another."""
    found = seen("alone")[0]
    assert found["facts"]["digest"] == found["digest"] != found["other digest"]
    assert found["facts"]["engine"] == "solo"
    assert found["facts"]["parameters"] == "6794"
    assert found["facts"]["tensorflow"]
    assert found["facts"]["keras"]


def test_memory_is_told_where_it_can_be(seen: Any) -> None:
    """One device of a CPU process: its growth; several share it, so nobody can tell."""
    assert seen("alone")[0]["memory"][0] > 0
    assert seen("together")[0]["memory"] == [None, None, None]


def test_the_seeds_network_has_its_parameters(seen: Any) -> None:
    """78,923,530, as the seed's."""
    assert seen("alone")[0]["maxer"] == 78_923_530


@pytest.mark.parametrize("filters", [1, 3, 256])
def test_the_largest_tensor_of_any_layer_sets_the_limit(seen: Any, filters: int) -> None:
    """What TensorFlow's GPU kernels count, also where the layer lies within a model within the
    model.
    """
    found = seen("alone")[0]["limits"]
    assert found["rows"][str(filters)] == found["elements"] // (8 * 8 * filters)


def test_one_row_more_is_refused_before_any_kernel_runs(seen: Any) -> None:
    """The refusal retreats as out-of-memory does, where the kernel would end the process."""
    found = seen("alone")[0]["limits"]
    words, is_memory = found["refused"]
    assert f"{found['rows']['256']} samples" in words
    assert is_memory


def test_a_model_without_known_shapes_has_no_limit(seen: Any) -> None:
    """A model written as a class doesn't say what its layers give."""
    assert seen("alone")[0]["limits"]["open"] is None


def test_every_way_of_training_steps(seen: Any) -> None:
    """From device memory, compiled by XLA, in half precision, recurrent."""
    found = seen("alone")[0]
    for way in ("from device", "compiled", "gru"):
        assert len(found[way]) == 2
        assert all(0 < loss < 10 for loss in found[way])
    assert found["half"] == "mixed_bfloat16"
    assert found["by XLA"] is True


def test_towers_step_as_one_device(seen: Any) -> None:
    """The same weights after 4 steps, within float32's rounding; then other shares, with a device
    left out.
    """
    found = seen("together")[0]
    assert max(found["towers"]) < 1e-4
    assert len(found["left out"]) == len(found["again"]) == 2
    assert len(found["from device"]) == 4
    assert found["engines"] == ["solo", "towers"]


def test_passes_step_as_one_pass(seen: Any) -> None:
    """The same weights after 3 more steps: in passes on one device, and in others on three."""
    found = seen("together")[0]
    assert found["passes"] < 1e-4
    one, towers = found["losses in passes"]
    assert one == pytest.approx(towers, abs=1e-4)


def test_a_group_steps_together(seen: Any) -> None:
    """Both processes have the same loss and weights after each change of shares."""
    first, second = seen("group")
    assert first["losses"] == second["losses"]
    assert first["weights"] == second["weights"]
    assert first["engine"] == "multiworker"


def test_shares_that_cannot_be_are_refused(seen: Any) -> None:
    """No share for this process, too few shares, XLA over several devices, a wrong setting."""
    alone, together = seen("alone")[0], seen("together")[0]
    assert "can't step with the shares (0,)" in alone["no share"]
    assert "can't step with the shares (3, 4)" in together["shares"]
    assert "XLA" in together["xla"]
    assert "use_cudnn can't be 'maybe'" in alone["bad cudnn"]
    assert all("can't step with the shares" in found["refused"] for found in seen("group"))


def test_the_users_model_is_trained(seen: Any) -> None:
    """With inputs made from its shapes and losses, or by its sample_batch."""
    found = seen("alone")[0]
    assert found["own"]["plain"] == found["own"]["stack"] == ""
    assert found["own sampled"]["lazy"] == ""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("open_shape", "doesn't say its input shapes"),
        ("wrong_build", "Received an invalid value for `units`"),
        ("uncompiled", "isn't compiled"),
        ("nothing", "returns int, not a Keras model"),
    ],
)
def test_a_users_function_that_gives_no_model(seen: Any, name: str, says: str) -> None:
    """One line says what is wrong with it."""
    words = seen("alone")[0]["own"][name]
    assert says in words
    assert "\n" not in words


@pytest.mark.parametrize(
    ("part", "name", "line"),
    [
        ("own", "wrong_build", "    return keras.layers.Dense(-3)"),
        ("own sampled", "no batch", "    raise KeyError('labels')"),
    ],
)
def test_a_users_error_names_their_line(seen: Any, part: str, name: str, line: str) -> None:
    """The file and the line in it, while a model is built and while a batch is made."""
    where = seen("alone")[0][part][name].split(": ")[1]
    path, _, number = where.rpartition(":")
    assert Path(path).read_text().splitlines()[int(number) - 1] == line


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("wrong_call", '        return x["missing"]'),
        ("wrong_loss", "        return predicted.nonsense"),
    ],
)
def test_an_error_inside_a_step_names_the_users_line(seen: Any, name: str, line: str) -> None:
    """Through Keras and TensorFlow's tracing too."""
    words = seen("alone")[0]["own sampled"][name]
    assert "\n" not in words
    path, _, number = words.split(": ")[1].rpartition(":")
    assert Path(path).read_text().splitlines()[int(number) - 1] == line


def test_a_loss_that_is_lost_is_seen(seen: Any) -> None:
    """Finite before, not after."""
    assert seen("alone")[0]["lost"] == [True, False]


def test_sample_batch_of_a_wrong_size_is_refused(seen: Any) -> None:
    """The rows that it gave and the rows that it should have given."""
    assert "sample_batch(1)" in seen("alone")[0]["own short"]


@pytest.mark.parametrize("name", ["arrays", "weighted", "samples", "batches"])
def test_the_users_training_data_feeds_the_steps(seen: Any, name: str) -> None:
    """Arrays, with weights too; a dataset of samples; a function that makes one of batches. Epoch
    after epoch.
    """
    assert seen("alone")[0]["fed"][name] == ""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("number", "training_data() gives an object of type int."),
        ("short", "training_data() gives an object of type tuple."),
        ("other batch", "training_data() gives a batch of 7 rows instead of 5."),
        ("too few", "training_data() gives a batch of 4 rows instead of 5."),
        ("no dataset", "training_data() gives an object of type ndarray for a batch of 5."),
        ("raises", "division by zero"),
        ("lengths", "has lengths(), and a search assigns rows by their length in PyTorch only."),
    ],
)
def test_training_data_that_cannot_be_fed_is_refused(seen: Any, name: str, says: str) -> None:
    """One line says what is wrong with it."""
    words = seen("alone")[0]["fed"][name]
    assert says in words
    assert "\n" not in words


def test_no_code_that_tensorflow_writes_is_left(seen: Any) -> None:
    """AutoGraph keeps each function that it rewrites as a file in /tmp, where a child that is
    killed leaves it.
    """
    assert seen("alone")[0]["left"] == []


@pytest.fixture
def placed(seen: Any) -> Any:
    """What keras_towers did over two devices."""
    return seen("together")[0]["placed"]


@pytest.mark.parametrize("placement", ["towers", "alternate"])
def test_a_placement_has_one_devices_outputs_and_gradients(placed: Any, placement: str) -> None:
    """In single precision, on two logical devices, against one tape over the whole model."""
    assert placed[placement]["gradients"] <= 1e-5
    assert placed[placement]["weights"] <= 1e-5


def test_a_word_that_comes_often_moves_its_row_as_adam_has_it(placed: Any) -> None:
    """What a group of processes learns from the summed gradient, and Keras' sparse step does
    not.
    """
    assert placed["dense"] <= 1e-3


def test_towers_lie_one_on_each_device(placed: Any) -> None:
    where = placed["towers"]["devices"]
    assert where["user_conv_1"] == where["user_dense_1"] == ["CPU:0"]
    assert where["item_conv_1"] == where["item_pool_1"] == where["item_dense_1"] == ["CPU:1"]


def test_alternate_moves_at_each_operation(placed: Any) -> None:
    """Convolution, pool and dense of each tower; the gradient of an operation is where it was."""
    where = placed["alternate"]["devices"]
    assert [where[f"user_{kind}_1"] for kind in ("conv", "pool", "dense")] == [
        ["CPU:1"],
        ["CPU:0"],
        ["CPU:0"],
    ]
    assert [where[f"item_{kind}_1"] for kind in ("conv", "pool", "dense")] == [
        ["CPU:0"],
        ["CPU:1"],
        ["CPU:1"],
    ]
    assert where["MaxPoolGrad"] == ["CPU:0", "CPU:1"]


def test_resnet50_has_its_published_size(placed: Any) -> None:
    """25,636,712 parameters with ImageNet's 1000 classes: 23,587,712 and 2048 x 10 + 10 with
    ten.
    """
    assert placed["resnet50"] == 23_587_712 + 2048 * 10 + 10
