"""A split learns what one device learns: weights and logs after 20 steps, in float64, against Keras alone.

Each engine has processes of its own, all started at once; a test reads what its engine's printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.keras_start import Answers, start, start_group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]  # one wait for all processes, on a machine that may be busy

SCRIPT = Path(__file__).parents[1] / "support" / "keras_proofs.py"
SECONDS = 550
COMMON = ["dataset", "momentum 3:1 class weights one row", "adamw L2 5:0:1 weights"]
TOWERS = [
    *("clipped accumulation", "activity, three steps per execution", "sum", "weighted mean"),
    *("mask", "two heads", "embedding"),
    *("passes 5:1:2", "passes 2:5"),
]


@pytest.fixture(scope="module")
def proofs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    """What each engine's processes printed."""
    folder = str(tmp_path_factory.mktemp("keras"))
    engines = {engine: [start(SCRIPT, engine, folder)] for engine in ("towers", "mirrored")}
    groups = {
        f"group of {size}": start_group(SCRIPT, "multiworker", folder, roles=["worker"] * size) for size in (2, 3)
    }
    answers = Answers(engines | groups, SECONDS)
    yield answers
    answers.close()


@pytest.mark.parametrize("case", COMMON + TOWERS)
def test_towers_learn_what_one_device_learns(proofs: Any, case: str) -> None:
    """Weights within 1e-12 after 21 steps with a short last batch; what fit reports within 1e-12 too."""
    found = proofs("towers")[0][case]
    assert found["weights"] <= 1e-12
    assert found["logs"] <= 1e-12
    assert found["steps"] == 3


@pytest.mark.parametrize("case", [*COMMON, "synchronized", "two heads", "activity", "embedding"])
def test_mirrored_learns_what_one_device_learns(proofs: Any, case: str) -> None:
    """Weights and logs within 1e-12; BatchNormalization too, where it is synchronized."""
    found = proofs("mirrored")[0][case]
    assert found["weights"] <= 1e-12
    assert found["logs"] <= 1e-12


CLIPPED = "clipped momentum L2 weights one row"


@pytest.mark.parametrize(
    "case", [CLIPPED, "accumulation weights", "activity one row", "dataset", "two heads", "passes"]
)
def test_two_processes_learn_what_one_device_learns(proofs: Any, case: str) -> None:
    """Weights and logs within 1e-12, in both processes, clipping and accumulation included."""
    for found in proofs("group of 2"):
        assert found["engine"] == "multiworker"
        assert found[case]["weights"] <= 1e-12
        assert found[case]["logs"] <= 1e-12


@pytest.mark.parametrize("size", [2, 3])
def test_a_group_sums_each_tensor_whatever_was_summed_before(proofs: Any, size: int) -> None:
    """Two types, and lengths that come and go: each is settled between the processes once, under its own key."""
    for found in proofs(f"group of {size}"):
        assert found["sums"]["found"] == found["sums"]["right"]


def test_three_processes_learn_in_passes_what_one_device_learns(proofs: Any) -> None:
    """Shares 15, 6, 3 in 5, 1 and 2 passes of a plan that leaves a fourth device out; the last batch is one row."""
    for found in proofs("group of 3"):
        assert found["passes"]["weights"] <= 1e-12
        assert found["passes"]["logs"] <= 1e-12


def test_processes_shuffle_in_the_same_order(proofs: Any) -> None:
    """A shuffling fit ends with the same loss, metrics and weights in every process."""
    first, second = (found["shuffled"] for found in proofs("group of 2"))
    assert first == second


def test_processes_evaluate_and_predict_as_one_device(proofs: Any) -> None:
    """Each process has the metrics of all rows, and predicts all of them."""
    for found in proofs("group of 2"):
        assert found["evaluate"]["logs"] <= 1e-12
        assert found["evaluate"]["predict"] <= 1e-12


@pytest.mark.parametrize("engine", ["towers", "mirrored"])
def test_evaluate_and_predict_are_those_of_one_device(proofs: Any, engine: str) -> None:
    """Over several devices, with weights and a short last batch."""
    found = proofs(engine)[0]["evaluate"]
    assert found["logs"] <= 1e-12
    assert found["predict"] <= 1e-12


def test_a_dataset_has_each_sample_once_an_epoch(proofs: Any) -> None:
    """In an order that changes by epoch and is the same for the same seed."""
    found = proofs("towers")[0]["epoch rows"]
    assert found == {"complete": True, "repeatable": True, "reshuffled": True, "sizes": [24] * 6 + [9]}


def test_towers_average_moving_statistics_by_rows(proofs: Any) -> None:
    """BatchNormalization's moving mean is that of the whole batch; its variance lacks the spread between devices."""
    found = proofs("towers")[0]["batch normalization"]
    assert found["mean"] <= 1e-12
    assert found["variance"] <= 1e-3


def test_every_device_does_its_own_heavy_work(proofs: Any) -> None:
    """Forward and backward of each share are placed on its device, not drawn onto the first."""
    found = proofs("towers")[0]["placed"]
    for kind in ("Conv2D", "Conv2DBackpropFilter", "MaxPool", "MaxPoolGrad", "MatMul"):
        assert {"CPU:0", "CPU:1", "CPU:2"} <= set(found[kind]), kind


def test_loss_scaling_stays_whole(proofs: Any) -> None:
    """Half precision stays near one device; an overflow on one device alone skips the step on all."""
    found = proofs("towers")[0]["half"]
    assert found["near"] < 0.02
    assert found["kept"] == 0
    assert found["scale"] == 0.5


def test_a_training_reports_itself(proofs: Any) -> None:
    """Each device that computes with its share, while it trains; nothing is left when it has ended."""
    found = proofs("towers")[0]["reported"]
    assert found["devices"] == [["cpu-0-of-3", 20], ["cpu-2-of-3", 4]]
    assert found["framework"] == "tensorflow"
    assert found["rate"] > 0
    assert found["after"] == 0


def test_limits_and_processes_that_a_training_does_not_have_are_said_once(proofs: Any) -> None:
    """Each limited device that computes with its limit, and what follows from it; not an engine that was asked for."""
    said, apart = proofs("towers")[0]["limits"]
    assert "measured with a process for each device; this is one process" in apart
    assert "limits that this training doesn't have" in said
    assert said.count("60%") == 2


def test_batches_that_are_not_the_plans_are_noted_once(proofs: Any) -> None:
    """For each model, whether arrays or a dataset's own batches; the plan's own aren't noted, unless data are fewer."""
    first, arrays, dataset, second, small = proofs("towers")[0]["noted"]
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
    found = proofs("towers")[0]["saved"]
    assert found["predict"] <= 1e-12
    assert found["plain"] == 1


def test_ratios_mean_what_they_meant(proofs: Any) -> None:
    """768:560 of 100 samples are 57 and 43, and the learning is that of one device."""
    found = proofs("towers")[0]["ratios form"]
    assert found["first"] == 57
    assert found["weights"] <= 1e-12


def test_devices_draw_their_own_numbers_in_passes(proofs: Any) -> None:
    """No two start from the same seed."""
    seeds = proofs("towers")[0]["seeds"]
    assert len({tuple(seed) for seed in seeds}) == 3


def test_what_passes_cannot_put_together_is_refused(proofs: Any) -> None:
    """Losses that aren't means over rows, steps outside a graph, and a strategy that takes whole shares."""
    found = proofs("towers")[0]["refused in passes"]
    assert len(found) == 5
    for words in found.values():
        assert "passes" in words.lower()
        assert "--micro off" in words


def test_statistics_over_a_pass_are_said(proofs: Any) -> None:
    """Beside what is said of every split; one device in passes is one, as Keras' own step takes the whole share."""
    assert proofs("towers")[0]["engine of one in passes"] == "towers"
    said = proofs("towers")[0]["said of passes"]
    assert "Batch normalization sees one pass of 7 rows, not the whole share." in said
    assert len(said) == 2


@pytest.mark.parametrize(("engine", "trained"), [("towers", {"xla"}), ("mirrored", set()), ("group of 2", set())])
def test_what_an_engine_cannot_do_is_refused(proofs: Any, engine: str, trained: set[str]) -> None:
    """Before the first step, in a sentence with a remedy; everything else that was tried runs."""
    for process in proofs(engine):
        found = process["refusals"]
        assert {name for name, words in found.items() if not words} == trained
        assert len(found) >= 6
        assert all("\n" not in words for words in found.values())


WARNED = {
    "towers": {"normalization"},
    "mirrored": {"normalization", "two heads"},
    "group of 2": {"normalization", "two heads", "embedding"},
}


@pytest.mark.parametrize("engine", WARNED)
def test_what_an_engine_does_otherwise_is_warned_of(proofs: Any, engine: str) -> None:
    """In one sentence before the first step; XLA is switched off silently, as no split can use it."""
    for process in proofs(engine):
        found = process["warned"]
        assert not found.pop("xla")
        assert {name: len(sentences) for name, sentences in found.items()} == {
            name: int(name in WARNED[engine]) for name in found
        }


@pytest.mark.parametrize("engine", WARNED)
def test_half_precision_differs_by_rounding(proofs: Any, engine: str) -> None:
    """mixed_bfloat16, against one device after seven steps."""
    assert all(process["rounding"] < 0.02 for process in proofs(engine))


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
        ("other precision, strict", "measured in float64, this model is mixed_bfloat16"),
    ],
)
def test_a_split_that_cannot_be_is_refused(proofs: Any, request_: str, says: str) -> None:
    """The value that is wrong stands in the sentence."""
    assert says in proofs("towers")[0]["requests"][request_]
