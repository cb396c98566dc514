"""The checks behind `evener doctor`; frameworks are checked in children, so that none is loaded here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec

from evener.devices.backend import Backend
from evener.devices.registry import all_backends
from evener.errors import DeviceError, EvenerError

Level = Literal["ok", "note", "problem"]

IMPORT_SECONDS = 120
_QUERIES = {
    "tensorflow": "import tensorflow as m; print(m.__version__, len(m.config.list_physical_devices('GPU')))",
    "torch": "import torch as m; print(m.__version__, m.cuda.device_count())",
}
_INSTALL = {
    "tensorflow": "pip install 'evener[tensorflow]', or evener[gpu] with an NVIDIA GPU",
    "torch": "pip install 'evener[torch]'",
}
EXTRAS = {  # what each adds, and the modules that it brings
    "app": ("the full-screen app", ("textual", "textual_plotext")),
    "web": ("the app in a browser", ("textual_serve",)),
    "plot": ("evener report", ("matplotlib",)),
    "metrics": ("monitor --metrics", ("prometheus_client",)),
    "huggingface": ("transformers' trainers", ("transformers", "accelerate")),
    "lightning": ("Lightning", ("lightning",)),
    "ray": ("several machines", ("ray",)),
}


class Check(msgspec.Struct, frozen=True):
    """The result of one check."""

    name: str
    level: Level
    found: str  # one line
    remedy: str = ""


def check_machine() -> tuple[Check, ...]:
    """Run every check; never raises. A framework that hangs is reported after two minutes."""
    drivers = [_check_driver(backend) for backend in all_backends() if backend.maker]
    return (
        Check("python", "ok", f"{platform.python_version()} at {sys.executable}"),
        *(check for check, _ in drivers),
        *_check_frameworks(sum(count for _, count in drivers)),
        *_check_clashes(),
        _check_extras(),
        _check_state_folder(),
        _check_folder("temporary folder", Path(tempfile.gettempdir()), "TMPDIR"),
    )


def _check_driver(backend: Backend) -> tuple[Check, int]:
    """The version of a maker's driver, and its number of devices."""
    name = f"{backend.maker} driver"
    try:
        listing = backend.list_devices()
    except DeviceError as fault:
        return Check(name, "note", fault.message, f"{fault.remedy} Without it, CPU slices are used."), 0
    count = len(listing.devices)
    if listing.notes:
        return Check(name, "problem", " ".join(listing.notes), backend.remedy), count
    return Check(name, "ok", f"{listing.driver}, {count} device{'s' * (count != 1)}"), count


def _check_frameworks(gpus: int) -> list[Check]:
    """Check the frameworks; one that works is enough, and what is wrong with the other is then a note."""
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda name: _check_framework(name, gpus), _QUERIES))
    if all(check.level == "problem" for check in found):
        return found
    return [msgspec.structs.replace(check, level="note") if check.level == "problem" else check for check in found]


def _check_framework(name: str, gpus: int) -> Check:
    if importlib.util.find_spec(name) is None:
        return Check(name, "problem", "not installed", f"To use it: {_INSTALL[name]}.")
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-P", "-c", _QUERIES[name]]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return Check(name, "problem", f"import took over {IMPORT_SECONDS} s", f"Reinstall it: {_INSTALL[name]}.")
    words = answer.stdout.split()
    if answer.returncode != 0 or len(words) != 2:
        lines = answer.stderr.strip().splitlines()
        detail = lines[-1] if lines else f"exit code {answer.returncode}"
        return Check(name, "problem", f"can't be imported: {detail}", f"Reinstall it: {_INSTALL[name]}.")
    return _compare_gpus(name, words[0], int(words[1]), gpus)


def _compare_gpus(name: str, version: str, seen: int, gpus: int) -> Check:
    """The check that a framework that works sees all GPUs of the driver."""
    found = f"{version}, sees {seen} of {gpus} GPUs"
    if seen < gpus:
        variables = " and ".join(filter(None, (backend.visible_variable for backend in all_backends())))
        remedy = f"Check {variables}" + ("; or install evener[gpu]." if name == "tensorflow" else ".")
        return Check(name, "note", found, remedy)
    return Check(name, "ok", found)


def _check_clashes() -> list[Check]:
    """Installed packages that don't work together."""
    checks = []
    doubles = [pair for backend in all_backends() for pair in backend.double_packages]
    for extra, needed in (*doubles, ("tensorflow-cpu", "tensorflow")):
        if (version := _version(extra)) and _version(needed):
            remedy = f"Remove it, and install {needed} again: both provide the same module."
            checks.append(Check(f"{extra} package", "note", f"{version}, in addition to {needed}", remedy))
    keras = _version("keras")
    if keras and tuple(int(part) for part in keras.split(".")[:2]) < (3, 12):
        checks.append(Check("keras", "problem", f"{keras} with evener's Keras adapter", "Install keras 3.12 or newer."))
    return checks


def _check_extras() -> Check:
    """What evener does without, as each extra is optional, and the line that adds it."""
    missing = [name for name, (_, modules) in EXTRAS.items() if not all(map(importlib.util.find_spec, modules))]
    have = ", ".join(name for name in EXTRAS if name not in missing) or "none"
    if not missing:
        return Check("extras", "ok", have)
    without = ", ".join(f"{name} ({EXTRAS[name][0]})" for name in missing)
    remedy = f"Add those that you need: pip install 'evener[{','.join(missing)}]'."
    return Check("extras", "note" if "app" in missing else "ok", f"{have}; not installed: {without}", remedy)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_state_folder() -> Check:
    from evener.system.state_folders import runs_folder

    try:
        folder = runs_folder()
    except EvenerError as fault:
        return Check("runs folder", "problem", fault.message, fault.remedy)
    return _check_folder("runs folder", folder, "XDG_STATE_HOME")


def _check_folder(name: str, folder: Path, variable: str) -> Check:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as stream:
            stream.write(b"evener")
    except OSError as error:
        remedy = f"Set {variable} to a folder that you may write to."
        return Check(name, "problem", f"{folder}: {error.strerror or error}", remedy)
    return Check(name, "ok", str(folder))
