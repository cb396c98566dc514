"""The backend of NVIDIA GPUs. NVML lists them, and MPS limits them."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from evener.errors import DeviceError

from ..backend import QUIET, Backend, ChildEnvironment, Discovery, Listing, Vitals, VitalsReader
from ..types import Device, Source, Term
from . import cuda_library
from .gpu_reader import GpuReader
from .nvml_calls import DriverGoneError, GpuGoneError
from .nvml_library import GONE_WORDS, driver_fault, error_code, find_gpu, list_gpus, load, opened
from .source import NvmlSource

# NVIDIA's MPS daemon, and the folder where it listens
MPS_PROGRAM = "nvidia-cuda-mps-control"
MPS_FOLDER = "/tmp/nvidia-mps"


# paths between GPUs, fastest first, by NVML's index of the P2P capability that uses them
P2P_PATHS = {2: "NVLink", 0: "PCIe, P2P"}
P2P_WORKS = 0


class NvmlVitals:
    """Reads throttling, clock, memory and processes of a GPU through NVML, during measurements."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._nvml = load()
        self._open = False
        self._reader: GpuReader | None = None

    def read(self, full: bool) -> Vitals:
        """Return throttling, clock and energy. With `full`, also read memory and processes.

        If the GPU or the driver fails, no error is raised; the field `trouble` describes the
        failure. The next call then opens NVML again.
        """
        nvml = self._nvml
        try:
            if self._reader is None:
                nvml.nvmlInit()
                self._open = True
                gpu = find_gpu(nvml, self._device.id)
                if gpu is None:
                    raise GpuGoneError
                self._reader = GpuReader(nvml, gpu.handle, self._device)
            return self._reader.vitals(full)
        except (GpuGoneError, DriverGoneError) as gone:
            words = str(gone)
        except nvml.NVMLError as error:
            words = GONE_WORDS.get(error_code(error)) or driver_fault(error).message
        self.close()
        return Vitals(time.monotonic(), trouble=words)

    def close(self) -> None:
        """Close NVML. The next `read` opens it again."""
        self._reader = None
        if self._open:
            self._open = False
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()


class NvidiaGpus(Backend):
    """The backend of NVIDIA GPUs and MIG instances, which are requested as `gpu` or `gpu:N`.

    Compute limits are enforced by NVIDIA's MPS.
    """

    kind = "gpu"
    maker = "NVIDIA"
    id_prefixes = ("gpu-", "mig-")
    visible_variable = "CUDA_VISIBLE_DEVICES"
    late_variables = ("CUDA_",)
    driver_files = ("/dev/nvidia",)  # nvidiactl, nvidia0, nvidia-uvm, nvidia-caps
    server_programs = ("nvidia-cuda-mps-server",)
    device_words = ("cuda", "cudnn", "cublas", "nccl")
    memory_words = (
        "cublas_status_alloc_failed",
        "cublas_status_not_initialized",
        "cudnn_status_alloc_failed",
        "cudnn_status_not_supported",
    )
    torch_name = "cuda"
    tensorflow_name = "GPU"
    double_packages = (("pynvml", "nvidia-ml-py"),)
    check_module = "evener.devices.nvidia.device_check"
    remedy = "Check nvidia-smi and dmesg."
    settle_seconds = 0.12  # the driver's profiler needs at least 0.1 s between samples

    def has_started_driver(self, files: Collection[str]) -> bool:
        """Return True if CUDA has been initialized in this process. `files` isn't used."""
        return cuda_library.has_started()

    def list_devices(self) -> Listing:
        """Return all GPUs that answer. A GPU in MIG mode is replaced by its instances.

        Raises `DeviceError` if there are none.
        """
        listing = list_gpus()
        if not listing.devices:
            raise DeviceError("The NVIDIA driver lists no GPU that answers.", self.remedy)
        return listing

    def find(self, terms: Sequence[Term], variables: Mapping[str, str]) -> Discovery:
        """Return the GPUs that a request selects, in the order of the terms.

        `variables` are environment variables. If the machine has GPUs of several models, and
        CUDA_VISIBLE_DEVICES selects them by index, a message warns that CUDA's default order may
        differ from that of nvidia-smi. Raises DeviceError if no GPU is visible, and RequestError if
        a term matches none.
        """
        found = super().find(terms, variables)
        named = variables.get(self.visible_variable, "")
        by_bus = variables.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or all(
            term.pick for term in terms
        )
        if by_bus or not any(text.strip().isdecimal() for text in named.split(",")):
            return found
        if len({gpu.name for gpu in self.list_devices().devices}) < 2:
            return found
        note = (
            f"CUDA_VISIBLE_DEVICES={named} is read in the order of nvidia-smi; other CUDA "
            f"programs read it so "
            "only with CUDA_DEVICE_ORDER=PCI_BUS_ID."
        )
        return msgspec.structs.replace(found, notes=(*found.notes, note))

    def open_source(self, discovery: Discovery) -> Source:
        """Return a source that reads the GPUs' metrics through NVML."""
        return NvmlSource(discovery.devices, notes=discovery.notes)

    def show_by_number(self, devices: Sequence[Device]) -> dict[str, str]:
        """Return environment variables that make only these GPUs visible, by their indices.

        If any of them is a MIG instance, UUIDs are used instead.
        """
        if any(device.id.startswith("MIG-") for device in devices):
            return super().show_by_number(devices)
        numbers = ",".join(str(device.index) for device in devices)
        return {self.visible_variable: numbers, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def child_environment(self, devices: Sequence[Device], framework: str) -> ChildEnvironment:
        """Return the environment of a process that trains on these GPUs.

        A compute limit becomes the percentage of active threads in MPS. Raises `DeviceError` if
        there is a limit but no MPS daemon is running, and `ValueError` if the GPUs have different
        limits.
        """
        grown = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
        variables = {**QUIET, **grown, **self.show([device.id for device in devices])}
        percentages = {device.limit.percent or 100.0 for device in devices}
        if len(percentages) > 1:
            raise ValueError(
                "MPS holds a whole process to one percentage: unequal GPUs need a child each"
            )
        (percent,) = percentages
        if percent < 100:
            if not self.daemon_runs():
                limited = ", ".join(device.label for device in devices)
                raise DeviceError(
                    f"{limited} can't be held to {percent:g} %: no MPS daemon runs.",
                    f"Start one with {MPS_PROGRAM} -d, or omit the percentage.",
                )
            variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{percent:g}"
        return ChildEnvironment(variables)

    def open_vitals(self, device: Device) -> VitalsReader:
        """Return a reader of the GPU's throttling, clock, memory and processes."""
        return NvmlVitals(device)

    def bus_address(self, device: Device) -> str:
        """Return the GPU's PCI address, such as `0000:3b:00.0`, or "" if it is unknown.

        MIG instances have no address.
        """
        if device.id.startswith("MIG-"):
            return ""
        try:
            with opened() as nvml:
                gpu = find_gpu(nvml, device.id)
                address = nvml.nvmlDeviceGetPciInfo(gpu and gpu.handle).busId
            domain, rest = (address.decode() if isinstance(address, bytes) else str(address)).split(
                ":", 1
            )
            return f"{int(domain, 16):04x}:{rest.lower()}"
        except (
            Exception
        ):  # whatever the driver raises: the lock between the user's own sessions still holds
            return ""

    def name_path(self, first: Device, second: Device) -> str:
        """Return the connection between two GPUs: "NVLink", "PCIe, P2P" or "PCIe, no P2P".

        Returns "" if it is unknown, or for MIG instances.
        """
        if any(device.id.startswith("MIG-") for device in (first, second)):
            return ""
        try:
            with opened() as nvml:
                gpus = [find_gpu(nvml, device.id) for device in (first, second)]
                handles = [gpu and gpu.handle for gpu in gpus]
                for index, words in P2P_PATHS.items():
                    if nvml.nvmlDeviceGetP2PStatus(*handles, index) == P2P_WORKS:
                        return words
        except Exception:  # whatever the driver raises: a link is measured without a name
            return ""
        return "PCIe, no P2P"

    def daemon_runs(self) -> bool:
        """Return True if an MPS daemon is running, judging by the pid file in its directory."""
        folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or MPS_FOLDER)
        with suppress(OSError, ValueError, OverflowError):
            pid = int((folder / f"{MPS_PROGRAM}.pid").read_text().strip("\0 \n"))
            return pid > 0 and psutil.pid_exists(pid)
        return False
