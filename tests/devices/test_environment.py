"""The environment with which a child starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.devices.nvidia.backend import NvidiaGpus
from evener.devices.registry import BACKENDS, child_environment
from evener.devices.types import Device, Limit
from evener.errors import DeviceError, RequestError
from evener.system.cores import cap_address_space

GIB = 1 << 30
FREE = Limit()


def slice_of(index: int, limit: Limit = FREE) -> Device:
    """Return a slice with one core and 4 GiB."""
    return Device(f"cpu-{index}-of-2", index, "CPU", "cpu", 4 * GIB, (index,), limit)


def gpu(index: int, limit: Limit = FREE) -> Device:
    """Return a GPU of 80 GiB."""
    return Device(f"GPU-{index:08x}", index, "H100", "gpu", 80 * GIB, (), limit)


def test_a_slice_gets_its_cores_threads_and_memory_and_no_gpu() -> None:
    made = child_environment([slice_of(1)], "tensorflow")
    assert made.cores == (1,)
    assert made.threads == 1
    assert made.variables["CUDA_VISIBLE_DEVICES"] == ""
    assert made.variables["OMP_NUM_THREADS"] == made.variables["TF_NUM_INTRAOP_THREADS"] == "1"
    assert made.variables["TF_CPU_BFC_MEM_LIMIT_IN_MB"] == "4096"
    assert "TF_ENABLE_ONEDNN_OPTS" not in made.variables
    assert made.address_space_bytes is None


def test_a_memory_limit_makes_tensorflow_run_out_catchably() -> None:
    made = child_environment([slice_of(0, Limit(memory_bytes=GIB))], "tensorflow")
    assert made.variables["TF_CPU_BFC_MEM_LIMIT_IN_MB"] == "1024"
    assert made.variables["TF_ENABLE_ONEDNN_OPTS"] == "0"


def test_torch_on_a_slice_is_capped_by_its_address_space() -> None:
    made = child_environment([slice_of(0, Limit(memory_bytes=GIB))], "torch")
    assert made.address_space_bytes == GIB
    assert not [name for name in made.variables if name.startswith("TF_CPU")]


def test_several_slices_in_one_child_pool_their_cores_and_memory() -> None:
    made = child_environment([slice_of(1), slice_of(0)], "torch")
    assert made.cores == (0, 1)
    assert made.address_space_bytes == 8 * GIB


def test_gpus_are_shown_by_number_but_parts_of_one_by_their_ids() -> None:
    part = Device("MIG-0", 0, "H100", "gpu", 10 * GIB, (), FREE)
    shown = [NvidiaGpus().show_by_number(each) for each in ([gpu(1), gpu(0)], [part])]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in shown] == ["1,0", "MIG-0"]


def test_gpus_are_named_by_uuid_in_the_order_of_the_request() -> None:
    made = child_environment([gpu(1), gpu(0)], "tensorflow")
    assert made.variables["CUDA_VISIBLE_DEVICES"] == "GPU-00000001,GPU-00000000"
    assert made.variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert made.variables["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    assert made.cores == ()


def test_a_percentage_of_a_gpu_needs_an_mps_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    limited = gpu(1, Limit(percent=60))
    with pytest.raises(DeviceError, match="GPU:1 can't be held to 60 %") as caught:
        child_environment([limited], "torch")
    assert "nvidia-cuda-mps-control" in caught.value.remedy
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
    assert (
        child_environment([limited], "torch").variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "60"
    )
    assert (
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
        not in child_environment([gpu(0, Limit(percent=100))], "torch").variables
    )


@pytest.mark.parametrize("text", ["", "nonsense", "-1", "0", "999999999999999999999"])
def test_a_pid_file_that_names_no_process_is_no_daemon(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text(text)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not NvidiaGpus().daemon_runs()


def test_devices_that_one_process_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="kinds"):
        child_environment([gpu(0), slice_of(0)], "torch")
    with pytest.raises(ValueError, match="child each"):
        child_environment([gpu(0), gpu(1, Limit(percent=60))], "torch")


def test_a_child_sees_no_devices_of_another_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for a child on slices, and for one on another maker's cards."""
    monkeypatch.setitem(BACKENDS, "toy", "tests.devices.test_another_maker:ToyCards")
    for device in (slice_of(0), gpu(0)):
        assert child_environment([device], "torch").variables["TOY_VISIBLE"] == ""
    made = child_environment(
        [Device("toy-0001", 1, "Toyland Express", "toy", GIB)], "torch"
    ).variables
    assert (made["TOY_VISIBLE"], made["CUDA_VISIBLE_DEVICES"]) == ("toy-0001", "")


def test_a_maker_that_holds_no_percentage_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be measured at full speed otherwise."""
    monkeypatch.setitem(BACKENDS, "toy", "tests.devices.test_another_maker:ToyCards")
    limited = Device("toy-0001", 1, "Toyland Express", "toy", GIB, limit=Limit(percent=60))
    with pytest.raises(DeviceError, match="TOY:1 can't be held to 60 %"):
        child_environment([limited], "torch")


def test_a_kind_of_device_that_this_evener_does_not_have_is_named() -> None:
    """A journal of a newer version may have such a kind."""
    with pytest.raises(RequestError, match="no devices of the kind 'abacus'"):
        child_environment([Device("abacus-0", 0, "Abacus", "abacus", GIB)], "torch")


def test_a_simulated_device_needs_nothing() -> None:
    assert child_environment([Device("sim-0-t4", 0, "T4", "sim", GIB)], "none").variables == {}


def test_a_capped_process_fails_to_allocate_and_lives_on() -> None:
    """64 MiB fit in a cap of 256 MiB; 512 MiB raise a MemoryError that is caught."""
    code = (
        "from evener.system.cores import cap_address_space\n"
        "cap_address_space(256 << 20)\n"
        "bytearray(64 << 20)\n"
        "try:\n    bytearray(512 << 20)\nexcept MemoryError:\n    print('caught')\n"
    )
    folder = str(Path(sys.modules[cap_address_space.__module__].__file__ or "").parents[1])
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": folder},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "caught\n"


@pytest.mark.slow
def test_a_limited_slice_ends_in_an_error_that_torch_raises(
    trainer_ranks: Callable[..., Any],
) -> None:
    """Batches double until 256 MiB are full. PyTorch raises the error, and a smaller batch runs
    afterwards.
    """
    made = child_environment([slice_of(0, Limit(memory_bytes=256 << 20))], "torch")
    ((fitted, failed),) = trainer_ranks(
        "tests.support.limited_slice.grow", made.address_space_bytes
    )
    assert 128 <= fitted < failed < 8192
