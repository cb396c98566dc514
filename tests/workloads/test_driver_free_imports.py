"""An import of bitsandbytes asks NVML for a GPU's compute capability, and CUDA isn't started."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from evener.workloads.torch_backend import driver_free_imports
from evener.workloads.torch_backend.driver_free_imports import COUNTS_BY_NVML

ASKS = """
import the_cuda
FOUND = [the_cuda.get_device_capability(each) for each in the_cuda.ASKED]

def ask():
    return the_cuda.get_device_capability(0)
"""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A stand-in for `torch.cuda` that records whether CUDA was started, with two GPUs in NVML."""

    made = SimpleNamespace(started=False)

    def start(device: Any = None) -> tuple[int, int]:
        made.started = True
        return (7, 0)

    made.is_initialized = lambda: made.started
    made.get_device_capability = start
    made._get_pynvml_handler = lambda index: ("GPU", index)
    made.ASKED = (0, SimpleNamespace(idx=1), None)
    capabilities = {("GPU", 0): [9, 0], ("GPU", 1): [8, 6]}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", capabilities.__getitem__)
    for name in ("bitsandbytes", "another"):
        (tmp_path / f"{name}.py").write_text(ASKS)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "the_cuda", made)
    monkeypatch.syspath_prepend(str(tmp_path))
    driver_free_imports._answer_by_nvml(made)
    yield made
    for name in ("bitsandbytes", "another"):
        sys.modules.pop(name, None)


def test_bitsandbytes_is_imported_without_starting_cuda(cuda: SimpleNamespace) -> None:
    imported = import_module("bitsandbytes")
    assert imported.FOUND == [(9, 0), (8, 6), (9, 0)]
    assert not cuda.started


def test_any_other_question_is_answered_by_cuda(cuda: SimpleNamespace) -> None:
    """The answer may decide what a rank does with its own GPU, so its process isn't forked."""
    imported = import_module("bitsandbytes")
    assert imported.ask() == (7, 0)
    assert cuda.started
    cuda.started = False
    assert import_module("another").FOUND == [(7, 0)] * 3


def test_without_nvml_cuda_answers(cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(handle: Any) -> None:
        raise OSError(handle)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", fails)
    assert import_module("bitsandbytes").FOUND == [(7, 0)] * 3


def test_a_trial_starts_cuda_without_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sees all GPUs, so the first may be one that the search leaves out."""
    started: list[str] = []
    cuda = SimpleNamespace(is_available=lambda: True, init=lambda: started.append("cuda"))

    class NoTensors(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"torch.{name} is used")

    monkeypatch.setitem(sys.modules, "torch", NoTensors(cuda=cuda))
    driver_free_imports.initialize_driver()
    assert started == ["cuda"]


def test_pytorch_has_the_names_that_are_used() -> None:
    cuda = pytest.importorskip("torch").cuda
    assert COUNTS_BY_NVML in inspect.getsource(cuda._nvml_based_avail)
    assert list(inspect.signature(cuda._get_pynvml_handler).parameters) == ["device"]
