"""Recordings survive a torn end and refuse what they don't know; the plain monitor prints once, in a loop, and JSON."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.devices.recording import Recorder, Recording
from evener.errors import RequestError
from evener.tui.cli.monitor import monitor

SIM = "sim:gtx1080ti,gtx1080"


def _recorded(path: Path, script: Any, ticks: int = 3) -> Path:
    with Recorder(path, "node7") as recorder:
        for tick in range(ticks):
            assert recorder.write(script.snapshot(at_seconds=1000.0 + tick))
    return path


def _printed(*arguments: Any, **options: Any) -> str:
    with redirect_stdout(io.StringIO()) as out:
        monitor(*arguments, **options)
    return out.getvalue()


def test_what_was_recorded_comes_back_equal(tmp_path: Path, script: Any) -> None:
    recording = Recording(_recorded(tmp_path / "a.jsonl", script))
    assert len(recording) == 3
    assert recording.snapshot(1) == script.snapshot(at_seconds=1001.0)
    assert recording.header.hostname == "node7"
    recording.close()


def test_a_recording_from_before_trainings_were_kept_comes_back(tmp_path: Path, script: Any) -> None:
    path = _recorded(tmp_path / "a.jsonl", script)
    assert b',"reports":[]' in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(b',"reports":[]', b""))
    recording = Recording(path)
    assert recording.snapshot(2) == script.snapshot(at_seconds=1002.0)
    recording.close()


def test_a_torn_last_line_is_left_out(tmp_path: Path, script: Any) -> None:
    path = _recorded(tmp_path / "a.jsonl", script)
    path.write_bytes(path.read_bytes()[:-40])
    recording = Recording(path)
    assert len(recording) == 2
    recording.close()


def test_a_broken_line_in_the_middle_is_named_and_ends_a_replay(tmp_path: Path, script: Any) -> None:
    path = _recorded(tmp_path / "a.jsonl", script)
    rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([rows[0], rows[1], b'{"at_seconds": "x"}\n', rows[3]]))
    source = Recording(path)
    assert source.sample().at_seconds == 1000.0
    broken = source.sample()
    assert "line 3" in broken.notes[0]
    assert source.ended
    source.close()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a recording"),
        (b"hello\n", "is not a recording"),
        (b"\xff\xfe\n", "is not a recording"),
        (b"[" * 200_000 + b"\n", "is not a recording"),
        (b'{"evener_monitor": 9}\n', "version 9"),
        (b'{"evener_monitor": 1}\n', "holds no snapshot"),
        (b'{"evener_monitor": 1}\n{"at_sec', "holds no snapshot"),
    ],
)
def test_other_files_are_one_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(RequestError) as caught:
        Recording(path)
    assert said in caught.value.message
    assert caught.value.exit_code == 2


def test_a_missing_recording_and_a_folder_are_one_sentence(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(RequestError, match="can't be read"):
            Recording(path)


def test_a_recording_replaces_nothing_and_stays_within_its_size(tmp_path: Path, script: Any) -> None:
    path = _recorded(tmp_path / "a.jsonl", script)
    with pytest.raises(RequestError, match="exists already"):
        Recorder(path)
    with Recorder(tmp_path / "b.jsonl", largest_bytes=4000) as recorder:
        written = [recorder.write(script.snapshot()) for _ in range(5)]
    assert written[-1] is False
    assert recorder.full
    assert (tmp_path / "b.jsonl").stat().st_size <= 4000


def test_a_replay_gives_each_snapshot_then_says_that_it_ended(tmp_path: Path, script: Any) -> None:
    source = Recording(_recorded(tmp_path / "a.jsonl", script))
    assert [device.id for device in source.devices()] == ["gpu-0", "gpu-1"]
    assert [source.sample().at_seconds for _ in range(3)] == [1000.0, 1001.0, 1002.0]
    assert source.sample().notes[-1] == "The recording ends here."
    source.close()


def test_once_prints_every_device_without_colour() -> None:
    text = _printed(SIM, once=True)
    assert "SIM:0 GTX 1080 Ti" in text
    assert "SIM:1 GTX 1080" in text
    assert "none is measured" in text
    assert "\x1b" not in text


def test_json_is_one_object_with_units_in_its_keys() -> None:
    reading = json.loads(_printed(SIM, as_json=True))
    first = reading["devices"][0]
    assert first["device"]["name"] == "GTX 1080 Ti"
    assert first["power_watts"]["state"] == "value"
    assert first["utilization_percent"]["value"] == 0.0
    assert msgspec.json.encode(reading)


def test_too_short_an_interval_is_refused_with_its_reason() -> None:
    with pytest.raises(RequestError, match="slow the devices down"):
        monitor(SIM, interval="0.01")


def test_a_loop_prints_one_object_a_line_until_the_reader_goes(tmp_path: Path) -> None:
    class ThreeLines(io.StringIO):
        def write(self, text: str) -> int:
            if self.getvalue().count("\n") == 3:
                raise BrokenPipeError
            return super().write(text)

    out = ThreeLines()
    record = tmp_path / "r.jsonl"
    with pytest.raises(BrokenPipeError), redirect_stdout(out):
        monitor(SIM, as_json=True, interval="0.1", record=record)
    assert [len(json.loads(row)["devices"]) for row in out.getvalue().splitlines()] == [2, 2, 2]
    recording = Recording(record)
    assert len(recording) == 3, "what was shown is what was kept"
    recording.close()


def test_a_recording_is_replayed_to_its_end(tmp_path: Path, script: Any) -> None:
    path = _recorded(tmp_path / "a.jsonl", script)
    rows = _printed("auto", as_json=True, interval="0.1", replay=path).splitlines()
    assert [json.loads(row)["at_seconds"] for row in rows] == [1000.0, 1001.0, 1002.0]
    assert json.loads(rows[0])["trainings"] == []
    assert json.loads(_printed("auto", as_json=True, replay=path))["at_seconds"] == 1002.0


def test_a_stream_without_unicode_gets_ascii() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    with redirect_stdout(out):
        monitor(SIM, once=True)
    assert raw.getvalue().decode("ascii")
