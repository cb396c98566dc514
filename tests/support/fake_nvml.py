"""A scripted double of the `pynvml` module: GPUs that answer, fail one call at a time, get lost, come back, or hang.

    nvml = FakeNvml(gpus=2)
    nvml.fail("nvmlDeviceGetTemperature", nvml.NVML_ERROR_NO_PERMISSION, gpu=1)
    nvml.lose(0); nvml.restore(0); nvml.unload(); nvml.reload(); nvml.hang("nvmlDeviceGetFieldValues")
    nvml.advance(1.0)  # the counters run on

Constants, exceptions and structures are the real module's, so what passes here has the right shapes.
"""  # noqa: E501

# ruff: noqa: N802 - the names are the module's

from __future__ import annotations

import ctypes
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1 << 30
GPM_VALUES = {
    1: 90.0,
    2: 80.0,
    3: 12.0,
    5: 70.0,
    10: 14.0,
    20: 100.0,
    21: 200.0,
    60: 1000.0,
    61: 2000.0,
}
DRIVER = "580.159"


@dataclass
class FakeProcess:
    """A process on a GPU."""

    pid: int
    used_bytes: int | None = 2 * GIB
    sm_percent: int = 40
    graphics: bool = False


@dataclass
class FakeGpu:
    """One GPU's state, which tests may change."""

    uuid: str
    name: str = "NVIDIA H200"
    total_bytes: int = 141 * GIB
    reserved_bytes: int = 1 * GIB
    used_bytes: int = 3 * GIB
    temperature: int = 40
    slowdown_temperature: int = 90
    power_watts: float = 300.0
    power_limit_watts: float = 700.0
    clock_mhz: int = 1500
    clock_max_mhz: int = 1980
    capability: tuple[int, int] = (9, 0)
    utilization: int = 95
    fan_percent: int | None = None
    gpm: dict[int, float] | None = field(default_factory=lambda: dict(GPM_VALUES))
    throttled: dict[int, float] = field(default_factory=dict)  # field id -> fraction of the time
    ecc_errors: int = 0
    recovery_action: int = 0
    event_reasons: int = 0
    processes: list[FakeProcess] = field(default_factory=list)
    instances: list[FakeGpu] = field(default_factory=list)  # MIG
    lost: bool = False
    counters: Counter[int] = field(default_factory=Counter)


@dataclass(eq=False)
class _Handle:
    gpu: FakeGpu
    generation: int


class FakeNvml:
    """The module's double, for `sys.modules["pynvml"]` or for a function with a library
    argument.
    """

    def __init__(self, gpus: int = 2, driver: bool = True) -> None:
        self.gpus = [
            FakeGpu(f"GPU-{index:08x}-0000-0000-0000-00000000000{index % 10}")
            for index in range(gpus)
        ]
        self.calls: Counter[str] = Counter()
        self.driver_code = 0 if driver else pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        self.released = threading.Event()
        self.events: deque[tuple[FakeGpu, int, int]] = deque()
        self.event_sets = 0
        # by two UUIDs: the indices of the capabilities between these GPUs
        self.peers: dict[frozenset[str], set[int]] = {}
        self.open = 0
        self._generation = 0
        self._failures: dict[tuple[str, int | None], list[int]] = {}
        self._hanging: set[tuple[str, int | None]] = set()
        self._samples: list[Any] = []
        self._handles: dict[tuple[str, int], _Handle] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvml") and callable(getattr(pynvml, name, None)):
            raise AttributeError(f"the double of pynvml has no {name}")
        return getattr(pynvml, name)

    # what a test scripts

    def fail(self, call: str, code: int, gpu: int | None = None, times: int | None = None) -> None:
        """Make `call` fail with `code`, on one GPU or on all, `times` times or permanently."""
        self._failures[call, gpu] = [code, -1 if times is None else times]

    def mend(self, call: str, gpu: int | None = None) -> None:
        """Make `call` succeed again."""
        self._failures.pop((call, gpu), None)

    def hang(self, call: str, gpu: int | None = None) -> None:
        """Make `call` block until `release`, on one GPU or on all."""
        self.released.clear()
        self._hanging.add((call, gpu))

    def release(self) -> None:
        """Let all hanging calls continue."""
        self._hanging.clear()
        self.released.set()

    def lose(self, gpu: int) -> None:
        """Make the GPU fall off the bus."""
        self.gpus[gpu].lost = True

    def restore(self, gpu: int) -> None:
        """Bring the GPU back."""
        self.gpus[gpu].lost = False

    def unload(self, code: int = pynvml.NVML_ERROR_DRIVER_NOT_LOADED) -> None:
        """Unload the driver: handles are void, and init fails with `code`."""
        self.driver_code = code
        self._generation += 1

    def reload(self) -> None:
        """Load the driver again. Old handles stay void until the next init."""
        self.driver_code = 0
        self._generation += 1
        self.open = 0

    def advance(self, seconds: float) -> None:
        """Advance the counters by this time."""
        for gpu in self.gpus:
            gpu.counters[pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION] += round(
                gpu.power_watts * seconds * 1000
            )
            for field_id, share in gpu.throttled.items():
                gpu.counters[field_id] += round(share * seconds * 1e9)
            gpu.counters[pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES] += round(5e8 * seconds)
            gpu.counters[pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES] += round(1e9 * seconds)
            gpu.counters[pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX] += round(1e6 * seconds)
            gpu.counters[pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX] += round(2e6 * seconds)

    def emit(self, gpu: int, kind: int, data: int = 0) -> None:
        """Emit an event to waiting calls."""
        self.events.append((self.gpus[gpu], kind, data))

    # the module's functions

    def _handle(self, gpu: FakeGpu) -> _Handle:
        """Return the same object for the same GPU, as NVML returns the same pointer."""
        return self._handles.setdefault(
            (gpu.uuid, self._generation), _Handle(gpu, self._generation)
        )

    def _enter(self, call: str, handle: _Handle | None = None) -> FakeGpu | None:
        self.calls[call] += 1
        gpu = handle.gpu if handle is not None else None
        keys = ((call, self.gpus.index(gpu) if gpu in self.gpus else None), (call, None))
        if self._hanging.intersection(keys):
            self.released.wait(30)
        for key in keys:
            scripted = self._failures.get(key)
            if scripted and scripted[1] != 0:
                scripted[1] -= 1
                raise pynvml.NVMLError(scripted[0])
        if self.open == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        if handle is not None and (handle.generation != self._generation or self.driver_code):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        if gpu is not None and gpu.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return gpu

    def nvmlInit(self) -> None:
        self.calls["nvmlInit"] += 1
        if self.driver_code:
            raise pynvml.NVMLError(self.driver_code)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self._enter("nvmlShutdown")
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._enter("nvmlSystemGetDriverVersion")
        return DRIVER

    def nvmlDeviceGetCount(self) -> int:
        self._enter("nvmlDeviceGetCount")
        if self.driver_code:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> _Handle:
        handle = self._handle(self.gpus[index])
        self._enter("nvmlDeviceGetHandleByIndex", handle)
        return handle

    def nvmlDeviceGetUUID(self, handle: _Handle) -> str:
        self._enter("nvmlDeviceGetUUID", handle)
        return handle.gpu.uuid

    def nvmlDeviceGetName(self, handle: _Handle) -> str:
        self._enter("nvmlDeviceGetName", handle)
        return handle.gpu.name

    def nvmlDeviceGetCudaComputeCapability(self, handle: _Handle) -> tuple[int, int]:
        self._enter("nvmlDeviceGetCudaComputeCapability", handle)
        return handle.gpu.capability

    def nvmlDeviceGetMigMode(self, handle: _Handle) -> list[int]:
        self._enter("nvmlDeviceGetMigMode", handle)
        return [int(bool(handle.gpu.instances))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: _Handle) -> int:
        self._enter("nvmlDeviceGetMaxMigDeviceCount", handle)
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: _Handle, index: int) -> _Handle:
        self._enter("nvmlDeviceGetMigDeviceHandleByIndex", handle)
        if index >= len(handle.gpu.instances):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self._handle(handle.gpu.instances[index])

    def nvmlDeviceGetGpuInstanceId(self, handle: _Handle) -> int:
        self._enter("nvmlDeviceGetGpuInstanceId", handle)
        return 1 + next(
            i for gpu in self.gpus for i, each in enumerate(gpu.instances) if each is handle.gpu
        )

    def nvmlDeviceGetMemoryInfo(self, handle: _Handle, version: int | None = None) -> Any:
        self._enter("nvmlDeviceGetMemoryInfo_v2" if version else "nvmlDeviceGetMemoryInfo", handle)
        gpu = handle.gpu
        total = gpu.total_bytes
        return SimpleNamespace(
            total=total,
            reserved=gpu.reserved_bytes,
            used=gpu.used_bytes,
            free=total - gpu.reserved_bytes - gpu.used_bytes,
        )

    def nvmlDeviceGetTemperature(self, handle: _Handle, sensor: int) -> int:
        self._enter("nvmlDeviceGetTemperature", handle)
        return handle.gpu.temperature

    def nvmlDeviceGetTemperatureThreshold(self, handle: _Handle, threshold: int) -> int:
        self._enter("nvmlDeviceGetTemperatureThreshold", handle)
        return handle.gpu.slowdown_temperature

    def nvmlDeviceGetClockInfo(self, handle: _Handle, kind: int) -> int:
        self._enter("nvmlDeviceGetClockInfo", handle)
        return handle.gpu.clock_mhz

    def nvmlDeviceGetMaxClockInfo(self, handle: _Handle, kind: int) -> int:
        self._enter("nvmlDeviceGetMaxClockInfo", handle)
        return handle.gpu.clock_max_mhz

    def nvmlDeviceGetPowerUsage(self, handle: _Handle) -> int:
        self._enter("nvmlDeviceGetPowerUsage", handle)
        return round(handle.gpu.power_watts * 1000)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: _Handle) -> int:
        self._enter("nvmlDeviceGetEnforcedPowerLimit", handle)
        return round(handle.gpu.power_limit_watts * 1000)

    def nvmlDeviceGetUtilizationRates(self, handle: _Handle) -> Any:
        self._enter("nvmlDeviceGetUtilizationRates", handle)
        return SimpleNamespace(gpu=handle.gpu.utilization, memory=10)

    def nvmlDeviceGetFanSpeed(self, handle: _Handle) -> int:
        self._enter("nvmlDeviceGetFanSpeed", handle)
        if handle.gpu.fan_percent is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return handle.gpu.fan_percent

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: _Handle) -> int:
        self._enter("nvmlDeviceGetCurrentClocksEventReasons", handle)
        return handle.gpu.event_reasons

    def nvmlDeviceGetFieldValues(self, handle: _Handle, field_ids: list[Any]) -> Any:
        self._enter("nvmlDeviceGetFieldValues", handle)
        gpu, values = handle.gpu, (pynvml.c_nvmlFieldValue_t * len(field_ids))()
        for value, asked in zip(values, field_ids, strict=True):
            field_id = asked[0] if isinstance(asked, tuple) else asked
            value.fieldId = field_id
            value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
            code = self._failures.get((f"field {field_id}", None), [0, 0])[0]
            value.nvmlReturn = code
            value.value.ullVal = self._field(gpu, field_id) if not code else 0
        return values

    def _field(self, gpu: FakeGpu, field_id: int) -> int:
        named = {
            pynvml.NVML_FI_DEV_POWER_AVERAGE: round(gpu.power_watts * 1000),
            pynvml.NVML_FI_DEV_POWER_INSTANT: round(gpu.power_watts * 1000),
            pynvml.NVML_FI_DEV_POWER_CURRENT_LIMIT: round(gpu.power_limit_watts * 1000),
            pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL: gpu.ecc_errors,
            pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: gpu.recovery_action,
        }
        return named.get(field_id, gpu.counters[field_id])

    def nvmlGpmQueryDeviceSupport(self, handle: _Handle) -> Any:
        self._enter("nvmlGpmQueryDeviceSupport", handle)
        return SimpleNamespace(isSupportedDevice=int(handle.gpu.gpm is not None))

    def nvmlGpmSampleAlloc(self) -> Any:
        self._enter("nvmlGpmSampleAlloc")
        self._samples.append(ctypes.create_string_buffer(8))
        return ctypes.cast(self._samples[-1], pynvml.c_nvmlGpmSample_t)

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self._enter("nvmlGpmSampleFree")

    def nvmlGpmSampleGet(self, handle: _Handle, sample: Any) -> Any:
        self._enter("nvmlGpmSampleGet", handle)
        ctypes.cast(sample, ctypes.POINTER(ctypes.c_int64))[0] = 1 + self.gpus.index(handle.gpu)
        return sample

    def nvmlGpmMigSampleGet(self, handle: _Handle, instance: int, sample: Any) -> Any:
        self._enter("nvmlGpmMigSampleGet", handle)
        assert handle.gpu.instances[instance - 1]
        ctypes.cast(sample, ctypes.POINTER(ctypes.c_int64))[0] = 1 + self.gpus.index(handle.gpu)
        return sample

    def nvmlGpmMetricsGet(self, request: Any) -> Any:
        self._enter("nvmlGpmMetricsGet")
        filled = [
            ctypes.cast(each, ctypes.POINTER(ctypes.c_int64))[0]
            for each in (request.sample1, request.sample2)
        ]
        addresses = [
            ctypes.cast(each, ctypes.c_void_p).value for each in (request.sample1, request.sample2)
        ]
        if 0 in filled or filled[0] != filled[1] or addresses[0] == addresses[1]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        gpm = self.gpus[filled[0] - 1].gpm or {}
        for metric in request.metrics[: request.numMetrics]:
            metric.nvmlReturn = 0 if metric.metricId in gpm else pynvml.NVML_ERROR_NOT_SUPPORTED
            metric.value = gpm.get(metric.metricId, 0.0)
        return request

    def _processes(self, call: str, handle: _Handle, graphics: bool) -> list[Any]:
        self._enter(call, handle)
        return [
            SimpleNamespace(pid=each.pid, usedGpuMemory=each.used_bytes)
            for each in handle.gpu.processes
            if each.graphics == graphics
        ]

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: _Handle) -> list[Any]:
        return self._processes("nvmlDeviceGetComputeRunningProcesses_v3", handle, False)

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: _Handle) -> list[Any]:
        return self._processes("nvmlDeviceGetGraphicsRunningProcesses_v3", handle, True)

    def nvmlDeviceGetProcessUtilization(self, handle: _Handle, since: int) -> list[Any]:
        self._enter("nvmlDeviceGetProcessUtilization", handle)
        busy = [each for each in handle.gpu.processes if each.sm_percent]
        if not busy:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return [
            SimpleNamespace(pid=each.pid, timeStamp=since + 1, smUtil=each.sm_percent)
            for each in busy
        ]

    def nvmlDeviceGetP2PStatus(self, first: _Handle, second: _Handle, index: int) -> int:
        self._enter("nvmlDeviceGetP2PStatus", first)
        pair = frozenset({first.gpu.uuid, second.gpu.uuid})
        return 0 if index in self.peers.get(pair, set()) else pynvml.NVML_P2P_STATUS_UNKNOWN

    def nvmlDeviceGetSupportedEventTypes(self, handle: _Handle) -> int:
        self._enter("nvmlDeviceGetSupportedEventTypes", handle)
        return 0xFFFF

    def nvmlEventSetCreate(self) -> object:
        self._enter("nvmlEventSetCreate")
        self.event_sets += 1
        return object()

    def nvmlDeviceRegisterEvents(self, handle: _Handle, kinds: int, event_set: object) -> None:
        self._enter("nvmlDeviceRegisterEvents", handle)

    def nvmlEventSetWait_v2(self, event_set: object, timeout_ms: int) -> Any:
        self._enter("nvmlEventSetWait_v2")
        if self.events:
            gpu, kind, data = self.events.popleft()
            return SimpleNamespace(device=self._handle(gpu), eventType=kind, eventData=data)
        threading.Event().wait(min(timeout_ms, 20) / 1000)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)

    def nvmlEventSetFree(self, event_set: object) -> None:
        self._enter("nvmlEventSetFree")
        self.event_sets -= 1
