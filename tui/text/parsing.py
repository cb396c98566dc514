"""Parse what users type as options or in the form, such as durations, settings and devices."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import msgspec

from evener.balancer.objectives import OBJECTIVES, SPEED, find_objective, slowdown_objective_names
from evener.balancer.request import Request
from evener.balancer.store.runs import load_noise
from evener.devices.registry import find_backend
from evener.devices.terms import write_limit
from evener.devices.types import Device, group_by_host
from evener.errors import RequestError
from evener.training.noise_scale import ENDLESS, NoiseScale

REQUEST_HELP = {
    "devices": "auto, gpu, gpu:0,2, cpu, cpu/N (N slices), ray (every host of a Ray cluster), "
    "ray:HOST/gpu:0 or"
    " sim:gtx1080ti,gtx1080 (simulated); @ limits a device to a part of its cores and memory: "
    "gpu:0@60%+8GiB.",
    "ray_address": (
        "HOST:PORT of the Ray cluster. Default: RAY_ADDRESS, else the one that runs on "
        "this machine."
    ),
    "workload": "A built-in workload, or file.py:build for your own (its code is run).",
    "framework": "tensorflow or torch. Default: the workload's own, or what your file imports.",
    "settings": "Set a parameter of the workload: key=value.",
    "precision": "float32, mixed_bfloat16 or mixed_float16.",
    "xla": "Compile the training step with XLA.",
    "inputs": "Where batches come from: host memory, as in training, or the device itself.",
    "engine": "How TensorFlow synchronises a split: auto, towers or multiworker.",
    "share": "Run even if another session is using the devices.",
    "seed": "Random seed; the same seed makes the same choices.",
    "global_batch": "Fixed number of samples per step.",
    "max_global_batch": "Upper limit for the global batch, in samples.",
    "multiple_of": "Make every share a multiple of this number.",
    "micro": (
        "auto: compute a share that doesn't fit in memory in several passes; off: keep to "
        "what fits at once."
    ),
    "objective": (
        f"What to maximise; "
        f"{'; '.join(f'{name}: {one.summary}' for name, one in OBJECTIVES.items())}."
    ),
    "max_slowdown": (
        "How much slower than the fastest the most efficient layout may be. Default: 10%."
    ),
    "noise_scale": "Noise scale of the gradient: rows, or the training that measured it with "
    "--noise: "
    "its id, or"
    " `last`.",
    "own_batch": "Rows per step of your script today, over all processes, for advice on the "
    "learning rate. Default:"
    " that of --noise-scale's training.",
    "budget": "Longest time to measure, like 90s or 5m; none: no limit.",
    "tolerance": "Take the smallest global batch within this fraction of the fastest; 0.02 is 2 %.",
    "pace": "Simulated devices: real seconds for each simulated one; 0 doesn't wait.",
}
_FRAMEWORKS = ("tensorflow", "torch")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_LIKE_ROWS = re.compile(
    r"[-+]?[\d.,]+(e[-+]?\d+)?", re.IGNORECASE
)  # looks like a number, not like a run's id
_THOUSANDS = re.compile(r",(?=\d{3}(?!\d))")
# possessive quantifiers make matching linear
_PART = re.compile(r"(?<![\d.])(\d++(?:\.\d++)?+) *+(ms|s|min|m|h|d)(?![a-z]) *")


def make_request(
    *,
    workload: str | None = None,
    framework: str | None = None,
    settings: list[str] | None = None,
    budget: str = "120s",
    inputs: str = "host",
    max_slowdown: str | None = None,
    noise_scale: str | None = None,
    **fields: Any,
) -> Request:
    """Build a request from the values that the user has typed for options.

    - `settings`: key=value pairs for the workload.
    - `budget`: a duration such as "5m", or "none".
    - `inputs`: "host" or "device".
    - `max_slowdown`: a percentage or fraction, such as "10%" or "0.1".
    - `noise_scale`: rows, or the id of a training run that measured it.
    - `fields`: further fields of `Request`, passed on unchanged.

    Raises RequestError for a value that can't be used.
    """
    if framework not in (None, *_FRAMEWORKS):
        raise RequestError(
            f"--framework {framework!r} is not known.", f"Choose {' or '.join(_FRAMEWORKS)}."
        )
    if max_slowdown is not None:
        if not find_objective(fields.get("objective", SPEED.name)).trades_speed:
            raise RequestError(
                f"--max-slowdown goes with --objective {slowdown_objective_names()}.",
                "Add that, or leave --max-slowdown out.",
            )
        fields["max_slowdown"] = parse_max_slowdown(max_slowdown)
    if noise_scale is not None:
        fields["noise_scale"], own_batch = _parse_noise_scale(noise_scale)
        fields["own_batch"] = own_batch if fields.get("own_batch") is None else fields["own_batch"]
    return Request(
        settings=parse_settings(settings or []),
        budget_seconds=parse_budget(budget),
        workload=workload,
        framework=framework or _default_framework(workload),
        input=inputs,
        **fields,
    )


def parse_max_slowdown(text: str) -> float:
    """Parse a percentage or fraction such as "10%" or "0.1", and return the fraction.

    Raises RequestError for other text and for negative numbers.
    """
    number = text.strip()
    part = _parse_number(number.removesuffix("%"), "--max-slowdown")
    if not 0 <= part < math.inf:
        raise _option_error("--max-slowdown", text, "a part", "10% or 0.1")
    return part / 100 if number.endswith("%") else part


def _parse_noise_scale(text: str) -> tuple[NoiseScale, int | None]:
    """Return the gradient noise scale, and the training run's global batch if it is known.

    `text` is a number of rows, or the id of a training run that measured the noise scale.
    """
    if not _LIKE_ROWS.fullmatch(text):
        measured = load_noise(text)
        return measured.scale, measured.batch or None
    rows = _parse_number(_THOUSANDS.sub("", text), "--noise-scale")
    if not 1 <= rows < ENDLESS:
        raise _option_error("--noise-scale", text, "a number of rows, 1 or more", "3900")
    return NoiseScale(rows, rows, rows, 0), None


def _default_framework(workload: str | None) -> str:
    """Return the framework for a workload if the user doesn't choose one."""
    # A built-in workload has a framework, and a user's file imports one. Otherwise the default is
    # an installed framework, tensorflow before torch.
    installed = next((each for each in _FRAMEWORKS if find_spec(each)), _FRAMEWORKS[0])
    if workload is None:
        return installed
    from evener.workloads import registry, user_code

    if ":" in workload or user_code.names_a_file(workload):
        return user_code.guess_framework(workload)
    own = registry.find(workload).framework
    return installed if own == "none" else own


def _option_error(option: str, text: str, expected: str, example: str) -> RequestError:
    """Return the error for an option whose value is `text` instead of what was expected.

    It suggests the value `example`.
    """
    return RequestError(f"{option} {text!r} is not {expected}.", f"Write it like {example}.")


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """Parse key=value pairs. Values that aren't valid JSON are kept as text.

    Raises RequestError for text without a key or "=", and for values that can't be stored.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator or not key:
            raise _option_error("--set", pair, "key=value", "--set layers=4")
        settings[key] = _parse_value(text)
        try:
            msgspec.json.encode({key: settings[key]})
        except (ValueError, OverflowError, RecursionError):
            raise RequestError(
                f"--set {pair[:80]!r} can't be stored as text.", "Write it in UTF-8."
            ) from None
    return settings


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def parse_words(text: str | None) -> list[str] | None:
    """Split a comma-separated list into words, or return None if `text` is None.

    Raises RequestError for an empty word.
    """
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise RequestError(f"{text!r} is not a list of words.", "Write it like solo,even,pack.")
    return words


def parse_budget(text: str) -> float | None:
    """Return a time budget in seconds, or None for "none"."""
    return None if text == "none" else parse_duration(text, "--budget")


def parse_duration(text: str, option: str) -> float:
    """Return the seconds of a duration such as 90, 90s, 10m, 1h30m or 30d.

    Raises RequestError for other text; the message names `option`.
    """
    given = text.strip()
    if re.fullmatch(r"\d+(\.\d+)?", given):
        given += "s"
    parts = _PART.findall(given)
    if not parts or _PART.sub("", given):
        raise _option_error(option, text, "a time", "90s, 10m, 1h30m or 30d")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def select_devices(spec: str, devices: Sequence[Device], positions: Sequence[int]) -> str:
    """Return a `--devices` value that names only some of the devices in `spec`.

    `devices` are all devices in `spec`, and `positions` are the indices of those to keep. Raises
    RequestError if none is kept, or if `spec` is the file of a simulated machine and some are left
    out.
    """
    if not positions:
        raise RequestError("No device is chosen.", "Tick at least one with Space.")
    if len(positions) == len(devices):
        return spec
    picked = [devices[position] for position in positions]
    if find_backend(picked[0].kind).simulated:
        return _select_simulated(spec, devices, positions)
    return ",".join(_select_on_host(host, own) for host, own in group_by_host(picked).items())


def _select_on_host(host: str, picked: Sequence[Device]) -> str:
    where = f"ray:{host}/" if host else ""
    return ",".join(
        where + _limited(find_backend(device.kind).write_term(device.id), device)
        for device in picked
    )


def _limited(name: str, device: Device) -> str:
    return f"{name}@{write_limit(device.limit)}" if device.limit else name


def _select_simulated(spec: str, devices: Sequence[Device], positions: Sequence[int]) -> str:
    kind = f"{devices[0].kind}:"
    pieces = [piece.strip().removeprefix(kind) for piece in spec.split(",")]
    if len(pieces) != len(devices):
        raise RequestError(
            "A machine file can't be used in part.", "Tick every device, or write a smaller file."
        )
    return kind + ",".join(pieces[position] for position in positions)


def parse_samples(text: str, option: str) -> int:
    """Parse a whole number of samples, with or without spaces.

    Raises RequestError for other text; the message names `option`.
    """
    try:
        return int(text.replace(" ", ""))
    except ValueError:
        raise RequestError(
            f"{option} {text!r} is not a whole number.", "Give samples, like 1024."
        ) from None


def _parse_number(text: str, option: str) -> float:
    """Parse a number, or raise RequestError with a message that names `option`."""
    try:
        return float(text)
    except ValueError:
        raise _option_error(option, text, "a number", "0.5") from None


def request_fields(texts: Mapping[str, str]) -> dict[str, Any]:
    """Convert the text of form fields to arguments of `make_request`, and leave out empty ones.

    Raises RequestError for a number that can't be parsed.
    """
    readers: dict[str, Callable[[str, str], Any]] = {
        "settings": lambda text, _: text.split(),
        "global_batch": parse_samples,
        "max_global_batch": parse_samples,
        "tolerance": _parse_number,
        "pace": _parse_number,
    }
    filled = {name: text.strip() for name, text in texts.items() if text.strip()}
    return {
        name: readers[name](text, f"--{name.replace('_', '-')}") if name in readers else text
        for name, text in filled.items()
    }
