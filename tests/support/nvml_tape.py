"""Records the driver's answers to a NvmlSource, and plays them back in place of the NVML module.

A recording ("tape") is JSON lines: a header, then a line for each distinct call with its arguments
and, with their times, the answers that differ from the one before. `python -m benchmarks.nvml_tape`
records one on real GPUs.
"""

from __future__ import annotations

import bisect
import ctypes
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

from evener.devices.nvidia.nvml_library import Library
from evener.devices.nvidia.source import address

FORMAT = 1
# its argument is a time, so every call would differ
UNKEYED = "nvmlDeviceGetProcessUtilization"
Key = tuple[str, int | None, str]  # call or kind, GPU, arguments


class NvmlRecorder:
    """Wraps the module, or a double of it, and records what its functions return."""

    def __init__(self, library: Library = pynvml) -> None:
        self._library = library
        self.began = time.monotonic()
        self.answers: dict[Key, list[tuple[float, Any]]] = {}
        self._gpus: dict[int, int] = {}  # GPU index by the address of its handle
        self._sampled: dict[int, int] = {}  # GPU index by the address of a GPM sample

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name)
        if not (name.startswith("nvml") and callable(found)) or name.startswith("nvmlEvent"):
            return found
        return lambda *arguments, **keywords: self._call(name, found, *arguments, **keywords)

    def _call(self, name: str, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        handles = [self._gpus[address(each)] for each in arguments if address(each) in self._gpus]
        gpu = handles[0] if handles else None
        numbers = [
            each
            for each in (*arguments, *keywords.values())
            if isinstance(each, int) and name != UNKEYED
        ]
        try:
            answer = call(*arguments, **keywords)
        except pynvml.NVMLError as error:
            self._keep((name, gpu, json.dumps(numbers)), {"error": error.value})
            raise
        if name == "nvmlDeviceGetHandleByIndex":
            self._gpus[address(answer)] = arguments[0]
        elif name == "nvmlGpmSampleGet":
            self._sampled[address(arguments[1])] = self._gpus[address(arguments[0])]
        elif name == "nvmlGpmMetricsGet":
            self._keep_metrics(arguments[0])
        elif name == "nvmlDeviceGetFieldValues":
            for asked, got in zip(arguments[1], answer, strict=True):
                self._keep(
                    ("field", gpu, json.dumps(asked)),
                    [got.nvmlReturn, got.valueType, got.value.ullVal],
                )
        elif not name.startswith("nvmlGpmSample"):
            self._keep((name, gpu, json.dumps(numbers)), _plain(answer))
        return answer

    def _keep_metrics(self, request: Any) -> None:
        gpu = self._sampled[address(request.sample1)]
        for metric in request.metrics[: request.numMetrics]:
            self._keep(
                ("gpm", gpu, str(metric.metricId)), [metric.nvmlReturn, round(metric.value, 4)]
            )

    def _keep(self, key: Key, answer: Any) -> None:
        answers = self.answers.setdefault(key, [])
        if not answers or answers[-1][1] != answer:
            answers.append((round(time.monotonic() - self.began, 3), answer))

    def lines(self, **header: Any) -> list[str]:
        """Return the lines of the recording."""
        rows = (
            {"call": key[0], "gpu": key[1], "of": key[2], "answers": kept}
            for key, kept in self.answers.items()
        )
        return [
            json.dumps(row, separators=(",", ":"))
            for row in ({"nvml_tape": FORMAT, **header}, *rows)
        ]


class NvmlPlayer:
    """A double of the module that answers each call as the driver did at the time `now`.

    Tests set `now`. A call that wasn't recorded raises KeyError: it needs another recording.
    """

    def __init__(self, path: Path) -> None:
        header, *rows = map(json.loads, path.read_text().splitlines())
        if header.get("nvml_tape") != FORMAT:
            raise ValueError(f"{path} is no tape of format {FORMAT}.")
        self.header: dict[str, Any] = header
        self.now = 0.0
        self._answers: dict[Key, list[tuple[float, Any]]] = {
            (row["call"], row["gpu"], row["of"]): row["answers"] for row in rows
        }
        self._samples: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or not callable(getattr(pynvml, name)):
            return getattr(pynvml, name)
        return lambda *arguments, **keywords: self._call(name, *arguments, **keywords)

    def nvmlInit(self) -> None:  # noqa: N802 - the names are the module's
        """Do nothing; it always succeeds."""

    def nvmlShutdown(self) -> None:  # noqa: N802
        """Do nothing."""

    def nvmlEventSetCreate(self) -> None:  # noqa: N802
        """Refuse, since recordings have no events."""
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> _Handle:  # noqa: N802
        """Return a handle with the GPU's index."""
        return _Handle(index)

    def nvmlDeviceGetFieldValues(self, handle: _Handle, fields: list[Any]) -> Any:  # noqa: N802
        """Look up each field on its own, so that calls may combine them in other ways than the
        recording.
        """
        values = (pynvml.c_nvmlFieldValue_t * len(fields))()
        for value, asked in zip(values, fields, strict=True):
            value.nvmlReturn, value.valueType, value.value.ullVal = self._at(
                "field", handle.gpu, json.dumps(asked)
            )
        return values

    def nvmlGpmSampleAlloc(self) -> Any:  # noqa: N802
        """Return a sample that can hold a GPU's index."""
        self._samples.append(ctypes.create_string_buffer(8))
        return ctypes.cast(self._samples[-1], pynvml.c_nvmlGpmSample_t)

    def nvmlGpmSampleFree(self, sample: Any) -> None:  # noqa: N802
        """Do nothing: Python frees it."""

    def nvmlGpmSampleGet(self, handle: _Handle, sample: Any) -> Any:  # noqa: N802
        """Write the GPU's index into the sample."""
        ctypes.cast(sample, ctypes.POINTER(ctypes.c_int64))[0] = handle.gpu
        return sample

    def nvmlGpmMetricsGet(self, request: Any) -> Any:  # noqa: N802
        """Return the recorded metrics."""
        gpu = ctypes.cast(request.sample1, ctypes.POINTER(ctypes.c_int64))[0]
        for metric in request.metrics[: request.numMetrics]:
            metric.nvmlReturn, metric.value = self._at("gpm", gpu, str(metric.metricId))
        return request

    def _call(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        gpu = next((each.gpu for each in arguments if isinstance(each, _Handle)), None)
        numbers = [
            each
            for each in (*arguments, *keywords.values())
            if isinstance(each, int) and name != UNKEYED
        ]
        key = name, gpu, json.dumps(numbers)
        if key not in self._answers:  # evener didn't make this call when it was recorded
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        answer = self._at(*key)
        if isinstance(answer, dict) and "error" in answer:
            raise pynvml.NVMLError(answer["error"])
        return _thing(answer)

    def _at(self, *key: Any) -> Any:
        answers = self._answers[key]
        return answers[
            max(0, bisect.bisect_right(answers, self.now, key=lambda entry: entry[0]) - 1)
        ][1]


class _Handle:
    def __init__(self, gpu: int) -> None:
        self.gpu = gpu


class _Thing:
    """A structure of the module, with members by name."""

    def __init__(self, members: dict[str, Any]) -> None:
        self.__dict__.update(members)


def _plain(answer: Any) -> Any:
    """Convert an answer into what JSON can hold."""
    if isinstance(answer, list | tuple):
        return [_plain(each) for each in answer]
    if isinstance(answer, bytes):
        return answer.decode(errors="replace")
    if answer is None or isinstance(answer, int | float | str):
        return answer
    names = [name for name, *_ in getattr(answer, "_fields_", ())] or list(vars(answer))
    members = {name: getattr(answer, name) for name in names}
    return {
        name: member
        for name, member in members.items()
        if member is None or isinstance(member, int | float | str)
    }


def _thing(answer: Any) -> Any:
    if isinstance(answer, list):
        return [_thing(each) for each in answer]
    return _Thing(answer) if isinstance(answer, dict) else answer
