"""Copy the user's script and its modules to other hosts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from evener.errors import RequestError
from evener.workloads.user_code import names_a_file

LARGEST_BYTES = 64 << 20


class ScriptCopy(msgspec.Struct, frozen=True):
    """The user's script and the other Python files in its folder, by relative path."""

    folder: str  # path of the script's folder
    name: str  # the script's file name
    files: dict[str, bytes]


def copy_script(script: Path) -> ScriptCopy:
    """Return a copy of a script with all modules and packages in its folder.

    Raises RequestError if these files exceed LARGEST_BYTES in total.
    """
    script = script.resolve()
    files = {
        str(path.relative_to(script.parent)): path.read_bytes()
        for path in _list_sources(script.parent)
    }
    if sum(map(len, files.values())) > LARGEST_BYTES:
        raise RequestError(
            f"The Python files beside {script} take more than {LARGEST_BYTES >> 20} MiB.",
            "Move the script to a folder of its own, so that it can be sent to the other hosts.",
        )
    return ScriptCopy(str(script.parent), script.name, files)


def copy_workload(workload: str) -> ScriptCopy | None:
    """Return a copy of the script that a workload like "train.py:build" names.

    Returns None for a workload that isn't in a file. Raises RequestError if the script and the
    modules in its folder are too large.
    """
    home = workload.rpartition(":")[0]
    return copy_script(Path(home)) if home and names_a_file(home) else None


def _list_sources(folder: Path) -> Iterator[Path]:
    """Yield the Python files of a folder and its packages."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py" and path.is_file():
            yield path
        elif (path / "__init__.py").is_file():
            yield from _list_sources(path)


class WrittenScript:
    """A copy of a script, written to a temporary folder of this host."""

    def __init__(self, script: ScriptCopy) -> None:
        self._script = script
        self._folder = tempfile.mkdtemp(prefix="evener-")
        for name, content in script.files.items():
            path = Path(self._folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    @property
    def path(self) -> str:
        """Path of the copied script."""
        return f"{self._folder}/{self._script.name}"

    def restore_paths(self, text: str) -> str:
        """Replace the temporary folder in an error text with the folder of the original script."""
        return text.replace(self._folder, self._script.folder)

    def close(self) -> None:
        """Delete the temporary folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
