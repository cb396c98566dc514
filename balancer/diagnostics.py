"""The checks behind `evener doctor`. Frameworks are asked in children, so that none is loaded here."""

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

from evener.errors import EvenerError

Level = Literal["ok", "note", "problem"]

_ASK_SECONDS = 120
_ASK = {
    "tensorflow": "import tensorflow as m; print(m.__version__, len(m.config.list_physical_devices('GPU')))",
    "torch": "import torch as m; print(m.__version__, m.cuda.device_count())",
}
_INSTALL = {
    "tensorflow": "pip install 'evener[tensorflow]', or evener[gpu] with an NVIDIA GPU",
    "torch": "pip install torch",
}


class Check(msgspec.Struct, frozen=True):
    """One thing looked at."""

    name: str
    level: Level
    found: str  # one line
    remedy: str = ""


def check_machine() -> tuple[Check, ...]:
    """Look at everything; never raises. A framework that hangs is reported after two minutes."""
    driver, gpus = _check_driver()
    with ThreadPoolExecutor() as pool:
        frameworks = list(pool.map(lambda name: _check_framework(name, gpus), _ASK))
    usable = any(check.level != "problem" for check in frameworks)
    if usable:
        frameworks = [
            msgspec.structs.replace(check, level="note") if check.level == "problem" else check for check in frameworks
        ]
    return (
        _check_python(),
        driver,
        *frameworks,
        *_check_clashes(),
        _check_state_folder(),
        _check_temporary_folder(),
    )


def _check_python() -> Check:
    found = f"{platform.python_version()} at {sys.executable}"
    return Check("python", "ok", found)


def _check_driver() -> tuple[Check, int]:
    """NVML's word on the driver, and how many GPUs it lists."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        remedy = "With an NVIDIA GPU: install its driver, or give the container access. Without: CPU slices are used."
        return Check("nvidia driver", "note", f"none found ({error})", remedy), 0
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        count = pynvml.nvmlDeviceGetCount()
        return Check("nvidia driver", "ok", f"{version}, {count} GPU{'s' * (count != 1)}"), count
    except pynvml.NVMLError as error:
        return Check("nvidia driver", "problem", f"answers, but not all: {error}", "Look at nvidia-smi and dmesg."), 0
    finally:
        pynvml.nvmlShutdown()


def _check_framework(name: str, gpus: int) -> Check:
    if importlib.util.find_spec(name) is None:
        return Check(name, "problem", "not installed", f"To use it: {_INSTALL[name]}.")
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-P", "-c", _ASK[name]]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return Check(name, "problem", f"its import hung for {_ASK_SECONDS} s", f"Reinstall it: {_INSTALL[name]}.")
    words = answer.stdout.split()
    if answer.returncode != 0 or len(words) != 2:
        said = answer.stderr.strip().splitlines()
        detail = said[-1] if said else f"exit code {answer.returncode}"
        return Check(name, "problem", f"can't be imported: {detail}", f"Reinstall it: {_INSTALL[name]}.")
    version, seen = words[0], int(words[1])
    found = f"{version}, sees {seen} of {gpus} GPUs"
    if seen < gpus:
        cure = "Look at CUDA_VISIBLE_DEVICES" + ("; or install evener[gpu]." if name == "tensorflow" else ".")
        return Check(name, "note", found, cure)
    return Check(name, "ok", found)


def _check_clashes() -> list[Check]:
    """Version pairs that are known not to work together."""
    checks = []
    for distribution in ("pynvml", "tensorflow-cpu"):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if distribution == "pynvml":
            remedy = "Remove it: nvidia-ml-py provides the module; two owners of one module break each other."
            checks.append(Check("pynvml package", "note", f"{version} beside nvidia-ml-py", remedy))
        elif importlib.util.find_spec("tensorflow") and _version("tensorflow"):
            remedy = "Keep one of tensorflow and tensorflow-cpu."
            checks.append(Check("tensorflow-cpu", "note", f"{version} beside tensorflow", remedy))
    keras = _version("keras")
    if keras and tuple(int(part) for part in keras.split(".")[:2]) < (3, 12):
        checks.append(Check("keras", "problem", f"{keras} with evener's Keras adapter", "Install keras 3.12 or newer."))
    return checks


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_state_folder() -> Check:
    from evener.balancer.store.folders import runs_folder

    try:
        folder = runs_folder()
    except EvenerError as fault:
        return Check("runs folder", "problem", fault.message, fault.remedy)
    trouble = _cannot_write(folder)
    if trouble:
        return Check("runs folder", "problem", f"{folder}: {trouble}", "Set XDG_STATE_HOME to a folder of yours.")
    return Check("runs folder", "ok", str(folder))


def _check_temporary_folder() -> Check:
    folder = Path(tempfile.gettempdir())
    trouble = _cannot_write(folder)
    if trouble:
        return Check("temporary folder", "problem", f"{folder}: {trouble}", "Set TMPDIR to a folder of yours.")
    return Check("temporary folder", "ok", str(folder))


def _cannot_write(folder: Path) -> str:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder) as stream:
            stream.write(b"evener")
            stream.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""
