"""The built-in workloads, and functions that find and build a workload by its name.

No framework is imported until a workload is built.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import msgspec

from evener.errors import EvenerError, RequestError

from .protocol import BACKENDS, Entry, WorkerSetup, Workload

Framework = Literal["tensorflow", "torch", "none"]
FRAMEWORKS: tuple[Framework, ...] = ("tensorflow", "torch", "none")

_MAXER = (
    "jinkos/multi-gpus, gpu_maxing_model.py: an MNIST network with far more layers than it needs"
)
_MNIST = "a small convolutional network on 28 x 28 images made in code; nothing is downloaded"
_GRU = "the multi-GPU recurrent demo: 4 x GRU 512 and Dense 128, on sequences made in code"
LARGEST_MNIST = 16384  # steps on more than a quarter of such a data set train poorly
_MNIST_SETTINGS: dict[str, Any] = {"filters": 16, "dense": 64, "learning_rate": 0.001}
_GRU_SIZES = {"steps": 64, "features": 32, "units": 512, "layers": 4, "dense": 128, "classes": 10}
_TOWERS = {
    "vocabulary": 20_000,
    "words": 800,
    "embedding": 50,
    "filters": 10,
    "kernel": 3,
    "dense": 64,
}
_GRU_SETTINGS: dict[str, Any] = {**_GRU_SIZES, "learning_rate": 0.001}


def _model(name: str, summary: str, source: str, settings: dict[str, Any], **limits: Any) -> Entry:
    """Create the registry entry of a built-in model.

    The prefix of the name says which framework it uses.
    """
    framework: Framework = "tensorflow" if name.startswith("keras_") else "torch"
    return Entry(
        name, framework, f"{BACKENDS[framework]}.models:build", summary, source, settings, **limits
    )


_TABLE = (
    _model(
        "keras_maxer",
        (
            "the network that shows what GPUs of different sizes can do together (78,923,530 "
            "parameters)"
        ),
        _MAXER,
        {"learning_rate": 0.001},
        # beyond this, its first tensors exceed TensorFlow's 2^31 elements on a GPU
        largest_share=10_699,
    ),
    _model(
        "keras_mnist",
        "a small convolutional network, for CPUs",
        _MNIST,
        _MNIST_SETTINGS,
        largest_share=LARGEST_MNIST,
    ),
    _model(
        "keras_gru",
        "four recurrent layers, whose step time is flat up to large batches",
        _GRU,
        {**_GRU_SETTINGS, "use_cudnn": "auto"},
    ),
    _model(
        "keras_resnet50",
        "ResNet-50 on pictures of CIFAR's size",
        "the slides that squeeze more juice out of a single GPU by packing",
        {"side": 32, "classes": 10, "learning_rate": 0.001},
        least={"side": 32, "classes": 2},  # the minimum of keras.applications
    ),
    _model(
        "keras_towers",
        "ratings from reviews: two convolutional towers that can lie on two devices",
        "aistein/dlprof, DeepCoNN on two GPUs",
        {**_TOWERS, "learning_rate": 0.0001},
        least=dict.fromkeys(_TOWERS, 1),
        placements=("single", "towers", "alternate"),
    ),
    _model("torch_maxer", "keras_maxer's twin in PyTorch", _MAXER, {"learning_rate": 0.001}),
    _model(
        "torch_mnist",
        "keras_mnist's twin in PyTorch",
        _MNIST,
        _MNIST_SETTINGS,
        largest_share=LARGEST_MNIST,
    ),
    _model("torch_gru", "keras_gru's twin in PyTorch", _GRU, _GRU_SETTINGS),
    _model(
        "torch_text",
        "a small decoder-only language model on texts of unequal length",
        "made here; lengths are lognormal, tokens random",
        {
            "vocabulary": 256,
            "width": 64,
            "layers": 2,
            "heads": 4,
            "rows": 4096,
            "median": 32.0,
            "sigma": 0.8,
            "longest": 256,
            "seed": 0,
            "learning_rate": 0.001,
        },
    ),
    _model(
        "torch_depth",
        (
            "a convolutional stack in two halves on two devices, plain and with micro-batches in "
            "flight"
        ),
        "slides on several GPUs: model parallelism in depth",
        {"side": 32, "classes": 10, "norm": "group", "micro_batches": 4, "learning_rate": 0.001},
        least={"side": 32, "micro_batches": 2},  # for five poolings
        placements=("single", "halves", "halves-micro"),
    ),
    _model(
        "torch_tiles",
        (
            "images cut in 2 x 2 tiles on several devices, borders exchanged: exactly the whole "
            "image's result"
        ),
        "slides on several GPUs: tile parallelism for images",
        {"side": 128, "classes": 10, "learning_rate": 0.001},
        least={"side": 8},  # for two poolings without empty tiles
        placements=("single", "tiles"),
        placement_devices=4,
    ),
)
_ENTRIES = {entry.name: entry for entry in _TABLE}


def names(framework: str = "") -> tuple[str, ...]:
    """Return the names of all registered workloads, or of those for one framework."""
    return tuple(entry.name for entry in _ENTRIES.values() if framework in ("", entry.framework))


def add(entry: Entry) -> None:
    """Register a workload; it replaces one of the same name."""
    _ENTRIES[entry.name] = entry


def default_name(framework: str, on_cpu: bool) -> str:
    """Return the workload to use if the user names none, which is a smaller one on CPUs."""
    return f"{framework.replace('tensorflow', 'keras')}_{'mnist' if on_cpu else 'maxer'}"


def find(name: str, framework: str = "") -> Entry:
    """Return the workload with this name.

    It is a built-in one, or the user's own function, with a name such as `train.py:build`. The
    user's file is parsed, but not run. Raises `RequestError` if there is no such workload, or if it
    belongs to another framework.
    """
    if framework and framework not in FRAMEWORKS:
        raise RequestError(
            f"There is no framework {framework!r}.",
            f"Choose one of {_listed(FRAMEWORKS, framework)}.",
        )
    from . import user_code

    entry = _ENTRIES.get(name)
    if entry is None and (":" in name or user_code.names_a_file(name)):
        return user_code.entry(name, framework or "tensorflow")
    if entry is None:
        known = _listed(names(framework), name)
        raise RequestError(
            f"There is no workload {name!r}.", f"Known: {known}; or your own, as train.py:build."
        )
    if framework and entry.framework not in (framework, "none"):
        known = _listed(names(framework), name.split("_", 1)[-1])
        raise RequestError(
            f"{name} is a {entry.framework} workload, not a {framework} one.", f"Known: {known}."
        )
    return entry


def resolve_settings(entry: Entry, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the workload's settings: the given values, and defaults for the others.

    Values may be strings, which are converted. Settings of the user's own function aren't checked.
    Raises `RequestError` for an unknown setting, a wrong type or a value below the minimum.
    """
    if ":" in entry.name:
        return dict(values)
    settings = dict(entry.settings)
    for key, value in values.items():
        if key not in settings:
            known = _listed(tuple(settings), key)
            raise RequestError(f"{entry.name} has no setting {key!r}.", f"It has {known}.")
        kind = type(settings[key])
        try:
            settings[key] = msgspec.convert(value, kind, strict=False)
        except msgspec.ValidationError:
            raise RequestError(
                f"The setting {key} of {entry.name} can't be {value!r}.",
                f"It is {_article(kind)}, {settings[key]!r} by default.",
            ) from None
        if key in entry.least and settings[key] < entry.least[key]:
            raise RequestError(
                f"{entry.name} can't have {key}={settings[key]}.",
                f"Give {entry.least[key]} or more.",
            )
    return settings


def find_imports(name: str, framework: str) -> tuple[str, ...]:
    """Return modules that the workload's processes can import before it is built.

    Each is written as "module" or "module:name". Returns an empty tuple if the workload can't be
    found or read.
    """
    from . import user_code

    with suppress(EvenerError, OSError, SyntaxError, ValueError):
        module = find(name, framework).home.partition(":")[0]
        script = name.rpartition(":")[0]
        libraries = (
            user_code.find_library_imports(Path(script)) if user_code.names_a_file(script) else ()
        )
        return (module, *libraries)
    return ()


def build(
    name: str, setup: WorkerSetup, settings: Mapping[str, Any], framework: str = ""
) -> Workload:
    """Build a workload in this process.

    Raises `RequestError` for an unknown name, setting or placement, or if a placement needs more
    devices.
    """
    entry = find(name, framework)
    chosen = resolve_settings(entry, settings)
    if setup.placement not in ("", "single"):
        if setup.placement not in entry.placements:
            known = _listed(entry.placements, setup.placement)
            raise RequestError(
                f"There is no placement {setup.placement!r}.", f"Choose one of {known}."
            )
        if len(setup.devices) < 2:
            raise RequestError(
                f"The placement {setup.placement} needs 2 devices.", "Name more with --devices."
            )
    module, _, attribute = entry.home.partition(":")
    make = getattr(import_module(module), attribute)
    workload: Workload = make(name, setup, chosen)
    return workload


def _listed(known: Iterable[str], wanted: str) -> str:
    known = list(known)
    close = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    return ", ".join([*close, *(name for name in known if name not in close)])


def _article(kind: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "a text")
