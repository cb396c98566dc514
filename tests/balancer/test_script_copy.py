"""Which of the user's own code is sent to another host, and the errors that come back
from there.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from evener.balancer.probes import script_copy
from evener.balancer.probes.failures import GroupError, RankFailure
from evener.balancer.probes.script_copy import WrittenScript, copy_script, copy_workload
from evener.errors import DeviceError, RequestError

SENT = ["parts/__init__.py", "parts/deep/__init__.py", "parts/deep/c.py", "sizes.py", "train.py"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return a script with a neighbour, a package, and folders that aren't packages."""
    files = {
        "train.py": "a",
        "sizes.py": "b",
        "parts/__init__.py": "",
        "parts/deep/__init__.py": "",
        "parts/deep/c.py": "c",
    }
    for name, text in {
        **files,
        "data/rows.py": "no",
        "data/rows.bin": "no",
        "notes.txt": "no",
    }.items():
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "work" / "train.py"


def test_python_files_beside_a_script_and_its_packages_travel(script: Path) -> None:
    made = copy_script(script)
    assert sorted(made.files) == [
        "parts/__init__.py",
        "parts/deep/__init__.py",
        "parts/deep/c.py",
        "sizes.py",
        "train.py",
    ]
    written = WrittenScript(made)
    there = Path(written.path)
    assert (there.name, there.read_text(), (there.parent / "parts/deep/c.py").read_text()) == (
        "train.py",
        "a",
        "c",
    )
    assert written.restore_paths(f"{there}:3: wrong") == f"{script}:3: wrong"
    written.close()
    assert not there.parent.exists()


def test_only_a_file_is_sent(script: Path) -> None:
    assert copy_workload("synthetic") is None
    assert copy_workload("package.module:build") is None
    found = copy_workload(f"{script}:build")
    assert found is not None
    assert found.name == "train.py"


def test_too_much_is_refused(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_copy, "LARGEST_BYTES", 2)
    with pytest.raises(RequestError, match="folder of its own"):
        copy_script(script)


def test_errors_keep_what_they_say_on_their_way_from_a_host() -> None:
    """They are serialized and made again, like copies."""
    failure = RankFailure(1, "device", "gone")
    assert copy.copy(GroupError(failure)).root == failure
    fault = copy.copy(DeviceError("No driver.", "Install it."))
    assert (fault.message, fault.remedy) == ("No driver.", "Install it.")
