"""Models as users write them learn and report by a split what they do on one device, or are refused in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.keras_start import Answers, start, start_group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "support" / "keras_users.py"
SECONDS = 240


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """What each process printed, all started at once."""
    group = start_group(SCRIPT, "chief", roles=("chief", "worker"))
    running = {engine: [start(SCRIPT, engine)] for engine in ("towers", "mirrored")}
    answers = Answers(running | dict(zip(("chief", "worker"), [[process] for process in group], strict=True)), SECONDS)
    try:
        yield {name: answers(name)[0] for name in ("towers", "mirrored", "chief", "worker")}
    finally:
        answers.close()


@pytest.mark.parametrize(
    "case", ["own loss", "own test", "own predict", "added", "watched", "without training", "frozen", "sparse"]
)
def test_towers_do_with_a_users_model_what_one_device_does(found: Any, case: str) -> None:
    """A compute_loss and steps of the user's own, losses and metrics inside layers, sparse rows, nothing to train."""
    assert found["towers"][case] <= 1e-12


@pytest.mark.parametrize("case", ["single samples", "single vectors", "rebatched instance", "eager"])
def test_what_users_give_is_taken_as_it_is_meant(found: Any, case: str) -> None:
    """A model instead of a function; tf.data pipelines of single samples, or of batches of another size."""
    assert found["towers"][case] <= 1e-12


@pytest.mark.parametrize("process", ["mirrored", "chief", "worker"])
@pytest.mark.parametrize("case", ["own predict", "added", "single samples"])
def test_every_engine_does_what_one_device_does(found: Any, process: str, case: str) -> None:
    """A predict_step of the user's own, losses inside layers, and pipelines of single samples."""
    assert found[process][case] <= 1e-12


def test_a_dataset_becomes_global_batches(found: Any) -> None:
    """Of single samples, or of batches of another size, whose size is read where it is static and where it is not."""
    assert found["towers"]["batch sizes"] == [[24, 24, 1]] * 2
    assert found["towers"]["rows"] == [20, 20]


def test_losses_that_a_model_adds_itself_are_warned_of(found: Any) -> None:
    """A sum over rows would count by rows."""
    assert any("adds losses of its own" in sentence for sentence in found["towers"]["adds"])


def test_fit_shows_keras_own_signature(found: Any) -> None:
    """An editor completes its arguments."""
    assert found["towers"]["signatures"]


def test_readme_and_docs_show_one_form() -> None:
    """The form that warns of nothing."""
    assert 'Split("plan.toml").build(build)' in (SCRIPT.parents[2] / "README.md").read_text()
    text = (SCRIPT.parents[2] / "docs" / "training.md").read_text()
    assert "model = split.build(make_model)  # " in text
    assert "\nmodel.fit(x, y, epochs=5)  # the batch size is the plan's" in text


def test_fit_as_documented_warns_of_nothing(found: Any) -> None:
    """Neither arrays nor split.data."""
    assert found["towers"]["documented"] == []


@pytest.mark.parametrize("way", ["clone_model", "clone_model functional", "deepcopy", "pickle"])
def test_a_copy_that_is_not_split_is_warned_of(found: Any, way: str) -> None:
    """Once, with the remedy; saving, after which everybody expects a plain model, warns of nothing."""
    (said,) = found["towers"]["copies"][way]
    assert "trains on one device: pass the copy to split.model()" in said
    assert found["towers"]["copies"]["save"] == []


def test_each_prediction_draws_fresh_numbers(found: Any) -> None:
    """A model that samples doesn't give the same noise again."""
    assert found["towers"]["fresh noise"] > 0.01


def test_a_report_counts_the_batch_that_is_fitted(found: Any) -> None:
    """Not the split's own, where fit is given another; and the CPU isn't taken for a GPU of that number."""
    assert found["towers"]["reported"]["samples"] == [16, 16, 16, 1] * 2
    assert found["towers"]["reported"]["devices"] == ["cpu:0", "cpu:1", "cpu:2"]


def test_each_process_of_a_group_reports_its_own_rows(found: Any) -> None:
    """3 : 1 of each batch, and the single row that is left."""
    assert found["chief"]["reported"] == [18, 18, 0] * 2
    assert found["worker"]["reported"] == [6, 6, 1] * 2


def test_a_report_leaves_out_the_first_step_of_each_batch_size(found: Any) -> None:
    """Also that of the short last batch, which is counted by its own size, and where nobody says its size."""
    reported = found["towers"]["reported"]
    assert reported["timed arrays"] == [False, True, True, False, True, True, True, True]
    assert reported["timed dataset"] == [False, True, False, True, True, True]


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
        ("towers", "one cpu", "Call evener.keras_split.make_logical_cpus(2)"),
        ("towers", "unclear", "batches or single samples"),
        ("towers", "own order", "dataset.shuffle(...)"),
        ("towers", "no list", "devices='CPU:0' names no devices"),
        ("towers", "no devices", "names no devices"),
        ("towers", "words", "A ratio of '3'"),
        ("towers", "plan and ratios", "Both a plan and ratios"),
        ("mirrored", "own test", "a test_step of its own"),
        ("mirrored", "single", "a single number"),
        ("chief", "own test", "a test_step of its own"),
        ("worker", "single", "a single number"),
    ],
)
def test_what_a_split_would_do_otherwise_is_refused(found: Any, engine: str, case: str, says: str) -> None:
    """In a sentence; a layer inside a layer of the user's own is seen too."""
    assert says in found[engine]["refusals"][case]


def test_single_batches_under_a_strategy_are_those_of_one_device(found: Any) -> None:
    """train_on_batch, test_on_batch and predict_on_batch, which Keras would do once for each replica."""
    assert found["mirrored"]["steps"] <= 1e-12
    assert found["mirrored"]["assigned"] <= 1e-12


@pytest.mark.parametrize("process", ["mirrored", "chief", "worker"])
def test_validation_by_a_pydataset_is_that_of_one_device(found: Any, process: str) -> None:
    """Whole batches that Keras makes, each evaluated by all."""
    assert found[process]["validated"] <= 1e-12


@pytest.mark.parametrize("case", ["sparse", "frozen"])
def test_replicas_do_what_one_device_does(found: Any, case: str) -> None:
    """Sparse batches from a tf.data pipeline; a model with nothing to train."""
    assert found["mirrored"][case] <= 1e-12


def test_a_chief_is_the_first_of_a_group(found: Any) -> None:
    """TF_CONFIG with a chief and a worker: two ranks, the weights of one device, a single row in a batch included."""
    assert [found[kind]["rank"] for kind in ("chief", "worker")] == [0, 1]
    assert max(found[kind][case] for kind in ("chief", "worker") for case in ("steps", "assigned")) <= 1e-12
