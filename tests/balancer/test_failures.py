"""Which exits of a child mean that memory ran out."""

from __future__ import annotations

import re
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.balancer.probes import failures
from evener.balancer.probes.child_prober import ChildProber
from evener.balancer.probes.protocol import Build, ChildError, Exited
from evener.balancer.probes.worker import Worker
from evener.balancer.request import Job, Request
from evener.balancer.types import Failed, Observation, OutOfMemory, Probe, Stage, solo
from evener.devices.types import Device
from evener.workloads.protocol import WorkerSetup

MEMORY = [
    (("ResourceExhaustedError", "OpError"), "Graph execution error"),
    (("OutOfMemoryError", "RuntimeError"), "Tried to allocate 2.00 GiB"),
    (("MemoryError",), ""),
    (("AcceleratorError", "RuntimeError"), "CUDA error: out of memory"),
    (("RuntimeError",), "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    (("RuntimeError",), "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    (("NotFoundError",), "No algorithm worked!  Error messages: CUDNN_STATUS_ALLOC_FAILED"),
    (
        ("RuntimeError",),
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
    ),
    (("OSError",), "[Errno 12] Cannot allocate memory"),
    (("InternalError",), "CUDA_ERROR_OUT_OF_MEMORY"),
]
OTHER = [
    (("ValueError",), "shapes do not match"),
    (("ResourceExhaustedError",), "Received message larger than max (5 vs. 4)"),
    (("InternalError",), "NCCL error: unhandled system error"),
    ((), ""),
]


@pytest.mark.parametrize(("types", "text"), MEMORY)
def test_these_exceptions_mean_memory(types: tuple[str, ...], text: str) -> None:
    """They are recognized by their type, or by their text if a framework has no type for it."""
    assert failures.error_is_memory(types, text)


@pytest.mark.parametrize(("types", "text"), OTHER)
def test_these_do_not(types: tuple[str, ...], text: str) -> None:
    """Other errors keep their kind."""
    assert not failures.error_is_memory(types, text)


@pytest.mark.parametrize(
    ("code", "cap_share", "killed", "stderr", "memory"),
    [
        (-signal.SIGKILL, 0.0, True, "", True),  # the kernel has killed one more process
        (-signal.SIGKILL, 1.0, False, "", False),  # killed by somebody else
        (-signal.SIGSEGV, 0.9, False, "", True),  # at its cap
        (-signal.SIGSEGV, 0.2, False, "", False),
        (
            -signal.SIGABRT,
            0.0,
            False,
            "terminate called after throwing an instance of 'std::bad_alloc'",
            True,
        ),
        (1, 0.0, False, "RuntimeError: CUDA out of memory", True),
        (1, 0.1, False, "Traceback", False),
        (0, 1.0, False, "out of memory", False),  # an orderly exit
    ],
)
def test_an_end_means_memory_by_its_signal_its_cap_or_its_last_words(
    code: int, cap_share: float, killed: bool, stderr: str, memory: bool
) -> None:
    """A signal alone doesn't suffice."""
    assert failures.exit_is_memory(code, cap_share, killed, stderr) is memory


def test_ends_in_words_name_the_signal_or_the_code() -> None:
    """A signal without a name is described too."""
    assert failures.describe_exit(-11) == ("signal", "its process was ended by SIGSEGV")
    assert failures.describe_exit(7)[0] == "exit"
    assert "7" in failures.describe_exit(7)[1]
    assert failures.describe_exit(-200) == ("signal", "its process was ended by signal 200")


def test_a_gpu_is_blamed_only_if_one_is_named() -> None:
    """Two names don't decide."""
    assert (
        failures.find_gpu_number(
            "OOM on /job:localhost/replica:0/task:0/device:GPU:1 by allocator GPU_1_bfc"
        )
        == 1
    )
    assert failures.find_gpu_number("device:GPU:0 and device:GPU:1") is None
    assert failures.find_gpu_number("somewhere") is None


@given(st.text())
def test_one_line_is_one_bounded_line_that_a_terminal_can_take(text: str) -> None:
    """It has no control characters or escapes, and a bounded length."""
    line = failures.one_line(text)
    assert len(line) <= 300
    assert not any(ord(character) < 32 or 0x7F <= ord(character) < 0xA0 for character in line)


def test_a_traced_error_is_reported_by_its_last_line() -> None:
    """Users don't need TensorFlow's "in user code:"."""
    text = "in user code:\n\n    File x.py, line 3\n\n    ValueError: 3 != 4\n"
    assert failures.one_line(text) == "ValueError: 3 != 4"


def test_a_heading_of_tensorflow_s_gives_way_to_what_went_wrong() -> None:
    """Its graph errors begin with the place; the cause is last, before the node's name."""
    text = "Graph execution error:\n\nDetected at node conv defined at (most recent call last):\n"
    text += (
        '  File "train.py", line 3, in step\n\nCUDNN_STATUS_BAD_PARAM in cudnnSetTensorNdDescriptor'
    )
    text += "\n\t [[{{node conv}}]]\nHint: add report_tensor_allocations\n [Op:__inference_step_3]"
    assert failures.one_line(text) == "CUDNN_STATUS_BAD_PARAM in cudnnSetTensorNdDescriptor"
    assert failures.one_line("Graph execution error:") == "Graph execution error:"


def test_a_long_error_keeps_its_cause_and_its_device() -> None:
    """TensorFlow lists pages of places before the error, which has the GPU's number."""
    places = '  File "/home/user/.venv/lib/keras/src/layers/layer.py", line 3, in call\n\n' * 50
    cause = "OOM when allocating tensor with shape[9] on /job:localhost/device:GPU:1"
    heading = "Graph execution error:\n\nDetected at node conv\n"
    reply = Worker().describe_error(MemoryError(f"{heading}{places}{cause}\n\t [[{{{{node}}}}]]"))
    failed = failures.error_failure(0, reply)
    assert failed.detail == f"MemoryError: {cause}"
    assert failed.gpu == 1


def test_a_layer_s_error_is_reported_without_colors_and_without_its_arguments() -> None:
    """Keras names the layer first, then the error in bold, then the arguments."""
    text = (
        "Exception encountered when calling Net.call().\n\n\x1b[1mno such "
        "layer\x1b[0m\n\nArguments received: x"
    )
    assert failures.one_line(text) == "no such layer"


def test_a_long_line_is_cut_between_words() -> None:
    """A truncated word could be read as another one."""
    assert failures.one_line("shape (12, 345) is wrong", 16) == "shape (12, …"


HOST = [
    (("MemoryError",), "Unable to allocate 96.0 GiB for an array with shape (9, 9)"),
    (("_ArrayMemoryError", "MemoryError"), "Unable to allocate 96.0 GiB"),
    (
        ("RuntimeError",),
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
    ),
    (("OSError",), "[Errno 12] Cannot allocate memory"),
]
CARD = [
    (("OutOfMemoryError", "RuntimeError"), "CUDA out of memory. Tried to allocate 2.00 GiB"),
    (("OutOfMemoryError", "MemoryError"), "Out of memory allocating 9 bytes"),
    (("ResourceExhaustedError", "OpError"), "OOM when allocating tensor"),
    (("RuntimeError",), "CUDA error: out of memory"),
    (("MemoryError",), "std::bad_alloc: cudaErrorMemoryAllocation: out of memory"),
]


def fail_to_build(device: str, types: tuple[str, ...], text: str) -> failures.RankFailure:
    """Return the failure of a process on a device whose build() raised such an error."""
    worker = Worker()
    worker._build = Build(
        "train.py:build",
        "torch",
        {},
        WorkerSetup((device,)),
        in_host_memory=device.lower().startswith("cpu"),
    )
    reply = worker.recover(MemoryError(text), ChildError(types, text, "train.py:3"))
    return failures.error_failure(0, reply)


@pytest.mark.parametrize(("types", "text"), HOST)
def test_a_lack_of_the_host_s_memory_in_a_build_is_not_that_of_a_gpu(
    types: tuple[str, ...], text: str
) -> None:
    """It is an error of the build, which ends the search. Fewer rows wouldn't help."""
    failed = fail_to_build("cuda:0", types, text)
    assert (failed.out_of_memory, failed.user_code, failed.cause) == (False, True, "raised")
    assert re.fullmatch(
        rf"train\.py:3: the host's memory is short \([\d.]+ [KMG]iB were free\): {types[0]}: .*",
        failed.detail,
    ), failed.detail


@pytest.mark.parametrize(("types", "text"), CARD)
def test_a_lack_of_a_gpu_s_memory_in_a_build_stays_that(types: tuple[str, ...], text: str) -> None:
    failed = fail_to_build("cuda:0", types, text)
    assert failed.out_of_memory
    assert failed.fits_no_rows


@pytest.mark.parametrize(("types", "text"), HOST)
@pytest.mark.parametrize("device", ["cpu", "CPU:0"])
def test_the_host_s_memory_is_that_of_cpu_devices(
    device: str, types: tuple[str, ...], text: str
) -> None:
    failed = fail_to_build(device, types, text)
    assert failed.out_of_memory
    assert failed.fits_no_rows


@pytest.mark.parametrize(("kind", "outcome"), [("gpu", Failed), ("cpu", OutOfMemory)])
def test_a_build_that_linux_kills_for_memory_is_not_out_of_a_gpu_s_memory(
    kind: str, outcome: type[Observation]
) -> None:
    killed = failures.exit_failure(0, Exited(-signal.SIGKILL, kernel_killed=True))
    device = Device(f"{kind}-0", 0, "A", kind, 1 << 33)
    prober = ChildProber(Job(Request(), (device,), "train.py:build", "torch"))
    try:
        seen = prober._failed(Probe(solo(1, 0, 8), Stage.SOLO, 1.0), killed, "building", 2.0)
    finally:
        prober.close()
    assert type(seen) is outcome
    if isinstance(seen, Failed):
        assert seen.detail == (
            "GPU:0, building: the host's memory is short, so Linux killed its process"
        )
