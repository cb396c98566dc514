"""Experiment trackers get the app's metrics through each trainer's logger."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from evener.devices.types import HostSample, Snapshot
from evener.live.metrics import join_metrics
from evener.tui.view.trainings import join_trainings
from tests.support.trainings import AT_SECONDS, make_ranks

PROGRAMS = "tests.support.tracked_programs"
NAMES = ("samples_per_second", "step_ms")
OF_A_RANK = ("rows", "share", "samples_per_second", "own_work_ms", "waiting_ms")


@pytest.mark.parametrize(
    "changed", [{}, {"plan_samples_per_second": 9_000.0}, {"world": 3, "retreats": 2}], ids=str
)
def test_figures_are_those_of_the_app(changed: dict[str, Any]) -> None:
    """There are metrics of the run and of each rank; those of the plan need all ranks."""
    reports = make_ranks(**changed)
    host = HostSample(
        cpu_percent=0.0,
        load_1min=0.0,
        memory_used_bytes=0,
        memory_total_bytes=0,
        cores=2,
        hostname="here",
    )
    snapshot = Snapshot(
        at_seconds=AT_SECONDS,
        interval_seconds=1.0,
        devices=(),
        processes=(),
        host=host,
        sampling_seconds=0.001,
        reports=reports,
    )
    (row,) = join_trainings(snapshot)
    found = join_metrics(reports[::-1])
    shown = {
        "samples_per_second": row.samples_per_second,
        "of_plan": row.of_plan,
        "step_ms": 1000 * row.step_s,
        "input_ms": 1000 * row.input_s,
        "out_of_memory_passes": sum(each.retreats for each in reports),
    }
    rows = sum(rank.share for rank in row.ranks)
    for rank in row.ranks:
        shown |= {
            f"rank{rank.rank}/rows": rank.share,
            f"rank{rank.rank}/share": rank.share / rows,
            f"rank{rank.rank}/samples_per_second": rank.samples_per_second,
            f"rank{rank.rank}/own_work_ms": 1000 * rank.own_work_s,
            f"rank{rank.rank}/waiting_ms": 1000 * rank.waiting_s,
        }
    wanted = {f"evener/{name}": figure for name, figure in shown.items() if figure}
    assert found == pytest.approx(wanted)


def _last(logs: list[dict[str, Any]]) -> dict[str, float]:
    """Return evener's metrics in the last log that has any, without their prefix."""
    with_figures = [log for log in logs if "evener/samples_per_second" in log]
    assert with_figures, logs
    return {
        name.removeprefix("evener/"): figure
        for name, figure in with_figures[-1].items()
        if name.startswith("evener/")
    }


@pytest.fixture(scope="module")
def by_plan(trainer_ranks: Callable[..., list[Any]]) -> list[Any]:
    """Return what two ranks of a plan with 6 + 2 rows logged."""
    if not all(map(find_spec, ("transformers", "accelerate", "lightning"))):
        pytest.skip("a trainer isn't installed")
    return trainer_ranks(f"{PROGRAMS}.train_by_plan", world=2)


@pytest.fixture(scope="module")
def alone(trainer_ranks: Callable[..., list[Any]], tmp_path_factory: Any) -> Any:
    """Return what one process without a plan logged, and its trackers' folder."""
    if not all(map(find_spec, ("transformers", "accelerate", "lightning"))):
        pytest.skip("a trainer isn't installed")
    folder = tmp_path_factory.mktemp("trackers")
    (found,) = trainer_ranks(f"{PROGRAMS}.train_without", str(folder))
    return found, folder


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["Trainer", "Lightning"])
def test_a_tracker_gets_own_work_and_shares_of_every_rank(by_plan: list[Any], trainer: str) -> None:
    """Only the first rank logs them, with the fraction of the plan's samples/s."""
    first, second = (rank[trainer] for rank in by_plan)
    found = _last(first["logs"])
    assert (found["rank0/rows"], found["rank1/rows"]) == (6, 2)
    assert (found["rank0/share"], found["rank1/share"]) == (0.75, 0.25)
    assert all(found[f"rank{rank}/{name}"] > 0 for rank in (0, 1) for name in OF_A_RANK)
    assert all(found[name] > 0 for name in (*NAMES, "of_plan"))
    together = found["rank0/samples_per_second"] + found["rank1/samples_per_second"]
    assert found["samples_per_second"] == pytest.approx(together)
    assert found["rank0/own_work_ms"] < found["step_ms"] * 1.5
    assert not [log for log in second["logs"] if "evener/samples_per_second" in log]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["Trainer", "Lightning", "loop"])
def test_a_training_without_a_plan_has_its_own_figures(alone: Any, trainer: str) -> None:
    """All training runs log samples/s, and trainers also the parts of a step."""
    logged = alone[0][trainer]
    found = _last(logged["logs"])
    assert found["samples_per_second"] > 0
    assert found["samples_per_second"] < 8 / 0.03, "a step takes 30 ms and longer"
    if trainer == "loop":
        assert logged["first"] == {}, "nothing was reported yet"
    else:
        assert found["step_ms"] > 30
        assert 0 < found["input_ms"] < found["step_ms"]
        assert logged["left"] == 0, "the monitor has forgotten the training"


@pytest.mark.slow
def test_what_a_trainer_prints_and_remembers_stays_as_it_was(alone: Any, by_plan: Any) -> None:
    """Only trackers get the metrics."""
    for logged in (alone[0]["Trainer"], by_plan[0]["Trainer"]):
        assert len(logged["printed"]) >= 4
        assert not [line for line in logged["printed"] if "evener" in line]
        assert not [log for log in logged["history"] if any("evener" in name for name in log)]


@pytest.mark.slow
def test_tensorboard_has_them(alone: Any) -> None:
    """The file was written by transformers' own callback."""
    found, folder = alone
    if "tensorboard" not in found["trackers"]:
        pytest.skip("TensorBoard isn't installed")
    (events,) = [path for path in folder.rglob("*tfevents*") if path.is_file()]
    tags = dict(_read_scalars(events))
    assert tags["train/evener/samples_per_second"] > 0
    assert tags["train/evener/step_ms"] > 30


@pytest.mark.slow
def test_wandb_has_them_offline(alone: Any) -> None:
    found, folder = alone
    if "wandb" not in found["trackers"]:
        pytest.skip("W&B isn't installed")
    (run,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert b"train/evener/samples_per_second" in run.read_bytes()


@pytest.mark.slow
def test_mlflow_has_them(alone: Any) -> None:
    found, folder = alone
    if "mlflow" not in found["trackers"]:
        pytest.skip("MLflow isn't installed")
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        rows = dict(database.execute("select key, value from metrics"))
    assert rows["evener/samples_per_second"] > 0


@pytest.mark.slow
def test_trackio_has_them(alone: Any, by_plan: Any) -> None:
    """transformers' own callback logs them, under a plan for both ranks."""
    for logged, name in (
        (alone[0], "train/evener/samples_per_second"),
        (by_plan[0], "train/evener/rank1/own_work_ms"),
    ):
        assert [log[name] for log in logged["Trainer"]["trackio"] if log.get(name, 0) > 0]


def _read_scalars(path: Path) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) from TensorBoard's event file.

    Its records are length, checksum, message and checksum.
    """
    event = import_module("tensorboardX.proto.event_pb2").Event
    content = path.read_bytes()
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        for value in event.FromString(content[12 : 12 + length]).summary.value:
            yield value.tag, value.simple_value
        content = content[16 + length :]


@pytest.mark.slow
@pytest.mark.parametrize("planned", [True, False])
def test_keras_callbacks_find_them_in_the_logs(
    keras_ranks: Callable[..., list[Any]], planned: bool
) -> None:
    """Callbacks after Report find them at an epoch's end, but not without `log`."""
    (found,) = keras_ranks("tests.support.keras_tracked.train", planned)
    metrics = _last(found["logs"])
    assert metrics["samples_per_second"] > 0
    assert metrics["step_ms"] > 30
    if planned:
        assert (metrics["rank0/rows"], metrics["rank1/rows"]) == (5, 3)
    assert not [name for log in found["plain"] for name in log if name.startswith("evener")]
