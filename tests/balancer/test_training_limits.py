"""The limits of a training that a search finds: from invented numbers, and from real trainings.

Each real training has one known cause.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.balancer.jobs import make_job_with_knobs
from evener.balancer.probes.child_prober import ChildProber
from evener.balancer.probes.launch_plan import find_workers
from evener.balancer.request import Job, Request
from evener.balancer.result.sentences import write_verdict
from evener.balancer.result.training_limits import find_training_limits
from evener.balancer.search.layouts import BALANCE, LayoutOptions
from evener.balancer.search.report import SearchReport
from evener.balancer.types import (
    Interval,
    KeptBatch,
    Layout,
    PartSeconds,
    Probe,
    Problem,
    Result,
    Stage,
    Timed,
    layout_of,
    solo,
)
from evener.devices.cpu import slices
from evener.devices.types import Device
from evener.errors import RequestError
from evener.training.limits import LimitKind, TrainingLimit
from tests.support import limited_trainings
from tests.support.frameworks import skip_without
from tests.support.verdicts import SPLIT, candidate, judged, result, standing, write_text

ALONE = solo(1, 0, 64)
CPUS = tuple(Device(f"cpu-{i}-of-2", i, "CPU", "cpu", None) for i in range(2))
NOTHING = PartSeconds(input_seconds=0.0, update_seconds=0.0)


def timed(layout: Layout, *parts: PartSeconds | None, step: float = 0.1, **known: Any) -> Timed:
    """Return a measurement with these parts. Every device computes for the whole step, unless
    given.
    """
    own = known.pop("device_seconds", tuple(step if share else None for share in layout.shares))
    stage: Stage = Stage.REST if len(layout.active) == 1 else Stage.SPLIT
    return Timed(
        probe=Probe(layout, stage, 4.0),
        step_seconds=step,
        low_seconds=step,
        high_seconds=step,
        steps=40,
        memory_bytes=(None,) * len(layout.shares),
        device_seconds=own,
        first_step_seconds=step,
        elapsed_seconds=5.0,
        parts=parts,
        **known,
    )


def limits_of(seen: Timed, devices: tuple[Device, ...], *more: Timed) -> list[TrainingLimit]:
    """Return the limits of the layout of one measurement or several, if it is chosen."""
    layout = seen.probe.layout
    figure = Interval(*(layout.global_batch / seen.step_seconds,) * 3)
    report = SearchReport(
        problem=Problem(len(devices), (None,) * len(devices)),
        options=LayoutOptions(),
        chosen=Result(layout, figure, 1),
        turns={layout: (seen, *more)},
    )
    return list(find_training_limits(report, [seen, *more], devices))


def kinds(limits: list[TrainingLimit]) -> list[LimitKind]:
    return [each.kind for each in limits]


# ---------------------------------------------------------------------- figures


def test_input_has_the_gain_that_was_measured_with_a_batch_at_hand() -> None:
    part = PartSeconds(input_seconds=0.09, update_seconds=0.001)
    (limit,) = limits_of(timed(ALONE, part, kept=KeptBatch(0.02, 0.019, 0.021)), CPUS[:1])
    assert limit.kind is LimitKind.INPUT
    assert limit.milliseconds == pytest.approx(90.0)
    assert (limit.gain, limit.measured) == (pytest.approx(4.0), True)
    assert limit.gain_low == pytest.approx(0.1 / 0.024 - 1), "turns differ by a fifth"
    assert "num_workers" in limit.remedy


def test_several_steps_with_a_batch_at_hand_give_a_narrower_gain() -> None:
    part = PartSeconds(input_seconds=0.09, update_seconds=0.001)
    kept = [KeptBatch(each, each, each) for each in (0.0195, 0.02, 0.0205)]
    first, *more = [timed(ALONE, part, kept=each) for each in kept]
    (limit,) = limits_of(first, CPUS[:1], *more)
    assert limit.gain == pytest.approx(0.1 / 0.02 - 1)
    assert 0.1 / 0.024 - 1 < limit.gain_low < 0.1 / 0.022 - 1
    first, *more = [timed(ALONE, part, kept=KeptBatch(each, each, each)) for each in (0.018, 0.022)]
    (limit,) = limits_of(first, CPUS[:1], *more)
    assert limit.gain_low < 0.1 / 0.03 - 1, "two that differ say little"


def test_input_of_a_framework_that_fetches_within_its_step_is_what_the_kept_batch_spares() -> None:
    part = PartSeconds(input_seconds=None)
    (limit,) = limits_of(timed(ALONE, part, kept=KeptBatch(0.06, 0.06, 0.06)), CPUS[:1])
    assert (limit.kind, limit.share) == (LimitKind.INPUT, pytest.approx(0.4))
    assert "tf.data" in limit.remedy


def test_a_starved_host_says_by_whom_and_a_larger_limit_comes_first() -> None:
    part = PartSeconds(
        input_seconds=0.012,
        update_seconds=0.06,
        starved_seconds=0.05,
        taken_by="train.py (1.9 cores)",
    )
    limits = limits_of(timed(ALONE, part), CPUS[:1])
    assert kinds(limits)[0] is LimitKind.HOST_STARVED
    assert limits[0].by == "train.py (1.9 cores)"
    assert set(kinds(limits)[1:]) == {LimitKind.INPUT, LimitKind.OPTIMIZER}
    assert sum(each.share for each in limits[1:]) < 0.4, "half of both is waiting for cores"


def test_the_gain_of_freed_cores_includes_what_others_slow_beside_waiting() -> None:
    """Beside a program of 21 threads on 24 cores, threads waited for 47 %; the gain was 221 %."""
    part = PartSeconds(input_seconds=0.0, update_seconds=0.0, starved_seconds=0.0465)
    (limit,) = limits_of(timed(ALONE, part), CPUS[:1])
    assert limit.gain_low < 1 / (1 - 0.465) - 1 < limit.gain, "of the time in which threads waited"
    assert limit.gain_low < 2.21 < limit.gain_high < 4
    few = msgspec.structs.replace(part, starved_seconds=0.008)
    (limit,) = limits_of(timed(ALONE, few), CPUS[:1])
    assert limit.gain_high < 0.25, "few threads wait, so few others slow the rest"


def test_a_gpu_that_waits_for_kernels_is_limited_by_its_host() -> None:
    gpu = Device("GPU-1", 0, "NVIDIA A", "gpu", None)
    (limit,) = limits_of(timed(ALONE, NOTHING, enqueued_seconds=0.04), (gpu,))
    assert (limit.kind, limit.share) == (LimitKind.HOST_LAUNCHES, pytest.approx(0.6))
    assert limit.gain == pytest.approx(1.0), "of twice the batch, in the same time"
    assert limit.gain_low < 0.8
    (limit,) = limits_of(timed(ALONE, NOTHING, enqueued_seconds=0.08), (gpu,))
    assert limit.gain == pytest.approx(0.25), "of twice the batch, in twice the device's time"
    late = PartSeconds(input_seconds=0.05, update_seconds=0.0)
    seen = timed(ALONE, late, kept=KeptBatch(0.05, 0.05, 0.05), enqueued_seconds=0.03)
    found = {each.kind: each.milliseconds for each in limits_of(seen, (gpu,))}
    assert found[LimitKind.HOST_LAUNCHES] == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("part", "kind", "by"),
    [
        (PartSeconds(heat_seconds=0.02), LimitKind.HEAT, "GPU:0"),
        (PartSeconds(power_seconds=0.02), LimitKind.POWER, "GPU:0"),
        (
            PartSeconds(neighbour=0.2, busy=0.8, neighbours="python other.py"),
            LimitKind.NEIGHBOUR,
            "python other.py on GPU:0",
        ),
    ],
)
def test_what_slows_a_device_is_a_limit(part: PartSeconds, kind: LimitKind, by: str) -> None:
    gpu = Device("GPU-1", 0, "NVIDIA A", "gpu", None)
    (limit,) = limits_of(timed(ALONE, part), (gpu,))
    assert (limit.kind, limit.by, limit.share) == (kind, by, pytest.approx(0.2))
    assert limit.gain == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("ran", "others", "waited"),
    [
        (0.5, 0.5, 0.5),  # both always have kernels enqueued
        (0.2, 0.8, 0.6),  # its kernels end long before the end of its time slice
        (0.2, 0.3, 0.3),  # the other process rarely computes
        (0.6, 0.0, 0.0),
    ],
)
def test_kernels_wait_for_a_neighbour_while_they_are_enqueued_and_do_not_run(
    ran: float, others: float, waited: float
) -> None:
    """A step takes 100 ms, and its device has nothing to do for 20 ms because its host is late."""
    gpu = Device("GPU-1", 0, "NVIDIA A", "gpu", None)
    part = PartSeconds(neighbour=others, busy=ran, neighbours="python other.py")
    seen = timed(ALONE, part, enqueued_seconds=0.08)
    found = {each.kind: each for each in limits_of(seen, (gpu,))}
    if not waited:
        assert LimitKind.NEIGHBOUR not in found
        return
    limit = found[LimitKind.NEIGHBOUR]
    assert limit.share == pytest.approx(waited)
    assert limit.gain_low < limit.gain < limit.gain_high


def test_a_sample_from_before_the_session_s_kernels_began_says_nothing_of_a_neighbour() -> None:
    """An H200's driver gave such a sample in one of two turns; alone, it trained 1.91 times as
    fast.
    """
    gpu = Device("GPU-1", 0, "NVIDIA A", "gpu", None)
    first, second = (
        timed(ALONE, PartSeconds(neighbour=others, busy=ran), enqueued_seconds=0.098)
        for others, ran in ((0.4, 0.6), (0.99, 0.01))
    )
    (limit,) = limits_of(first, (gpu,), second)
    assert limit.kind is LimitKind.NEIGHBOUR
    assert 1 + limit.gain == pytest.approx(1.91, rel=0.15)
    assert limit.gain_low < 0.91 < limit.gain_high


def test_what_slows_a_device_that_waits_for_others_is_no_limit() -> None:
    gpus = tuple(Device(f"GPU-{i}", i, "NVIDIA A", "gpu", None) for i in range(2))
    hot = PartSeconds(heat_seconds=0.05)
    seen = timed(layout_of((32, 32)), hot, NOTHING, device_seconds=(0.05, 0.1))
    assert kinds(limits_of(seen, gpus)) == []
    seen = timed(layout_of((32, 32)), hot, NOTHING, device_seconds=(0.1, 0.05))
    assert kinds(limits_of(seen, gpus)) == [LimitKind.HEAT]


def test_unequal_devices_are_what_the_plan_takes_away() -> None:
    """The data has them, and no sentence repeats the plan's gain over equal shares."""
    even = candidate("even", layout_of((128, 128)))
    parts = (NOTHING,) * 2
    seen = timed(SPLIT.layout, *parts)
    verdict = judged(
        result(SPLIT, 2560), seen=[seen], results=(result(SPLIT, 2560), result(even, 2000))
    )
    (limit,) = verdict.limits
    assert (limit.kind, limit.taken_away) == (LimitKind.UNEQUAL, True)
    assert limit.gain == pytest.approx(0.28)
    assert "Limited by" not in write_verdict(verdict).text


def test_the_exchange_is_what_the_last_of_a_split_waits_for() -> None:
    """The other device also waits for its gradients, which more equal shares would avoid."""
    layout = layout_of((40, 24))
    (limit,) = limits_of(timed(layout, NOTHING, NOTHING, device_seconds=(0.07, 0.02)), CPUS)
    assert (limit.kind, limit.milliseconds) == (LimitKind.EXCHANGE, pytest.approx(30.0))
    assert limit.by == "CPU:0 – CPU:1"


def test_the_link_between_the_chosen_devices_is_reported_once() -> None:
    """The exchange names it if that is a limit; otherwise it has its own line. The plan
    has it too.
    """
    parts = (NOTHING,) * 2
    known: dict[str, Any] = {"link_bytes_per_second": 6.1e9, "link_path": "PCIe, no P2P"}
    line = "CPU:0 – CPU:1  PCIe, no P2P, 6.1 GB/s"
    slow = timed(layout_of((40, 24)), *parts, device_seconds=(0.07, 0.07), **known)
    (limit,) = limits_of(slow, CPUS)
    assert (limit.kind, limit.by) == (LimitKind.EXCHANGE, line)
    verdict = judged(result(SPLIT, 2560), seen=[timed(SPLIT.layout, *parts, **known)])
    assert verdict.link is not None
    assert verdict.link.describe().endswith("  PCIe, no P2P, 6.1 GB/s")
    assert write_verdict(verdict).text.count("6.1 GB/s") == 1
    none = judged(result(SPLIT, 2560), seen=[timed(SPLIT.layout, *parts)])
    assert none.link is None


def test_waiting_for_rows_is_not_taken_for_an_exchange() -> None:
    layout = layout_of((40, 24))
    parts = (PartSeconds(input_seconds=0.06), PartSeconds(input_seconds=0.06))
    found = kinds(limits_of(timed(layout, *parts, device_seconds=(0.039, 0.039)), CPUS))
    assert found == [LimitKind.INPUT]


def test_passes_cost_what_each_takes_whatever_its_rows() -> None:
    """40 ms of each pass don't depend on its rows, so one of two passes could be saved."""
    layout = Layout("split", (58, 38), micro=(58, 19))
    seen = timed(layout, NOTHING, NOTHING, step=0.102, device_seconds=(0.1, 0.102))
    alone = [
        timed(solo(2, 1, rows), None, NOTHING, step=0.04 + 0.0006 * rows) for rows in (8, 12, 19)
    ]
    figure = Interval(*(96 / 0.102,) * 3)
    report = SearchReport(
        problem=Problem(2, (None, None)),
        options=LayoutOptions(),
        chosen=Result(layout, figure, 1),
        turns={layout: (seen,)},
    )
    found = {one.kind: one for one in find_training_limits(report, [*alone, seen], CPUS)}
    memory = found[LimitKind.MEMORY]
    assert (memory.milliseconds, memory.by) == (pytest.approx(40.0), "CPU:1")
    assert memory.gain_low < 0.102 / 0.062 - 1 < memory.gain_high


@pytest.mark.parametrize(
    ("times", "micro", "now", "single"),
    [
        (((4, 0.00438), (8, 0.0051)), 8, 0.0403, 0.00771),
        (((8, 0.00845), (64, 0.01728)), 64, 0.13824, 0.08679),
        (((8, 0.00996), (64, 0.01252)), 64, 0.10016, 0.02855),
    ],
    ids=["large weights, few rows", "maxer", "keras_maxer"],
)
def test_a_gpu_s_passes_cost_as_its_time_by_rows_goes_on(
    times: tuple[tuple[int, float], ...], micro: int, now: float, single: float
) -> None:
    """These are an H200's times for two sizes, for eight passes of the larger one, and for a single
    pass.

    The first model has large weights: few rows leave most of the GPU idle.
    """
    layout = solo(1, 0, 8 * micro, micro)
    gpu = Device("GPU-1", 0, "NVIDIA A", "gpu", None)
    seen = timed(layout, NOTHING, step=now)
    alone = [timed(solo(1, 0, rows), NOTHING, step=seconds) for rows, seconds in times]
    figure = Interval(*(8 * micro / now,) * 3)
    report = SearchReport(
        problem=Problem(1, (None,)),
        options=LayoutOptions(),
        chosen=Result(layout, figure, 1),
        turns={layout: (seen,)},
    )
    (memory,) = find_training_limits(report, [*alone, seen], (gpu,))
    assert memory.kind is LimitKind.MEMORY
    assert 1 + memory.gain == pytest.approx(now / single, rel=0.15)
    assert memory.gain_low < now / single - 1 < memory.gain_high


def test_simulated_devices_and_measurements_of_older_versions_have_no_limits() -> None:
    assert limits_of(timed(ALONE), CPUS[:1]) == []


def test_the_verdict_names_its_limits_behind_the_answer_the_largest_first() -> None:
    parts = (PartSeconds(input_seconds=0.07, update_seconds=0.028),) * 2
    seen = timed(SPLIT.layout, *parts, kept=KeptBatch(0.02, 0.02, 0.02))
    verdict = judged(result(SPLIT, 2560), seen=[seen])
    words = write_verdict(verdict)
    lines = words.text.splitlines()
    assert kinds(list(verdict.limits)) == [LimitKind.INPUT, LimitKind.OPTIMIZER]
    assert lines[1] == words.headline
    assert lines[2].startswith("Limited by input: 70 ms of a step, 70 %.")
    assert "12 800 samples/s" in lines[2]
    assert lines[3].startswith("Limited by the optimizer")


def test_a_loss_that_waiting_for_rows_explains_is_not_the_exchange_s() -> None:
    """The cost of rows isn't part of the cost of synchronization."""
    chosen = result(SPLIT, 1000)
    alone = [result(candidate("solo", solo(2, i, 256)), 800) for i in range(2)]
    known: dict[str, Any] = {
        "solos": tuple(alone),
        "sync_seconds": 0.3,
        "results": (chosen, *alone),
    }
    late = (PartSeconds(input_seconds=0.2),) * 2
    seen = timed(SPLIT.layout, *late, step=0.256)
    assert judged(chosen, seen=[seen], **known).sum_loss is None
    assert judged(chosen, **known).sum_loss is not None


# ---------------------------------------------------------------------- loader workers


def with_knob(knob: str) -> Layout:
    return msgspec.structs.replace(SPLIT.layout, knobs=(knob,))


def test_the_best_number_of_workers_is_reported_with_what_to_write() -> None:
    few, many = candidate("split", with_knob("workers2")), candidate("split", with_knob("workers4"))
    ranking = [standing(few, 1500, -0.25), standing(SPLIT, 500, -0.75)]
    text = write_text(result(many, 2000), ranking).text
    assert "4: 2 000, 2: 1 500, as your code has it: 500" in text
    assert "num_workers=4" in text


def test_a_loader_that_is_best_as_it_is_stays_so() -> None:
    ranking = [standing(candidate("split", with_knob("workers2")), 1500, -0.25)]
    text = write_text(result(SPLIT, 2000), ranking).text
    assert "Leave your loader as it is." in text


def test_workers_can_be_tried_where_evener_makes_the_loader(tmp_path: Path) -> None:
    skip_without("torch")
    script = tmp_path / "train.py"
    script.write_text(limited_trainings.PLAIN)
    own = Request(devices="cpu/1", workload=f"{script}:build", framework="torch")
    options = make_job_with_knobs(own, ["workers"]).request.compare
    assert options is not None
    assert [find_workers([knob]) for knob in options.knobs] == [0, 2, 4, 8]
    assert options.families == BALANCE.families
    for devices, workload, framework in (
        ("cpu/1", "torch_mnist", "torch"),
        ("sim:gtx1080ti,gtx1080", None, "torch"),
    ):
        request = Request(devices=devices, workload=workload, framework=framework)
        options = make_job_with_knobs(request, ["workers"]).request.compare
        assert options is not None
        assert options.knobs == ()
        assert "--try" in options.left_out[0]
    with pytest.raises(RequestError, match="xla"):
        make_job_with_knobs(own, ["xla"])


# ---------------------------------------------------------------------- real trainings

SECONDS = 1.0


@pytest.fixture
def prober_of(tmp_path: Path, shared_servers: None) -> Iterator[Any]:
    """Yield a function that makes a prober of a training with the given file, on one slice of the
    CPU.
    """
    skip_without("torch")
    made: list[ChildProber] = []

    def make(code: str) -> ChildProber:
        script = tmp_path / "train.py"
        script.write_text(code)
        made.append(ChildProber(Job(Request(), slices(2)[:1], f"{script}:build", "torch")))
        return made[-1]

    yield make
    for prober in made:
        prober.close()


def measure(prober: ChildProber, rows: int, *knobs: str) -> Timed:
    """Return a measurement of one device alone with this many rows."""
    layout = msgspec.structs.replace(solo(1, 0, rows), knobs=knobs)
    probe = Probe(layout, Stage.SOLO, SECONDS)
    (seen,) = prober.measure((probe,), lambda _: None, threading.Event())
    assert isinstance(seen, Timed), seen
    return seen


def find(prober: ChildProber, rows: int) -> list[TrainingLimit]:
    """Return the limits of a training, except the host's, because other tests run at the
    same time.
    """
    limits = limits_of(measure(prober, rows), slices(2)[:1])
    return [each for each in limits if each.kind is not LimitKind.HOST_STARVED]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "rows", "kind"),
    [
        (limited_trainings.SLOW_ROWS, 64, LimitKind.INPUT),
        (limited_trainings.SLOW_COLLATE, 64, LimitKind.INPUT),
        (limited_trainings.LARGE_OPTIMIZER, 8, LimitKind.OPTIMIZER),
        (limited_trainings.SLEEPING_MODEL, 64, LimitKind.OWN_CODE),
    ],
    ids=["slow rows", "slow collate", "large optimizer", "a model that sleeps"],
)
def test_a_training_with_one_cause_is_limited_by_it_first(
    prober_of: Any, code: str, rows: int, kind: LimitKind
) -> None:
    seen = measure(prober_of(code), rows)
    (part,) = seen.parts
    assert part is not None
    # other tests run at the same time
    alone = msgspec.structs.replace(part, starved_seconds=0.0)
    found = limits_of(msgspec.structs.replace(seen, parts=(alone,)), slices(2)[:1])
    assert kinds(found)[:1] == [kind]


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", [limited_trainings.PLAIN, limited_trainings.DEEPER], ids=["plain", "deeper"]
)
def test_a_plain_training_has_no_limit(prober_of: Any, code: str) -> None:
    assert find(prober_of(code), 512) == []


@pytest.mark.slow
def test_a_training_whose_cores_are_taken_is_starved_and_says_by_whom(
    prober_of: Any, tmp_path: Path
) -> None:
    core = slices(2)[0].cores[0]
    script = tmp_path / "busy_load.py"
    script.write_text(f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass\n")
    load = [subprocess.Popen([sys.executable, str(script)]) for _ in range(3)]
    try:
        seen = measure(prober_of(limited_trainings.PLAIN), 64)
    finally:
        for each in load:
            each.kill()
            each.wait()
    starved = {each.kind: each for each in limits_of(seen, slices(2)[:1])}[LimitKind.HOST_STARVED]
    assert starved.share > 0.3
    assert "cores)" in starved.by
    assert str(os.getpid()) not in starved.by


@pytest.mark.slow
def test_the_ceiling_without_input_is_the_speed_with_rows_at_hand(prober_of: Any) -> None:
    """Rows take 2 ms each. On a busy machine, a step of 3 ms may take 13 or even 70."""
    prober = prober_of(limited_trainings.SLOW_ROWS)
    slow = measure(prober, 64)
    fast = measure(prober_of(limited_trainings.PLAIN), 64)
    assert slow.kept is not None
    assert slow.kept.step_seconds > 0.1 * fast.step_seconds
    assert slow.kept.low_seconds < 3 * fast.step_seconds, "its interval is wide on a busy machine"
    assert slow.step_seconds > 2 * slow.kept.step_seconds


@pytest.mark.slow
def test_rows_that_wait_for_a_disk_come_sooner_with_workers(prober_of: Any) -> None:
    """Four workers wait for four rows at once."""
    prober = prober_of(limited_trainings.SLOW_ROWS)
    alone, four = measure(prober, 32, "workers0"), measure(prober, 32, "workers4")
    assert four.step_seconds < 0.6 * alone.step_seconds
