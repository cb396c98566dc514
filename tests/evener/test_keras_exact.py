"""A split learns what one device learns: weights and logs after two epochs, in float64, against
Keras alone.

Each engine has processes of its own, forked from one that has imported Keras; a test reads what its
engine's found. Models as users write them are in the last part.
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
ROLES = {"group of 2": ("chief", "worker"), "group of 3": ("worker",) * 3}  # of TensorFlow's groups
EVERY_WAY = "assigned, validated, single samples and batches, instance"
RATIOS = "momentum, class weights, one row, ratios form"
TOWERS = [
    *(
        RATIOS,
        "clipped accumulation, adamw, L2, activity, weighted mean, three steps per execution 5:0:1",
    ),
    *(
        "masked embedding, dataset",
        "two heads",
        "passes 2:5, weights, one row, evaluate and predict",
    ),
]


@pytest.fixture(scope="module")
def proofs(
    keras_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> Answers:
    """What each engine's processes found."""
    folder = str(tmp_path_factory.mktemp("keras"))

    def prove(name: str) -> list[Any]:
        engine = "multiworker" if name in ROLES else name
        return keras_ranks(
            "tests.support.keras_proofs.prove", engine, folder, roles=ROLES.get(name, ())
        )

    return Answers(prove)


@pytest.mark.parametrize("case", TOWERS)
def test_towers_learn_what_one_device_learns(proofs: Any, case: str) -> None:
    """Weights within 1e-12 after two epochs with a short last batch; what fit reports within 1e-12
    too.
    """
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
    """Weights and logs within 1e-12, and the same in all processes: clipping and accumulation
    included.
    """
    first, *others = proofs(group)
    assert first["engine"] == "multiworker"
    assert first[case]["weights"] <= 1e-12
    assert first[case]["logs"] <= 1e-12
    assert all(other[case]["learned"] == first[case]["learned"] for other in others)


@pytest.mark.parametrize("case", ["forced", "by rule"])
def test_processes_whose_shares_change_learn_what_one_device_learns(proofs: Any, case: str) -> None:
    """Within 1e-12 after 24 steps or 140: with changes after every fifth, weights, clipped; and as
    the rule says.

    Three begin with shares 15, 6, 3 in 5, 1 and 2 passes of a plan that leaves a fourth device out.
    """
    first, *others = (found[case] for found in proofs("group of 3"))
    assert first["weights"] <= 1e-12
    assert first["logs"] <= 1e-12
    assert all(other["learned"] == first["learned"] for other in others)


def test_a_slow_process_loses_rows_and_gets_them_back(proofs: Any) -> None:
    """Slow from step 60 to 109. All decide the same, and the first process says why; the monitor
    sees the shares in force.
    """
    every = [found["by rule"] for found in proofs("group of 3")]
    for found in every:
        assert found["shares"] == [[0, [15, 6, 3]], [70, [18, 3, 3]], [120, [15, 6, 3]]]
    assert every[0]["said"] == [
        "cpu-1-of-4 slower by 100 % since step 60: 15+6+3 -> 18+3+3",
        "cpu-1-of-4 faster by 50 % since step 110: 18+3+3 -> 15+6+3",
    ]
    assert every[1]["said"] == every[2]["said"] == []
    assert every[0]["recorded"] == [[15, 6, 3], [18, 3, 3], [15, 6, 3]]
    assert every[1]["recorded"] == every[2]["recorded"] == []


def test_a_group_of_which_one_rebalances_is_refused_in_every_process(proofs: Any) -> None:
    """Else it would cut batches otherwise than the others."""
    said = (
        "RequestError: Rank 1 has rebalance=True, rank 0 has rebalance=False. Give every "
        "process the same."
    )
    assert [found["one that rebalances"] for found in proofs("group of 3")] == [said] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_a_group_sums_each_tensor_whatever_was_summed_before(proofs: Any, size: int) -> None:
    """Two types, and lengths that come and go: each is settled between the processes once, under
    its own key.

    int32, which TensorFlow doesn't sum over GPUs, goes as int64.
    """
    for found in proofs(f"group of {size}"):
        assert found["sums"]["found"] == found["sums"]["right"]
        assert found["sums"]["kinds"] == ["float32", "int64"]


def test_processes_shuffle_in_the_same_order(proofs: Any) -> None:
    """A shuffling fit ends with the same loss and metrics in every process."""
    first, second = (found["users"]["shuffled"] for found in proofs("group of 2"))
    assert first == second


def test_a_dataset_has_each_sample_once_an_epoch(proofs: Any) -> None:
    """In an order that changes by epoch and is the same for the same seed."""
    found = proofs("towers")[0]["epoch rows"]
    assert found == {
        "complete": True,
        "repeatable": True,
        "reshuffled": True,
        "sizes": [24] * 3 + [9],
    }


@pytest.mark.parametrize("case", ["masked", "weighted"])
def test_towers_learn_the_same_from_rows_dealt_by_length(proofs: Any, case: str) -> None:
    """Weights and figures, a validation's too, with means over tokens, clipping and a short last
    batch.
    """
    found = proofs("towers")[0]["lengths"][case]
    assert found["weights"] <= 1e-12
    assert found["logs"] <= 1e-12


def test_rows_dealt_by_length_come_once_and_without_most_padding(proofs: Any) -> None:
    """Over three devices, shuffled; 23 % of the steps are words, and one device would compute
    nearly all of them.
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
        ("looks ahead", "another output for a row without its padding"),
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
    """Each before a step, in a sentence."""
    assert said in proofs("towers")[0]["lengths"]["refused"][case]


def test_towers_average_moving_statistics_by_rows(proofs: Any) -> None:
    """BatchNormalization's moving mean is that of the whole batch; its variance lacks the spread
    between devices.
    """
    found = proofs("towers")[0]["batch normalization"]
    assert found["mean"] <= 1e-12
    assert found["variance"] <= 1e-3


def test_fit_traces_its_step_once(proofs: Any) -> None:
    """Variables of optimizer and metrics are made before it: TensorFlow traces a step twice that
    makes some. An audit makes two graphs more.
    """
    assert proofs("towers")[0]["batch normalization"]["traces"] == 1 + 2


def test_every_device_does_its_own_heavy_work(proofs: Any) -> None:
    """Forward and backward of each share are placed on its device, not drawn onto the first."""
    found = proofs("towers")[0]["placed"]
    for kind in ("Conv2D", "Conv2DBackpropFilter", "MaxPool", "MaxPoolGrad", "MatMul"):
        assert {"CPU:0", "CPU:1", "CPU:2"} <= set(found[kind]), kind


def test_loss_scaling_stays_whole(proofs: Any) -> None:
    """Half precision stays near one device; an overflow on one device alone skips the step on
    all.
    """
    found = proofs("towers")[0]["half"]
    assert found["near"] < 0.02
    assert found["kept"] == 0
    assert found["scale"] == 0.5


def test_a_training_reports_itself(proofs: Any) -> None:
    """Each device that computes with its share, while it trains; nothing is left when it has
    ended.
    """
    found = proofs("towers")[0]["reported"]
    assert found["devices"] == [["cpu-0-of-3", 20], ["cpu-2-of-3", 4]]
    assert found["framework"] == "tensorflow"
    assert found["rate"] > 0
    assert found["after"] == 0


def test_limits_and_processes_that_a_training_does_not_have_are_said_once(proofs: Any) -> None:
    """Each limited device that computes with its limit, and what follows; also an engine that was
    asked for.
    """
    said, apart, asked = proofs("towers")[0]["limits"]
    assert asked == (
        "The plan was measured with engine='multiworker', this is 'towers': expect other samples/s."
    )
    assert "measured with a process for each device; this is one process" in apart
    assert "limits that this training doesn't have" in said
    assert said.count("60%") == 2


def test_batches_that_are_not_the_plans_are_noted_once(proofs: Any) -> None:
    """For each model, whether arrays or a dataset's own batches; the plan's own aren't noted,
    unless data are fewer.
    """
    small, first, arrays, dataset, second = proofs("towers")[0]["noted"]
    assert first == second == "turn"
    assert "The data have 20 rows, fewer than the plan's global batch of 24" in small
    assert "Batches of 20 samples are trained, not the plan's 24" in arrays
    assert arrays == dataset


def test_towers_draw_fresh_numbers(proofs: Any) -> None:
    """Dropout's state moves on in each step."""
    found = proofs("towers")[0]["dropout"]
    assert found["seeds"] >= 1
    assert found["moved"] == 1
    assert found["apart"] > 0


def test_the_model_is_saved_as_the_users_own(proofs: Any) -> None:
    """Loaded without evener's classes, it predicts the same."""
    found = proofs("towers")[0][RATIOS]["saved"]
    assert found["predict"] <= 1e-12
    assert found["plain"] == 1


def test_ratios_mean_what_they_meant(proofs: Any) -> None:
    """768:560 of 100 samples are 57 and 43."""
    assert proofs("towers")[0][RATIOS]["first"] == 57


def test_devices_draw_their_own_numbers_in_passes(proofs: Any) -> None:
    """No two start from the same seed."""
    seeds = proofs("towers")[0]["seeds"]
    assert len({tuple(seed) for seed in seeds}) == 3


def test_what_passes_cannot_put_together_is_refused(proofs: Any) -> None:
    """Losses that aren't means over rows, steps outside a graph, and a strategy that takes whole
    shares.
    """
    found = proofs("towers")[0]["refused in passes"]
    assert len(found) == 4
    for words in found.values():
        assert "passes" in words.lower()
        assert "--micro off" in words


def test_statistics_over_a_pass_are_said(proofs: Any) -> None:
    """Beside what is said of every split; one device in passes is one, as Keras' own step takes the
    whole share.
    """
    assert proofs("towers")[0]["engine of one in passes"] == "towers"
    said = proofs("towers")[0]["said of passes"]
    assert "Batch normalization sees one pass of 7 rows, not the whole share." in said
    assert len(said) == 2


TRAINED: dict[str, set[str]] = {"towers": {"xla"}, "group of 2": set()}


@pytest.mark.parametrize(("engine", "trained"), TRAINED.items())
def test_what_an_engine_cannot_do_is_refused(proofs: Any, engine: str, trained: set[str]) -> None:
    """Before the first step, in a sentence with a remedy; everything else that was tried runs."""
    for process in proofs(engine):
        found = process["refusals"]
        assert {name for name, words in found.items() if not words} == trained
        assert len(found) >= 6
        assert all("\n" not in words for words in found.values())


WARNED = {"towers": {"normalization"}, "group of 2": {"normalization"}}


@pytest.mark.parametrize("engine", WARNED)
def test_what_an_engine_does_otherwise_is_warned_of(proofs: Any, engine: str) -> None:
    """In one sentence before the first step; XLA is switched off silently, as no split can use
    it.
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
    """The value that is wrong stands in the sentence."""
    assert says in proofs("towers")[0]["requests"][request_]


def test_a_plan_by_hand_was_measured_in_no_precision(proofs: Any) -> None:
    assert proofs("towers")[0]["requests"]["by hand, strict"] == ""


@pytest.fixture(scope="module")
def found(proofs: Any) -> dict[str, Any]:
    """What each process did with models as users write them."""
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
        *[("towers", case) for case in ("single samples, rebatched, instance", "eager")],
        *[(process, "added, sparse") for process in ("towers", "chief")],
        *[("chief", case) for case in (EVERY_WAY, "own predict")],
    ],
)
def test_a_split_does_with_a_users_model_what_one_device_does(
    found: Any, process: str, case: str
) -> None:
    """A model instead of a function, with steps, losses and metrics of its own, inside layers too;
    sparse rows.

    Pipelines of single samples or of batches of another size; validation by a PyDataset; single
    batches.
    """
    assert found[process][case]["weights"] <= 1e-12
    assert found[process][case]["logs"] <= 1e-12


@pytest.mark.parametrize("case", ["own predict", "added, sparse", EVERY_WAY])
def test_a_worker_has_what_its_chief_has(found: Any, case: str) -> None:
    """TF_CONFIG with a chief and a worker; the same weights and figures, a single row in a batch
    included.
    """
    assert [found[kind]["rank"] for kind in ("chief", "worker")] == [0, 1]
    assert found["chief"][case]["learned"] == found["worker"][case]["learned"]


def test_a_dataset_becomes_global_batches(found: Any) -> None:
    """Of single samples, vectors as long as their labels too, or of batches of another size, static
    or not.
    """
    assert found["towers"]["batch sizes"] == [[24, 24, 1]] * 3
    assert found["towers"]["rows"] == [20, 20]


def test_fit_shows_keras_own_signature(found: Any) -> None:
    """An editor completes its arguments."""
    assert found["towers"]["signatures"]


def test_readme_and_docs_show_one_form() -> None:
    """The form that warns of nothing."""
    assert 'Split("plan.toml").build(build)' in (ROOT / "README.md").read_text()
    text = (ROOT / "docs" / "training.md").read_text()
    assert "model = split.build(make_model)  # " in text
    assert "\nmodel.fit(x, y, epochs=5)  # the batch size is the plan's" in text


def test_fit_as_documented_warns_of_nothing(found: Any) -> None:
    """Neither arrays nor split.data."""
    assert found["towers"]["documented"] == []


@pytest.mark.parametrize("way", ["clone_model", "clone_model functional", "deepcopy", "pickle"])
def test_a_copy_that_is_not_split_is_warned_of(found: Any, way: str) -> None:
    """Once, with the remedy; saving, after which everybody expects a plain model, warns of
    nothing.
    """
    (said,) = found["towers"]["copies"][way]
    assert "trains on one device: pass the copy to split.model()" in said
    assert found["towers"]["copies"]["save"] == []


def test_each_prediction_draws_fresh_numbers(found: Any) -> None:
    """A model that samples doesn't give the same noise again."""
    assert found["towers"]["fresh noise"] > 0.01


def test_a_report_counts_the_batch_that_is_fitted(found: Any) -> None:
    """Not the split's own, where fit is given another, and rows of a short batch; and the CPU isn't
    taken for a GPU of that number.
    """
    reported = found["towers"]["reported"]
    assert reported["samples"] == [16, 16, 16, 1] * 2
    assert reported["pairs"] == [32, 32] * 2  # Keras cuts these, and the short batch counts whole
    assert reported["dataset"] == [24, 24, 24] * 2
    assert reported["devices"] == ["cpu:0", "cpu:1"]


def test_splits_of_a_process_share_its_group(found: Any) -> None:
    """Another strategy would reset the sums that a faster process has begun."""
    assert [found[kind]["one group"] for kind in ("chief", "worker")] == [True, True]


def test_the_first_process_of_a_group_reports_for_all(found: Any) -> None:
    """Each batch of 24, and the single row that is left."""
    assert found["chief"]["reported"] == [24, 24, 1] * 2
    assert found["worker"]["reported"] == []


def test_devices_go_by_any_name_that_tensorflow_has_for_them(found: Any) -> None:
    """ "/device:CPU:0" and "cpu:2" as well as "CPU:0"."""
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
    """In a sentence; a layer inside a layer of the user's own is seen too."""
    assert says in found[engine]["refusals"][case]
