"""The journal: on disk at once, incomplete ends cut off, broken lines named, other users' files
refused.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.balancer import journal
from evener.balancer.journal import AskedEntry, Header, LaterEntry, ObservationEntry
from evener.balancer.old_verdicts import upgrade_verdict
from evener.balancer.request import Request
from evener.balancer.types import Failed, OutOfMemory, Probe, Stage, Timed, solo
from evener.balancer.verdict import (
    AdapterMemory,
    Chosen,
    LeftOut,
    MeasuredRate,
    StateMemory,
    Verdict,
)
from evener.devices.types import Device
from evener.errors import EvenerError, RequestError

DEVICES = (
    Device("cpu-0-of-2", 0, "CPU", "cpu", 1 << 30, (0,)),
    Device("cpu-1-of-2", 1, "CPU", "cpu", None, (1,)),
)
HEADER = Header(
    "20260101-000000-abcd", "2026-01-01T00:00:00Z", Request(), DEVICES, "synthetic", "none", "0"
)
PROBE = Probe(solo(2, 0, 8), Stage.SOLO, 1.0)
TIMED = Timed(PROBE, 0.01, 0.009, 0.011, 50, (1 << 20, None), (0.01, None), 0.1, 1.0)
ENTRIES: list[LaterEntry] = [
    AskedEntry((PROBE,), 0.0),
    ObservationEntry(TIMED, 1.0),
    ObservationEntry(OutOfMemory(PROBE, (0,), "full", 0.5), 1.5),
    ObservationEntry(Failed(PROBE, "signal", "SIGSEGV", (0,), 0.1), 1.6),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a journal with a header and an entry of each kind."""
    path = tmp_path / "run" / "journal.jsonl"
    written = journal.create(path, HEADER)
    for entry in ENTRIES:
        written.append(entry)
    written.close()
    return path


def test_an_old_verdict_is_read_by_its_new_names() -> None:
    """Journals before 0.3 have other names for some fields."""
    found = Verdict(
        chosen=Chosen("solo", "one_device", "8 on CPU:0", ("CPU:0",), (8,), (8,), 8),
        rate=MeasuredRate(100.0, 99.0, 101.0),
        left_out=(LeftOut("device", "CPU:1", "failed", "SIGSEGV"),),
        state=StateMemory(9, ("CPU:0",), (), (AdapterMemory("lora", "LoRA", 1, ("CPU:0",)),)),
    )
    today = json.loads(msgspec.json.encode(found))
    old = json.loads(msgspec.json.encode(found))
    old["figure"] = old.pop("rate")
    old["chosen"]["answer"] = old["chosen"].pop("description")
    old["left_out"] = [{"what": "device", "name": "CPU:1", "reason": "failed", "why": "SIGSEGV"}]
    old["state"]["whole_on"] = old["state"].pop("fits_on")
    old["state"]["adapters"][0]["fits"] = old["state"]["adapters"][0].pop("fits_on")
    assert msgspec.convert(upgrade_verdict(old), Verdict) == found
    assert upgrade_verdict(today) == today


def test_what_was_written_is_read_back(path: Path) -> None:
    """Header and entries, in order, in a file that only this user can read."""
    record = journal.read(path)
    assert record.header == HEADER
    assert list(record.entries) == ENTRIES
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_cut_off_on_resume(path: Path, cut: int) -> None:
    """The lines before it are kept, and the next line begins in its place."""
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    assert list(journal.read(path).entries) == ENTRIES[:-1]
    again, _ = journal.reopen(path)
    again.append(ENTRIES[-1])
    again.close()
    assert path.read_bytes() == content


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(path: Path) -> None:
    """Nothing after it is silently trusted."""
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2][:20]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(RequestError, match=r"journal.jsonl: line 3 is broken") as fault:
        journal.read(path)
    assert "line 3" in fault.value.remedy


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"step_seconds":0.01', b'"step_seconds":-1.0'),
        (b'"step_seconds":0.01', b'"step_seconds":1e300'),
        (b'"low_seconds":0.009', b'"low_seconds":0.5'),
        (b'"shares":[8,0]', b'"shares":[8,0,1]'),
        (b'"shares":[8,0]', b'"shares":[-8,16]'),
        (b'"memory_bytes":[1048576,null]', b'"memory_bytes":[1048576]'),
    ],
)
def test_numbers_that_no_measurement_has_are_refused(path: Path, old: bytes, new: bytes) -> None:
    """Negative times, crossed intervals, shares for devices that don't exist."""
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))
    with pytest.raises(RequestError, match=r"line \d+ "):
        journal.read(path)


def test_a_newer_schema_says_so(path: Path) -> None:
    """The message is the same if the file has entries that this version doesn't know."""
    path.write_bytes(path.read_bytes().replace(b'"schema":2', b'"schema":7,"more":true'))
    with pytest.raises(RequestError, match="schema 7"):
        journal.read(path)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"{}\n", b'{"entry":"asked","probes":[],"at_seconds":0}\n']
)
def test_a_file_without_a_header_is_no_journal(path: Path, content: bytes) -> None:
    """One sentence, whatever the file contains."""
    path.write_bytes(content)
    with pytest.raises(RequestError):
        journal.read(path)


def test_a_file_that_others_may_write_is_not_trusted(path: Path) -> None:
    """A link, a folder or a pipe in its place isn't trusted either."""
    path.chmod(0o666)
    with pytest.raises(RequestError, match="not trusted"):
        journal.read(path)
    path.chmod(0o600)
    link = path.with_name("link.jsonl")
    link.symlink_to(path)
    with pytest.raises(RequestError, match="can't be read"):
        journal.read(link)
    pipe = path.with_name("pipe.jsonl")
    os.mkfifo(pipe)
    with pytest.raises(RequestError, match="not a plain file"):
        journal.read(pipe)
    with pytest.raises(RequestError):
        journal.read(path.parent)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_not_trusted(path: Path) -> None:
    """The mode of the file doesn't matter."""
    os.chown(path, 12345, 12345)
    with pytest.raises(RequestError, match="belongs to"):
        journal.read(path)


FILL = """
import resource, sys
from pathlib import Path

from evener.balancer import journal
from evener.errors import RequestError
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
written, record = journal.reopen(Path({path!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    written.append(record.entries[1])
except RequestError as fault:
    print(fault)
"""


def test_a_full_disk_is_a_one_line_error_and_leaves_what_was_written(path: Path) -> None:
    """A line that no longer fits is removed completely."""
    content = path.read_bytes()
    code = FILL.format(path=str(path), limit=len(content) + 30)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "can't be written: File too large" in done.stdout
    assert done.stdout.count("\n") == 1
    assert path.read_bytes() == content
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_folder_that_can_t_be_made_is_a_one_line_error(tmp_path: Path) -> None:
    """There is a file in place of the folder."""
    (tmp_path / "in the way").write_text("")
    with pytest.raises(RequestError, match="can't be written") as fault:
        journal.create(tmp_path / "in the way" / "journal.jsonl", HEADER)
    assert "XDG_STATE_HOME" in fault.value.remedy


def test_two_journals_of_one_name_are_never_one(path: Path) -> None:
    """Creating a journal doesn't touch an existing file."""
    content = path.read_bytes()
    with pytest.raises(RequestError):
        journal.create(path, HEADER)
    assert path.read_bytes() == content


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_damage_is_read_or_refused_with_a_one_line_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bytes changed, removed or inserted anywhere give a record or an error, never a traceback."""
    content = b"\n".join(msgspec.json.encode(entry) for entry in [HEADER, *ENTRIES]) + b"\n"
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        length = data.draw(st.integers(0, 30))
        content = content[:at] + data.draw(st.binary(max_size=20)) + content[at + length :]
    path = tmp_path_factory.mktemp("fuzz") / "journal.jsonl"
    path.write_bytes(content)
    path.chmod(0o600)
    said = ""
    try:
        assert journal.read(path).header.schema in (1, 2)
    except EvenerError as fault:
        said = fault.message
    assert "\n" not in said
