"""Real children that die, hang or write garbage: each gives an observation and leaves nothing."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from evener.balancer.events import ProbeProgress
from evener.balancer.probes.child_prober import ChildProber
from evener.balancer.probes.children import ChildGroup, Inbox
from evener.balancer.probes.hosts import LocalHost
from evener.balancer.probes.measurement import Timeouts
from evener.balancer.probes.protocol import Command, ReleaseMemory, Reply, RunSteps
from evener.balancer.request import Job, Request
from evener.balancer.types import (
    Failed,
    Layout,
    Observation,
    OutOfMemory,
    Probe,
    Stage,
    Timed,
    layout_of,
    solo,
)
from evener.devices.backend import ChildEnvironment
from evener.devices.cpu import slices
from evener.devices.types import Device, Limit
from evener.live.reporter import Training, read_trainings
from tests.support.cores import two_cores
from tests.support.probe_children import at_birth, list_children, list_probe_children
from tests.support.probers import child_prober
from tests.support.python_path import python_path

HASTY = Timeouts(build=60.0, prepare=1.0, block=0.5)  # timeouts for children that hang
pytestmark = two_cores
GONE_SECONDS = 60.0
Make = Callable[..., ChildProber]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes probers over two slices; checks that no child is left after they are closed."""
    made: list[ChildProber] = []

    def new(
        timeouts: Timeouts | None = None, devices: tuple[Device, ...] = (), **settings: Any
    ) -> ChildProber:
        made.append(child_prober(devices or slices(2), timeouts=timeouts, **settings))
        return made[-1]

    yield new
    for prober in made:
        prober.close()
        prober.close()
    deadline = time.monotonic() + GONE_SECONDS
    while list_children() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not list_children()


def observe(
    prober: ChildProber, *layouts: Layout, report: Callable[[ProbeProgress], None] = lambda _: None
) -> list[Observation]:
    """Return the observations of short probes of these layouts at the same time, in their order."""
    probes = tuple(
        Probe(layout, Stage.SOLO if layout.kind == "solo" else Stage.SPLIT, 0.2)
        for layout in layouts
    )
    seen = {one.probe: one for one in prober.measure(probes, report, threading.Event())}
    return [seen[probe] for probe in probes]


def test_solo_children_measure_at_once_and_are_kept(make: Make) -> None:
    """Two devices use two processes, which the next probe uses again."""
    prober = make()
    first = observe(prober, solo(2, 0, 8), solo(2, 1, 8))
    pids = {child.pid for child in list_probe_children()}
    assert len(pids) == 2
    second = observe(prober, solo(2, 0, 16), solo(2, 1, 32))
    assert {child.pid for child in list_probe_children()} == pids
    for seen in (*first, *second):
        assert isinstance(seen, Timed)
        assert seen.low_seconds <= seen.step_seconds <= seen.high_seconds
        assert (
            0 < (seen.device_seconds[seen.probe.layout.active[0]] or 0) < 1.01 * seen.step_seconds
        )
        assert seen.step_seconds > 0.005
    assert prober.facts().workload_digest


def test_a_child_trains_on_until_the_others_of_its_round_have_ended(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child trains on until the other probes of its round have finished.

    Two slices may be two hyper-threads of a core: the slower one would speed up once the other is
    done.
    """
    asked: list[tuple[int, type[Command]]] = []
    call = ChildGroup.call

    def watched(group: ChildGroup, command: Callable[[int], Command], *rest: Any) -> list[Reply]:
        asked.append((group.ranks.positions[0], type(command(0))))
        return call(group, command, *rest)

    monkeypatch.setattr(ChildGroup, "call", watched)
    probes = Probe(solo(2, 0, 8), Stage.SOLO, 0.2), Probe(solo(2, 1, 8), Stage.SOLO, 1.2)
    seen = {one.probe: one for one in make().measure(probes, lambda _: None, threading.Event())}
    short, long = (seen[probe].elapsed_seconds for probe in probes)
    assert short < 0.8 * long, "what it does then isn't measured"
    steps = [position for position, command in asked if command is RunSteps]
    assert 0 in steps[-3:]
    assert dict(asked) == {0: ReleaseMemory, 1: ReleaseMemory}, "and no longer"


def test_a_loss_that_is_lost_is_a_warning_with_its_step_and_stays_one(make: Make) -> None:
    """A NaN loss gives a warning with the last step of the block in which it was seen.

    In a group, the warning names the rank that lost it first.
    """
    prober = make(fail="nan", at_share=0, at_step=3)
    (first,) = observe(prober, solo(2, 1, 8))
    assert isinstance(first, Timed)
    (lost,) = (each for each in first.warnings if each.code == "not_finite")
    assert lost.device == 1
    assert 4 <= lost.value <= first.steps + 200
    (again,) = observe(prober, solo(2, 1, 16))
    assert isinstance(again, Timed)
    assert lost in again.warnings
    (sound,) = observe(make(), solo(2, 0, 8))
    assert isinstance(sound, Timed)
    assert all(each.code != "not_finite" for each in sound.warnings)


def test_a_running_probe_reports_itself_as_a_training_until_it_rests(make: Make) -> None:
    """A running probe reports its device and samples/s to the monitor; an idle child doesn't."""
    prober = make(base_ms=5.0, per_sample_ms=0.0, noise=0.3)
    seen: list[Training] = []
    probe = Probe(solo(2, 1, 8), Stage.SOLO, 2.0, whole=True)
    (timed,) = prober.measure((probe,), lambda _: seen.extend(read_trainings()), threading.Event())
    assert isinstance(timed, Timed)
    last = seen[-1]
    assert [device.id for device in last.devices] == ["cpu-1-of-2"]
    assert last.samples_per_second == pytest.approx(timed.samples_per_second, rel=0.5)
    deadline = time.monotonic() + GONE_SECONDS
    while read_trainings() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not read_trainings()
    assert list_probe_children()


def test_a_split_steps_as_one_and_has_each_rank_s_own_work(make: Make) -> None:
    """The step time is the slowest rank's; the other rank's compute time (own work) is less."""
    (seen,) = observe(make(per_sample_ms=0.2), layout_of((240, 8)))
    assert isinstance(seen, Timed)
    assert seen.step_seconds > 0.03
    slow, quick = seen.device_seconds
    assert slow is not None
    assert quick is not None
    assert quick < 0.75 * slow


def test_a_step_in_which_memory_grows_is_not_in_the_figure(make: Make) -> None:
    """A step in which memory grows doesn't count.

    The larger rank's 150th step takes twice the memory and 1 s instead of 10 ms; the warm-up has
    fewer than 100 steps.
    """
    prober = make(base_ms=10.0, memory_base_mib=8, fail="grow", at_step=150, at_share=5)
    probe = Probe(layout_of((4, 5)), Stage.SPLIT, 2.0, 0, True, 200)
    (seen,) = prober.measure((probe,), lambda _: None, threading.Event())
    assert isinstance(seen, Timed)
    assert seen.memory_bytes == (8 << 20, 16 << 20)
    assert seen.steps == 200
    assert seen.steps * seen.step_seconds < seen.elapsed_seconds - seen.start_seconds - 0.7, (
        "that second is missing"
    )


def test_a_slice_held_to_a_part_of_its_speed_takes_longer_alone_and_keeps_a_group_waiting(
    make: Make,
) -> None:
    """At half speed, a step takes about twice as long, and a group waits for it.

    On a busy machine it may take even longer.
    """
    one, two = slices(2)
    halved = Device(
        two.id, two.index, two.name, two.kind, two.memory_bytes, two.cores, Limit(percent=50.0)
    )
    prober = make(devices=(one, halved), base_ms=10.0)
    (half,) = observe(prober, solo(2, 1, 8))
    assert isinstance(half, Timed)
    assert half.step_seconds > 1.6 * 0.01
    (split,) = observe(prober, layout_of((8, 8)))
    assert isinstance(split, Timed)
    assert split.step_seconds > 1.6 * 0.01


def test_a_pack_runs_side_by_side(make: Make) -> None:
    """A pack's throughput counts every process."""
    (seen,) = observe(make(), Layout("pack", (8, 0), processes=2))
    assert isinstance(seen, Timed)
    assert len(list_probe_children()) == 2
    assert seen.samples_per_second == pytest.approx(16 / seen.step_seconds)


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("starting", signal.SIGKILL),
        ("building", signal.SIGSEGV),
        ("warming up", signal.SIGABRT),
        ("measuring", signal.SIGKILL),
        ("measuring", signal.SIGSEGV),
    ],
)
def test_a_killed_child_is_a_failed_probe_with_the_signal_and_the_next_one_works(
    make: Make, phase: str, number: signal.Signals
) -> None:
    """A child killed in any phase by any signal is a failed probe; the retry uses a new child."""
    asked = threading.Event()

    def kill(progress: ProbeProgress) -> None:
        if progress.phase == phase and not asked.is_set():
            asked.set()  # a long phase is reported repeatedly
            # "starting" is reported before there is a child
            while not (found := list_probe_children()):
                time.sleep(0.001)
            os.kill(found[0].pid, number)

    def later(progress: ProbeProgress) -> None:
        threading.Thread(
            target=kill, args=(progress,)
        ).start() if progress.phase == "starting" else kill(progress)

    prober = make()
    (seen,) = observe(prober, solo(2, 0, 8), report=later)
    assert isinstance(seen, Failed)
    assert seen.cause == "signal"
    assert number.name in seen.detail
    assert seen.devices == (0,)
    assert isinstance(observe(prober, solo(2, 0, 8))[0], Timed)


AT_REPORT = """
import os, pathlib, synthetic_workload
def die(self):
    if not pathlib.Path({flag!r}).exists():
        pathlib.Path({flag!r}).touch()
        os.write(1, b'{{"type":"Ran","steps":')
        os.kill(os.getpid(), {number})
    return (1,)
synthetic_workload.Synthetic.max_memory_bytes = die
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_child_killed_as_it_reports_is_a_failed_probe_too(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    """A child killed after its steps and before its reply is a failed probe; the retry counts."""
    site(monkeypatch, tmp_path, AT_REPORT.format(flag=str(tmp_path / "died"), number=int(number)))
    prober = make()
    (seen,) = observe(prober, solo(2, 0, 8))
    assert isinstance(seen, Failed)
    assert seen.cause == "signal"
    assert number.name in seen.detail
    assert isinstance(observe(prober, solo(2, 0, 8))[0], Timed)


def test_one_killed_rank_ends_its_group_and_is_named(make: Make) -> None:
    """The failure names the killed rank, not the others that lost their connection."""

    def kill(progress: ProbeProgress) -> None:
        if progress.phase == "measuring":
            ranks = sorted(list_probe_children(), key=lambda child: child.create_time())
            if len(ranks) == 2:
                ranks[1].kill()

    (seen,) = observe(make(), layout_of((8, 8)), report=kill)
    assert isinstance(seen, Failed)
    assert "SIGKILL" in seen.detail or "has gone" in seen.detail
    assert not list_probe_children()


def test_a_stopped_child_is_a_time_out(make: Make) -> None:
    """A child stopped by SIGSTOP while it measures gives a timeout, and is killed."""

    def stop(progress: ProbeProgress) -> None:
        if progress.phase == "measuring":
            for child in list_probe_children():
                child.suspend()

    started = time.monotonic()
    (seen,) = observe(make(HASTY), solo(2, 0, 8), report=stop)
    assert isinstance(seen, Failed)
    assert seen.cause == "timeout"
    assert time.monotonic() - started < GONE_SECONDS
    assert not list_probe_children()


@pytest.mark.parametrize(
    ("fail", "cause", "words"),
    [
        ("raise", "raised", "ValueError: synthetic was asked to raise"),
        ("exit", "exit", "exit code 3"),
        ("kill", "signal", "SIGKILL"),
        ("hang", "timeout", "no answer within"),
    ],
)
@pytest.mark.parametrize("at_step", [0, 3])
def test_a_workload_that_fails_is_a_failed_probe_in_one_line(
    make: Make, fail: str, cause: str, words: str, at_step: int
) -> None:
    """A failure in the first step or in a timed one gives the cause and the phase."""
    prober = make(HASTY if fail == "hang" else None, fail=fail, at_step=at_step)
    (seen,) = observe(prober, solo(2, 1, 8))
    assert isinstance(seen, Failed)
    assert seen.cause == cause
    assert words in seen.detail
    assert seen.detail.startswith("CPU:1, ")
    assert "\n" not in seen.detail


def test_running_out_of_memory_names_its_device_and_the_child_is_not_used_again(make: Make) -> None:
    """Solo or in a group, the device is named, and a smaller probe runs in another process."""
    prober = make(fail="memory", at_share=64)
    alone, other = observe(prober, solo(2, 0, 64), solo(2, 1, 8))
    assert isinstance(alone, OutOfMemory)
    assert alone.devices == (0,)
    assert isinstance(other, Timed)
    (group,) = observe(prober, layout_of((8, 64)))
    assert isinstance(group, OutOfMemory)
    assert isinstance(observe(prober, solo(2, 0, 8))[0], Timed)


def test_a_share_that_does_not_fit_at_once_is_measured_in_passes(make: Make) -> None:
    """Three passes need only the memory of the largest, solo and next to a rank with one pass."""
    devices = tuple(
        msgspec.structs.replace(each, limit=Limit(memory_bytes=32 << 20)) for each in slices(2)
    )
    prober = make(devices=devices, memory_per_sample_mib=1.0, memory_base_mib=0.0, base_ms=5.0)
    (whole,) = observe(prober, solo(2, 0, 64))
    assert isinstance(whole, OutOfMemory)
    for layout in (layout_of((64, 0), (22, 0)), layout_of((64, 8), (22, 8))):
        (seen,) = observe(prober, layout)
        assert isinstance(seen, Timed), seen
        assert seen.step_seconds > 0.015
        assert seen.memory_bytes[0] == 22 << 20


def run_of(prober: ChildProber, seconds: float, steps: int) -> Observation:
    """Return the observation of a whole run of the first device."""
    probe = Probe(solo(2, 0, 8), Stage.SOLO, seconds, whole=True, steps=steps)
    (seen,) = prober.measure((probe,), lambda _: None, threading.Event())
    return seen


def test_a_whole_run_lasts_its_time_or_its_steps(make: Make) -> None:
    """The run times all of its duration or steps, although a steady step is known long before."""
    prober = make(base_ms=2.0, noise=0.0)
    by_time, by_steps = run_of(prober, 0.6, 0), run_of(prober, 0.2, 200)
    assert isinstance(by_time, Timed)
    assert by_time.elapsed_seconds - by_time.start_seconds >= 0.6
    assert isinstance(by_steps, Timed)
    assert by_steps.steps == 200
    assert by_steps.memory_bytes[0]


def test_a_run_of_slow_steps_is_not_taken_for_a_hung_one(make: Make) -> None:
    """Steps that each take longer than the shortest timeout of a block don't count as hung."""
    seen = run_of(make(Timeouts(block=0.1), base_ms=120.0), 0.2, 8)
    assert isinstance(seen, Timed)
    assert seen.steps == 8
    assert seen.step_seconds > 0.1


def test_a_child_that_hangs_in_the_middle_of_a_run_of_steps_is_ended(make: Make) -> None:
    """A block that doesn't finish is given up, however many steps were requested."""
    started = time.monotonic()
    seen = run_of(make(HASTY, base_ms=2.0, fail="hang", at_step=200), 0.2, 1_000_000)
    assert isinstance(seen, Failed)
    assert seen.cause == "timeout"
    assert time.monotonic() - started < GONE_SECONDS
    assert not list_probe_children()


def test_chatter_on_standard_output_is_no_message(make: Make) -> None:
    """A workload may print anything."""
    assert isinstance(observe(make(fail="garbage"), solo(2, 0, 8))[0], Timed)


ASKS = (
    "import synthetic_workload\nsynthetic_workload.Synthetic.max_memory_bytes = lambda "
    "self: input()"
)


def test_nothing_can_be_read_from_standard_input(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A workload that asks for input fails at once, and can't read the child's commands."""
    site(monkeypatch, tmp_path, ASKS)
    (seen,) = observe(make(), solo(2, 0, 8))
    assert isinstance(seen, Failed)
    assert seen.cause == "raised"
    assert "EOFError" in seen.detail


RETRIES = """
import synthetic_workload
made = synthetic_workload.Synthetic
steps, own = [0], made.step
def step(self):
    steps[0] += 1
    return own(self)
made.step = step
made.count_memory_retries = lambda self: int({} * steps[0])
"""


@pytest.mark.parametrize(("a_step", "is_named"), [(1.5, True), (0.2, False)])
def test_an_allocator_that_frees_its_cache_in_most_steps_is_a_warning(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, a_step: float, is_named: bool
) -> None:
    site(monkeypatch, tmp_path, RETRIES.format(a_step))
    (seen,) = observe(make(), solo(2, 1, 8))
    assert isinstance(seen, Timed)
    found = [each for each in seen.warnings if each.code == "short_of_memory"]
    assert [each.device for each in found] == [1] * is_named
    assert not is_named or found[0].value == pytest.approx(a_step, rel=0.1)
    assert seen.is_short_of_memory(1) == is_named
    assert not seen.is_short_of_memory(0)


def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Run `code` in every server before evener's own code."""
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))


BABBLE = {
    "garbage": "import os; os.write(1, b'\\x00\\xff what is this\\n')",
    "half a line": (
        'import os; os.write(1, b\'{"type": "Ready"\'); os.close(1); os.open(os.devnull, '
        "os.O_WRONLY)"
    ),
    "100 MB in lines": (
        "import os\nfor _ in range(1600): os.write(1, b'x' * 63 + b'\\n' + b'y' * 65471 + b'\\n')"
    ),
    "100 MB without an end": "import os\nfor _ in range(1600): os.write(1, b'x' * 65536)",
    "a wrong reply": 'import os; os.write(1, b\'{"type":"Ran","steps":1}\\n\')',
    "deep nesting": "import os; os.write(1, b'[' * 60000 + b'\\n')",
}


@pytest.mark.parametrize("what", BABBLE)
def test_garbage_on_the_protocol_is_a_failed_probe_and_memory_stays_bounded(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    """Any amount of any garbage gives a failed probe, and memory stays bounded."""
    at_birth(monkeypatch, tmp_path, BABBLE[what])
    before = psutil.Process().memory_info().rss
    (seen,) = observe(make(), solo(2, 0, 8))
    assert isinstance(seen, Failed)
    assert seen.cause in ("protocol", "exit")
    assert len(seen.detail) < 500
    assert psutil.Process().memory_info().rss - before < 40 << 20


def test_100_mb_on_standard_error_are_drained_and_forgotten(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The child isn't blocked, and its output isn't kept in full."""
    at_birth(
        monkeypatch, tmp_path, "import os\nfor _ in range(1600): os.write(2, b'\\x1b[31mx' * 8192)"
    )
    before = psutil.Process().memory_info().rss
    assert isinstance(observe(make(), solo(2, 0, 8))[0], Timed)
    assert psutil.Process().memory_info().rss - before < 40 << 20


def test_a_child_that_closes_its_pipes_is_a_failed_probe(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Standard input or output is closed before the first message."""
    for descriptor in (0, 1):
        at_birth(monkeypatch, tmp_path, f"import os; os.close({descriptor})")
        (seen,) = observe(make(), solo(2, 0, 8))
        assert isinstance(seen, Failed)


def test_a_server_that_dies_while_it_imports_is_a_failed_probe_with_what_it_wrote(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The failed probe has the server's output, and the next probe gets a new server."""
    errors = tmp_path / "errors.txt"
    site(
        monkeypatch,
        tmp_path,
        "import os; os.write(2, b'no such instruction'); os.kill(os.getpid(), 4)",
    )
    resolved = Job(Request(), slices(2), "synthetic", "none")
    prober = ChildProber(resolved, error_file=errors)
    (seen,) = observe(prober, solo(2, 0, 8))
    assert isinstance(seen, Failed)
    assert (seen.cause, "SIGILL" in seen.detail) == ("signal", True), seen.detail
    assert "no such instruction" in errors.read_text()
    site(monkeypatch, tmp_path, "")
    assert isinstance(observe(prober, solo(2, 0, 8))[0], Timed)
    prober.close()


def test_all_children_share_a_server_and_end_with_it(make: Make) -> None:
    """All children exit with their server, and a new server replaces it."""
    prober = make()
    assert all(isinstance(seen, Timed) for seen in observe(prober, solo(2, 0, 8), solo(2, 1, 8)))
    assert isinstance(observe(prober, layout_of((8, 8)))[0], Timed)
    (server,) = list_children()
    assert len(list_probe_children()) == 4
    server.kill()
    deadline = time.monotonic() + GONE_SECONDS
    while list_children() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert isinstance(observe(prober, layout_of((8, 8)))[0], Timed)


def test_a_stop_ends_running_probes_at_once_and_invents_nothing(make: Make) -> None:
    """A stop gives no observation and leaves no busy child."""
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    started = time.monotonic()
    prober = make()
    assert not list(prober.measure((Probe(solo(2, 0, 8), Stage.SOLO, 60.0),), lambda _: None, stop))
    assert time.monotonic() - started < GONE_SECONDS
    assert not list_probe_children()


def test_closing_while_measuring_ends_the_children_and_the_probe(make: Make) -> None:
    """Closing from another thread, like a signal, ends the children and the probe."""
    prober = make()
    threading.Timer(0.5, prober.close).start()
    started = time.monotonic()
    assert not list(
        prober.measure((Probe(solo(2, 0, 8), Stage.SOLO, 60.0),), lambda _: None, threading.Event())
    )
    assert time.monotonic() - started < GONE_SECONDS


def test_a_child_that_can_t_be_started_is_a_failed_probe(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing Python gives a failed probe."""
    monkeypatch.setattr("sys.executable", "/no/such/python")
    (seen,) = observe(make(), solo(2, 0, 8))
    assert isinstance(seen, Failed)
    assert "could be started" in seen.detail


@pytest.mark.parametrize("moment", [0.0, 0.001, 0.003, 0.01, 0.03])
def test_closing_while_children_are_being_born_leaves_none(make: Make, moment: float) -> None:
    """A child that is being started when its prober closes exits at once."""
    prober = make()
    threading.Timer(moment, prober.close).start()
    assert not list(
        prober.measure(
            (Probe(solo(2, 0, 8), Stage.SOLO, 60.0), Probe(solo(2, 1, 8), Stage.SOLO, 60.0)),
            lambda _: None,
            threading.Event(),
        )
    )
    deadline = time.monotonic() + GONE_SECONDS
    while list_children() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not list_probe_children()


def test_a_child_that_died_while_it_rested_leaves_no_pipe_open() -> None:
    """The host drops a child that died while idle when the next one starts."""
    host = LocalHost(slices(1), "none", "synthetic")
    try:
        inbox: Inbox = queue.Queue()
        first = host.start_child(0, inbox, ChildEnvironment({}), None)
        inbox.get(timeout=GONE_SECONDS)  # the child is ready
        deadline = time.monotonic() + GONE_SECONDS
        # its server may report later that it runs
        while not first.pid and time.monotonic() < deadline:
            time.sleep(0.001)
        assert first.pid, "0 would be the group of the tests"
        os.killpg(first.pid, signal.SIGKILL)
        while first.alive and time.monotonic() < deadline:
            time.sleep(0.02)
        host.start_child(1, queue.Queue(), ChildEnvironment({}), None)
        assert first._stdin.closed
    finally:
        host.close()
