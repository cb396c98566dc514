"""Sessions that end without a plan: whose fault it was, what was seen, and what to do."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from evener.balancer.events import Event, Finished, ProbeProgress, Report
from evener.balancer.journal import FactsEntry, Header, JournalContents, ObservationEntry
from evener.balancer.request import Request
from evener.balancer.result.explain_failure import explain_no_plan, find_failures, find_unfinished
from evener.balancer.result.judge import SearchEnd
from evener.balancer.result.sentences import write_unfinished
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.balancer.types import (
    Belief,
    End,
    Facts,
    Failed,
    Layout,
    ModelState,
    Observation,
    OutOfMemory,
    PredictedCurve,
    Probe,
    Stage,
    Stop,
    Timed,
    solo,
)
from evener.balancer.verdict import Unfinished
from evener.devices.types import Device, Limit
from evener.errors import NoLayoutError

HUNG = Unfinished("building", "It", 90.0, ("GPU:0",))
WORDS = "It had not returned after 90 s on GPU:0."
DEVICES = tuple(Device(f"GPU-{i}", i, "NVIDIA A", "gpu", 1 << 33) for i in range(2))


def driven(**options: object) -> list[Event]:
    """Return the events of a session on simulated cards."""
    session = Session(open_run(Request(devices="sim:gtx1080ti,gtx1080", **options)))  # type: ignore[arg-type]
    with closing(session):
        return list(session.events())


def faulted(**options: object) -> NoLayoutError:
    """Return the error of such a session."""
    with pytest.raises(NoLayoutError) as fault:
        driven(**options)
    return fault.value


def record(header: Header, *seen: Observation) -> JournalContents:
    """Return the journal of a run with these observations."""
    return JournalContents(header, tuple(ObservationEntry(one, 1.0) for one in seen), 0)


def late(unfinished: tuple[Unfinished, ...]) -> SearchEnd:
    """Return the end of a run whose time was over."""
    return SearchEnd(End(Stop.LATE), 60.0, unfinished=unfinished)


def test_failures_are_reported_by_each_device_s_smallest_one() -> None:
    """Out of memory is reported with the batch, other failures with their cause."""
    seen: list[Observation] = [
        OutOfMemory(Probe(solo(2, 0, 64), Stage.SOLO, 1.0), (0,), "full", 1.0),
        OutOfMemory(Probe(solo(2, 0, 8), Stage.SOLO, 1.0), (0,), "full", 1.0),
        Failed(
            Probe(solo(2, 1, 8), Stage.SOLO, 1.0),
            "raised",
            "GPU:1, building: t.py:3: ValueError: no",
            (1,),
            1.0,
        ),
    ]
    assert tuple(find_failures(seen, DEVICES)) == (
        "GPU:0 ran out of memory with 8 samples",
        "GPU:1 failed with 8 samples while building: t.py:3: ValueError: no",
    )


@pytest.mark.parametrize("stop", [Stop.OUT_OF_MEMORY, Stop.LATE])
def test_a_budget_too_short_for_a_step_in_shards_is_not_called_a_lack_of_memory(
    stop: Stop,
) -> None:
    """3 billion parameters in bfloat16 with adapters, under 6 and 3 GiB.

    Each card ran 4 rows and 1 row with a part of the state, which left too little time to start the
    children of a whole step.
    """
    cards = tuple(
        msgspec.structs.replace(each, limit=Limit(memory_bytes=size << 30))
        for each, size in zip(DEVICES, (6, 3), strict=True)
    )
    request = Request(devices="gpu:0@6GiB,gpu:1@3GiB", framework="torch", budget_seconds=90.0)
    header = Header("r", "2026-01-01T00:00:00Z", request, cards, "big.py:build", "torch", "0")
    entries: list[ObservationEntry | FactsEntry] = [
        FactsEntry(Facts(state=ModelState(6_282_344_448, 841_512_960)))
    ]
    for i in range(2):
        full = OutOfMemory(Probe(solo(2, i, 1), Stage.SOLO, 1.0), (i,), "full", 1.0)
        entries.append(ObservationEntry(full, 1.0))
        for turn, (rows, used) in enumerate(((4, 1_601_177_600), (1, 1_306_675_200))):
            layout = Layout("part", tuple(rows if i == place else 0 for place in range(2)))
            memory = tuple(used if i == place else None for place in range(2))
            probe = Probe(layout, Stage.PART, 1.0, turn)
            ran = Timed(probe, 0.3, 0.3, 0.3, 5, memory, (None, None), 0.3, 5.0)
            entries.append(ObservationEntry(ran, 1.0))
    end = SearchEnd(End(stop), 82.0)
    fault = explain_no_plan(JournalContents(header, tuple(entries), 0), Belief((), ""), end)
    assert "doesn't fit" not in fault.message
    assert "budget of 90 s" in fault.message
    assert "--budget" in fault.remedy


def test_a_failure_that_all_devices_share_is_reported_once() -> None:
    seen = [
        Failed(
            Probe(solo(2, i, 8), Stage.SOLO, 1.0),
            "raised",
            f"GPU:{i}, building: there is no torch.",
            (i,),
            1.0,
        )
        for i in range(2)
    ]
    assert tuple(find_failures(seen, DEVICES)) == (
        "GPU:0 and GPU:1 failed while building: there is no torch",
    )


def raised(position: int, error: str) -> Failed:
    """Return a device's failure while warming up."""
    probe = Probe(solo(2, position, 8), Stage.SOLO, 1.0)
    detail = f"GPU:{position}, warming up: {error} (traceback in errors.txt)"
    return Failed(probe, "raised", detail, (position,), 1.0)


def test_an_error_of_every_device_is_the_code_s_and_names_where_the_model_is_made(
    tmp_path: Path,
) -> None:
    """No line of the user's code was running; memory and devices aren't to blame."""
    file = tmp_path / "bug.py"
    file.write_text("import torch\n\ndef build():\n    return None\n")
    request = Request(devices="gpu:0,1", framework="torch")
    header = Header("r", "2026-01-01T00:00:00Z", request, DEVICES, f"{file}:build", "torch", "0")
    inner = "RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    seen = record(header, raised(0, inner), raised(1, inner))
    belief, end = Belief((), ""), late(())
    fault = explain_no_plan(seen, belief, end)
    assert "failed while warming up: RuntimeError" in fault.message
    assert f"{file}:3" in fault.message
    assert "memory" not in fault.remedy
    own = f"{file}:4: ValueError: no"
    fault = explain_no_plan(
        record(header, raised(0, own), raised(1, own)), Belief((), ""), late(())
    )
    assert f"{file}:3" not in fault.message
    other = explain_no_plan(
        record(header, raised(0, own), raised(1, inner)), Belief((), ""), late(())
    )
    assert "memory" in other.remedy


@pytest.mark.parametrize("batch", [1800, 1_000_000])
def test_a_global_batch_that_does_not_fit_is_reported_with_one_that_does(batch: int) -> None:
    """The largest batch that is named can be balanced."""
    fault = faulted(global_batch=batch, micro="off")
    assert f"A global batch of {batch} samples doesn't fit" in fault.message
    assert "SIM:0 holds" in fault.message
    most = int(fault.remedy.split()[3].rstrip(","))
    assert isinstance(driven(global_batch=most, micro="off")[-1], Finished)


def test_four_times_what_fits_is_a_plan_in_passes() -> None:
    """So is a batch that only the largest card's memory would hold."""
    for batch in (1800, 4 * 1500):
        end = driven(global_batch=batch)[-1]
        assert isinstance(end, Finished)
        assert sum(share.batch for share in end.plan.layout.share) == batch
        assert all(0 < share.micro < share.batch for share in end.plan.layout.share)


def test_a_split_that_fails_is_reported_although_each_device_ran_alone() -> None:
    """It fits, and time is left, so neither is the reason."""
    alone = Timed(
        Probe(solo(2, 0, 8), Stage.SOLO, 1.0), 1.0, 1.0, 1.0, 5, (1, None), (1.0, None), 1.0, 5.0
    )
    split = Failed(
        Probe(Layout("split", (8, 8)), Stage.SPLIT, 1.0),
        "raised",
        "GPU:0, building: no NCCL.",
        (0,),
        1.0,
    )
    request = Request(global_batch=16, budget_seconds=120.0)
    header = Header(
        "run", "2026-01-01T00:00:00Z", request, DEVICES, "keras_mnist", "tensorflow", "0"
    )
    curves = tuple(PredictedCurve(i, (), 64, None) for i in range(2))
    belief = Belief(curves, "Done.")
    fault = explain_no_plan(record(header, alone, split), belief, SearchEnd(End(Stop.TIED), 60.0))
    assert "building: no NCCL" in fault.message
    other = explain_no_plan(record(header, alone), belief, SearchEnd(End(Stop.NO_FIT), 60.0))
    assert other.message == f"No layout could be measured: {Stop.NO_FIT.value}"


def test_a_budget_that_was_too_short_is_reported_with_a_longer_one() -> None:
    """Devices ran alone, below the requested batch."""
    fault = faulted(budget_seconds=2.0, global_batch=1024)
    assert (
        fault.message
        == "The budget of 2 s was over before a layout of the global batch was measured."
    )
    assert "--budget 4s" in fault.remedy


def building(position: int, seconds: float, phase: str = "building") -> ProbeProgress:
    """Return a probe that was in a phase for this long."""
    return ProbeProgress(
        Probe(solo(2, position, 8), Stage.SOLO, 1.0), phase, None, None, 60.0, seconds
    )


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (
            "/home/me/train.py:build",
            "train.py's build() had not returned after 28 s on GPU:0 and GPU:1.",
        ),
        ("my.package:make", "my.package's make() had not returned after 28 s on GPU:0 and GPU:1."),
        ("keras_mnist", "keras_mnist had not been built after 28 s on GPU:0 and GPU:1."),
    ],
)
def test_what_had_not_ended_is_named_with_its_devices_and_the_longest_time(
    workload: str, words: str
) -> None:
    """Measuring itself isn't a reason."""
    running = [building(1, 28.2), building(0, 27.0), building(0, 3.0, "measuring")]
    (late_one,) = find_unfinished(workload, DEVICES, running)
    assert write_unfinished(late_one) == words
    (step,) = find_unfinished(workload, DEVICES, [building(1, 9.0, "warming up")])
    assert write_unfinished(step).endswith("had not ended after 9 s on GPU:1.")


def test_a_search_that_is_stopped_at_once_names_no_start_that_had_only_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = Session(open_run(Request(devices="sim:gtx1080ti,gtx1080")))

    def measure(probes: tuple[Probe, ...], report: Report, *_: object) -> list[Observation]:
        report(ProbeProgress(probes[0], "importing", None, None, 0.1, 0.1))
        session.stop()
        return []

    monkeypatch.setattr(session._prober, "measure", measure)
    with closing(session), pytest.raises(NoLayoutError) as fault:
        list(session.events())
    assert fault.value.message == "The search was stopped before anything was measured."


def test_a_lack_of_the_host_s_memory_is_not_called_an_error_of_the_code() -> None:
    """Every device's build() failed, as it would on any device."""
    header = Header(
        "run", "2026-01-01T00:00:00Z", Request(), DEVICES, "/home/me/train.py:build", "torch", "0"
    )
    full = "train.py:3: the host's memory is short (1.2 GiB were free): MemoryError"
    seen = [
        Failed(
            Probe(solo(2, i, 8), Stage.SOLO, 1.0), "raised", f"GPU:{i}, building: {full}", (i,), 1.0
        )
        for i in range(2)
    ]
    fault = explain_no_plan(record(header, *seen), Belief((), "Done."), late(()))
    assert fault.message == (
        f"No layout could be measured: GPU:0 and GPU:1 failed while building: {full}."
    )
    assert fault.remedy == "Free memory of the host, or let build() need less of it."


def test_steps_in_shards_without_memory_are_named_with_the_time_of_a_further_one() -> None:
    """Each device ran alone with a part of the model, so the state isn't the reason."""
    header = Header("run", "2026-01-01T00:00:00Z", Request(), DEVICES, "q.py:build", "torch", "0")
    seen: list[Observation] = []
    for i in range(2):
        seen.append(OutOfMemory(Probe(solo(2, i, 8), Stage.SOLO, 1.0), (i,), "", 1.0))
        alone = msgspec.structs.replace(solo(2, i, 8), kind="part")
        seen.append(
            Timed(
                Probe(alone, Stage.PART, 0.2),
                0.1,
                0.1,
                0.1,
                9,
                (None, None),
                (None, None),
                0.1,
                1.0,
            )
        )
    for rows in (10, 9):
        layout = Layout("shard", (1, rows), state=(0.9, 0.1))
        seen.append(OutOfMemory(Probe(layout, Stage.SHARD, 1.0), (1,), "", 9.0))
    fault = explain_no_plan(record(header, *seen), Belief((), "Done."), late(()))
    assert "; in shards, memory ran out too, with 1 + 10 and 1 + 9 samples." in fault.message
    assert fault.remedy.startswith("Give a longer budget, as in --budget 240s: another try")
    assert "about 9 s" in fault.remedy


def test_a_slow_import_is_not_blamed_on_the_user_s_function() -> None:
    """It was stopped within an import statement, the file's own lines, or the function."""
    header = Header(
        "run",
        "2026-01-01T00:00:00Z",
        Request(),
        DEVICES,
        "/home/me/train.py:build",
        "tensorflow",
        "0",
    )
    belief = Belief((), "Done.")
    faults = {}
    for phase in ("importing", "loading", "building"):
        stopped = msgspec.structs.replace(building(0, 95.0, phase), where="/home/me/train.py:3")
        said = find_unfinished(header.workload, DEVICES, [stopped])
        faults[phase] = explain_no_plan(record(header), belief, late(said))
    assert (
        "Importing had not ended after 95 s on GPU:0, at /home/me/train.py:3."
        in faults["importing"].message
    )
    assert "endless loop" not in faults["importing"].remedy
    assert faults["loading"].message.startswith("The import of train.py had not ended after 95 s")
    assert (
        faults["building"].message
        == "train.py's build() had not returned after 95 s on GPU:0, at /home/me/train.py:3."
    )
    assert "endless loop" in faults["building"].remedy


@pytest.mark.parametrize(
    ("phase", "seconds", "has_run", "suspected"),
    [
        ("building", 90.0, False, "at first"),
        ("warming up", 90.0, False, "at first"),
        ("warming up", 4.0, False, "after a longer budget"),  # starting took the rest
        ("building", 90.0, True, "never"),  # the same code has returned in another process
        ("preparing", 90.0, False, "never"),  # it isn't the user's code
    ],
)
def test_code_that_may_only_have_lacked_time_is_not_blamed(
    phase: str, seconds: float, has_run: bool, suspected: str
) -> None:
    asked = Request(global_batch=64)
    header = Header("run", "2026-01-01T00:00:00Z", asked, DEVICES, "train.py:build", "torch", "0")
    probe = Probe(solo(2, 0, 8), Stage.SOLO, 1.0)
    ran = Timed(probe, *(0.1, 0.1, 0.1, 9), (None, None), (None, None), 0.1, 1.0)
    curves = tuple(PredictedCurve(i, (), 64, None) for i in range(2))
    late_one = Unfinished(phase, "train.py", seconds, ("GPU:0",))
    fault = explain_no_plan(
        record(header, *[ran] * has_run), Belief(curves, "Done."), late((late_one,))
    )
    assert ("The budget of 120 s" in fault.message) == (suspected != "at first")
    assert fault.remedy.startswith("Raise it") == (suspected != "at first")
    assert ("endless loop" in fault.remedy) == (suspected != "never")
    assert "--budget 240s" in fault.remedy


def test_the_end_names_what_had_not_ended_of_the_user_s_own_instead_of_the_budget() -> None:
    """For a built-in workload, or if the user stopped it, it names both."""
    header = Header(
        "run", "2026-01-01T00:00:00Z", Request(), DEVICES, "train.py:build", "tensorflow", "0"
    )
    belief = Belief((), "Done.")
    own = explain_no_plan(record(header), belief, late((HUNG,)))
    assert (own.message, "--budget 240s" in own.remedy) == (WORDS, True)
    listed = record(msgspec.structs.replace(header, workload="keras_mnist"))
    built_in = explain_no_plan(listed, belief, late((HUNG,)))
    assert built_in.message == "The budget of 120 s was over before anything was measured. " + WORDS
    stopped = explain_no_plan(
        record(header), belief, SearchEnd(End(Stop.INTERRUPTED), 60.0, True, (HUNG,))
    )
    assert stopped.message == "The search was stopped before anything was measured. " + WORDS
    assert "--resume run" in stopped.remedy
