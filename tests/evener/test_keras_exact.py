"""A split has the weights and logs of one device after two epochs in float64.

It is compared with plain Keras. Each engine has its own processes, forked from one that has
imported Keras; a test reads the results of its engine. The last part has models as users write
them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.frameworks import skip_without
from tests.support.keras_start import Answers

skip_without("tensorflow")
# one wait for all processes, on a machine that may be busy
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

ROOT = Path(__file__).parents[2]
ROLES = {
    "group of 2": ("chief", "worker"),
    "group of 3": ("worker",) * 3,
}  # roles of the processes in TensorFlow's groups
EVERY_WAY = "assigned, validated, single samples and batches, instance"
RATIOS = "momentum, class weights, one row, ratios form"
TOWERS = [
    *(
        RATIOS,
        "clipped accumulation, adamw, L2, activity, weighted mean, three steps per execution 5:0:1",
    ),
    *("masked embedding, dataset", "passes 2:5, weights, one row, evaluate and predict"),
]


@pytest.fixture(scope="module")
def proofs(
    keras_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> Answers:
    """Return the results of each engine's processes."""
    folder = str(tmp_path_factory.mktemp("keras"))

    def prove(name: str) -> list[Any]:
        engine = "multiworker" if name in ROLES else name
        return keras_ranks(
            "tests.support.keras_proofs.prove", engine, folder, roles=ROLES.get(name, ())
        )

    return Answers(prove)


@pytest.mark.parametrize("case", TOWERS)
def test_towers_learn_what_one_device_learns(proofs: Any, case: str) -> None:
    """Weights and fit's logs are within 1e-12 after two epochs with a short last batch."""
    found = proofs("towers")[0][case]
    assert found["weights"] <= 1e-12
    assert found["logs"] <= 1e-12


@pytest.mark.parametrize(
    ("group", "case"),
    [
        ("group of 2", "masked dataset"),
        ("group of 2", "sum clipped accumulation momentum L2 activity class weights one row"),
        ("group of 2", "adamw L2 synchronized own loss weights two rows"),
    ],
)
def test_processes_learn_what_one_device_learns(proofs: Any, group: str, case: str) -> None:
    """Weights and logs are within 1e-12 and the same in all processes.

    This includes clipping and accumulation.
    """
    first, *others = proofs(group)
    assert first["engine"] == "multiworker"
    assert first[case]["weights"] <= 1e-12
    assert first[case]["logs"] <= 1e-12
    assert all(other[case]["learned"] == first[case]["learned"] for other in others)


@pytest.mark.parametrize("case", ["forced", "by rule"])
def test_processes_whose_shares_change_learn_what_one_device_learns(proofs: Any, case: str) -> None:
    """Results are within 1e-12 although shares change.

    They change after every fifth of 24 steps, with weights and clipping, or by the rule in 140
    steps. Three processes start with shares 15, 6, 3 in 5, 1 and 2 passes of a plan that leaves a
    fourth device out.
    """
    first, *others = (found[case] for found in proofs("group of 3"))
    assert first["weights"] <= 1e-12
    assert first["logs"] <= 1e-12
    assert all(other["learned"] == first["learned"] for other in others)


def test_a_slow_process_loses_rows_and_gets_them_back(proofs: Any) -> None:
    """A process that is slow from step 60 to 109 loses rows and gets them back.

    All processes decide the same, and the first one says why; the monitor shows the current shares.
    """
    every = [found["by rule"] for found in proofs("group of 3")]
    for found in every:
        assert found["shares"] == [[0, [15, 6, 3]], [70, [18, 3, 3]], [120, [15, 6, 3]]]
    assert every[0]["said"] == [
        "CPU:1 slower by 100 % since step 60: 15+6+3 -> 18+3+3",
        "CPU:1 faster by 50 % since step 110: 18+3+3 -> 15+6+3",
    ]
    assert every[1]["said"] == every[2]["said"] == []
    assert every[0]["recorded"] == [[15, 6, 3], [18, 3, 3], [15, 6, 3]]
    assert every[1]["recorded"] == every[2]["recorded"] == []


def test_a_group_of_which_one_rebalances_is_refused_in_every_process(proofs: Any) -> None:
    """A process that alone rebalances would split batches differently from the others."""
    said = (
        "RequestError: Rank 1 has rebalance=True, rank 0 has rebalance=False. Give every "
        "process the same."
    )
    assert [found["one that rebalances"] for found in proofs("group of 3")] == [said] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_a_group_sums_each_tensor_whatever_was_summed_before(proofs: Any, size: int) -> None:
    """Tensors of two types and changing lengths are summed correctly.

    Each kind is negotiated between the processes once, under its own key. int32, which TensorFlow
    doesn't sum over GPUs, is sent as int64.
    """
    for found in proofs(f"group of {size}"):
        assert found["sums"]["found"] == found["sums"]["right"]
        assert found["sums"]["kinds"] == ["float32", "int64"]


def test_processes_shuffle_in_the_same_order(proofs: Any) -> None:
    """A shuffling fit ends with the same loss and metrics in every process."""
    first, second = (found["users"]["shuffled"] for found in proofs("group of 2"))
    assert first == second


def test_a_dataset_has_each_sample_once_an_epoch(proofs: Any) -> None:
    """The order changes by epoch and is the same for the same seed."""
    found = proofs("towers")[0]["epoch rows"]
    assert found == {
        "complete": True,
        "repeatable": True,
        "reshuffled": True,
        "sizes": [24] * 3 + [9],
    }


@pytest.mark.parametrize("case", ["masked", "weighted"])
def test_towers_learn_the_same_from_rows_assigned_by_length(proofs: Any, case: str) -> None:
    """Rows assigned by length give the same weights, logs and validation results.

    This includes means over tokens, clipping and a short last batch.
    """
    found = proofs("towers")[0]["lengths"][case]
    assert found["weights"] <= 1e-12
    assert found["logs"] <= 1e-12


def test_rows_assigned_by_length_come_once_and_without_most_padding(proofs: Any) -> None:
    """Over three devices, shuffled rows assigned by length occur once, with little padding.

    23 % of all steps are words, and one device would compute nearly all of them.
    """
    found = proofs("towers")[0]["lengths"]["computed"]
    assert found["once"]
    assert found["part"] < 0.8
    assert proofs("towers")[0]["lengths"]["one device"]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        *[
            (case, "The loss counts padding")
            for case in ("unmasked", "weights of rows", "mean over steps")
        ],
        ("looks ahead", "a different output for a row without its padding"),
        ("batch normalization", "Batch normalization counts padding"),
        ("activity", "adds losses of its layers' outputs"),
        ("eager", "eagerly"),
        ("predict", "in the order of the devices"),
        ("passes", "A plan with passes can't assign rows by length"),
        ("fewer", "80 lengths for 81 rows"),
        ("too long", "has 16 tokens, but x has a second axis of 4"),
        ("fractions", "isn't a list of whole numbers"),
    ],
)
def test_rows_whose_padding_would_count_are_refused(proofs: Any, case: str, said: str) -> None:
    """Each case is refused with a message before a step."""
    assert said in proofs("towers")[0]["lengths"]["refused"][case]


def test_towers_average_moving_statistics_by_rows(proofs: Any) -> None:
    """BatchNormalization's moving mean is that of the whole batch.

    Its variance lacks the spread between devices.
    """
    found = proofs("towers")[0]["batch normalization"]
    assert found["mean"] <= 1e-12
    assert found["variance"] <= 1e-3


def test_fit_traces_its_step_once(proofs: Any) -> None:
    """The step is traced once, because the variables of optimizer and metrics exist before.

    TensorFlow would trace a step twice that creates variables. An audit adds two graphs.
    """
    assert proofs("towers")[0]["batch normalization"]["traces"] == 1 + 2


def test_every_device_does_its_own_heavy_work(proofs: Any) -> None:
    """Forward and backward operations of each share are placed on its device, not on the first."""
    found = proofs("towers")[0]["placed"]
    for kind in ("Conv2D", "Conv2DBackpropFilter", "MaxPool", "MaxPoolGrad", "MatMul"):
        assert {"CPU:0", "CPU:1", "CPU:2"} <= set(found[kind]), kind


def test_loss_scaling_stays_whole(proofs: Any) -> None:
    """Half precision stays near one device; an overflow on one device skips the step on all."""
    found = proofs("towers")[0]["half"]
    assert found["near"] < 0.02
    assert found["kept"] == 0
    assert found["scale"] == 0.5


def test_a_training_reports_itself(proofs: Any) -> None:
    """The report has each device with its share during training, and is removed afterwards."""
    found = proofs("towers")[0]["reported"]
    assert found["devices"] == [["cpu-0-of-3", 20], ["cpu-2-of-3", 4]]
    assert found["framework"] == "tensorflow"
    assert found["rate"] > 0
    assert found["after"] == 0


def test_limits_and_processes_that_a_training_does_not_have_are_said_once(proofs: Any) -> None:
    """A message names each device with a limit, and the consequence.

    A requested engine that wasn't used is reported, too.
    """
    said, apart, asked = proofs("towers")[0]["limits"]
    assert asked == (
        "The plan was measured with engine='multiworker', this is 'towers': expect other samples/s."
    )
    assert "measured with a process for each device; this is one process" in apart
    assert "limits that this training doesn't have" in said
    assert said.count("60%") == 2


def test_batches_that_are_not_the_plans_are_noted_once(proofs: Any) -> None:
    """Batches of another size than the plan's are reported once per model.

    They may come from arrays or from a dataset; data with fewer rows count, too.
    """
    small, first, arrays, dataset, second = proofs("towers")[0]["noted"]
    assert first == second == "turn"
    assert "The data have 20 rows, fewer than the plan's global batch of 24" in small
    assert "Batches of 20 samples are trained, not the plan's 24" in arrays
    assert arrays == dataset


def test_towers_draw_fresh_numbers(proofs: Any) -> None:
    """Dropout's state advances in each step."""
    found = proofs("towers")[0]["dropout"]
    assert found["seeds"] >= 1
    assert found["moved"] == 1
    assert found["apart"] > 0


def test_the_model_is_saved_as_the_users_own(proofs: Any) -> None:
    """The saved model is loaded without evener's classes and predicts the same."""
    found = proofs("towers")[0][RATIOS]["saved"]
    assert found["predict"] <= 1e-12
    assert found["plain"] == 1


def test_ratios_mean_what_they_meant(proofs: Any) -> None:
    """Ratios 768:560 split 100 samples into 57 and 43."""
    assert proofs("towers")[0][RATIOS]["first"] == 57


def test_devices_draw_their_own_numbers_in_passes(proofs: Any) -> None:
    """No two devices start from the same seed."""
    seeds = proofs("towers")[0]["seeds"]
    assert len({tuple(seed) for seed in seeds}) == 3


def test_what_passes_cannot_put_together_is_refused(proofs: Any) -> None:
    """Losses that count steps, eager steps, and strategies without passes are refused."""
    found = proofs("towers")[0]["refused in passes"]
    assert len(found) == 3
    for words in found.values():
        assert "passes" in words.lower()
        assert "--micro off" in words


def test_statistics_over_a_pass_are_warned_of(proofs: Any) -> None:
    """Statistics per pass are reported, in addition to the messages of every split.

    A single device in passes counts, because Keras' own step takes the whole share.
    """
    assert proofs("towers")[0]["engine of one in passes"] == "towers"
    said = proofs("towers")[0]["said of passes"]
    assert "Batch normalization sees one pass of 7 rows, not the whole share." in said
    assert len(said) == 2


TRAINED: dict[str, set[str]] = {"towers": {"xla"}, "group of 2": set()}


@pytest.mark.parametrize(("engine", "trained"), TRAINED.items())
def test_what_an_engine_cannot_do_is_refused(proofs: Any, engine: str, trained: set[str]) -> None:
    """The refusal comes before the first step with a message and a hint; everything else runs."""
    for process in proofs(engine):
        found = process["refusals"]
        assert {name for name, words in found.items() if not words} == trained
        assert len(found) >= 5
        assert all("\n" not in words for words in found.values())


WARNED = {"towers": {"normalization"}, "group of 2": {"normalization"}}


@pytest.mark.parametrize("engine", WARNED)
def test_what_an_engine_does_otherwise_is_warned_of(proofs: Any, engine: str) -> None:
    """One sentence before the first step warns of it.

    XLA is disabled silently, as no split can use it.
    """
    for process in proofs(engine):
        found = process["warned"]
        assert not found.pop("xla")
        assert {name: len(sentences) for name, sentences in found.items()} == {
            name: int(name in WARNED[engine]) for name in found
        }


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ("no gpu", "TensorFlow sees no GPU:0, GPU:1"),
        ("gpus 0", "gpus=0 names no GPU"),
        ("ratio 0", "A ratio of 0"),
        ("ratio nan", "A ratio of nan"),
        ("ratio below 0", "A ratio of -2"),
        ("ratios missing", "2 devices and 1 ratios"),
        ("batch below devices", "A global batch of 1"),
        ("twice", "names a device twice"),
        ("engine", "no engine 'tower'"),
        ("nothing", "needs a plan, or gpus"),
        ("group missing", "needs a process for each device"),
        ("no file", "nowhere.toml can't be read"),
        ("rebalance", "looks at each device's own work, and engine='towers' has one"),
        ("noise", "No noise scale is measured in Keras"),
        ("other precision, strict", "measured in float64, this model is mixed_bfloat16"),
    ],
)
def test_a_split_that_cannot_be_is_refused(proofs: Any, request_: str, says: str) -> None:
    """The message has the wrong value."""
    assert says in proofs("towers")[0]["requests"][request_]


def test_a_plan_by_hand_was_measured_in_no_precision(proofs: Any) -> None:
    assert proofs("towers")[0]["requests"]["by hand, strict"] == ""


@pytest.fixture(scope="module")
def found(proofs: Any) -> dict[str, Any]:
    """Return the results of each process for models as users write them."""
    processes = [*proofs("towers"), *proofs("group of 2")]
    return dict(
        zip(("towers", "chief", "worker"), (each["users"] for each in processes), strict=True)
    )


@pytest.mark.parametrize(
    ("process", "case"),
    [
        *[
            ("towers", case)
            for case in ("own loss, test and predict", "watched", "without training, frozen")
        ],
        ("towers", "single samples, rebatched, instance"),
        *[(process, "added, sparse") for process in ("towers", "chief")],
        *[("chief", case) for case in (EVERY_WAY, "own predict")],
    ],
)
def test_a_split_does_with_a_users_model_what_one_device_does(
    found: Any, process: str, case: str
) -> None:
    """A split gives one device's results for models as users write them.

    The models have their own steps, losses and metrics, also in layers, and sparse rows; or are
    passed instead of a function. Pipelines yield single samples or batches of another size;
    validation is by a PyDataset; single batches are trained on.
    """
    assert found[process][case]["weights"] <= 1e-12
    assert found[process][case]["logs"] <= 1e-12


@pytest.mark.parametrize("case", ["own predict", "added, sparse", EVERY_WAY])
def test_a_worker_has_what_its_chief_has(found: Any, case: str) -> None:
    """With a chief and a worker in TF_CONFIG, both have the same weights and logs.

    This includes a batch of a single row.
    """
    assert [found[kind]["rank"] for kind in ("chief", "worker")] == [0, 1]
    assert found["chief"][case]["learned"] == found["worker"][case]["learned"]


def test_a_dataset_becomes_global_batches(found: Any) -> None:
    """Single samples, or batches of any static or dynamic size, become global batches.

    Samples may be vectors as long as their labels.
    """
    assert found["towers"]["batch sizes"] == [[24, 24, 1]] * 3
    assert found["towers"]["rows"] == [20, 20]


def test_fit_shows_keras_own_signature(found: Any) -> None:
    """An editor can complete the arguments of fit."""
    assert found["towers"]["signatures"]


def test_docs_show_one_form() -> None:
    """The documented form gives no warning."""
    assert 'Split("plan.toml").build(build)' in (ROOT / "docs" / "index.md").read_text()
    text = (ROOT / "docs" / "training.md").read_text()
    assert "model = split.build(make_model)  # " in text
    assert "\nmodel.fit(x, y, epochs=5)  # the batch size is the plan's" in text


def test_fit_as_documented_warns_of_nothing(found: Any) -> None:
    """Neither arrays nor split.data give a warning."""
    assert found["towers"]["documented"] == []


@pytest.mark.parametrize("way", ["clone_model", "clone_model functional", "deepcopy", "pickle"])
def test_a_copy_that_is_not_split_is_warned_of(found: Any, way: str) -> None:
    """A copied model gives one warning with a hint.

    Saving, which gives a plain model, gives none.
    """
    (said,) = found["towers"]["copies"][way]
    assert "trains on one device: pass the copy to split.model()" in said
    assert found["towers"]["copies"]["save"] == []


def test_each_prediction_draws_fresh_numbers(found: Any) -> None:
    """A model that samples doesn't repeat its noise."""
    assert found["towers"]["fresh noise"] > 0.01


def test_a_report_counts_the_batch_that_is_fitted(found: Any) -> None:
    """The report counts the batch passed to fit, and the rows of a short batch.

    The CPU isn't taken for the GPU of the same number.
    """
    reported = found["towers"]["reported"]
    assert reported["samples"] == [16, 16, 16, 1] * 2
    assert (
        reported["pairs"] == [32, 32] * 2
    )  # Keras splits these, and the short batch counts as a full one
    assert reported["dataset"] == [24, 24, 24] * 2
    assert reported["devices"] == ["cpu:0", "cpu:1"]


def test_splits_of_a_process_share_its_group(found: Any) -> None:
    """Another strategy would reset the sums that a faster process has started."""
    assert [found[kind]["one group"] for kind in ("chief", "worker")] == [True, True]


def test_the_first_process_of_a_group_reports_for_all(found: Any) -> None:
    """The report has each batch of 24, and the single remaining row."""
    assert found["chief"]["reported"] == [24, 24, 1] * 2
    assert found["worker"]["reported"] == []


def test_devices_go_by_any_name_that_tensorflow_has_for_them(found: Any) -> None:
    """ "/device:CPU:0" and "cpu:2" are valid like "CPU:0"."""
    assert found["towers"]["named"] == ["CPU:0", "CPU:1", "CPU:2"]


@pytest.mark.parametrize(
    ("engine", "case", "says"),
    [
        ("towers", "assigned", "SpectralNormalization"),
        ("towers", "stateful", "stateful=True"),
        ("towers", "single", "a single number"),
        ("towers", "inner", "synchronizes its statistics"),
        ("towers", "numbers", "single numbers"),
        ("towers", "elsewhere", "Keras runs on jax"),
        ("towers", "no model", "not NoneType"),
        ("towers", "no function", "not str"),
        ("towers", "one cpu", "Call evener.keras.make_logical_cpus(2)"),
        ("towers", "unclear", "batches or single samples"),
        ("towers", "graphs", "can't be put together"),
        ("towers", "own order", "dataset.shuffle(...)"),
        ("towers", "no list", "devices='CPU:0' names no devices"),
        ("towers", "no devices", "names no devices"),
        ("towers", "words", "A ratio of '3'"),
        ("towers", "plan and ratios", "Both a plan and ratios"),
        ("chief", "own test", "a test_step of its own"),
        ("worker", "single", "a single number"),
    ],
)
def test_what_a_split_would_do_otherwise_is_refused(
    found: Any, engine: str, case: str, says: str
) -> None:
    """The refusal has a message, also for a layer inside a user's own layer."""
    assert says in found[engine]["refusals"][case]
