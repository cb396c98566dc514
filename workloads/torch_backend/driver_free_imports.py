"""Import libraries without initializing CUDA.

A process that has initialized CUDA can't be forked, so each child process would have to import the
libraries and load the model again. PyTorch can count GPUs through NVML, the driver's management
library. The process can then still be forked. bitsandbytes asks for the GPU's compute capability
when it is imported. PEFT imports bitsandbytes if that is installed, and TRL imports PEFT.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import wraps
from typing import Any

import wrapt

COUNTS_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"  # PyTorch's own variable
ASKS_CAPABILITY = "bitsandbytes"


def prevent_driver_initialization() -> None:
    """Keep imports of PyTorch and bitsandbytes from initializing CUDA in this process.

    Call it before they are imported. The process can then be forked. It sets the environment
    variable PYTORCH_NVML_BASED_CUDA_CHECK.
    """
    os.environ.setdefault(COUNTS_BY_NVML, "1")
    wrapt.register_post_import_hook(_answer_by_nvml, "torch.cuda")


def initialize_driver() -> None:
    """Initialize CUDA if PyTorch is loaded and sees a GPU.

    Raises `RuntimeError` if CUDA can't be initialized.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        # the fork server sees all GPUs, also those that others use
        torch.cuda.init()


def _answer_by_nvml(cuda: Any) -> None:
    """Make `torch.cuda.get_device_capability` use NVML while bitsandbytes is being imported."""
    # other code may ask in order to decide something for its own GPU, and then has to start CUDA
    by_cuda = cuda.get_device_capability

    @wraps(by_cuda)
    def get_device_capability(device: Any = None) -> tuple[int, int]:
        if not cuda.is_initialized() and _is_being_imported(ASKS_CAPABILITY):
            # the private function may change, and NVML may be missing
            with suppress(Exception):
                import pynvml

                handle = cuda._get_pynvml_handler(getattr(device, "idx", device) or 0)
                major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
                return major, minor
        found: tuple[int, int] = by_cuda(device)
        return found

    cuda.get_device_capability = get_device_capability


def _is_being_imported(name: str) -> bool:
    specification = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(specification, "_initializing", False))
