"""A full disk or a kill while a sharded model is saved leaves the previous checkpoint intact."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_disk import fill

torch: Any = pytest.importorskip("torch")
checkpoint: Any = pytest.importorskip("evener.torch.shards.checkpoint")
load_file: Any = pytest.importorskip("safetensors.torch").load_file


def write(folder: Path, value: float, end: Any = None) -> str:
    """Write a checkpoint of two files, call `end` after each, and return the error."""
    writer = checkpoint._Writer(folder, True, checkpoint.INDEX)
    writer.run(writer.open)
    for name in ("first", "second"):
        writer.write("model", {name: torch.full((1000,), value)})
        if end is not None:
            end()
    writer.run(lambda: writer.close({"extra": value}))
    fault: str = writer.fault
    return fault


def read(folder: Path) -> set[float]:
    """Return the values in the checkpoint's tensors and in its index."""
    index = json.loads((folder / checkpoint.INDEX).read_text())
    tensors = [load_file(folder / file)[name] for name, file in index["weight_map"].items()]
    assert len(tensors) == 2
    return {
        index["metadata"]["evener"]["extra"],
        *(float(each) for tensor in tensors for each in tensor),
    }


def test_a_full_disk(small_disk: Path) -> None:
    folder = small_disk / "checkpoint"
    assert write(folder, 1.0) == ""
    fault = write(folder, 2.0, lambda: fill(small_disk, 2000))
    assert str(folder) in fault
    assert "can't be written" in fault
    assert read(folder) == {1.0}
    assert len(list(folder.iterdir())) == 3, "what was written of the new one is gone"
    (small_disk / "filler").unlink()
    assert write(folder, 3.0) == ""
    assert read(folder) == {3.0}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_ended(tmp_path: Path, number: int) -> None:
    write(tmp_path, 1.0)
    child = os.fork()
    if not child:
        try:
            write(tmp_path, 2.0, lambda: os.kill(os.getpid(), number))
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    assert read(tmp_path) == {1.0}
    write(tmp_path, 3.0)
    assert read(tmp_path) == {3.0}
    assert len(list(tmp_path.iterdir())) == 3, "what the ended one has left is gone"
