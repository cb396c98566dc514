"""Keras workloads as a probe steps them: on one device, on several, and in process groups.

A network placed on two devices has the same outputs, gradients and trained weights as on one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.frameworks import skip_without
from tests.support.keras_start import Answers, free_peers

skip_without("tensorflow")
# time limit for all processes, on a machine that may be busy
pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

STEPS = "tests.workloads.keras_steps"


@pytest.fixture(scope="module")
def seen(
    keras_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> Answers:
    """Return the results of each function of keras_steps.py in its processes."""
    folder = str(tmp_path_factory.mktemp("own"))

    def step(name: str) -> list[Any]:
        if name == "group":
            return keras_ranks(f"{STEPS}.group", *free_peers(2), world=2)
        return keras_ranks(f"{STEPS}.{name}", folder)

    return Answers(step)


def test_the_small_network_learns(seen: Any) -> None:
    """The loss falls, as the generated images have something to learn."""
    found = seen("alone")[0]
    assert found["last"] < 0.8 * found["first"]


def test_one_trace_serves_all_sizes(seen: Any) -> None:
    """All batch sizes use one trace, plus one for passes; variables exist before it.

    In a group, the process with the larger share also traces a measurement of how parts are summed
    before each.
    """
    assert seen("alone")[0]["traces"] == 1
    traces = [found["traces"] for found in seen("group")]
    # traces after each size; passes from the second on, when the second process's share is larger
    assert traces == [[2, 3, 3, 3], [1, 3, 3, 3]]


def test_a_child_goes_on_after_running_out_of_memory_if_its_memory_came_back(seen: Any) -> None:
    """The second failed step leaves 256 MiB allocated, so its child exits."""
    found = seen("alone")[0]["out of memory"]
    assert found == {"recovered": [True, False], "ran": True}


def test_a_child_is_configured_to_run_out_of_gpu_memory_at_once(seen: Any) -> None:
    """TensorFlow would otherwise wait 10 s before each error.

    What it does on a GPU with this is known from a measurement only, as a CPU has no such limit.
    """
    assert seen("alone")[0]["fails at once"]


def test_facts_name_versions_and_the_model(seen: Any) -> None:
    """The facts have versions and the model's digest, which is the same in a training script."""
    found = seen("alone")[0]
    assert found["facts"]["digest"] == found["digest"] != found["other digest"]
    assert found["facts"]["engine"] == "solo"
    assert found["facts"]["parameters"] == "6794"
    assert found["facts"]["tensorflow"]
    assert found["facts"]["keras"]


def test_memory_is_told_where_it_can_be(seen: Any) -> None:
    """The memory of a single CPU device is the process's growth; for several it is unknown."""
    assert seen("alone")[0]["memory"][0] > 0
    assert seen("together")[0]["memory"] == [None, None, None]


def test_the_seeds_network_has_its_parameters(seen: Any) -> None:
    """The network has 78,923,530 parameters, like the original one."""
    assert seen("alone")[0]["maxer"] == 78_923_530


@pytest.mark.parametrize("filters", [1, 3, 256])
def test_the_largest_tensor_of_any_layer_sets_the_limit(seen: Any, filters: int) -> None:
    """The limit is the element limit of TensorFlow's GPU kernels, also for nested layers."""
    found = seen("alone")[0]["limits"]
    assert found["rows"][str(filters)] == found["elements"] // (8 * 8 * filters)


def test_one_row_more_is_refused_before_any_kernel_runs(seen: Any) -> None:
    """One row too many is refused like an out-of-memory error; the kernel would end the process."""
    found = seen("alone")[0]["limits"]
    words, is_memory = found["refused"]
    assert f"{found['rows']['256']} samples" in words
    assert is_memory


def test_a_model_without_known_shapes_has_no_limit(seen: Any) -> None:
    """A subclassed model has no limit, because its layers' output shapes are unknown."""
    assert seen("alone")[0]["limits"]["open"] is None


def test_every_way_of_training_steps(seen: Any) -> None:
    """Training works from device memory, with XLA, in half precision, and for a recurrent model."""
    found = seen("alone")[0]
    for way in ("from device", "compiled", "gru"):
        assert len(found[way]) == 2
        assert all(0 < loss < 10 for loss in found[way])
    assert found["half"] == "mixed_bfloat16"
    assert found["by XLA"] is True


def test_towers_step_as_one_device(seen: Any) -> None:
    """Towers have the same weights as one device after 4 steps, up to float32 rounding.

    This also holds for other shares with one device left out.
    """
    found = seen("together")[0]
    assert max(found["towers"]) < 1e-4
    assert len(found["left out"]) == len(found["again"]) == 2
    assert len(found["from device"]) == 4
    assert found["engines"] == ["solo", "towers"]


def test_passes_step_as_one_pass(seen: Any) -> None:
    """Passes on one device and on three have the same weights as one pass after 3 more steps."""
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
    """Invalid shares, XLA over several devices and wrong settings are refused."""
    alone, together = seen("alone")[0], seen("together")[0]
    assert "can't step with the shares (0,)" in alone["no share"]
    assert "can't step with the shares (3, 4)" in together["shares"]
    assert "XLA" in together["xla"]
    assert "use_cudnn can't be 'maybe'" in alone["bad cudnn"]
    assert all("can't step with the shares" in found["refused"] for found in seen("group"))


def test_the_users_model_is_trained(seen: Any) -> None:
    """The user's model is trained on inputs made from its shapes, or from its sample_batch."""
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
    """A message of one line says what is wrong with the user's function."""
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
    """An error while a model or a batch is built names the user's file and line."""
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
    """An error within a step names the user's line, through Keras' and TensorFlow's tracing."""
    words = seen("alone")[0]["own sampled"][name]
    assert "\n" not in words
    path, _, number = words.split(": ")[1].rpartition(":")
    assert Path(path).read_text().splitlines()[int(number) - 1] == line


def test_a_loss_that_is_lost_is_seen(seen: Any) -> None:
    """The loss is reported as finite before the weights become NaN, and not after."""
    assert seen("alone")[0]["lost"] == [True, False]


def test_sample_batch_of_a_wrong_size_is_refused(seen: Any) -> None:
    """The message has the number of rows returned and the number expected."""
    assert "sample_batch(1)" in seen("alone")[0]["own short"]


@pytest.mark.parametrize("name", ["arrays", "weighted", "samples", "batches"])
def test_the_users_training_data_feeds_the_steps(seen: Any, name: str) -> None:
    """Arrays with or without weights, and datasets of samples or batches, are trained on.

    The data is repeated epoch after epoch.
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
    """A message of one line says what is wrong with the training data."""
    words = seen("alone")[0]["fed"][name]
    assert says in words
    assert "\n" not in words


def test_no_code_that_tensorflow_writes_is_left(seen: Any) -> None:
    """AutoGraph's generated files don't remain in /tmp.

    It keeps a file for each function that it rewrites; a killed child would leave it.
    """
    assert seen("alone")[0]["left"] == []


@pytest.fixture
def placed(seen: Any) -> Any:
    """Return the results of keras_towers on two devices."""
    return seen("together")[0]["placed"]


@pytest.mark.parametrize("placement", ["towers", "alternate"])
def test_a_placement_has_one_devices_outputs_and_gradients(placed: Any, placement: str) -> None:
    """Two logical devices give the same loss and gradients in float32 as a tape over the model."""
    assert placed[placement]["gradients"] <= 1e-5
    assert placed[placement]["weights"] <= 1e-5


def test_a_word_that_comes_often_moves_its_row_as_adam_has_it(placed: Any) -> None:
    """A frequent word's embedding row follows Adam's formula for the summed gradient.

    A group of processes learns this; Keras' sparse step doesn't.
    """
    assert placed["dense"] <= 1e-3


def test_towers_lie_one_on_each_device(placed: Any) -> None:
    where = placed["towers"]["devices"]
    assert where["user_conv_1"] == where["user_dense_1"] == ["CPU:0"]
    assert where["item_conv_1"] == where["item_pool_1"] == where["item_dense_1"] == ["CPU:1"]


def test_alternate_moves_at_each_operation(placed: Any) -> None:
    """Convolution, pooling and dense layers alternate between devices, as do their gradients."""
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
    """ResNet-50 has 25,636,712 parameters with ImageNet's 1000 classes.

    With ten classes these are 23,587,712 and 2048 x 10 + 10.
    """
    assert placed["resnet50"] == 23_587_712 + 2048 * 10 + 10
