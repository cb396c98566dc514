"""Everything that evener parses, as fuzzing targets.

Each turns bytes into a value or an EvenerError, never another exception.
tests/faults/test_fuzz_texts.py passes them mutated seeds for seconds, `python -m benchmarks.fuzz`
for as long as requested.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from evener.balancer import journal
from evener.balancer.events import Finished
from evener.balancer.probes import protocol
from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.balancer.session_state import SessionState, advance
from evener.balancer.store import runs
from evener.balancer.store.runs import recorded_events
from evener.devices.discover import discover, open_source
from evener.devices.simulated import parse_machine
from evener.devices.terms import parse_limit, write_limit
from evener.devices.types import Snapshot
from evener.errors import EvenerError
from evener.live.files import file_name, read_trainings, start_ticks
from evener.plan.file import Plan, parse_plan, to_json, to_toml
from evener.printable import plain
from evener.tui.cli.monitor import snapshot_text
from evener.tui.cli.session_runner import search_screen
from evener.tui.text.parsing import parse_duration, parse_settings
from evener.tui.text.summaries import event_line, summary_lines
from evener.workloads import registry
from tests.support.machines import samples_per_second

Target = Callable[[bytes], object]
LONGEST_MESSAGE = 10_000  # characters of an error, not counting quotes of the input
# longer journals aren't replayed, because the cost grows with every observation
REPLAYED_LINES = 60
MACHINE = """[sync]
base_ms = 12.0
per_device_ms = 10.0
[[device]]
name = "Fast"
memory_mib = 11178
memory_base_mib = 1500.0
memory_per_sample_mib = 8.2
noise = 0.005
curve = [[64, 93.6], [256, 226.7], [1024, 761.3]]
stall_ms = 1.5
contention = 0.1
[[device]]
name = "Slow"
memory_mib = 8000
memory_curve = [[1, 900.0], [512, 6000.0]]
curve = [[64, 150.0], [512, 900.0]]
pack_gain = [[2, 1.2], [4, 1.3]]
[[placement]]
name = "halves"
curve = [[1, 5.0], [64, 90.0]]
[[event]]
at_seconds = 5.0
until_seconds = 20.0
device = 1
memory_taken_mib = 3000.0
slowed = 0.3
[[event]]
at_seconds = 15.0
device = 0
lost = true
"""
_WORD = re.compile(rb'"[^"\n]*"|-?\d[\d.e+-]*|true|false|null|\[[^\[\]\n]*\]|\{[^{}\n]*\}')
ODD = (
    *(
        b"-1",
        b"0",
        b"1",
        b"1e999",
        b"-0.0",
        b"1e-320",
        b"NaN",
        b"inf",
        b"9" * 400,
        b"9223372036854775807",
        b"1e15",
    ),
    *(
        b"-9223372036854775809",
        b"null",
        b"true",
        b'""',
        b"[]",
        b"{}",
        b"[[]]",
        b"\n",
        b"\n\n",
        b"'",
        b'"""',
        b'"a"',
    ),
    *(
        b"\x1b[2J",
        b'"\\u001b[2J\\u202e\\u009b"',
        b"\xff\xfe",
        "\u202e\x9b".encode(),
        b'"\\ud800"',
        b"\x00",
    ),
    *(
        b"[" * 3000,
        b'{"a":' * 500,
        b"1" * 5000,
        b'"split"',
        b'"place"',
        b'"pack"',
        b'"failed"',
        b'"out_of_memory"',
    ),
)
REPLY = (
    protocol.Ready(),
    protocol.Built({"framework": "none", "digest": "x"}),
    protocol.Prepared(0.5),
    protocol.Ran(3, 0.5, 0.4, 0.0, (1024, None)),
    protocol.ChildError(("ValueError",), "bad", "file.py:3"),
)


@contextlib.contextmanager
def _file(data: bytes, name: str = "input") -> Iterator[Path]:
    """Yield a file with these bytes that only its user can write."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        path.chmod(0o600)
        yield path


def fuzz_plan(data: bytes) -> None:
    """Check that a readable plan is written again as the same plan and can be shown."""
    plan = parse_plan(data)
    assert parse_plan(to_toml(plan)) == parse_plan(to_json(plan))
    _show(
        "\n".join(summary_lines(plan, [str(share.index) for share in plan.layout.share], "verdict"))
    )


def fuzz_machine(data: bytes) -> None:
    """Check that a readable machine has a finite speed, and that a search on it ends."""
    machine = parse_machine(data)
    assert samples_per_second(machine, (1,) * len(machine.devices)) >= 0
    if len(machine.devices) <= 3:
        _search(data)


def _search(data: bytes) -> None:
    with _file(data, "machine.toml") as path:
        session = Session(
            open_run(Request(devices=f"sim:{path}", budget_seconds=30.0, max_global_batch=512))
        )
        try:
            for event in session.events():
                assert event is not None
        finally:
            session.close()


def fuzz_journal(data: bytes) -> None:
    """Check that a readable journal can be shown, replayed, and turned into a plan."""
    with _file(data) as path:
        record = journal.read(path)
    if len(record.entries) > REPLAYED_LINES:
        return
    state = SessionState()
    for event in recorded_events(record):
        state = advance(state, event)
        _show(
            event_line(event, state.devices) or "",
            *(line.text for line in search_screen(state, 100)),
        )
    runs.recover(record)


def fuzz_live(data: bytes) -> None:
    """Check that a live file of this process is a report or is ignored."""
    name = file_name(os.getpid(), start_ticks(os.getpid()) or 0, 1)
    with _file(data, name) as path:
        path.parent.chmod(0o700)
        for training in read_trainings([path.parent]):
            _show(
                training.framework, training.workload, *(device.id for device in training.devices)
            )


def fuzz_reply(data: bytes) -> None:
    """Check that a child's output is a reply or unreadable, and is shown in one line."""
    for text in data.split(b"\n"):
        said = protocol.parse_reply(text)
        assert isinstance(said, protocol.Reply | protocol.InvalidReply)
        if isinstance(said, protocol.ChildError):
            from evener.balancer.probes.failures import error_failure

            assert "\n" not in error_failure(0, said).detail


def fuzz_snapshot(data: bytes) -> None:
    """Check that the texts of drivers and processes are drawn without control characters."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        snapshot = msgspec.json.decode(data, type=Snapshot)
        _show(*snapshot_text(snapshot, 100, colour=False).splitlines())


def fuzz_devices(data: bytes) -> None:
    """Parse values of `--devices`, except those that name files."""
    spec = data.decode(errors="surrogateescape")
    if "/" not in spec.split("cpu")[0] and ".toml" not in spec.lower():
        found = discover(spec)
        assert found.devices


def fuzz_limit(data: bytes) -> None:
    """Check that a readable limit is written and read again as the same limit."""
    limit = parse_limit(data.decode(errors="surrogateescape"))
    assert parse_limit(write_limit(limit)) == limit


def fuzz_settings(data: bytes) -> None:
    """Parse `--set` pairs, one per line, for a workload that has settings."""
    pairs = data.decode(errors="surrogateescape").split("\n")
    registry.resolve_settings(registry.find("torch_gru"), parse_settings(pairs))


def fuzz_numbers(data: bytes) -> None:
    """Parse budgets and intervals."""
    with contextlib.suppress(EvenerError):
        parse_duration(data.decode(errors="surrogateescape"), "--budget")


def _show(*lines: str) -> None:
    """Check that the terminal gets plain text."""
    for line in lines:
        for part in line.split("\n"):
            assert part == plain(part, len(part) + 1), f"raw on the terminal: {part!r}"


TARGETS: dict[str, Target] = {
    "plan": fuzz_plan,
    "machine": fuzz_machine,
    "journal": fuzz_journal,
    "live": fuzz_live,
    "reply": fuzz_reply,
    "snapshot": fuzz_snapshot,
    "devices": fuzz_devices,
    "limit": fuzz_limit,
    "settings": fuzz_settings,
    "numbers": fuzz_numbers,
}


def call(target: Target, data: bytes) -> None:
    """Run one input. An EvenerError is fine if its message is neither empty nor too long."""
    fault = _fault(target, data)
    assert fault is None or fault.message, "a fault without words"
    assert len(str(fault)) < LONGEST_MESSAGE + 8 * len(data), "a fault longer than anybody reads"


def _fault(target: Target, data: bytes) -> EvenerError | None:
    try:
        target(data)
    except EvenerError as fault:
        return fault
    return None


@cache
def seeds(name: str) -> tuple[bytes, ...]:
    """Return valid inputs of a target, to be mutated."""
    if name in ("plan", "journal"):
        texts, plan = _measured()
        return (to_toml(plan), to_json(plan)) if name == "plan" else texts
    made: dict[str, tuple[bytes, ...]] = {
        "machine": (MACHINE.encode(),),
        "live": (
            b'{"framework":"torch","workload":"w","samples_per_second":5.5,"step":3,"updated_at":1.7e9,'
            b'"devices":[{"id":"GPU-1","index":0,"batch":8,"samples_per_second":5.5}]}',
        ),
        "reply": (b"".join(protocol.encode_line(reply) for reply in REPLY),),
        "snapshot": (_sampled(),),
        "devices": (
            b"auto",
            b"cpu/2:0,1@60%+8GiB",
            b"sim:gtx1080ti,gtx1080@50%",
            b"gpu:GPU-12",
            b"cpu@1GiB,cpu:1",
        ),
        "limit": (b"60%+8GiB", b".5%", b"1.25TB"),
        "settings": (b'base_ms=4\nnoise=0.5\nfail="raise"', b"parameters=[1,2]\nat_step=1e3"),
        "numbers": (b"120s", b"1.5h", b"90", b"0,2,5"),
    }
    return made[name]


def _measured() -> tuple[tuple[bytes, ...], Plan]:
    """Return a plan, and journals of short searches on simulated devices.

    One of the searches runs out of memory.
    """
    requests = (
        Request(devices="sim:gtx1080ti,gtx1080", max_global_batch=256),
        Request(devices="sim:gtx1080ti"),
    )
    plans = []
    with tempfile.TemporaryDirectory() as folder, environment("XDG_STATE_HOME", folder):
        for request in requests:
            session = Session(open_run(request))
            plans += [event.plan for event in session.events() if isinstance(event, Finished)]
            session.close()
        journals = sorted(Path(folder).glob("evener/runs/*/journal.jsonl"))
        return tuple(path.read_bytes() for path in journals), plans[0]


def _sampled() -> bytes:
    with contextlib.closing(open_source(discover("cpu"))) as source:
        return msgspec.json.encode(source.sample())


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def mutations(first: tuple[bytes, ...]) -> SearchStrategy[bytes]:
    """Return seeds with numbers, words or other pieces replaced, or any bytes."""
    odd = st.sampled_from(ODD)
    edit = st.tuples(
        st.booleans(),
        st.integers(0, 1 << 20),
        st.sampled_from((0, 0, 1, 2, 10, 40, 400)),
        odd | st.binary(max_size=6),
    )
    mutated = st.builds(_edited, st.sampled_from(first), st.lists(edit, min_size=1, max_size=4))
    return mutated | mutated | mutated | odd | st.binary(max_size=200)


def _edited(data: bytes, edits: list[tuple[bool, int, int, bytes]]) -> bytes:
    """Return the data after these edits.

    Each edit replaces a word, a number or a number of bytes. It swaps two lines if its piece is a
    line's end.
    """
    for whole, at, length, piece in edits:
        words = list(_WORD.finditer(data)) if whole else []
        if piece == b"\n" and data.count(b"\n") > 1:
            lines = data.split(b"\n")
            one, two = at % len(lines), (at // 7) % len(lines)
            lines[one], lines[two] = lines[two], lines[one]
            data = b"\n".join(lines)
            continue
        start, end = words[at % len(words)].span() if words else (at % (len(data) + 1),) * 2
        data = data[:start] + piece + data[end + (0 if words else length) :]
    return data
